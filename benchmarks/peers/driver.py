"""What every engine's process does: take workloads from stdin, run them, answer on stdout, a JSON line each.

It is imported by other virtual environments, and needs no more than the standard library.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, TextIO

Add = Callable[[str, list[int], int], None]
"""Adds a request: its id, its prompt's token ids, and how many tokens to answer, whatever they are."""
Step = Callable[[], Iterable[tuple[str, list[int], bool]]]
"""Lets the engine do a step: ids, new token ids, and whether the request is done."""


def keep_stdout() -> TextIO:
    """The real stdout, for answers alone: libraries, which print what they like, get stderr in its place."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


def serve(out: TextIO, version: str, add: Add, step: Step) -> None:
    """Answer workloads until stdin ends, with an engine in this process."""

    def run(requests: list[tuple[list[int], int]], concurrency: int) -> dict[str, Any]:
        return run_closed_loop(requests, concurrency, add, step)

    answer(out, version, run, [os.getpid()])


def answer(
    out: TextIO,
    version: str,
    run: Callable[[list[tuple[list[int], int]], int], dict[str, Any]],
    pids: list[int],
) -> None:
    """Like `serve`, for what runs a whole list of requests by itself; the memory of `pids` is told."""
    print(json.dumps({"version": version}), file=out, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        for pid in pids:
            _forget_peak_rss(pid)
        if asked["before"]:
            run(asked["before"], 1)
        result = run(asked["requests"], asked["concurrency"])
        result["peak_rss"] = sum(map(_peak_rss, pids))
        print(json.dumps(result), file=out, flush=True)


def run_closed_loop(
    requests: list[tuple[list[int], int]], concurrency: int, add: Add, step: Step
) -> dict[str, Any]:
    """Seconds of the whole, and of each request its first and last token and what it got."""
    waiting = [(str(index), *request) for index, request in enumerate(requests)][::-1]
    added: dict[str, float] = {}
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    tokens: dict[str, list[int]] = {}
    live = 0
    start = time.perf_counter()
    while waiting or live:
        while waiting and live < concurrency:
            request_id, prompt, output_len = waiting.pop()
            added[request_id] = time.perf_counter()
            tokens[request_id] = []
            add(request_id, prompt, output_len)
            live += 1
        for request_id, new, done in step():
            if new:
                last[request_id] = time.perf_counter()
                first.setdefault(request_id, last[request_id])
                tokens[request_id] += new
            live -= bool(done)
    seconds = time.perf_counter() - start
    return summary(seconds, added, first, last, tokens)


def summary(
    seconds: float,
    added: dict[str, float],
    first: dict[str, float],
    last: dict[str, float],
    tokens: dict[str, list[int]],
) -> dict[str, Any]:
    """A run's answer, in the order of its requests."""
    order = sorted(added, key=int)
    return {
        "seconds": seconds,
        "ttft": [first[key] - added[key] for key in order],
        "tpot": [(last[key] - first[key]) / (len(tokens[key]) - 1) for key in order if len(tokens[key]) > 1],
        "tokens": [tokens[key] for key in order],
    }


def _forget_peak_rss(pid: int) -> None:
    """Let the peak start again from what a process has now (proc_pid_clear_refs(5))."""
    with open(f"/proc/{pid}/clear_refs", "w") as file:
        file.write("5")


def _peak_rss(pid: int) -> int:
    """The most bytes of memory that a process has had since the peak was forgotten."""
    with open(f"/proc/{pid}/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM"))
