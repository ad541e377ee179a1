"""A trace as Chrome trace events, for Perfetto and chrome://tracing.

Format: "Trace Event Format", complete (X), instant (i), counter (C) and metadata (M) events; times in
microseconds. Process 1 is the engine, process 2 has a thread per sequence.
"""

from collections.abc import Iterator
from typing import Any

from tessera_cli.engine.trace_account import name_of
from tessera_cli.engine.trace_reader import Key, Trace, TracedStep

_ENGINE, _SEQUENCES = 1, 2


def chrome_trace(trace: Trace) -> dict[str, Any]:
    """The JSON object that the viewers load."""
    threads: dict[Key, int] = {}
    events = [_named("process", _ENGINE, 0, "engine"), _named("process", _SEQUENCES, 0, "sequences")]
    events.append(_named("thread", _ENGINE, 0, "steps"))
    for step in trace.steps:
        events += _engine_events(step)
        events += _sequence_events(step, threads)
    events += [_named("thread", _SEQUENCES, number, name_of(key)) for key, number in threads.items()]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": trace.config}


def _engine_events(step: TracedStep) -> Iterator[dict[str, Any]]:
    begin = step.start
    for name, seconds in step.timings.items():
        args = {"step": step.number, "tokens": step.num_tokens, "sequences": len(step.scheduled)}
        yield _event("X", name, _ENGINE, 0, begin, dur=_micros(seconds), args=args)
        begin += seconds
    pool = {"used": step.num_used_blocks, "cached": step.num_cached_blocks, "free": step.num_free_blocks}
    yield _event("C", "KV blocks", _ENGINE, 0, step.time, args=pool)
    yield _event("C", "running", _ENGINE, 0, step.time, args={"sequences": step.num_running})
    yield _event("C", "waiting", _ENGINE, 0, step.time, args={"sequences": step.num_waiting})


def _sequence_events(step: TracedStep, threads: dict[Key, int]) -> Iterator[dict[str, Any]]:
    for key in step.preempted:
        yield _instant("preempted", _thread(threads, key), step.start)
    for item in step.scheduled:
        # What samples and computes one token only is a decode, but for a prompt's last token left alone.
        name = "decode" if item.num_samples and item.num_tokens == 1 else "prefill"
        args = {
            "step": step.number,
            "start": item.start,
            "tokens": item.num_tokens,
            "blocks": item.num_blocks,
        }
        duration = _micros(step.time) - _micros(step.start)
        yield _event("X", name, _SEQUENCES, _thread(threads, item.key), step.start, dur=duration, args=args)
    for request_id, child_index, reason in step.finished:
        yield _instant(f"finished: {reason}", _thread(threads, (request_id, child_index)), step.time)


def _thread(threads: dict[Key, int], key: Key) -> int:
    return threads.setdefault(key, len(threads) + 1)


def _instant(name: str, thread: int, seconds: float) -> dict[str, Any]:
    return _event("i", name, _SEQUENCES, thread, seconds, s="t")


def _event(phase: str, name: str, process: int, thread: int, seconds: float, **more: Any) -> dict[str, Any]:
    return {"ph": phase, "name": name, "pid": process, "tid": thread, "ts": _micros(seconds), **more}


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": f"{kind}_name", "pid": process, "tid": thread, "args": {"name": name}}


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 1)
