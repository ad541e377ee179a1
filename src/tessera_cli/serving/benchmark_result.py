"""What one run of a benchmark measured, under vLLM's names."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tessera_cli.serving.load_result import METRICS, Distribution, LoadResult


class SampleTimes(Protocol):
    """The latencies of a finished sample, in seconds; `tpot` is None for a single output token."""

    @property
    def ttft(self) -> float | None: ...
    @property
    def tpot(self) -> float | None: ...
    @property
    def itl(self) -> Sequence[float]: ...
    @property
    def e2el(self) -> float | None: ...


@dataclass(frozen=True, kw_only=True)
class BenchmarkResult(LoadResult):
    """What one run measured; `duration` is from the first submission to the last end.

    Attributes:
        errors: why requests failed, one for each.
        slowest: of each completed request the slowest sample's latencies, by metric, in seconds.
        max_output_tokens_per_s: in the busiest of the run's whole seconds; None if only chunks were seen.
        forks: samples that went on from a shared prompt.
        block_copies: blocks copied because one of several holders wrote.
        output_sha256: of the output token ids in the order of the requests; None if only text was seen.
    """

    errors: Sequence[str]
    slowest: Sequence[Mapping[str, float]]
    max_output_tokens_per_s: int | None = None
    forks: int | None = None
    block_copies: int | None = None
    output_sha256: str | None = None

    @property
    def failed(self) -> int:
        return len(self.errors)

    def goodput(self, bounds: Mapping[str, float]) -> float:
        """Requests per second whose every sample is within all `bounds`, which are milliseconds by metric.

        A latency that a request does not have, as TPOT with one token, misses no bound.
        """
        good = sum(
            all(latencies.get(metric, 0.0) * 1000 <= bound for metric, bound in bounds.items())
            for latencies in self.slowest
        )
        return good / self.duration

    def as_dict(
        self, percentiles: Sequence[float] = (50, 90, 99), bounds: Mapping[str, float] | None = None
    ) -> dict[str, Any]:
        """The result under vLLM's JSON keys, with the goodput within `bounds`."""
        return self.figures(percentiles) | {
            "failed": self.failed,
            "request_goodput": self.goodput(bounds) if bounds else None,
            "max_output_tokens_per_s": self.max_output_tokens_per_s,
            "forks": self.forks,
            "block_copies": self.block_copies,
            "output_sha256": self.output_sha256,
        }


def distributions(samples: Iterable[SampleTimes]) -> dict[str, Distribution]:
    """The latencies of all samples, by metric."""
    seconds: dict[str, list[float]] = {metric: [] for metric in METRICS}
    for times in samples:
        seconds["itl"] += times.itl
        for metric, value in _single(times).items():
            seconds[metric].append(value)
    return {metric: Distribution.of(values) for metric, values in seconds.items()}


def slowest(samples: Sequence[SampleTimes]) -> dict[str, float]:
    """The greatest TTFT, TPOT and E2EL among the samples of one request."""
    worst: dict[str, float] = {}
    for times in samples:
        for metric, value in _single(times).items():
            worst[metric] = max(value, worst.get(metric, value))
    return worst


def busiest_second(times: Iterable[float], start: float) -> int:
    """The most of `times` within one of the whole seconds after `start`."""
    return max(Counter(int(time - start) for time in times).values(), default=0)


def _single(times: SampleTimes) -> dict[str, float]:
    values = {"ttft": times.ttft, "tpot": times.tpot, "e2el": times.e2el}
    return {metric: value for metric, value in values.items() if value is not None}
