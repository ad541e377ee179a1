"""Prompts from the command line, a file or stdin, read strictly: a fault names its file and line."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.errors import DataError, UsageError

Messages = list[dict[str, str]]


class _Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    role: Literal["system", "user", "assistant"]
    content: str


class _PromptLine(BaseModel):
    """One line of a .jsonl prompt file: what to answer, and sampling fields that hold for this line only."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    prompt: Annotated[str, Field(min_length=1)] | None = None
    messages: Annotated[list[_Message], Field(min_length=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    seed: Annotated[int, Field(ge=0)] | None = None


@dataclass(frozen=True)
class Prompt:
    """What to answer: `text` or `messages`, never both.

    `sampling` holds the line's own sampling fields, which win over the command line's. `source` names the
    prompt in errors.
    """

    text: str | None
    messages: Messages | None
    sampling: dict[str, Any]
    source: str


def read_prompts(texts: Sequence[str], prompt_file: str | None) -> list[Prompt]:
    """The prompts of `--prompt` or of `--prompt-file`, in order.

    Args:
        texts: the values of `--prompt`.
        prompt_file: a .txt file (one prompt per non-empty line), a .jsonl file, or "-" for lines of text on
            stdin.

    Raises:
        UsageError: neither or both are given, or a prompt is empty.
        DataError: the file cannot be read as what it claims to be.
    """
    if texts and prompt_file is not None:
        raise UsageError("both --prompt and --prompt-file are given", hint="give one of them")
    if prompt_file is not None:
        return _read_file(prompt_file)
    if not texts:
        raise UsageError("no prompt", hint="give --prompt TEXT, --prompt-file FILE or --prompt-file -")
    for index, text in enumerate(texts):
        if not text.strip():
            raise UsageError(f"--prompt number {index + 1} is empty", hint="give it some text")
        check_unicode(text, f"--prompt number {index + 1}")
    return [Prompt(text, None, {}, f"--prompt number {index + 1}") for index, text in enumerate(texts)]


def check_unicode(text: str, source: str) -> None:
    """See that `text` is whole characters: stray bytes of the shell and halves of pairs in JSON are not.

    Raises:
        DataError: it is not, and no tokenizer would take it.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        where = f"at character {error.start + 1}"
        raise DataError(f"{source}: not Unicode text, {where}", hint="give UTF-8 text") from None


def sampling_of(prompts: Sequence[Prompt], base: SamplingParams, seed: int) -> list[SamplingParams]:
    """The sampling of each prompt: `base` with the prompt's own fields, and `seed` plus its index."""
    return [
        replace(base, **({"seed": seed + index} | prompt.sampling)) for index, prompt in enumerate(prompts)
    ]


def conversations_of(
    prompts: Sequence[Prompt], chat: bool | None, system: str | None, has_template: bool
) -> list[Messages] | None:
    """What goes through the chat template, or None if the prompts are continued as they are.

    Raises:
        UsageError: the template, or the lack of it, contradicts the options.
        DataError: a prompt has messages or a system message where there is no place for them.
    """
    if chat is True and not has_template:
        raise UsageError("--chat: the model has no chat template", hint="use --raw")
    if chat is False or not has_template:
        reason = "--raw" if has_template else "the model has no chat template"
        if system is not None:
            raise UsageError(f"--system has no place: {reason}", hint="leave --system out")
        for prompt in prompts:
            if prompt.text is None:
                raise DataError(f"{prompt.source}: `messages` has no place: {reason}", hint="give `prompt`")
        return None
    beginning = [] if system is None else [{"role": "system", "content": system}]
    conversations = []
    for prompt in prompts:
        messages = prompt.messages or [{"role": "user", "content": prompt.text or ""}]
        if system is not None and messages[0]["role"] == "system":
            raise DataError(f"{prompt.source} has a system message of its own", hint="leave --system out")
        conversations.append([*beginning, *messages])
    return conversations


def _read_file(name: str) -> list[Prompt]:
    label = "stdin" if name == "-" else name
    suffix = ".txt" if name == "-" else Path(name).suffix.lower()
    if suffix not in (".txt", ".jsonl"):
        raise DataError(
            f"{name}: a prompt file is .txt or .jsonl, not {suffix or 'without a suffix'}",
            hint=".txt has one prompt per line; .jsonl one object per line with `prompt` or `messages`",
        )
    # Only newlines separate lines: str.splitlines would also cut at U+2028, which JSON strings may contain.
    lines = _decode(_read_bytes(name), label).replace("\r\n", "\n").split("\n")
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise DataError(f"{label} has no prompts: every line is empty", hint="write one prompt per line")
    if suffix == ".txt":
        return [Prompt(line, None, {}, f"{label} line {number}") for number, line in numbered]
    return [_parse_line(line, f"{label} line {number}") for number, line in numbered]


def _read_bytes(name: str) -> bytes:
    if name == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(name).read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"{name}: no such file", hint="give an existing file, or - for stdin") from error
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error.strerror}") from error


def _decode(data: bytes, label: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{label} line {number}: not UTF-8 text", hint="convert the file to UTF-8") from error


def _parse_line(line: str, source: str) -> Prompt:
    try:
        fields = json.loads(line, object_pairs_hook=_refuse_duplicates)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{source}: not a JSON object: {error}", hint="write one object per line") from error
    if not isinstance(fields, dict):
        raise DataError(f"{source}: not a JSON object", hint='write one object per line: {"prompt": "..."}')
    try:
        parsed = _PromptLine.model_validate(fields)
    except ValidationError as error:
        raise DataError(f"{source}: {_problem(error)}", hint=f"known keys: {_known_keys()}") from error
    if (parsed.prompt is None) == (parsed.messages is None):
        raise DataError(f"{source}: needs either `prompt` or `messages`", hint="give exactly one of them")
    messages = None if parsed.messages is None else [message.model_dump() for message in parsed.messages]
    for message in messages or ():
        check_unicode(message["content"], source)
    sampling = parsed.model_dump(exclude={"prompt", "messages"}, exclude_none=True)
    return Prompt(parsed.prompt, messages, sampling, source)


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"`{next(key for key in keys if keys.count(key) > 1)}` is given twice")
    return fields


def _problem(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"unknown key `{where}`"
    return f"`{where}`: {first['msg'][0].lower()}{first['msg'][1:]}"


def _known_keys() -> str:
    return ", ".join(_PromptLine.model_fields)
