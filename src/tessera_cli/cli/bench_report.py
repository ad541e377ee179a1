"""What `tessera bench` prints: a run per concurrency, as text, Markdown, CSV or JSON; and the gates."""

import csv
import io
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import TYPE_CHECKING, Any

from tessera_cli.cli.output import align, to_json
from tessera_cli.errors import GateError

if TYPE_CHECKING:
    from tessera_cli.serving.baseline import BaselineResult
    from tessera_cli.serving.benchmark import BenchmarkResult


class BenchFormat(StrEnum):
    """How results are written."""

    TABLE = "table"
    MD = "md"
    CSV = "csv"
    JSON = "json"


@dataclass(frozen=True)
class BenchRun:
    """One load, measured `len(repeats)` times; `config` is everything needed to run it again."""

    concurrency: int | None
    repeats: list["BenchmarkResult"]
    baseline: "BaselineResult | None"
    config: dict[str, Any]

    @property
    def result(self) -> "BenchmarkResult":
        """The repeat of median output throughput (the lower of two), whole, so that its figures agree."""
        ordered = sorted(self.repeats, key=lambda repeat: repeat.output_throughput)
        return ordered[(len(ordered) - 1) // 2]

    @property
    def num_failed(self) -> int:
        return sum(repeat.failed for repeat in self.repeats)

    @property
    def ratio(self) -> float | None:
        """Output throughput over the baseline's; None without one, or where failures make work unequal."""
        if self.baseline is None or self.num_failed:
            return None
        return self.result.output_throughput / self.baseline.output_throughput

    def as_dict(self, percentiles: Sequence[float]) -> dict[str, Any]:
        """The result's keys at the top, then the spread of the repeats, the baseline and the config."""
        fields = {"max_concurrency": self.concurrency} | self.result.as_dict(percentiles)
        throughputs = [repeat.output_throughput for repeat in self.repeats]
        fields["repeat_output_throughput"] = throughputs
        if self.baseline is not None:
            fields["baseline"] = {
                "name": "transformers",
                "batch_size": self.baseline.batch_size,
                "duration": self.baseline.duration,
                "total_output_tokens": self.baseline.total_output_tokens,
                "output_throughput": self.baseline.output_throughput,
                "ratio": self.ratio,
            }
        return fields | self.config


def render_runs(runs: Sequence[BenchRun], form: BenchFormat, percentiles: Sequence[float]) -> str:
    """All runs, with the last newline."""
    match form:
        case BenchFormat.JSON:
            return to_json(document(runs, percentiles)) + "\n"
        case BenchFormat.CSV:
            records = [_scalars(run.as_dict(percentiles)) for run in runs]
            target = io.StringIO()
            writer = csv.DictWriter(
                target, fieldnames=list(dict.fromkeys(chain(*records))), lineterminator="\n"
            )
            writer.writeheader()
            writer.writerows(records)
            return target.getvalue()
        case BenchFormat.MD:
            metrics = runs[0].result.latencies
            header, *rows = _summary(runs, [(metric, p) for metric in metrics for p in percentiles])
            lines = [header, ["---:"] * len(header), *rows]
            return "".join(f"| {' | '.join(line)} |\n" for line in lines)
        case BenchFormat.TABLE:
            blocks = ["\n".join(_block(run, percentiles)) for run in runs]
            if len(runs) > 1:
                header, *rows = _summary(runs, [("ttft", 50), ("ttft", 99), ("tpot", 50)])
                blocks.append("\n".join(align(rows, header=header)))
            return "\n\n".join(blocks) + "\n"


def document(runs: Sequence[BenchRun], percentiles: Sequence[float]) -> dict[str, Any]:
    """One JSON object: the run itself, or of a sweep all of them under `results`."""
    if len(runs) == 1:
        return runs[0].as_dict(percentiles)
    return {"results": [run.as_dict(percentiles) for run in runs]}


def check_gates(
    runs: Sequence[BenchRun], *, max_ttft_p99: float | None, min_output_throughput: float | None
) -> None:
    """Hold every run to the bounds: TTFT in milliseconds, throughput in output tokens per second.

    Raises:
        GateError: a bound is missed; the message has every miss.
    """
    misses = []
    for run in runs:
        where = f"concurrency {run.concurrency or 'unlimited'}"
        ttft, throughput = run.result.percentile_ms("ttft", 99), run.result.output_throughput
        if max_ttft_p99 is not None and (ttft is None or ttft > max_ttft_p99):
            shown = "unmeasured" if ttft is None else f"{ttft:.1f} ms"
            misses.append(f"p99 TTFT {shown} is above {max_ttft_p99:g} ms at {where}")
        if min_output_throughput is not None and throughput < min_output_throughput:
            misses.append(f"output {throughput:.1f} tok/s is below {min_output_throughput:g} at {where}")
    if misses:
        raise GateError("; ".join(misses))


def _block(run: BenchRun, percentiles: Sequence[float]) -> list[str]:
    result = run.result
    spread = ""
    if len(run.repeats) > 1:
        throughputs = [repeat.output_throughput for repeat in run.repeats]
        spread = f"  (min {min(throughputs):,.1f}, max {max(throughputs):,.1f} of {len(throughputs)} runs)"
    work = f"{result.total_input_tokens:,} tokens in, {result.total_output_tokens:,} out"
    lines = [
        f"concurrency   {run.concurrency or 'unlimited'}, at most {result.max_concurrent_requests} in flight",
        f"requests      {result.completed} completed, {run.num_failed} failed",
        f"preemptions   {result.preemptions}",
        f"prefix cache  {_prefix_cache(result)}",
        *([f"forks         {result.forks}, {result.block_copies} blocks copied"] if result.forks else []),
        f"work          {work}, {result.duration:.2f} s",
        f"requests/s    {result.request_throughput:,.2f}",
        f"output tok/s  {result.output_throughput:,.1f}{spread}",
        f"total tok/s   {result.total_token_throughput:,.1f}",
        "latency ms  " + "".join(f"{name:>10}" for name in ["mean", *(f"p{p:g}" for p in percentiles)]),
    ]
    for metric, seconds in result.latencies.items():
        mean = statistics.fmean(seconds) * 1000 if seconds else None
        cells = [mean, *(result.percentile_ms(metric, percent) for percent in percentiles)]
        lines.append(f"  {metric.upper():<10}" + "".join(f"{_milliseconds(cell):>10}" for cell in cells))
    if run.baseline is not None:
        ratio = "" if run.ratio is None else f", ratio {run.ratio:.2f}"
        lines.append(
            f"transformers  {run.baseline.output_throughput:,.1f} output tok/s "
            f"in batches of {run.baseline.batch_size}{ratio}"
        )
    return lines


def _prefix_cache(result: "BenchmarkResult") -> str:
    rate = result.prefix_cache_hit_rate
    if rate is None:
        return "never asked"
    return f"{rate:.1%} hit, {result.prefix_cache_hits:,} of {result.prefix_cache_queries:,} prompt tokens"


def _summary(runs: Sequence[BenchRun], latencies: Sequence[tuple[str, float]]) -> list[list[str]]:
    """A header and one row per run; `latencies` are metrics with their percentiles."""
    has_baseline = any(run.baseline is not None for run in runs)
    header = ["concurrency", "req/s", "output tok/s"]
    header += [f"{metric.upper()} p{percent:g}" for metric, percent in latencies]
    table = [header + (["vs transformers"] if has_baseline else [])]
    for run in runs:
        result = run.result
        rates = (result.request_throughput, result.output_throughput)
        row = [str(run.concurrency or "unlimited"), *(f"{rate:,.1f}" for rate in rates)]
        row += [_milliseconds(result.percentile_ms(*latency)) for latency in latencies]
        if has_baseline:
            row.append("-" if run.ratio is None else f"{run.ratio:.2f}x")
        table.append(row)
    return table


def _scalars(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested objects as dotted columns; lists joined by spaces."""
    flat: dict[str, Any] = {}
    for key, value in fields.items():
        if isinstance(value, dict):
            flat |= _scalars(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = " ".join(map(str, value)) if isinstance(value, list) else value
    return flat


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"
