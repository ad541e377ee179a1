"""What runs of several engines come to."""

import os
import platform
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Runs = dict[str, dict[str, list[dict[str, Any]]]]
"""By workload and engine, the answer of each round (see `driver.summary`)."""
BASE = "tessera f32"


@dataclass(frozen=True)
class Row:
    """An engine at a workload: medians over the rounds.

    Attributes:
        lowest, highest: output tokens per second in the worst and the best round.
        over: each of Tessera's rows' speed over this engine's, the median of the rounds' ratios.
        peak_rss_mb: the most memory in any round.
        same_answers: share of the requests whose every token is that of Tessera in float32.
    """

    workload: str
    engine: str
    output_throughput: float
    lowest: float
    highest: float
    over: dict[str, float]
    mean_ttft_ms: float
    mean_tpot_ms: float
    peak_rss_mb: float
    same_answers: float


@dataclass(frozen=True)
class Figures:
    """One run of the benchmark."""

    machine: str
    versions: dict[str, str]
    rounds: int
    rows: list[Row]


def rows(results: Runs) -> list[Row]:
    """A row for each workload and engine."""
    return [_row(name, peer, by_peer) for name, by_peer in results.items() for peer in by_peer]


def _row(name: str, peer: str, by_peer: dict[str, list[dict[str, Any]]]) -> Row:
    runs, speeds = by_peer[peer], [speed(run) for run in by_peer[peer]]
    same = [
        ours == theirs
        for run, base in zip(runs, by_peer[BASE], strict=True)
        for theirs, ours in zip(run["tokens"], base["tokens"], strict=True)
    ]
    over = {
        other: statistics.median(speed(run) / its for run, its in zip(by_peer[other], speeds, strict=True))
        for other in by_peer
        if other.startswith("tessera")
    }
    return Row(
        workload=name,
        engine=peer,
        output_throughput=statistics.median(speeds),
        lowest=min(speeds),
        highest=max(speeds),
        over=over,
        mean_ttft_ms=1e3 * statistics.median(statistics.fmean(run["ttft"]) for run in runs),
        mean_tpot_ms=1e3 * statistics.median(statistics.fmean(run["tpot"]) for run in runs),
        peak_rss_mb=max(run["peak_rss"] for run in runs) / 1e6,
        same_answers=statistics.fmean(same),
    )


def speed(run: dict[str, Any]) -> float:
    """Output tokens per second."""
    return float(sum(map(len, run["tokens"])) / run["seconds"])


def machine() -> str:
    """The processor, its cores and the widest vectors it has, in a line."""
    fields = dict(
        (part.strip() for part in line.split(":", 1))
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if ":" in line
    )
    known = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_vnni": "VNNI"}
    flags = set(fields.get("flags", "").split())
    vectors = ", ".join(label for flag, label in known.items() if flag in flags)
    cores = len(os.sched_getaffinity(0))
    return (
        f"{cores} cores of {fields.get('model name', platform.processor())} ({vectors}), {platform.system()}"
    )
