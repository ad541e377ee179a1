"""A trace read back: strictly, except for a last line that a crash cut short."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tessera_cli.engine.trace import SCHEDULED_COLUMNS, TRACE_FORMAT, TRACE_VERSION
from tessera_cli.errors import DataError

Key = tuple[str, int]  # request id and child index


class TracedSequence(NamedTuple):
    """One sequence's share of a step; `num_blocks` hold what of it is computed by then."""

    request_id: str
    child_index: int
    start: int
    num_tokens: int
    num_samples: int
    num_blocks: int

    @property
    def key(self) -> Key:
        return self.request_id, self.child_index


@dataclass(frozen=True)
class TracedStep:
    """One line: counts after the step, seconds since the trace began at its end, seconds of its parts."""

    number: int
    time: float
    scheduled: tuple[TracedSequence, ...]
    block_copies: tuple[tuple[int, int], ...]
    preempted: tuple[Key, ...]
    finished: tuple[tuple[str, int, str], ...]
    num_used_blocks: int
    num_cached_blocks: int
    num_free_blocks: int
    num_running: int
    num_waiting: int
    timings: dict[str, float]

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.scheduled)

    @property
    def start(self) -> float:
        """When its first part began: the parts lie end to end before `time`."""
        return self.time - sum(self.timings.values())


@dataclass(frozen=True)
class Trace:
    """A whole file; `cut_line` is the number of a last line that was left unfinished, else None."""

    config: dict[str, Any]
    versions: dict[str, str]
    steps: tuple[TracedStep, ...]
    cut_line: int | None


def read_trace(path: Path) -> Trace:
    """Read a trace; a last line without its newline is what a crash leaves, and is left out.

    Raises:
        DataError: there is no such file, it is no trace of this version, or a line is broken.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise DataError(f"the trace {path} cannot be read: {error.strerror}") from None
    *lines, rest = text.split("\n")
    if not lines:
        raise DataError(f"{path} holds no trace: its first line is missing or unfinished")
    first = _parse(path, 1, lines[0])
    if not isinstance(first, dict) or first.get("format") != TRACE_FORMAT:
        raise DataError(f"{path}:1: no trace", hint="`generate` and `bench` write one with --trace FILE")
    if first.get("version") != TRACE_VERSION:
        raise DataError(f"{path}:1: trace version {first.get('version')!r}, and this reads {TRACE_VERSION}")
    steps = []
    try:
        config, versions = dict(first["config"]), dict(first["versions"])
        if tuple(first["scheduled_columns"]) != SCHEDULED_COLUMNS:
            raise ValueError("other columns")
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}:1: a broken header ({error})") from None
    for number, line in enumerate(lines[1:], start=2):
        raw = _parse(path, number, line)
        try:
            step = _step(raw)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            named = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise DataError(f"{path}:{number}: not a step of a trace ({named})") from None
        if step.number != number - 1:
            raise DataError(f"{path}:{number}: step {step.number} stands where step {number - 1} belongs")
        steps.append(step)
    return Trace(config, versions, tuple(steps), len(lines) + 1 if rest else None)


def _parse(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{number}: not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}:{number}: not JSON: {error}") from None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _step(raw: dict[str, Any]) -> TracedStep:
    pool = raw["pool"]
    return TracedStep(
        number=int(raw["step"]),
        time=float(raw["time"]),
        scheduled=tuple(_scheduled(row) for row in raw["scheduled"]),
        block_copies=tuple((int(source), int(target)) for source, target in raw["block_copies"]),
        preempted=tuple((str(request), int(child)) for request, child in raw["preempted"]),
        finished=tuple((str(request), int(child), str(reason)) for request, child, reason in raw["finished"]),
        num_used_blocks=int(pool["used"]),
        num_cached_blocks=int(pool["cached"]),
        num_free_blocks=int(pool["free"]),
        num_running=int(raw["running"]),
        num_waiting=int(raw["waiting"]),
        timings={str(name): float(seconds) for name, seconds in raw["timings"].items()},
    )


def _scheduled(row: list[Any]) -> TracedSequence:
    request_id, *counts = row
    return TracedSequence(str(request_id), *map(int, counts))
