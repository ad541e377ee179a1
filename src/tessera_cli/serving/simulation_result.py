"""What a simulation predicts, under the names of a benchmark's figures."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

from tessera_cli.serving.load_result import LoadResult


@dataclass(frozen=True, kw_only=True)
class SimulationResult(LoadResult):
    """One simulated run. Durations and latencies are simulated seconds; `wall_seconds` is what it took.

    KV usages are shares of the usable blocks, `mean_kv_cache_usage` over time. `mean_in_flight` are the
    requests that an arriving one found, on average over the second and the last third of the arrivals.
    """

    num_steps: int
    peak_kv_cache_usage: float
    mean_kv_cache_usage: float
    mean_in_flight: tuple[float, float]
    wall_seconds: float

    @property
    def keeps_up(self) -> bool:
        """Whether the requests in flight stay about as many as they are.

        Where more arrive than are served they grow with time, on average to 5/3 from the second third to the
        last; two requests more or less are chance.
        """
        middle, last = self.mean_in_flight
        return last <= 1.3 * middle + 2

    def as_dict(self, percentiles: SequenceOf[float] = (50, 90, 99)) -> dict[str, Any]:
        """The result under the keys of a benchmark's JSON, and those that only a simulation has."""
        return self.figures(percentiles) | {
            "failed": 0,
            "num_steps": self.num_steps,
            "peak_kv_cache_usage": self.peak_kv_cache_usage,
            "mean_kv_cache_usage": self.mean_kv_cache_usage,
            "keeps_up": self.keeps_up,
            "wall_seconds": self.wall_seconds,
            "simulated_requests_per_second": self.completed / self.wall_seconds,
        }
