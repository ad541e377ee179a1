"""What a simulation predicts, under the names of a benchmark's figures."""

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

METRICS = ("ttft", "tpot", "itl", "e2el")


class Distribution:
    """Values with their counts, so that a gap that a thousand sequences share is one entry."""

    def __init__(self, counts: Mapping[float, int]) -> None:
        self._values = sorted(counts)
        self._ends = list(accumulate(counts[value] for value in self._values))
        self.count = self._ends[-1] if self._ends else 0
        total = math.fsum(value * count for value, count in counts.items())
        self.mean = total / self.count if self.count else None

    @classmethod
    def of(cls, values: Iterable[float]) -> "Distribution":
        """The distribution of single values."""
        counts: dict[float, int] = {}
        for value in values:
            counts[value] = counts.get(value, 0) + 1
        return cls(counts)

    def percentile(self, percent: float) -> float | None:
        """Linear interpolation between ranks, as `engine.stats.percentile`; None without values."""
        if not self.count:
            return None
        rank = (self.count - 1) * percent / 100
        low, high = self._at(math.floor(rank)), self._at(math.ceil(rank))
        return low + (high - low) * (rank - math.floor(rank))

    def _at(self, rank: int) -> float:
        return self._values[bisect_right(self._ends, rank)]


@dataclass(frozen=True)
class SimulationResult:
    """One simulated run. Durations and latencies are simulated seconds; `wall_seconds` is what it took.

    `prefix_cache_queries` and `prefix_cache_hits` count tokens, KV usages are shares of the usable blocks,
    `mean_kv_cache_usage` over time. `mean_in_flight` are the requests that an arriving one found, on average
    over the second and the last third of the arrivals.
    """

    completed: int
    total_input_tokens: int
    total_output_tokens: int
    duration: float
    max_concurrent_requests: int
    preemptions: int
    num_steps: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    peak_kv_cache_usage: float
    mean_kv_cache_usage: float
    mean_in_flight: tuple[float, float]
    latencies: dict[str, Distribution]
    wall_seconds: float

    @property
    def request_throughput(self) -> float:
        return self.completed / self.duration

    @property
    def output_throughput(self) -> float:
        return self.total_output_tokens / self.duration

    @property
    def total_token_throughput(self) -> float:
        return (self.total_input_tokens + self.total_output_tokens) / self.duration

    @property
    def prefix_cache_hit_rate(self) -> float | None:
        """Share of the tokens looked for that were found; None where nothing was looked for."""
        return self.prefix_cache_hits / self.prefix_cache_queries if self.prefix_cache_queries else None

    @property
    def keeps_up(self) -> bool:
        """Whether the requests in flight stay about as many as they are.

        Where more arrive than are served they grow with time, on average to 5/3 from the second third to the
        last; two requests more or less are chance.
        """
        middle, last = self.mean_in_flight
        return last <= 1.3 * middle + 2

    def percentile_ms(self, metric: str, percent: float) -> float | None:
        """Percentile of one of METRICS in milliseconds; None where there is nothing."""
        seconds = self.latencies[metric].percentile(percent)
        return None if seconds is None else seconds * 1000

    def as_dict(self, percentiles: SequenceOf[float] = (50, 90, 99)) -> dict[str, Any]:
        """The result under the keys of a benchmark's JSON, and those that only a simulation has."""
        result: dict[str, Any] = {
            "completed": self.completed,
            "failed": 0,
            "total_input_tokens": self.total_input_tokens,
            "total_output_tokens": self.total_output_tokens,
            "duration": self.duration,
            "request_throughput": self.request_throughput,
            "output_throughput": self.output_throughput,
            "total_token_throughput": self.total_token_throughput,
            "max_concurrent_requests": self.max_concurrent_requests,
            "preemptions": self.preemptions,
            "num_steps": self.num_steps,
            "prefix_cache_queries": self.prefix_cache_queries,
            "prefix_cache_hits": self.prefix_cache_hits,
            "prefix_cache_hit_rate": self.prefix_cache_hit_rate,
            "peak_kv_cache_usage": self.peak_kv_cache_usage,
            "mean_kv_cache_usage": self.mean_kv_cache_usage,
            "keeps_up": self.keeps_up,
        }
        for metric in METRICS:
            mean = self.latencies[metric].mean
            result[f"mean_{metric}_ms"] = None if mean is None else mean * 1000
            result[f"median_{metric}_ms"] = self.percentile_ms(metric, 50)
            for percent in percentiles:
                result[f"p{percent:g}_{metric}_ms"] = self.percentile_ms(metric, percent)
        return result | {
            "wall_seconds": self.wall_seconds,
            "simulated_requests_per_second": self.completed / self.wall_seconds,
        }
