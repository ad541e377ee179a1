// One conversation with the model: what was said, and the next answer as it comes.

import { eventData } from "./sse.js";
import { request, ServerError } from "./server.js";

export class Conversation {
  #messages = [];

  get isEmpty() {
    return this.#messages.length === 0;
  }

  clear() {
    this.#messages = [];
  }

  /**
   * Ask for an answer to `text`; yields its pieces, and returns how long it was and why it ended.
   *
   * Where the reader stops early or the server fails, what has come so far stays in the conversation. If
   * nothing has come, neither does the question.
   */
  async *ask(text, { model, system, key, signal, ...parameters }) {
    const question = { role: "user", content: text };
    const before = system ? [{ role: "system", content: system }] : [];
    const messages = this.#messages;
    let answer = "";
    let usage = null;
    let reason = null;
    try {
      const response = await request("v1/chat/completions", {
        key,
        signal,
        body: {
          model,
          messages: [...before, ...messages, question],
          stream: true,
          stream_options: { include_usage: true },
          ...parameters,
        },
      });
      for await (const data of eventData(response)) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ServerError(chunk.error.code, chunk.error.message);
        usage = chunk.usage ?? usage;
        const choice = chunk.choices[0];
        reason = choice?.finish_reason ?? reason;
        const piece = choice?.delta?.content;
        if (piece) {
          answer += piece;
          yield piece;
        }
      }
      if (reason === null) throw new ServerError(0, "The answer broke off.");
    } finally {
      if (answer || reason) messages.push(question, { role: "assistant", content: answer });
    }
    return { numTokens: usage?.completion_tokens ?? null, reason };
  }
}
