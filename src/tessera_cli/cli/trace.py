"""`tessera trace`: what the engine did, from the file that --trace wrote."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tessera_cli.cli import options
from tessera_cli.cli.answers import check_destination
from tessera_cli.cli.output import Output, align
from tessera_cli.errors import UsageError
from tessera_cli.files import write_file

if TYPE_CHECKING:
    from tessera_cli.engine.trace_account import TraceAccount
    from tessera_cli.engine.trace_reader import Trace, TracedStep

_BAR = 40


def trace(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What --trace of generate or bench wrote.")],
    request: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="Only the steps of this request, one line each.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[bool, typer.Option("--steps", help="A line for every step before the summary.")] = False,
    chrome: Annotated[
        Path | None,
        typer.Option(
            metavar="OUT.json",
            help="Write trace events for ui.perfetto.dev or chrome://tracing.",
            show_default=False,
        ),
    ] = None,
    json_output: options.JsonOption = False,
    quiet: options.QuietOption = False,
    debug: options.DebugOption = False,
) -> None:
    """Tell what the engine did, step by step or in sum.

    \b
      tessera bench MODEL --trace run.trace
      tessera trace run.trace
      tessera trace run.trace --request 17
      tessera trace run.trace --chrome run.json

    A trace holds sizes and times, no text. One that was cut short by a crash is read up to its last whole
    line.
    """
    from tessera_cli.engine.chrome_trace import chrome_trace
    from tessera_cli.engine.trace_account import account
    from tessera_cli.engine.trace_reader import read_trace

    output = Output.of(json=json_output, quiet=quiet)
    destination = None if chrome is None else check_destination(chrome, others=[file])
    content = read_trace(file)
    if content.cut_line is not None:
        output.warning(f"{file}:{content.cut_line}: the last line is unfinished and left out")
    total = account(content)
    if request is not None and not any(key[0] == request for key in total.sequences):
        raise UsageError(f"{file} has no request {request!r}", hint=f"it has {_some_requests(total)}")
    if json_output:
        output.document(summary(content, total, request))
    else:
        if steps or request is not None:
            rows = step_rows(content, request)
            output.rows(rows, header=_STEP_HEADER if request is None else _REQUEST_HEADER)
            output.data("")
        output.data("\n".join(summary_lines(content, total, request)))
    if destination is not None:
        write_file(destination, json.dumps(chrome_trace(content), separators=(",", ":")) + "\n")
        output.note(f"wrote {destination}; open it in ui.perfetto.dev")


_STEP_HEADER = ["step", "time s", "ms", "sequences", "tokens", "decodes", "KV used", "running", "waiting", ""]
_REQUEST_HEADER = ["step", "time s", "ms", "sequence", "from", "tokens", "samples", "blocks", ""]


def step_rows(content: "Trace", request: str | None) -> list[list[str]]:
    """A row per step; of one request, a row for each of its sequences in each step that concerns it."""
    return [row for step in content.steps for row in _rows(step, request)]


def _rows(step: "TracedStep", request: str | None) -> list[list[str]]:
    from tessera_cli.engine.trace_account import name_of

    when = [str(step.number), f"{step.time:.3f}", f"{sum(step.timings.values()) * 1000:.1f}"]
    if request is None:
        events = [f"preempted {name_of(key)}" for key in step.preempted]
        events += [f"finished {name_of((name, child))} ({why})" for name, child, why in step.finished]
        decodes = sum(item.num_samples > 0 and item.num_tokens == 1 for item in step.scheduled)
        counts = (len(step.scheduled), step.num_tokens, decodes, step.num_used_blocks)
        return [[*when, *map(str, counts), str(step.num_running), str(step.num_waiting), ", ".join(events)]]
    rows = [[*when, name_of(key), *[""] * 4, "preempted"] for key in step.preempted if key[0] == request]
    ends = {(name, child): why for name, child, why in step.finished}
    for item in step.scheduled:
        if item.request_id == request:
            counts = (item.start, item.num_tokens, item.num_samples, item.num_blocks)
            end = ends.pop(item.key, None)
            note = "" if end is None else f"finished ({end})"
            rows.append([*when, name_of(item.key), *map(str, counts), note])
    rows += [
        [*when, name_of(key), *[""] * 4, f"finished ({why})"]
        for key, why in ends.items()
        if key[0] == request
    ]
    return rows


def summary_lines(content: "Trace", total: "TraceAccount", request: str | None) -> list[str]:
    """The whole trace, or one request's part of it, for people."""
    if request is not None:
        return _request_lines(total, request)
    share = total.peak_used_blocks / total.num_blocks if total.num_blocks else 0.0
    ends = ", ".join(f"{count} {reason}" for reason, count in sorted(total.finish_reasons.items())) or "none"
    parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in total.seconds.items()) or "none"
    lines = [
        f"steps        {total.num_steps:,} in {total.duration:.2f} s",
        f"time         {parts}",
        f"tokens       {total.num_scheduled_tokens:,} scheduled, {total.num_output_tokens:,} sampled",
        f"sequences    {len(total.sequences):,}; finished: {ends}",
        f"at most      {total.peak_running} running, {total.peak_waiting} waiting",
        f"KV blocks    peak {total.peak_used_blocks:,} of {total.num_blocks:,} ({share:.1%})"
        f" in step {total.peak_step}",
        f"copies       {total.num_block_copies:,} blocks",
        f"preemptions  {len(total.preemptions)}, {total.num_recomputed_tokens:,} tokens computed again",
    ]
    lines += _preemption_lines(total)
    most = max(total.tokens_per_step.values(), default=0) and max(n for *_, n in total.histogram())
    table = [
        [f"{low}-{high}" if low < high else str(low), str(count), "#" * round(_BAR * count / most)]
        for low, high, count in total.histogram()
    ]
    return [*lines, "", *align(table, header=["tokens/step", "steps", ""])]


