"""The engine's edge: what it refuses, what it reports, and that a failed step leaves nothing behind."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tessera_cli.engine.config import EngineConfig
from tessera_cli.engine.engine import Engine
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.engine.scheduler_output import SchedulerOutput
from tessera_cli.engine.sequence import FinishReason, SampleError
from tessera_cli.engine.step_result import StepResult
from tessera_cli.errors import CapacityError, UsageError
from tests.engines import greedy, make_engine, random_prompts, run_requests, run_to_end, tiny_decoder


@pytest.fixture
def engine(tiny_model_dir: Path) -> Engine:
    return make_engine(tiny_decoder(tiny_model_dir))


def test_counts_tokens_steps_and_ends(engine: Engine) -> None:
    prompts = random_prompts([5, 70, 3])
    run_requests(engine, {str(i): (prompt, greedy(4)) for i, prompt in enumerate(prompts)})
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    assert (stats.num_finished, stats.num_failed, stats.num_preemptions) == (3, 0, 0)
    assert (stats.prompt_tokens, stats.generation_tokens) == (78, 12)
    assert stats.num_steps == 5  # the long prompt takes two
    assert (stats.num_blocks, stats.block_size) == (199, 4)


def test_prompt_tokens_count_once_in_spite_of_preemption(tiny_model_dir: Path) -> None:
    engine = make_engine(tiny_decoder(tiny_model_dir), num_blocks=12, max_model_len=44)
    prompts = random_prompts([12, 11, 10])
    run_requests(engine, {str(i): (prompt, greedy(20)) for i, prompt in enumerate(prompts)})
    assert engine.stats().num_preemptions > 0
    assert (engine.stats().prompt_tokens, engine.stats().generation_tokens) == (33, 60)


def test_metrics_are_in_order_and_come_with_the_end(engine: Engine) -> None:
    engine.add_request("a", [5, 6, 7], greedy(3))
    outputs = [output for _ in range(3) for output in engine.step()]
    assert [output.metrics is None for output in outputs] == [True, True, False]
    metrics = outputs[-1].metrics
    assert metrics is not None
    assert metrics.first_scheduled_time is not None
    assert metrics.finished_time is not None
    times = [metrics.arrival_time, metrics.first_scheduled_time, *metrics.token_times, metrics.finished_time]
    assert times == sorted(times)
    assert len(metrics.token_times) == 3


def test_the_stop_token_is_the_last_token(engine: Engine) -> None:
    prompt = random_prompts([6])[0]
    free = run_requests(engine, {"free": (prompt, greedy(12))})["free"]
    stop = free.token_ids[5]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop_token_ids=(stop,))
    stopped = run_requests(engine, {"stopped": (prompt, params)})["stopped"]
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert stopped.finish_reason is FinishReason.STOP
    assert free.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("eos", [0, 2])
def test_every_end_of_sequence_id_of_the_model_ends_a_sequence(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, eos: int
) -> None:
    monkeypatch.setattr(engine._runner._model, "logits", lambda hidden: torch.eye(384)[[eos] * len(hidden)])
    engine.add_request("stops", [9], greedy(2, ignore_eos=False))
    engine.add_request("goes on", [9], greedy(2, ignore_eos=True))
    outputs = run_to_end(engine)
    assert outputs["stops"].token_ids == [eos]
    assert outputs["stops"].finish_reason is FinishReason.STOP
    assert outputs["goes on"].token_ids == [eos, eos]


def test_requests_without_a_seed_differ_and_a_seed_repeats(engine: Engine) -> None:
    prompt = random_prompts([6])[0]
    free = SamplingParams(temperature=2.0, max_tokens=12, ignore_eos=True)
    seeded = SamplingParams(temperature=2.0, max_tokens=12, ignore_eos=True, seed=7)
    requests = {"a": (prompt, free), "b": (prompt, free), "c": (prompt, seeded), "d": (prompt, seeded)}
    outputs = run_requests(engine, requests)
    assert outputs["a"].token_ids != outputs["b"].token_ids
    assert outputs["c"].token_ids == outputs["d"].token_ids


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_a_failed_step_is_undone_and_can_be_run_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    prompts = random_prompts([5, 9])
    requests = {str(i): (prompt, greedy(6)) for i, prompt in enumerate(prompts)}
    expected = run_requests(engine, requests)
    for request_id, (prompt, params) in requests.items():
        engine.add_request(request_id, prompt, params)
    run = engine._runner.run

    def fail(output: SchedulerOutput, matchers: object) -> StepResult:
        run(output)
        raise error

    monkeypatch.setattr(engine._runner, "run", fail)
    with pytest.raises(type(error)):
        engine.step()
    engine._scheduler.check_invariants()
    assert engine.stats().num_used_blocks == 0
    monkeypatch.undo()
    assert run_to_end(engine) == expected


def test_a_request_aborted_in_a_step_is_gone_after_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = engine._runner.run

    def abort_and_run(output: SchedulerOutput, matchers: object) -> StepResult:
        assert engine.abort("b")
        return run(output)

    for request_id in "abc":
        engine.add_request(request_id, [5, 6], greedy(3))
    monkeypatch.setattr(engine._runner, "run", abort_and_run)
    assert [output.request_id for output in engine.step()] == ["a", "c"]
    monkeypatch.undo()
    engine._scheduler.check_invariants()
    assert sorted(run_to_end(engine)) == ["a", "c"]


def test_a_sampling_failure_ends_one_request(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    run = engine._runner.run

    def run_and_fail_one(output: SchedulerOutput, matchers: object) -> StepResult:
        result = run(output)
        return replace(result, tokens=result.tokens | {("bad", 0): [SampleError("not finite")]})

    monkeypatch.setattr(engine._runner, "run", run_and_fail_one)
    engine.add_request("bad", [5], greedy(3))
    engine.add_request("good", [6], greedy(3))
    outputs = {output.request_id: output for output in engine.step()}
    assert outputs["bad"].finish_reason is FinishReason.ERROR
    assert outputs["bad"].error == "not finite"
    assert outputs["bad"].new_token_ids == ()
    monkeypatch.undo()
    assert len(run_to_end(engine)["good"].token_ids) == 2
    assert (engine.stats().num_failed, engine.stats().num_finished) == (1, 1)


def test_serves_the_weights_of_the_moment(tiny_model_dir: Path) -> None:
    decoder = tiny_decoder(tiny_model_dir)
    engine = make_engine(decoder)
    prompt = random_prompts([8])[0]
    before = run_requests(engine, {"a": (prompt, greedy(8))})["a"]
    with torch.no_grad():
        decoder.layers[0].qkv_proj.weight.mul_(-1)
    engine.reset_prefix_cache()
    after = run_requests(engine, {"a": (prompt, greedy(8))})["a"]
    fresh = run_requests(make_engine(decoder), {"a": (prompt, greedy(8))})["a"]
    assert before != after
    assert after == fresh


def test_a_decoder_can_be_trained_after_it_was_served(tiny_model_dir: Path) -> None:
    decoder = tiny_decoder(tiny_model_dir)
    run_requests(make_engine(decoder), {"a": ([5, 6], greedy(2))})
    hidden = decoder(torch.tensor([5]), torch.tensor([0]), lambda layer, q, k, v: q)
    decoder.logits(hidden).sum().backward()
    assert decoder.layers[0].qkv_proj.weight.grad is not None


@pytest.mark.parametrize(
    ("prompt", "params", "error", "match"),
    [
        ([], greedy(1), UsageError, "empty"),
        ([3] * 128, greedy(1), CapacityError, "128"),
        ([3, 384], greedy(1), UsageError, "384"),
        ([-1], greedy(1), UsageError, "-1"),
        ([3], SamplingParams(stop_token_ids=(384,)), UsageError, "stop_token_ids"),
    ],
)
def test_refuses_what_can_never_work(
    engine: Engine, prompt: list[int], params: SamplingParams, error: type[UsageError], match: str
) -> None:
    with pytest.raises(error, match=match):
        engine.add_request("a", prompt, params)
    assert not engine.has_unfinished()
    engine.add_request("a", [3], greedy(1))  # the id was not used up


def test_refuses_an_id_in_use_and_keeps_the_first(engine: Engine) -> None:
    engine.add_request("a", [3, 4], greedy(2))
    with pytest.raises(UsageError, match="'a'"):
        engine.add_request("a", [5], greedy(9))
    assert len(run_to_end(engine)["a"].token_ids) == 2


def test_a_step_without_requests_does_nothing(engine: Engine) -> None:
    assert engine.step() == []
    assert engine.stats().num_steps == 0


def test_an_engine_refuses_more_positions_than_the_model_has(tiny_model_dir: Path) -> None:
    with pytest.raises(CapacityError, match="512"):
        Engine(tiny_decoder(tiny_model_dir), EngineConfig(num_blocks=200, max_model_len=600))
