// The chat playground: settings and message in, answer out as it comes. Text is only ever set as text.

import { Conversation } from "./conversation.js";
import { wordsFor } from "./server.js";
import { seconds } from "./numbers.js";

const byId = (id) => document.getElementById(id);

/** Wire up the chat; `model` gives the name to ask for, or null while it is not known. */
export function startChat(model) {
  const prompt = byId("prompt");
  const send = byId("send");
  const stop = byId("stop");
  const log = byId("log");
  const conversation = new Conversation();
  let running = null;

  async function submit() {
    if (running || !byId("composer").reportValidity() || !settingsAreValid()) return;
    const text = prompt.value;
    prompt.value = "";
    running = new AbortController();
    setBusy(true);
    const isTold = await tell(text, conversation, running.signal, model());
    if (!isTold && !prompt.value) prompt.value = text;
    running = null;
    setBusy(false);
  }

  function setBusy(isBusy) {
    // Whoever used the button that goes away finds the focus in the message again.
    const held = document.activeElement === send || document.activeElement === stop;
    stop.hidden = !isBusy;
    send.hidden = isBusy;
    if (held) (isBusy ? stop : prompt).focus();
  }

  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  byId("settings-form").addEventListener("submit", (event) => event.preventDefault());
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  stop.addEventListener("click", () => running?.abort());
  byId("new-chat").addEventListener("click", () => {
    running?.abort();
    conversation.clear();
    log.replaceChildren(byId("log-empty") ?? emptyLog());
    prompt.focus();
  });
}

/** Ask, and write question and answer into the log; false if nothing came of it. */
async function tell(text, conversation, signal, model) {
  byId("log-empty")?.remove();
  addMessage("user", "You").body.textContent = text;
  const { message, body, note } = addMessage("assistant", model ?? "Model");
  message.setAttribute("aria-busy", "true"); // read out when it is whole, not token by token
  const asked = performance.now();
  let first = null;
  let isTold = true;
  try {
    const answer = conversation.ask(text, { model, signal, ...settings() });
    for (;;) {
      const { done, value } = await answer.next();
      first ??= performance.now();
      if (done) {
        note.textContent = summary(value, first - asked, performance.now() - first);
        break;
      }
      body.append(value);
      follow(message);
    }
  } catch (error) {
    isTold = first !== null;
    if (signal.aborted) note.textContent = "Stopped.";
    else fail(message, note, error);
  }
  message.removeAttribute("aria-busy");
  follow(message);
  return isTold;
}

function fail(message, note, error) {
  message.classList.add("failed");
  note.textContent = wordsFor(error);
  if (error.status === 401) byId("settings").open = true;
}

function summary({ numTokens, reason }, toFirst, afterFirst) {
  const parts = [];
  if (numTokens !== null) {
    parts.push(`${numTokens} ${numTokens === 1 ? "token" : "tokens"}`);
    parts.push(`first after ${seconds(toFirst / 1000)}`);
    if (numTokens > 1) parts.push(`${((1000 * (numTokens - 1)) / afterFirst).toFixed(1)} tokens/s`);
  }
  if (reason === "length") parts.push("cut at the limit of tokens");
  return parts.join(" · ");
}

function addMessage(role, name) {
  const message = document.createElement("article");
  message.className = `message ${role}`;
  const [author, body, note] = ["h3", "p", "p"].map((tag) => document.createElement(tag));
  author.textContent = name;
  body.className = "body";
  note.className = "note";
  message.append(author, body, note);
  byId("log").append(message);
  follow(message, true);
  return { message, body, note };
}

/** Keep the end in view, unless the reader has scrolled up. */
function follow(message, always = false) {
  const log = byId("log");
  const below = log.scrollHeight - log.scrollTop - log.clientHeight;
  if (always || below < 80) log.scrollTop = log.scrollHeight;
}

function emptyLog() {
  const empty = document.createElement("p");
  empty.id = "log-empty";
  empty.className = "empty";
  empty.textContent = "Ask something, and watch its blocks fill the KV cache.";
  return empty;
}

function settingsAreValid() {
  const form = byId("settings-form");
  if (!form.checkValidity()) byId("settings").open = true; // a hidden field cannot say what is wrong
  return form.reportValidity();
}

/** What the settings say; an empty field leaves the choice to the server. */
function settings() {
  const fields = { temperature: "temperature", top_p: "top-p", max_tokens: "max-tokens", seed: "seed" };
  const numbers = Object.entries(fields)
    .map(([name, id]) => [name, byId(id).value])
    .filter(([, value]) => value !== "")
    .map(([name, value]) => [name, Number(value)]);
  return { system: byId("system").value.trim(), key: apiKey(), ...Object.fromEntries(numbers) };
}

/** The API key that the user has entered, or an empty text. */
export function apiKey() {
  return byId("api-key").value.trim();
}