def _preemption_lines(total: "TraceAccount") -> list[str]:
    from tessera_cli.engine.trace_account import name_of

    rows = []
    for preemption in total.preemptions:
        again = preemption.num_recomputed_tokens
        price = (
            "not run again" if again is None else f"{again} of {preemption.num_computed_tokens} tokens again"
        )
        rows.append([f"  step {preemption.step}", name_of(preemption.key), price, preemption.reason])
    return align(rows) if rows else []


def _request_lines(total: "TraceAccount", request: str) -> list[str]:
    from tessera_cli.engine.trace_account import name_of

    lines = []
    for key, sequence in total.sequences.items():
        if key[0] == request:
            lines.append(
                f"{name_of(key)}: steps {sequence.first_step} to {sequence.last_step},"
                f" {sequence.num_scheduled_tokens} tokens computed, {sequence.num_cached_tokens} cached,"
                f" {sequence.num_output_tokens} sampled, {sequence.num_preemptions} preemptions,"
                f" {sequence.finish_reason or 'unfinished'}"
            )
    return lines


def summary(content: "Trace", total: "TraceAccount", request: str | None) -> dict[str, Any]:
    """The same as one JSON object."""
    from tessera_cli.engine.trace_account import name_of

    return {
        "config": content.config,
        "versions": content.versions,
        "num_steps": total.num_steps,
        "duration": total.duration,
        "seconds": dict(total.seconds),
        "num_scheduled_tokens": total.num_scheduled_tokens,
        "num_output_tokens": total.num_output_tokens,
        "num_block_copies": total.num_block_copies,
        "peak_used_blocks": total.peak_used_blocks,
        "num_blocks": total.num_blocks,
        "peak_running": total.peak_running,
        "peak_waiting": total.peak_waiting,
        "finish_reasons": dict(total.finish_reasons),
        "tokens_per_step": [
            {"from": low, "to": high, "steps": count} for low, high, count in total.histogram()
        ],
        "preemptions": [
            {
                "step": preemption.step,
                "sequence": name_of(preemption.key),
                "num_computed_tokens": preemption.num_computed_tokens,
                "num_recomputed_tokens": preemption.num_recomputed_tokens,
                "reason": preemption.reason,
            }
            for preemption in total.preemptions
            if request in (None, preemption.key[0])
        ],
        "sequences": {
            name_of(key): vars(sequence)
            for key, sequence in total.sequences.items()
            if request in (None, key[0])
        },
    }


def _some_requests(total: "TraceAccount") -> str:
    names = list(dict.fromkeys(key[0] for key in total.sequences))
    return ", ".join(names[:5]) + (" ..." if len(names) > 5 else "") if names else "none at all"
