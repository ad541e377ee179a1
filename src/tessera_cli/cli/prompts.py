"""Prompts from the command line, a file or stdin, read strictly: a fault names its file and line."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tessera_cli.cli.prompt_line import Messages, Prompt, check_unicode, parse_line
from tessera_cli.cli.sampling_options import FORMS, as_option
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.errors import DataError, UsageError


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


def sampling_of(prompts: Sequence[Prompt], base: SamplingParams, seed: int) -> list[SamplingParams]:
    """The sampling of each prompt: `base` with the prompt's own fields, and `seed` plus its index."""
    return [prompt.params(replace(base, seed=seed + index)) for index, prompt in enumerate(prompts)]


def check_priorities(prompts: Sequence[Prompt], policy: str) -> None:
    """Refuse priorities that the scheduling policy would not look at.

    Raises:
        DataError: a prompt has one, and the policy is another.
    """
    for prompt in prompts:
        if prompt.priority and policy != "priority":
            raise DataError(
                f"{prompt.source}: `priority` means nothing under --scheduling-policy {policy}",
                hint="add --scheduling-policy priority",
            )


def check_params(
    prompts: Sequence[Prompt], params: Sequence[SamplingParams], check: Callable[[SamplingParams], None]
) -> None:
    """Find what `check` refuses in the prompts' sampling before any work; once for all that ask the same.

    Raises:
        UsageError: it has refused something of the command line; the message names the option.
        DataError: it has refused something of a prompt's own; the message names the prompt.
    """
    checked = set()
    for prompt, one in zip(prompts, params, strict=True):
        asked = (one.structured_output, one.stop_token_ids, tuple(one.logit_bias.items()), one.n)
        if asked in checked:
            continue
        checked.add(asked)
        try:
            check(one)
        except UsageError as error:
            field = "structured_output" if error.param in FORMS else error.param
            if field is not None and field not in prompt.sampling:
                raise as_option(error) from error
            raise DataError(f"{prompt.source}: {error.message}", hint=error.hint) from error


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
    return [parse_line(line, f"{label} line {number}") for number, line in numbered]


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
