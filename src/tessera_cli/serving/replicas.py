"""How many replicas keep a service-level objective at a given rate."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tessera_cli.errors import GateError
from tessera_cli.serving.simulation_result import SimulationResult

MAX_REPLICAS = 1 << 16


@dataclass(frozen=True)
class Objective:
    """Upper bounds in milliseconds of a percentile of some metrics."""

    bounds: Mapping[str, float]
    percent: float

    def misses(self, result: SimulationResult) -> list[str]:
        """What of the objective a run does not keep, in words; empty where it keeps all of it."""
        misses = []
        for metric, bound in self.bounds.items():
            value = result.percentile_ms(metric, self.percent)
            if value is not None and value > bound:
                misses.append(f"p{self.percent:g} {metric.upper()} {value:,.1f} ms is above {bound:g} ms")
        if not result.keeps_up:
            misses.append("more requests arrive than are served")
        return misses


@dataclass(frozen=True)
class ReplicaPlan:
    """The fewest replicas found to keep the objective, and what each then does at its share of the rate."""

    num_replicas: int
    rate_per_replica: float
    result: SimulationResult


def plan_replicas(
    run: Callable[[float], SimulationResult], objective: Objective, target_rate: float
) -> ReplicaPlan:
    """Search the number of replicas that share `target_rate` requests per second evenly.

    Args:
        run: simulates one replica at a rate.

    Raises:
        GateError: not even a replica with next to nothing to do keeps the objective.
    """
    tried: dict[int, SimulationResult] = {}

    def misses(num_replicas: int) -> list[str]:
        tried[num_replicas] = run(target_rate / num_replicas)
        return objective.misses(tried[num_replicas])

    low, high = 0, 1  # `low` replicas do not do
    if misses(high) and (hopeless := misses(MAX_REPLICAS)):
        raise GateError(
            f"not even {MAX_REPLICAS:,} replicas keep the objective: {'; '.join(hopeless)}",
            hint="relax --slo, shorten the requests or take a faster machine",
        )
    while objective.misses(tried[high]):
        low, high = high, high * 2
        misses(high)
    while high - low > 1:
        middle = (low + high) // 2
        if misses(middle):
            low = middle
        else:
            high = middle
    return ReplicaPlan(high, target_rate / high, tried[high])
