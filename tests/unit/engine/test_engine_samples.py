"""Many samples of a request, what is told of their tokens, and who looks on."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tessera_cli.engine.engine import Engine
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.engine.sequence import FinishReason
from tessera_cli.errors import CapacityError, UsageError
from tests.engines import (
    VOCAB_SIZE,
    greedy,
    make_engine,
    random_prompts,
    run_requests,
    run_samples,
    run_to_end,
    tiny_decoder,
)

SAMPLED = SamplingParams(max_tokens=8, seed=3, ignore_eos=True)


@pytest.fixture
def engine(tiny_model_dir: Path) -> Engine:
    return make_engine(tiny_decoder(tiny_model_dir))


def test_each_sample_has_its_own_outputs_and_metrics(engine: Engine) -> None:
    engine.add_request("a", [5] * 6, replace(SAMPLED, n=3, max_tokens=2))
    first, second = engine.step(), engine.step()
    assert [(one.request_id, one.index) for one in first] == [("a", 0), ("a", 1), ("a", 2)]
    assert [(one.index, one.finish_reason) for one in second] == [(i, FinishReason.LENGTH) for i in range(3)]
    metrics = [one.metrics for one in second]
    assert len({id(one) for one in metrics}) == 3
    assert all(one is not None and len(one.token_times) == 2 for one in metrics)
    stats = engine.stats()
    assert (stats.num_finished, stats.num_forks, stats.num_block_copies) == (3, 2, 2)
    assert (stats.prompt_tokens, stats.generation_tokens) == (6, 6)
    assert not engine.has_unfinished()


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_sample_that_is_finished_gets_no_more_outputs(engine: Engine, index: int) -> None:
    engine.add_request("a", [5] * 6, replace(SAMPLED, n=3))
    engine.step()
    assert engine.finish("a", index)
    assert not engine.finish("a", index)
    assert [one.index for one in engine.step()] == sorted({0, 1, 2} - {index})
    run_samples(engine)
    assert engine.stats().num_finished == 3


def test_a_request_is_forgotten_when_its_last_sample_is_finished(engine: Engine) -> None:
    engine.add_request("a", [5] * 6, SAMPLED)
    engine.step()
    assert engine.finish("a", 0)
    assert not engine.has_unfinished()
    assert not engine._records.requests
    assert not engine.finish("a", 0)
    engine.add_request("a", [5], greedy(1))
    assert len(run_to_end(engine)["a"].token_ids) == 1


def test_an_abort_ends_all_samples(engine: Engine) -> None:
    engine.add_request("a", [5] * 6, replace(SAMPLED, n=3))
    engine.step()
    assert engine.abort("a")
    assert engine.step() == []
    assert engine.stats().num_used_blocks == 0


def test_more_samples_than_run_at_once_are_refused(engine: Engine) -> None:
    with pytest.raises(CapacityError, match="n=17"):
        engine.add_request("a", [5], replace(SAMPLED, n=17))


def test_a_priority_is_heeded_or_refused(tiny_model_dir: Path, engine: Engine) -> None:
    with pytest.raises(UsageError, match="priority"):
        engine.add_request("a", [5], greedy(1), priority=1)
    urgent = make_engine(tiny_decoder(tiny_model_dir), max_num_seqs=1, scheduling_policy="priority")
    for request_id, priority in (("low", 2), ("high", -1), ("middle", 0)):
        urgent.add_request(request_id, [5], greedy(1), priority=priority)
    assert list(run_to_end(urgent)) == ["high", "middle", "low"]


def test_salts_keep_caches_apart_and_hits_are_told(engine: Engine) -> None:
    prompt = random_prompts([9])[0]
    cached = []
    for salt in ("x", "y", "x", None):
        engine.add_request("a", prompt, greedy(1), cache_salt=salt)
        (output,) = engine.step()
        assert output.metrics is not None
        cached.append(output.metrics.num_cached_tokens)
    assert cached == [0, 0, 8, 0]
    stats = engine.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (36, 8)
    assert stats.prompt_tokens == 36
    assert (stats.num_cached_blocks, stats.num_used_blocks) == (6, 0)


def test_a_stop_token_of_the_request_is_the_stop_reason_and_the_models_own_is_none(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for token, reason in ((9, 9), (2, None)):  # 2 is the model's end of sequence
        rows = torch.eye(VOCAB_SIZE)
        monkeypatch.setattr(
            engine._runner._model, "logits", lambda hidden, row=rows[token]: row.repeat(len(hidden), 1)
        )
        params = SamplingParams(temperature=0.0, max_tokens=9, stop_token_ids=(9, 2))
        finished = run_requests(engine, {"a": ([5], params)})["a"]
        assert (finished.finish_reason, finished.stop_reason) == (FinishReason.STOP, reason)
        assert finished.token_ids == [token]


def test_logprobs_of_logits_wider_than_float32_end_the_request_and_not_the_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = torch.zeros(VOCAB_SIZE)
    row[3], row[4] = 3e38, -3e38
    monkeypatch.setattr(engine._runner._model, "logits", lambda hidden: row.repeat(len(hidden), 1))
    finished = run_requests(engine, {"a": ([5], replace(greedy(3), logprobs=2, prompt_logprobs=1))})["a"]
    assert (finished.finish_reason, finished.token_ids) == (FinishReason.ERROR, [])
    assert finished.prompt_logprobs == (None,)


@pytest.mark.parametrize("budget", [4, 64])
@pytest.mark.parametrize("num_blocks", [200, 16])
def test_logprobs_come_one_per_token_and_those_of_the_prompt_once_and_whole(
    tiny_model_dir: Path, budget: int, num_blocks: int
) -> None:
    engine = make_engine(
        tiny_decoder(tiny_model_dir),
        max_num_batched_tokens=budget,
        num_blocks=num_blocks,
        max_model_len=40,
    )
    prompts = random_prompts([13, 11, 9])
    for index, prompt in enumerate(prompts):
        params = replace(SAMPLED, max_tokens=20, n=2, logprobs=1, prompt_logprobs=0)
        engine.add_request(str(index), prompt, params)
    outputs = run_samples(engine)
    assert (engine.stats().num_preemptions > 0) == (num_blocks == 16)
    for index, prompt in enumerate(prompts):
        for one in outputs[str(index)]:
            assert [logprob.token_id for logprob in one.logprobs] == one.token_ids
        first, second = outputs[str(index)]
        assert second.prompt_logprobs is None
        assert first.prompt_logprobs is not None
        rows = first.prompt_logprobs
        assert rows[0] is None
        assert [row.token_id for row in rows[1:] if row is not None] == prompt[1:]


def test_the_observer_hears_of_every_committed_step(tiny_model_dir: Path) -> None:
    heard: list[tuple[Any, ...]] = []

    class Observer:
        def on_step(self, *step: Any) -> None:
            heard.append(step)

    engine = make_engine(tiny_decoder(tiny_model_dir), options={"observer": Observer()})
    assert engine.step() == []
    engine.add_request("a", [5] * 6, replace(SAMPLED, n=2, max_tokens=2))
    run_samples(engine)
    assert len(heard) == engine.stats().num_steps == 2
    output, tokens, finished, timings, stats = heard[-1]
    assert {item.sequence.key for item in output.scheduled} == set(tokens) == {("a", 0), ("a", 1)}
    assert {sequence.key for sequence in finished} == {("a", 0), ("a", 1)}
    assert list(timings) == ["schedule", "run", "commit"]
    assert min(timings.values()) >= 0
    assert (stats.num_running, stats.num_finished) == (0, 2)
