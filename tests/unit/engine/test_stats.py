"""Latencies and percentiles from known times."""

import numpy as np
import pytest

from tessera_cli.engine.stats import RequestMetrics, percentile


def test_latencies_follow_from_the_times() -> None:
    metrics = RequestMetrics(
        10.0, first_scheduled_time=11.0, token_times=[12.0, 12.5, 14.0], finished_time=14.5
    )
    assert metrics.ttft == 2.0
    assert metrics.itl == [0.5, 1.5]
    assert metrics.tpot == 1.0
    assert metrics.e2el == 4.5


def test_one_token_has_no_time_per_output_token() -> None:
    metrics = RequestMetrics(0.0, token_times=[1.0])
    assert metrics.ttft == 1.0
    assert metrics.tpot is None
    assert metrics.itl == []


def test_what_has_not_happened_is_none() -> None:
    metrics = RequestMetrics(0.0)
    assert (metrics.ttft, metrics.tpot, metrics.e2el) == (None, None, None)


@pytest.mark.parametrize("percent", [0, 1, 37.5, 50, 90, 99, 100])
@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_percentile_is_numpys(size: int, percent: float) -> None:
    values = np.random.default_rng(size).normal(size=size).tolist()
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), abs=1e-12)


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], -1), ([1.0], 101), ([1.0], float("nan"))])
def test_percentile_refuses_what_has_none(values: list[float], percent: float) -> None:
    with pytest.raises(ValueError, match="percent"):
        percentile(values, percent)
