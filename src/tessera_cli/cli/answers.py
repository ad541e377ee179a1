"""The answers of `tessera generate`: their records, their formats and the file they go to."""

import json
import os
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tessera_cli.cli.output import to_json
from tessera_cli.errors import UsageError

if TYPE_CHECKING:
    from tessera_cli.cli.prompt_line import Messages, Prompt
    from tessera_cli.serving.outputs import CompletionOutput, RequestOutput


class AnswerFormat(StrEnum):
    """How answers are written: bare text, a JSON object per line, or one JSON document."""

    TEXT = "text"
    JSONL = "jsonl"
    JSON = "json"


@dataclass(frozen=True)
class Answer:
    """One record.

    Attributes:
        index: its prompt's place among the prompts.
        sample_index: its own among the answers to the prompt.
        prompt: what the user gave; None where that is `messages`.
        messages: what the user gave; None where that is `prompt`.
        ttft_ms: from submission to the first token.
        logprobs: as in OpenAI's chat completions; None if they were not asked for.
        prompt_logprobs: as vLLM writes them, with the first answer to a prompt; None if not asked for.
    """

    index: int
    sample_index: int
    prompt: str | None
    messages: "Messages | None"
    text: str
    finish_reason: str
    stop_reason: int | str | None
    num_prompt_tokens: int
    num_output_tokens: int
    ttft_ms: float | None
    error: str | None
    logprobs: dict[str, Any] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None

    @classmethod
    def all_of(cls, index: int, prompt: "Prompt", output: "RequestOutput") -> list["Answer"]:
        """The records of what became of `prompt`, one for each answer."""
        return [cls._of(index, prompt, output, completion) for completion in output.outputs]

    @classmethod
    def _of(
        cls, index: int, prompt: "Prompt", output: "RequestOutput", completion: "CompletionOutput"
    ) -> "Answer":
        ttft = None if completion.metrics is None else completion.metrics.ttft
        logprobs = None
        if completion.logprobs is not None:
            logprobs = {"content": [one.as_content() for one in completion.logprobs]}
        prompt_logprobs = None
        if output.prompt_logprobs is not None and completion.index == 0:
            prompt_logprobs = [
                None if one is None else one.as_prompt_entry() for one in output.prompt_logprobs
            ]
        return cls(
            index=index,
            sample_index=completion.index,
            prompt=prompt.text,
            messages=prompt.messages,
            text=completion.text,
            finish_reason=str(completion.finish_reason),
            stop_reason=completion.stop_reason,
            num_prompt_tokens=len(output.prompt_token_ids),
            num_output_tokens=len(completion.token_ids),
            ttft_ms=None if ttft is None else round(ttft * 1000, 3),
            error=completion.error,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def as_dict(self) -> dict[str, Any]:
        """The fields in order, without those that were not given or not asked for."""
        values = vars(self) | {}
        del values["prompt" if self.prompt is None else "messages"]
        for name in ("logprobs", "prompt_logprobs"):
            if values[name] is None:
                del values[name]
        return values


def summarize(answers: Sequence[Answer], duration: float, peak_memory_bytes: int | None) -> dict[str, Any]:
    """Counts and rates of a whole job, under the benchmark's names; failed prompts count as failed alone.

    `peak_memory_bytes` is None where a server has answered.
    """
    failed = {answer.index for answer in answers if answer.error is not None}
    done = [answer for answer in answers if answer.index not in failed]
    inputs = {answer.index: answer.num_prompt_tokens for answer in done}
    num_input = sum(inputs.values())
    num_output = sum(answer.num_output_tokens for answer in done)
    return {
        "completed": len(inputs),
        "failed": len(failed),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "duration": duration,
        "prompt_throughput": num_input / duration,
        "output_throughput": num_output / duration,
        "peak_memory_bytes": peak_memory_bytes,
    }


def summary_line(summary: dict[str, Any]) -> str:
    """The summary for people."""
    failed = f" ({summary['failed']} failed)" if summary["failed"] else ""
    memory = summary["peak_memory_bytes"]
    return ", ".join(
        [
            f"{_count(summary['completed'] + summary['failed'], 'prompt')}{failed}",
            f"{summary['total_input_tokens']:,} tokens in",
            f"{summary['total_output_tokens']:,} out",
            f"prompt {summary['prompt_throughput']:,.1f} tok/s",
            f"gen {summary['output_throughput']:,.1f} tok/s",
            *([] if memory is None else [f"peak memory {memory / 2**30:.2f} GiB"]),
            f"{summary['duration']:.1f} s",
        ]
    )


def cut_notes(answers: Sequence[Answer], max_tokens: Sequence[int]) -> list[str]:
    """Lines on answers that did not end by themselves; `max_tokens` is each prompt's own limit."""
    cut = [
        (answer.num_output_tokens, max_tokens[answer.index])
        for answer in answers
        if answer.finish_reason == "length"
    ]
    by_limit = sum(num_tokens >= limit for num_tokens, limit in cut)
    lines = []
    if by_limit:
        lines.append(f"{_of(by_limit, answers)} cut by --max-tokens (finish_reason length)")
    if len(cut) > by_limit:
        lines.append(f"{_of(len(cut) - by_limit, answers)} cut by --max-model-len (finish_reason length)")
    return lines


def render_answers(answers: Sequence[Answer], summary: dict[str, Any], form: AnswerFormat) -> str:
    """All answers in input order, with the last newline."""
    match form:
        case AnswerFormat.JSON:
            return to_json({"answers": [answer.as_dict() for answer in answers], "summary": summary}) + "\n"
        case AnswerFormat.JSONL:
            records = (json.dumps(answer.as_dict(), ensure_ascii=False) for answer in answers)
            return "".join(f"{record}\n" for record in records)
        case AnswerFormat.TEXT if len(answers) == 1:
            return answers[0].text + "\n"
        case AnswerFormat.TEXT:
            several = {answer.index for answer in answers if answer.sample_index > 0}
            return "\n".join(
                f"[{_label(answer, several)}] {_heading(answer)}\n{answer.text}\n" for answer in answers
            )


def check_destination(path: Path, *, others: Iterable[Path | str | None] = ()) -> Path:
    """The file that `path` names, links followed.

    Args:
        path: what the user gave.
        others: files that the same command reads or writes.

    Raises:
        UsageError: its directory is missing or cannot be written to, it is one of `others`, or it is there
            and not a file (which a rename would replace).
    """
    path = path.resolve()
    if any(path == Path(other).resolve() for other in others if other is not None):
        raise UsageError(f"{path} would be overwritten: it is given twice", hint="name different files")
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent}: no such directory", hint="make it first, or write elsewhere")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"{path.parent}: no file can be made there", hint="write elsewhere")
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is not a file", hint="name a file")
    return path


def _label(answer: Answer, several: Set[int]) -> str:
    """The prompt's index, and the answer's own for the prompts that have `several`."""
    return f"{answer.index}.{answer.sample_index}" if answer.index in several else str(answer.index)


def _heading(answer: Answer) -> str:
    """The prompt's beginning, on one line, and the error if there is one."""
    content = answer.prompt if answer.prompt is not None else (answer.messages or [])[-1]["content"]
    line = " ".join(content.split())
    shown = line if len(line) <= 60 else line[:57] + "..."
    return shown if answer.error is None else f"{shown}\nerror: {answer.error}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _of(number: int, answers: Sequence[Answer]) -> str:
    if len(answers) == 1:
        return "the answer is"
    return f"{number} of {len(answers)} answers " + ("is" if number == 1 else "are")
