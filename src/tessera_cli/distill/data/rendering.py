"""From a row of data to tokens, and which of them the student is trained to produce.

The formats are TRL's. `text` is a plain document. `messages` is a conversation, rendered by the model's chat
template. `prompt_completion` is two strings, joined as they are without a template, or two lists of messages,
rendered as one conversation. Plain documents and completions get an end-of-sequence token. `prompts` are
continued by a model, in the way of `tessera generate`: text is what a user says, where there is a template.

Supervision follows the position in the text, never the value of a token: a template whose padding is its
end-of-sequence token still teaches the student to stop.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from tessera_cli.distill.data.messages import (
    Message,
    Tools,
    check_template,
    conversation,
    describe,
    text_of,
    tools_of,
)
from tessera_cli.errors import DataError
from tessera_cli.models.tokenizer import Tokenizer
from tessera_cli.recipe.data_section import TOOLS, DataFormat

Span = tuple[int, int]


def encode_row(
    row: dict[str, Any], data_format: DataFormat, tokenizer: Tokenizer, train_on: Literal["completion", "all"]
) -> tuple[np.ndarray, np.ndarray]:
    """Tokenise one row.

    Returns token ids (int32) and a mask (bool), both `[num_tokens]`: whether each token is a target. The
    first token is none, as nothing precedes it.

    Raises:
        DataError: a field is missing or of another type, or the tokenizer or the chat template rewrites the
            prompt when an answer follows it, so that no token boundary separates the two. Whoever knows the
            row's place adds it.
    """
    text, spans, plain = _render(row, data_format, tokenizer, train_on)
    token_ids = tokenizer.encode(text, add_special_tokens=plain)
    supervised = np.zeros(len(token_ids), dtype=bool)
    for start, end in spans:
        first, last = (_boundary(text, at, token_ids, tokenizer, plain) for at in (start, end))
        supervised[first:last] = True
    if plain and tokenizer.eos_token_ids and (not token_ids or token_ids[-1] not in tokenizer.eos_token_ids):
        token_ids = [*token_ids, tokenizer.eos_token_ids[0]]
        supervised = np.append(supervised, True)
    supervised[:1] = False
    return np.asarray(token_ids, dtype=np.int32), supervised


def encode_prompt(row: dict[str, Any], tokenizer: Tokenizer) -> list[int]:
    """The ids that a model continues to answer a row of format `prompts`.

    Raises:
        DataError: the prompt is neither text nor messages. Whoever knows the row's place adds it.
    """
    prompt, tools = row["prompt"], tools_of(row.get(TOOLS))
    is_text = isinstance(prompt, str)
    if is_text and tokenizer.chat_template is None:
        _no_tools(tools)
        return tokenizer.encode(_string(row, "prompt"))
    messages = conversation(prompt, "prompt") if not is_text else [_user(_string(row, "prompt"))]
    text = tokenizer.render_chat(messages, add_generation_prompt=True, tools=tools)
    check_template(text, messages, tools, tokenizer)
    return tokenizer.encode(text, add_special_tokens=False)


def _render(
    row: dict[str, Any], data_format: DataFormat, tokenizer: Tokenizer, train_on: Literal["completion", "all"]
) -> tuple[str, list[Span], bool]:
    """The text of a row, its supervised spans in characters, and whether it is plain (no chat template)."""
    first_answer = 0
    if data_format == "messages":
        messages = conversation(row["messages"], "messages")
    elif data_format == "text" or isinstance(row["prompt"], str):
        prompt = "" if data_format == "text" else _string(row, "prompt")
        text = prompt + _string(row, "text" if data_format == "text" else "completion")
        _no_tools(tools_of(row.get(TOOLS)))
        return text, [(0 if train_on == "all" else len(prompt), len(text))], True
    else:
        messages = conversation(row["prompt"], "prompt")
        first_answer = len(messages)
        messages += conversation(row["completion"], "completion")
    tools = tools_of(row.get(TOOLS))
    text = tokenizer.render_chat(messages, add_generation_prompt=False, tools=tools)
    check_template(text, messages, tools, tokenizer)
    if train_on == "all":
        return text, [(0, len(text))], False
    return text, _answers(text, messages, first_answer, tools, tokenizer), False


def _answers(
    text: str, messages: Sequence[Message], first_answer: int, tools: Tools, tokenizer: Tokenizer
) -> list[Span]:
    """Where in `text`, the rendered conversation, the assistant speaks, from message `first_answer` on.

    A span starts where generation would and ends with the template's end marker. White space that the
    template prints after the marker belongs to the next turn: a served model never produces it.
    """
    spans = []
    for index in range(first_answer, len(messages)):
        if messages[index]["role"] != "assistant":
            continue
        before = tokenizer.render_chat(messages[:index], add_generation_prompt=True, tools=tools)
        through = tokenizer.render_chat(messages[: index + 1], add_generation_prompt=False, tools=tools)
        if not through.startswith(before) or not text.startswith(through):
            raise DataError(
                f"the chat template changes what precedes message {index + 1} when the conversation goes on",
                hint="use a template that only appends, or `data.train_on: all`",
            )
        answer, said = messages[index]["content"].rstrip(), through[len(before) :].rstrip()
        unmarked = said.endswith(answer) if answer else not said
        spans.append((len(before), len(through) if unmarked else len(before) + len(said)))
    return spans


def _boundary(text: str, at: int, token_ids: list[int], tokenizer: Tokenizer, plain: bool) -> int:
    """How many of `token_ids` spell `text[:at]`."""
    if at == 0:
        return 0
    if at == len(text):
        return len(token_ids)
    prefix = tokenizer.encode(text[:at], add_special_tokens=plain)
    if token_ids[: len(prefix)] != prefix:
        raise DataError(
            f"no token boundary between {text[:at][-12:]!r} and {text[at:][:12]!r}",
            hint="start the answer with another character: the tokenizer joins it to the prompt's last ones",
        )
    return len(prefix)


def _string(row: dict[str, Any], key: str) -> str:
    value = row[key]
    if not value:
        raise DataError(f"`{key}` is {describe(value)}, expected text")
    return text_of(value, key)


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _no_tools(tools: Tools) -> None:
    if tools is not None:
        raise DataError("`tools` has no place in plain text", hint="write the prompt as messages")
