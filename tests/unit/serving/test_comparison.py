"""Ratios are those of the repeats' means, and their intervals cover what they should."""

import random
from typing import Any

import pytest

from tessera_cli.serving.comparison import compare_runs, differences, ratio_interval


def run(*throughputs: float, **others: Any) -> dict[str, Any]:
    repeats = [{"output_throughput": value, "mean_ttft_ms": 1000 / value} for value in throughputs]
    fields = {"max_concurrency": 8, "request_rate": "inf", "burstiness": 1.0}
    return fields | repeats[0] | {"repeats": repeats, "config": {"prompts_sha256": "a"}} | others


def test_equal_sides_have_ratio_one_within_every_interval():
    side = run(100, 110, 90, 105)
    compared = compare_runs(side, side)
    assert {one.name for one in compared.figures} == {"output_throughput", "mean_ttft_ms"}
    for figure in compared.figures:
        low, high = figure.interval
        assert figure.ratio == 1
        assert low < 1 < high


def test_the_ratio_is_of_means_and_a_clear_change_excludes_one():
    compared = compare_runs(run(100, 102, 98), run(150, 153, 147))
    throughput, ttft = (
        next(one for one in compared.figures if one.name == name)
        for name in ("output_throughput", "mean_ttft_ms")
    )
    assert (throughput.before, throughput.after) == pytest.approx((100, 150))
    assert throughput.ratio == compared.throughput_ratio == pytest.approx(1.5)
    assert 1 < throughput.interval[0] < 1.5 < throughput.interval[1]
    assert ttft.interval[1] < 1


def test_the_interval_covers_the_true_ratio_about_as_often_as_it_says():
    generator = random.Random(0)

    def covers() -> bool:
        before, after = ([generator.gauss(mean, 5) for _ in range(12)] for mean in (100, 120))
        low, high = ratio_interval(before, after)
        return low <= 1.2 <= high

    # A percentile bootstrap of twelve is somewhat too narrow: 93 % or so.
    assert 0.86 <= sum(covers() for _ in range(150)) / 150 <= 0.99


def test_a_single_repeat_has_no_interval():
    assert ratio_interval([1.0], [1.0, 2.0]) is None
    old = {"output_throughput": 10.0}
    compared = compare_runs(old, run(20, 22))
    assert compared.num_repeats == (1, 2)
    assert compared.figures[0].interval is None
    assert compared.throughput_ratio == pytest.approx(2.1)


def test_answers_are_equal_different_or_unknown():
    pairs = {("x", "x"): True, ("x", "y"): False, ("x", None): None, (None, None): None}
    for (old, new), same in pairs.items():
        assert compare_runs(run(1, output_sha256=old), run(1, output_sha256=new)).same_output is same


def test_different_work_is_named():
    base = run(1, config={"prompts_sha256": "a", "input_len": 8, "seed": 0})
    assert differences(base, base) == []
    # The engine may differ: that is what one compares.
    engine = {"prompts_sha256": "a", "input_len": 8, "seed": 0, "block_size": 32}
    assert differences(base, run(1, config=engine)) == []
    other = {"prompts_sha256": "b", "input_len": 16, "seed": 0}
    assert differences(base, run(1, config=other)) == ["input_len 8 and 16"]
    assert differences(base, run(1, config={"prompts_sha256": "b", "input_len": 8, "seed": 0})) == [
        "other prompts or sampling"
    ]
    assert differences(base, run(1, max_concurrency=9, config=base["config"])) == ["max_concurrency 8 and 9"]
    assert differences(base, {"output_throughput": 1.0})[-1] == "a side that does not say what was asked"
