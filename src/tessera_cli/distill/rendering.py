"""From a row of data to tokens, and which of them the student is trained to produce.

The formats are TRL's. `text` is a plain document. `messages` is a conversation, rendered by the model's chat
template. `prompt_completion` is two strings, joined as they are without a template, or two lists of messages,
rendered as one conversation. Plain documents and completions get an end-of-sequence token.

Supervision follows the position in the text, never the value of a token: a template whose padding is its
end-of-sequence token still teaches the student to stop.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from tessera_cli.distill.sources import DataFormat
from tessera_cli.errors import DataError
from tessera_cli.models.tokenizer import Tokenizer

Span = tuple[int, int]
Message = dict[str, str]
_ROLES = ("system", "user", "assistant")


class BadRowError(DataError):
    """A row that is not what its format says; whoever knows the row's place adds it."""


def encode_row(
    row: dict[str, Any], data_format: DataFormat, tokenizer: Tokenizer, train_on: Literal["completion", "all"]
) -> tuple[np.ndarray, np.ndarray]:
    """Tokenise one row.

    Returns token ids (int32) and a mask (bool), both `[num_tokens]`: whether each token is a target. The
    first token is none, as nothing precedes it.

    Raises:
        BadRowError: a field is missing or of another type, or the tokenizer or the chat template rewrites the
            prompt when an answer follows it, so that no token boundary separates the two.
    """
    text, spans, plain = _render(row, data_format, tokenizer)
    if train_on == "all":
        spans = [(0, len(text))]
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


def _render(
    row: dict[str, Any], data_format: DataFormat, tokenizer: Tokenizer
) -> tuple[str, list[Span], bool]:
    """The text of a row, its supervised spans in characters, and whether it is plain (no chat template)."""
    if data_format == "text":
        text = _string(row, "text")
        return text, [(0, len(text))], True
    if data_format == "messages":
        return *_render_conversation(_messages(row, "messages"), 0, tokenizer), False
    if isinstance(row["prompt"], str):
        prompt, completion = _string(row, "prompt"), _string(row, "completion")
        return prompt + completion, [(len(prompt), len(prompt) + len(completion))], True
    prompt_messages = _messages(row, "prompt")
    messages = prompt_messages + _messages(row, "completion")
    return *_render_conversation(messages, len(prompt_messages), tokenizer), False


def _render_conversation(
    messages: Sequence[Message], first_answer: int, tokenizer: Tokenizer
) -> tuple[str, list[Span]]:
    """Render a conversation; the spans are what the assistant says from message `first_answer` on.

    A span starts where generation would and ends with the template's end marker. White space that the
    template prints after the marker belongs to the next turn: a served model never produces it.
    """
    text = tokenizer.render_chat(messages, add_generation_prompt=False)
    spans = []
    for index in range(first_answer, len(messages)):
        if messages[index]["role"] != "assistant":
            continue
        before = tokenizer.render_chat(messages[:index], add_generation_prompt=True)
        through = tokenizer.render_chat(messages[: index + 1], add_generation_prompt=False)
        if not through.startswith(before) or not text.startswith(through):
            raise BadRowError(
                f"the chat template changes what precedes message {index + 1} when the conversation goes on",
                hint="use a template that only appends, or `data.train_on: all`",
            )
        stripped = through.rstrip()
        unmarked = stripped.endswith(messages[index]["content"].rstrip())
        spans.append((len(before), len(through if unmarked else stripped)))
    return text, spans


def _boundary(text: str, at: int, token_ids: list[int], tokenizer: Tokenizer, plain: bool) -> int:
    """How many of `token_ids` spell `text[:at]`."""
    if at == 0:
        return 0
    if at == len(text):
        return len(token_ids)
    prefix = tokenizer.encode(text[:at], add_special_tokens=plain)
    if token_ids[: len(prefix)] != prefix:
        raise BadRowError(
            f"no token boundary between {text[:at][-12:]!r} and {text[at:][:12]!r}",
            hint="start the answer with another character: the tokenizer joins it to the prompt's last ones",
        )
    return len(prefix)


def _string(row: dict[str, Any], key: str) -> str:
    value = row[key]
    if not isinstance(value, str) or not value:
        raise BadRowError(f"`{key}` is {_describe(value)}, expected text")
    return value


def _messages(row: dict[str, Any], key: str) -> list[Message]:
    value = row[key]
    if not isinstance(value, list) or not value:
        raise BadRowError(f"`{key}` is {_describe(value)}, expected a list of messages")
    return [_message(item, f"{key}[{index}]") for index, item in enumerate(value)]


def _message(item: Any, where: str) -> Message:
    if not isinstance(item, dict):
        raise BadRowError(f"`{where}` is {_describe(item)}, expected a role and a content")
    # The reader gives every message the keys that any message of the file has, empty where it has none.
    given = {key: value for key, value in item.items() if value is not None}
    unknown = sorted(given.keys() - {"role", "content"})
    if unknown:
        raise BadRowError(f"`{where}` has the key {unknown[0]!r}, only role and content are supported")
    if given.get("role") not in _ROLES:
        raise BadRowError(f"`{where}.role` is {_describe(item.get('role'))}, expected {', '.join(_ROLES)}")
    if not isinstance(given.get("content"), str):
        raise BadRowError(f"`{where}.content` is {_describe(item.get('content'))}, expected text")
    return {"role": given["role"], "content": given["content"]}


def _describe(value: Any) -> str:
    return "missing" if value is None else "empty" if value in ("", []) else repr(value)[:40]
