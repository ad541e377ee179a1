"""What a load came to, whether it was measured or simulated: the figures and the names that both have."""

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
        self.mean = self.std = None
        if self.count:
            self.mean = mean = math.fsum(value * count for value, count in counts.items()) / self.count
            squares = math.fsum(count * (value - mean) ** 2 for value, count in counts.items())
            # Of the population, as numpy's default and so vLLM's.
            self.std = math.sqrt(squares / self.count)

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


@dataclass(frozen=True, kw_only=True)
class LoadResult:
    """A load that was put on an engine or on a model of one. Durations and latencies are seconds.

    Token counts, throughputs and latencies are of the completed requests alone; `latencies` has one of each
    of METRICS for each sample of a request, and every gap between tokens for "itl". `prefix_cache_queries`
    and `prefix_cache_hits` count prompt tokens. What nobody outside the engine can see is None.
    """

    completed: int
    total_input_tokens: int
    total_output_tokens: int
    duration: float
    max_concurrent_requests: int
    preemptions: int | None
    prefix_cache_queries: int | None
    prefix_cache_hits: int | None
    latencies: Mapping[str, Distribution]

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
        """Hits over queries; None where the prefix cache was never asked."""
        if not self.prefix_cache_queries or self.prefix_cache_hits is None:
            return None
        return self.prefix_cache_hits / self.prefix_cache_queries

    def mean_ms(self, metric: str) -> float | None:
        """Mean of one of METRICS in milliseconds; None where there is nothing."""
        return _milliseconds(self.latencies[metric].mean)

    def percentile_ms(self, metric: str, percent: float) -> float | None:
        """Percentile of one of METRICS in milliseconds; None where there is nothing."""
        return _milliseconds(self.latencies[metric].percentile(percent))

    def figures(self, percentiles: SequenceOf[float]) -> dict[str, Any]:
        """Counts, throughputs and latencies under vLLM's JSON keys, such as ``p99_itl_ms``."""
        fields: dict[str, Any] = {
            "duration": self.duration,
            "completed": self.completed,
            "total_input_tokens": self.total_input_tokens,
            "total_output_tokens": self.total_output_tokens,
            "request_throughput": self.request_throughput,
            "output_throughput": self.output_throughput,
            "total_token_throughput": self.total_token_throughput,
            "max_concurrent_requests": self.max_concurrent_requests,
            "preemptions": self.preemptions,
            "prefix_cache_queries": self.prefix_cache_queries,
            "prefix_cache_hits": self.prefix_cache_hits,
            "prefix_cache_hit_rate": self.prefix_cache_hit_rate,
        }
        for metric in METRICS:
            fields[f"mean_{metric}_ms"] = self.mean_ms(metric)
            fields[f"median_{metric}_ms"] = self.percentile_ms(metric, 50)
            fields[f"std_{metric}_ms"] = _milliseconds(self.latencies[metric].std)
            for percent in percentiles:
                fields[f"p{percent:g}_{metric}_ms"] = self.percentile_ms(metric, percent)
        return fields


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000
