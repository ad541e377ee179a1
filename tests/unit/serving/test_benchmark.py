"""The load is what it says and what is measured is what happened, on an engine whose time is made up."""

from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest

from tessera_cli.engine.engine import SequenceOutput
from tessera_cli.engine.loading import load_engine
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.engine.sequence import FinishReason
from tessera_cli.engine.stats import EngineStats, RequestMetrics
from tessera_cli.errors import CapacityError, UsageError
from tessera_cli.serving.baseline import TransformersBaseline
from tessera_cli.serving.benchmark import run_benchmark
from tessera_cli.serving.benchmark_result import BenchmarkResult
from tessera_cli.serving.load_result import Distribution
from tessera_cli.serving.workload import (
    BenchmarkRequest,
    check_lengths,
    gamma_arrivals,
    greedy,
    random_requests,
)

STEP = 0.5


class Time:
    """A clock that only a step or a sleep moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept = 0.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds


class FakeEngine:
    """Gives a token to each of at most `width` requests in a step of half a second."""

    def __init__(self, time: Time, width: int = 1000, fails: dict[str, int] | None = None) -> None:
        self.n = 1
        self.time, self.width, self.fails = time, width, fails or {}
        self.queue: deque[tuple[str, int]] = deque()
        self.given: dict[str, int] = {}
        self.most = 0

    def add_request(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
        self.queue.append((request_id, params.max_tokens))
        self.n = params.n
        self.given[request_id] = 0
        self.most = max(self.most, len(self.queue))

    def step(self) -> list[SequenceOutput]:
        self.time.now += STEP
        outputs = []
        for request_id, wanted in list(self.queue)[: self.width]:
            if self.given[request_id] == self.fails.get(request_id):
                outputs.append(_failed(request_id))
                self.queue.remove((request_id, wanted))
                continue
            self.given[request_id] += 1
            ends = self.given[request_id] == wanted
            reason = FinishReason.LENGTH if ends else None
            outputs += [SequenceOutput(request_id, i, (7,), finish_reason=reason) for i in range(self.n)]
            if ends:
                self.queue.remove((request_id, wanted))
        return outputs

    def stats(self) -> EngineStats:
        return EngineStats(
            *(0, 0, 0, len(self.given), 0, 10, 0, 16, 0, 0, 0),
            prefix_cache_queries=3 * len(self.given),
            prefix_cache_hits=len(self.given),
            num_forks=5,
        )


def _failed(request_id: str) -> SequenceOutput:
    return SequenceOutput(request_id, 0, (), finish_reason=FinishReason.ERROR, error="broken logits")


def requests(*output_lens: int) -> list[BenchmarkRequest]:
    return [BenchmarkRequest([1, 2, 3], greedy(output_len)) for output_len in output_lens]


def run(engine: FakeEngine, work: list[BenchmarkRequest], **options: object) -> BenchmarkResult:
    return run_benchmark(engine, work, clock=engine.time.clock, sleep=engine.time.sleep, **options)


def seconds(distribution: Distribution) -> list[float]:
    """All values, in ascending order."""
    count = distribution.count
    return [distribution.percentile(100 * rank / max(1, count - 1)) for rank in range(count)]


def test_every_sample_of_a_request_is_timed_and_the_request_is_one():
    work = [BenchmarkRequest([1, 2, 3], replace(greedy(4), n=3)) for _ in range(2)]
    ended: list[list[RequestMetrics]] = []
    result = run(FakeEngine(Time()), work, concurrency=1, on_finished=ended.append)
    assert (result.completed, result.total_input_tokens, result.total_output_tokens) == (2, 6, 24)
    assert {name: values.count for name, values in result.latencies.items()} == {
        "ttft": 6,
        "tpot": 6,
        "itl": 18,
        "e2el": 6,
    }
    assert [len(samples) for samples in ended] == [3, 3]


def test_the_caches_counts_are_those_of_the_run():
    engine = FakeEngine(Time())
    run(engine, requests(2, 2), concurrency=2)
    result = run(engine, requests(*[2] * 6), concurrency=6)
    assert (result.prefix_cache_queries, result.prefix_cache_hits, result.forks) == (18, 6, 0)
    assert result.as_dict()["prefix_cache_hit_rate"] == pytest.approx(1 / 3)
    unasked = replace(result, prefix_cache_queries=0, prefix_cache_hits=0)
    assert unasked.prefix_cache_hit_rate is None


def test_runs_on_one_engine_never_use_a_request_id_twice():
    engine, seen = FakeEngine(Time()), []
    add = engine.add_request
    engine.add_request = lambda request_id, *rest: (seen.append(request_id), add(request_id, *rest))[1]
    for _ in range(3):
        run(engine, requests(2, 2, 3), concurrency=2)
    assert len(seen) == len(set(seen)) == 9


@pytest.mark.parametrize("concurrency", [1, 3, 8])
def test_the_closed_loop_never_has_more_in_flight_and_always_as_many(concurrency: int):
    engine = FakeEngine(Time())
    result = run(engine, requests(*[4] * 12), concurrency=concurrency)
    assert engine.most == result.max_concurrent_requests == concurrency
    assert result.duration == pytest.approx(-(-12 // concurrency) * 4 * STEP)
    assert (result.completed, result.failed) == (12, 0)


def test_latencies_follow_their_definitions():
    engine = FakeEngine(Time(), width=1)
    result = run(engine, requests(3, 2), concurrency=2)
    # One request at a time: the second waits for the three steps of the first, and that wait is in its TTFT.
    assert seconds(result.latencies["ttft"]) == pytest.approx([0.5, 2.0])
    assert seconds(result.latencies["e2el"]) == pytest.approx([1.5, 2.5])
    assert seconds(result.latencies["tpot"]) == pytest.approx([0.5, 0.5])
    assert seconds(result.latencies["itl"]) == pytest.approx([0.5] * 3)
    assert result.output_throughput == pytest.approx(5 / 2.5)
    assert result.total_token_throughput == pytest.approx((5 + 6) / 2.5)


def test_a_single_output_token_has_no_tpot_and_no_gap():
    figures = run(FakeEngine(Time()), requests(1, 1), concurrency=2).as_dict()
    assert figures["mean_tpot_ms"] is None
    assert figures["p99_itl_ms"] is None
    assert figures["mean_ttft_ms"] == pytest.approx(500)


def test_a_failed_request_adds_neither_tokens_nor_latencies():
    seen: list[list[RequestMetrics]] = []
    engine = FakeEngine(Time(), fails={"1": 1, "2": 0})
    result = run(engine, requests(4, 4, 4), concurrency=3, on_finished=seen.append)
    assert (result.completed, result.failed, result.errors) == (1, 2, ["broken logits"] * 2)
    assert (result.total_input_tokens, result.total_output_tokens) == (3, 4)
    assert result.latencies["ttft"].count == result.latencies["e2el"].count == 1
    assert seen.count([]) == 2


def test_an_answer_that_ends_early_is_a_failure():
    class Stops(FakeEngine):
        def step(self) -> list[SequenceOutput]:
            super().step()
            self.queue.clear()
            return [SequenceOutput("0", 0, (7,), finish_reason=FinishReason.STOP)]

    result = run(Stops(Time()), requests(4), concurrency=1)
    assert (result.completed, result.failed) == (0, 1)
    assert "1 of 4 tokens" in result.errors[0]


def test_with_a_rate_the_wait_counts_from_when_a_request_was_due():
    rate, work = 20.0, requests(*[1] * 8)
    engine = FakeEngine(Time())
    result = run(engine, work, concurrency=None, request_rate=rate, seed=3)
    due = gamma_arrivals(8, rate, 3)
    now, expected = 0.0, []
    while len(expected) < 8:
        now = max(now, due[len(expected)]) + STEP
        expected += [now - t for t in due[len(expected) :] if t <= now - STEP + 1e-9]
    assert seconds(result.latencies["ttft"]) == pytest.approx(sorted(expected))
    assert max(expected) > STEP


def test_an_idle_engine_sleeps_until_the_next_arrival():
    engine = FakeEngine(Time())
    result = run(engine, requests(*[1] * 5), concurrency=None, request_rate=0.01, seed=0)
    assert engine.time.slept > 0
    assert result.max_concurrent_requests == 1
    assert seconds(result.latencies["ttft"]) == pytest.approx([STEP] * 5)


def test_a_limit_holds_with_a_rate_and_the_wait_for_a_place_counts():
    engine = FakeEngine(Time())
    result = run(engine, requests(*[4] * 6), concurrency=2, request_rate=1e6)
    assert result.max_concurrent_requests == engine.most == 2
    # All are due almost at once: the second comes in the first one's first step. Each place is taken again
    # as soon as its request has had its four steps.
    assert seconds(result.latencies["ttft"]) == pytest.approx([0.5, 1.0, 2.5, 3.0, 4.5, 5.0], abs=1e-4)


def test_goodput_counts_the_requests_within_every_bound():
    engine = FakeEngine(Time(), width=1)
    # One at a time: TTFT 0.5, 2.0, 3.0 s, TPOT 0.5 s each, E2EL 1.5, 2.5, 4.0 s; 4 s in all.
    result = run(engine, requests(3, 2, 3), concurrency=3)
    assert result.goodput({"ttft": 2000.0}) == pytest.approx(2 / 4)
    assert result.goodput({"ttft": 2000.0, "e2el": 1500.0}) == pytest.approx(1 / 4)
    assert result.goodput({"tpot": 499.0}) == 0
    assert result.as_dict((50,), {"ttft": 1e9})["request_goodput"] == pytest.approx(result.request_throughput)
    assert result.as_dict()["request_goodput"] is None


def test_of_several_samples_the_slowest_has_to_keep_the_bounds():
    class Staggers(FakeEngine):
        def step(self) -> list[SequenceOutput]:
            self.time.now += STEP
            number = self.given["0"]
            self.given["0"] += 1
            if number == 1:
                self.queue.clear()
            return [SequenceOutput("0", number, (7,), finish_reason=FinishReason.LENGTH)]

    work = [BenchmarkRequest([1], replace(greedy(1), n=2))]
    result = run(Staggers(Time()), work, concurrency=1)
    assert (result.goodput({"ttft": 999.0}), result.goodput({"ttft": 1000.0})) == (0, 1)


def test_the_busiest_second_has_the_most_tokens():
    result = run(FakeEngine(Time()), requests(4, 4, 2), concurrency=3)
    # Steps give 3, 3, 2 and 2 tokens at 0.5, 1.0, 1.5 and 2.0 s: the second that begins at 1.0 has 3 + 2.
    assert result.max_output_tokens_per_s == 3 + 2


def test_equal_answers_have_equal_digests_whatever_the_concurrency(tiny_model_dir: Path):
    engine = load_engine(tiny_model_dir, num_blocks=64, dtype="float32", device="cpu")
    work = random_requests(4, input_len=8, output_len=4, range_ratio=0.5, vocab_size=300, seed=0)
    digests = {run_benchmark(engine, work, concurrency=n).output_sha256 for n in (1, 4)}
    others = run_benchmark(engine, work[::-1], concurrency=4)
    assert len(digests) == 1
    assert others.output_sha256 not in digests


def test_the_json_has_the_names_that_scripts_know():
    figures = run(FakeEngine(Time()), requests(3, 3), concurrency=1).as_dict((50, 90, 99, 99.9))
    for metric in ("ttft", "tpot", "itl", "e2el"):
        for statistic in ("mean", "median", "std", "p50", "p90", "p99", "p99.9"):
            assert figures[f"{statistic}_{metric}_ms"] is not None
    assert figures["duration"] == pytest.approx(3.0)
    assert figures["request_throughput"] == pytest.approx(2 / 3)
    assert figures["max_concurrent_requests"] == 1


def test_what_can_never_work_is_refused():
    with pytest.raises(UsageError, match="concurrency 0"):
        run(FakeEngine(Time()), requests(1), concurrency=0)
    with pytest.raises(UsageError, match="request rate"):
        run(FakeEngine(Time()), requests(1), concurrency=1, request_rate=0.0)
    with pytest.raises(UsageError, match="without requests"):
        run(FakeEngine(Time()), [], concurrency=1)
    with pytest.raises(UsageError, match="range ratio"):
        random_requests(1, input_len=1, output_len=1, range_ratio=1.0, vocab_size=5, seed=0)
    check_lengths(requests(2, 5), 8)
    with pytest.raises(CapacityError, match="3 tokens in and 6 out"):
        check_lengths(requests(2, 6), 8)


def test_the_engine_and_the_baseline_do_the_same_work_to_the_token(tiny_model_dir: Path):
    engine = load_engine(tiny_model_dir, num_blocks=64, dtype="float32", device="cpu")
    work = random_requests(5, input_len=12, output_len=6, range_ratio=0.5, vocab_size=300, seed=0)
    result = run_benchmark(engine, work, concurrency=2)
    baseline = TransformersBaseline(tiny_model_dir, dtype="float32", device="cpu").run(work, batch_size=2)
    assert (result.completed, result.failed) == (5, 0)
    assert result.total_output_tokens == baseline.total_output_tokens
    expected = [request.params.max_tokens for request in work]
    assert [len(token_ids) for token_ids in baseline.output_token_ids] == expected
    assert not engine.has_unfinished()
    assert engine.stats().num_used_blocks == 0
    sampled = [BenchmarkRequest([1], SamplingParams(temperature=0.5, max_tokens=2))]
    with pytest.raises(UsageError, match="greedy"):
        TransformersBaseline(tiny_model_dir, dtype="float32", device="cpu").run(sampled, batch_size=1)
