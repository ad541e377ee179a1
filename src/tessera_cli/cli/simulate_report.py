"""What `tessera simulate` prints: a prediction in the layout of `tessera bench`, and a plan of replicas."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tessera_cli.serving.replicas import Objective, ReplicaPlan
    from tessera_cli.serving.simulation_result import SimulationResult


def report(result: "SimulationResult", percentiles: Sequence[float]) -> list[str]:
    """One simulated run, line by line."""
    work = f"{result.total_input_tokens:,} tokens in, {result.total_output_tokens:,} out"
    hit_rate = result.prefix_cache_hit_rate
    usage = f"peak {result.peak_kv_cache_usage:.1%}, mean {result.mean_kv_cache_usage:.1%}"
    lines = [
        f"requests      {result.completed:,} completed, at most {result.max_concurrent_requests:,} in flight",
        f"work          {work}, {result.duration:,.2f} s in {result.num_steps:,} steps",
        f"requests/s    {result.request_throughput:,.2f}",
        f"output tok/s  {result.output_throughput:,.1f}",
        f"total tok/s   {result.total_token_throughput:,.1f}",
        f"preemptions   {result.preemptions:,}",
        f"KV cache      {usage}",
        f"prefix hits   {'-' if hit_rate is None else f'{hit_rate:.1%} of the prompt tokens'}",
        "latency ms  " + "".join(f"{name:>10}" for name in ["mean", *(f"p{p:g}" for p in percentiles)]),
    ]
    for metric in result.latencies:
        cells = [result.mean_ms(metric), *(result.percentile_ms(metric, percent) for percent in percentiles)]
        lines.append(f"  {metric.upper():<10}" + "".join(f"{_milliseconds(cell):>10}" for cell in cells))
    return lines


def plan_lines(plan: "ReplicaPlan", objective: "Objective", target_rate: float) -> list[str]:
    """How many replicas, and for what."""
    bounds = ", ".join(f"{metric.upper()} {bound:g} ms" for metric, bound in objective.bounds.items())
    return [
        f"replicas      {plan.num_replicas:,} for {target_rate:g} requests/s, "
        f"{plan.rate_per_replica:.3g} each",
        f"objective     p{objective.percent:g} {bounds}: kept; one replica's share:",
    ]


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"
