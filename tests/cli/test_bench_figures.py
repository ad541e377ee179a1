"""What `tessera bench` makes of its measurements: formats, gates, and values that are read strictly."""

import csv
import io
import json
from dataclasses import replace

import pytest

from tessera_cli.cli.bench_report import BenchFormat, render_runs
from tessera_cli.cli.bench_run import BenchRun, Compared, Gates
from tessera_cli.cli.bench_values import parse_bounds, parse_concurrency, parse_percentiles
from tessera_cli.errors import GateError, UsageError
from tessera_cli.serving.benchmark_result import BenchmarkResult
from tessera_cli.serving.load_result import METRICS, Distribution


def result(output_throughput: float = 100.0, *, ttft: float = 0.2, failed: int = 0) -> BenchmarkResult:
    values = {"ttft": [ttft] * 4, "tpot": [0.01] * 4, "itl": [0.01] * 196, "e2el": [1.0] * 4}
    return BenchmarkResult(
        completed=4,
        total_input_tokens=40,
        total_output_tokens=200,
        duration=200 / output_throughput,
        max_concurrent_requests=2,
        preemptions=0,
        prefix_cache_queries=40,
        prefix_cache_hits=0,
        latencies={metric: Distribution.of(values[metric]) for metric in METRICS},
        errors=["broken"] * failed,
        slowest=[{"ttft": ttft, "tpot": 0.01, "e2el": 1.0}] * 4,
    )


def bench_run(*repeats: BenchmarkResult, concurrency: int = 2, baseline: float | None = None) -> BenchRun:
    compared = None if baseline is None else Compared("transformers", baseline, {"batch_size": 2})
    return BenchRun(concurrency, list(repeats), compared, {"config": {"seed": 0}}, {"ttft": 500.0})


def test_the_median_repeat_is_shown_whole_with_the_spread():
    run = bench_run(result(90), result(120), result(100))
    assert run.result.output_throughput == pytest.approx(100)
    assert bench_run(result(90), result(100)).result.output_throughput == pytest.approx(90)
    text = render_runs([run], BenchFormat.TABLE, (50,))
    assert "min 90.0, max 120.0 of 3 runs" in text
    assert run.as_dict((50,))["repeat_output_throughput"] == pytest.approx([90, 120, 100])


def test_the_ratio_is_only_told_of_equal_work():
    assert bench_run(result(100), baseline=40).ratio == pytest.approx(2.5)
    assert "ratio 2.50" in render_runs([bench_run(result(100), baseline=40)], BenchFormat.TABLE, (50,))
    assert bench_run(result(100, failed=1), baseline=40).ratio is None


def test_every_format_has_every_run():
    runs = [bench_run(result(100), concurrency=1), bench_run(result(300), concurrency=8, baseline=100)]
    markdown = render_runs(runs, BenchFormat.MD, (50, 99)).splitlines()
    assert len(markdown) == 4
    assert len({line.count("|") for line in markdown}) == 1
    assert "3.00x" in markdown[3]
    rows = list(csv.DictReader(io.StringIO(render_runs(runs, BenchFormat.CSV, (50,)))))
    assert [row["max_concurrency"] for row in rows] == ["1", "8"]
    assert float(rows[1]["baseline.ratio"]) == pytest.approx(3)
    document = json.loads(render_runs(runs, BenchFormat.JSON, (50,)))
    assert [one["max_concurrency"] for one in document["results"]] == [1, 8]
    table = render_runs(runs, BenchFormat.TABLE, (50, 90, 99))
    assert max(map(len, table.splitlines())) <= 80


def test_gates_hold_for_every_run_and_name_every_miss():
    runs = [bench_run(result(100, ttft=0.2), concurrency=1), bench_run(result(300, ttft=0.9), concurrency=8)]
    Gates(max_ttft_p99=900.0, max_tpot_p99=10.0, min_output_throughput=100.0).check(runs)
    with pytest.raises(GateError) as caught:
        Gates(max_ttft_p99=500, max_tpot_p99=9, min_output_throughput=200, min_goodput=1.5).check(runs)
    assert "100.0 is below" not in caught.value.message
    assert "p99 TTFT 900.0 ms is above 500 ms at concurrency 8" in caught.value.message
    assert "output 100.0 tok/s is below 200 at concurrency 1" in caught.value.message
    assert "p99 TPOT 10.0 ms is above 9 ms at concurrency 1" in caught.value.message
    assert "goodput 0.00 requests/s is below 1.5 at concurrency 8" in caught.value.message
    assert "at concurrency 1; goodput" not in caught.value.message
    unmeasured = replace(result(), latencies={metric: Distribution.of([]) for metric in METRICS})
    with pytest.raises(GateError, match="unmeasured"):
        Gates(max_ttft_p99=1e9).check([bench_run(unmeasured)])


def test_lists_are_read_strictly():
    assert parse_concurrency(None, None) == [64]
    assert parse_concurrency(None, 2.0) == [None]
    assert parse_concurrency("1,8,64", None) == [1, 8, 64]
    assert parse_percentiles("50,99.9") == [50.0, 99.9]
    for text in ("", "1,1", "1.5", "1,,2"):
        with pytest.raises(UsageError):
            parse_concurrency(text, None)
    assert parse_bounds(["ttft:200,tpot:30", "e2el:1e3"], "--goodput", METRICS) == {
        "ttft": 200.0,
        "tpot": 30.0,
        "e2el": 1000.0,
    }
    for text in ("", ",", "ttft", "ttft:0", "ttft:inf", "ttft:nan", "ttft:1,ttft:2", "queue:3"):
        with pytest.raises(UsageError):
            parse_bounds([text], "--goodput", METRICS)
    for text in ("", "-1", "nan", "50,50.0", "100,99.99999"):
        with pytest.raises(UsageError):
            parse_percentiles(text)
