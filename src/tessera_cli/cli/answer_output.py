"""Where the answers of `tessera generate` go, and what is told about them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tessera_cli.cli.answers import Answer, AnswerFormat, cut_notes, render_answers
from tessera_cli.cli.output import Output
from tessera_cli.cli.terminal import without_controls
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.errors import UsageError
from tessera_cli.files import write_file

if TYPE_CHECKING:
    from tessera_cli.cli.prompt_line import Prompt

MAX_WARNINGS = 5


def choose_format(
    given: AnswerFormat | None, json_output: bool, output_file: Path | None, output: Output
) -> AnswerFormat:
    """The format that is asked for, else the one of the file's suffix or of what stdout is.

    Raises:
        UsageError: --json and another format.
    """
    if output_file is not None:
        by_suffix = {".json": AnswerFormat.JSON, ".txt": AnswerFormat.TEXT}
        return given or by_suffix.get(output_file.suffix.lower(), AnswerFormat.JSONL)
    if json_output:
        if given not in (None, AnswerFormat.JSON):
            raise UsageError(f"--json contradicts --format {given}", hint="give one of them")
        return AnswerFormat.JSON
    return given or (AnswerFormat.TEXT if output.stdout.isatty() else AnswerFormat.JSONL)


def shown(text: str, output: Output) -> str:
    """What a model wrote, as it is; on a terminal its control characters are written out."""
    return without_controls(text) if output.stdout.isatty() else text


def write_answers(
    answers: Sequence[Answer], summary: dict[str, Any], form: AnswerFormat, path: Path | None, output: Output
) -> None:
    """Write all answers, to `path` or to stdout."""
    text = render_answers(answers, summary, form)
    if path is None:
        output.stdout.write(shown(text, output))
        output.stdout.flush()
        return
    write_file(path, text)
    output.document({"output": str(path), "summary": summary})
    output.note(f"wrote {path}")


def tell_failures(
    prompts: Sequence["Prompt"], answers: Sequence[Answer], params: Sequence[SamplingParams], output: Output
) -> None:
    """Tell which prompts failed and which answers were cut; `params` are each prompt's own."""
    failed = {answer.index: answer.error for answer in reversed(answers) if answer.error is not None}
    for index in sorted(failed)[:MAX_WARNINGS]:
        output.warning(f"{prompts[index].source} failed: {failed[index]}")
    if len(failed) > MAX_WARNINGS:
        output.warning(f"{len(failed) - MAX_WARNINGS} more prompts failed; their records have `error`")
    for line in cut_notes(answers, [one.max_tokens for one in params]):
        output.note(f"note: {line}")
