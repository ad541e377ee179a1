"""One load as it was measured, maybe several times, and the gates that it is held to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tessera_cli.errors import GateError

if TYPE_CHECKING:
    from tessera_cli.serving.benchmark_result import BenchmarkResult


@dataclass(frozen=True)
class Compared:
    """What else answered the same requests; `figures` are those of its run."""

    name: str
    output_throughput: float
    figures: dict[str, Any]


@dataclass(frozen=True)
class BenchRun:
    """One load, measured `len(repeats)` times.

    Attributes:
        about: everything needed to run it again, as the JSON shows it.
        bounds: what goodput is counted within, in milliseconds by metric.
    """

    concurrency: int | None
    repeats: list["BenchmarkResult"]
    compared: Compared | None
    about: dict[str, Any]
    bounds: Mapping[str, float] = field(default_factory=dict)

    @property
    def result(self) -> "BenchmarkResult":
        """The repeat of median output throughput (the lower of two), whole, so that its figures agree."""
        ordered = sorted(self.repeats, key=lambda repeat: repeat.output_throughput)
        return ordered[(len(ordered) - 1) // 2]

    @property
    def num_failed(self) -> int:
        return sum(repeat.failed for repeat in self.repeats)

    @property
    def errors(self) -> list[str]:
        """Why requests failed, each reason once."""
        return sorted({error for repeat in self.repeats for error in repeat.errors})

    @property
    def ratio(self) -> float | None:
        """Output throughput over the baseline's; None without one, or where failures make work unequal."""
        if self.compared is None or self.num_failed:
            return None
        return self.result.output_throughput / self.compared.output_throughput

    def as_dict(self, percentiles: Sequence[float]) -> dict[str, Any]:
        """The result's keys at the top, then the repeats, the baseline and what was run on what."""
        nested = {key: value for key, value in self.about.items() if isinstance(value, dict)}
        fields = {key: value for key, value in self.about.items() if key not in nested}
        fields["max_concurrency"] = self.concurrency
        fields |= self.result.as_dict(percentiles, self.bounds)
        fields["goodput"] = dict(self.bounds) or None
        fields["repeat_output_throughput"] = [repeat.output_throughput for repeat in self.repeats]
        fields["repeats"] = [repeat.as_dict(percentiles, self.bounds) for repeat in self.repeats]
        if self.compared is not None:
            fields["baseline"] = (
                {"name": self.compared.name}
                | self.compared.figures
                | {"output_throughput": self.compared.output_throughput, "ratio": self.ratio}
            )
        return fields | nested


@dataclass(frozen=True)
class Gates:
    """Bounds on the figures of every run: latencies in milliseconds, rates per second; None is no bound."""

    max_ttft_p99: float | None = None
    max_tpot_p99: float | None = None
    min_output_throughput: float | None = None
    min_goodput: float | None = None

    def check(self, runs: Sequence[BenchRun]) -> None:
        """Hold every run to the bounds.

        Raises:
            GateError: a bound is missed; the message has every miss.
        """
        misses = [miss for run in runs for miss in self._misses(run)]
        if misses:
            raise GateError("; ".join(misses))

    def _misses(self, run: BenchRun) -> list[str]:
        result, where = run.result, f"concurrency {run.concurrency or 'unlimited'}"
        misses = []
        for metric, most in (("ttft", self.max_ttft_p99), ("tpot", self.max_tpot_p99)):
            value = result.percentile_ms(metric, 99)
            if most is not None and (value is None or value > most):
                shown = "unmeasured" if value is None else f"{value:.1f} ms"
                misses.append(f"p99 {metric.upper()} {shown} is above {most:g} ms at {where}")
        throughput, least = result.output_throughput, self.min_output_throughput
        if least is not None and throughput < least:
            misses.append(f"output {throughput:.1f} tok/s is below {least:g} at {where}")
        goodput = result.goodput(run.bounds)
        if self.min_goodput is not None and goodput < self.min_goodput:
            misses.append(f"goodput {goodput:.2f} requests/s is below {self.min_goodput:g} at {where}")
        return misses
