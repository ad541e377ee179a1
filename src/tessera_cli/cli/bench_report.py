"""What `tessera bench` prints: a run per concurrency, as text, Markdown, CSV or JSON."""

import csv
import io
from collections.abc import Sequence
from enum import StrEnum
from itertools import chain
from typing import TYPE_CHECKING, Any

from tessera_cli.cli.bench_run import BenchRun
from tessera_cli.cli.output import align, to_json

if TYPE_CHECKING:
    from tessera_cli.serving.benchmark_result import BenchmarkResult


class BenchFormat(StrEnum):
    """How results are written."""

    TABLE = "table"
    MD = "md"
    CSV = "csv"
    JSON = "json"


def render_runs(runs: Sequence[BenchRun], form: BenchFormat, percentiles: Sequence[float]) -> str:
    """All runs, with the last newline."""
    match form:
        case BenchFormat.JSON:
            return to_json(document(runs, percentiles)) + "\n"
        case BenchFormat.CSV:
            records = [_scalars(run.as_dict(percentiles)) for run in runs]
            for record in records:
                del record["repeats"]
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
        *_inside(result),
        f"work          {work}, {result.duration:.2f} s",
        f"requests/s    {result.request_throughput:,.2f}",
        *_goodput(run),
        f"output tok/s  {result.output_throughput:,.1f}{spread}",
        f"total tok/s   {result.total_token_throughput:,.1f}",
        "latency ms  " + "".join(f"{name:>10}" for name in ["mean", *(f"p{p:g}" for p in percentiles)]),
    ]
    for metric in result.latencies:
        cells = [result.mean_ms(metric), *(result.percentile_ms(metric, percent) for percent in percentiles)]
        lines.append(f"  {metric.upper():<10}" + "".join(f"{_milliseconds(cell):>10}" for cell in cells))
    if run.compared is not None:
        ratio = "" if run.ratio is None else f", ratio {run.ratio:.2f}"
        lines.append(f"baseline      {run.compared.output_throughput:,.1f} output tok/s{ratio}")
        lines.append(f"              {run.compared.name}")
    return lines


def _inside(result: "BenchmarkResult") -> list[str]:
    """What only an engine of one's own shows."""
    if result.preemptions is None:
        return []
    forks = [f"forks         {result.forks}, {result.block_copies} blocks copied"] if result.forks else []
    return [f"preemptions   {result.preemptions}", f"prefix cache  {_prefix_cache(result)}", *forks]


def _goodput(run: BenchRun) -> list[str]:
    if not run.bounds:
        return []
    within = ", ".join(f"{metric.upper()} {bound:g} ms" for metric, bound in run.bounds.items())
    return [f"goodput       {run.result.goodput(run.bounds):,.2f} requests/s within {within}"]


def _prefix_cache(result: "BenchmarkResult") -> str:
    rate = result.prefix_cache_hit_rate
    if rate is None:
        return "never asked"
    return f"{rate:.1%} hit, {result.prefix_cache_hits:,} of {result.prefix_cache_queries:,} prompt tokens"


def _summary(runs: Sequence[BenchRun], latencies: Sequence[tuple[str, float]]) -> list[list[str]]:
    """A header and one row per run; `latencies` are metrics with their percentiles."""
    has_baseline = any(run.compared is not None for run in runs)
    header = ["concurrency", "req/s", "output tok/s"]
    header += [f"{metric.upper()} p{percent:g}" for metric, percent in latencies]
    table = [header + (["vs baseline"] if has_baseline else [])]
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
