"""The runner: one token per sequence that samples, the same on every run, and no state but the cache."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tessera_cli.engine.config import EngineConfig
from tessera_cli.engine.model_runner import ModelRunner
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.engine.scheduler import Scheduler
from tessera_cli.engine.sequence import SampleError, Sequence
from tests.engines import greedy, random_prompts, tiny_decoder

CONFIG = EngineConfig(num_blocks=40, max_model_len=64, block_size=4, max_num_batched_tokens=12)


def make(path: Path, prompts: list[list[int]], params: SamplingParams) -> tuple[Scheduler, ModelRunner]:
    decoder = tiny_decoder(path)
    scheduler = Scheduler(CONFIG, decoder.config.eos_token_ids)
    for index, prompt in enumerate(prompts):
        scheduler.add(Sequence(str(index), prompt, params))
    return scheduler, ModelRunner(decoder, CONFIG, "reference")


def test_samples_for_those_that_reach_their_last_token(tiny_model_dir: Path) -> None:
    scheduler, runner = make(tiny_model_dir, random_prompts([5, 3, 9]), replace(greedy(4), seed=0))
    output = scheduler.schedule()
    assert runner.run(output).keys() == {"0", "1"}


def test_running_a_step_again_gives_the_same_tokens_and_changes_no_sequence(tiny_model_dir: Path) -> None:
    scheduler, runner = make(tiny_model_dir, random_prompts([5, 3]), SamplingParams(seed=3))
    output = scheduler.schedule()
    before = [(list(item.sequence.token_ids), item.sequence.num_computed_tokens) for item in output.scheduled]
    assert runner.run(output) == runner.run(output)
    assert before == [
        (item.sequence.token_ids, item.sequence.num_computed_tokens) for item in output.scheduled
    ]


def test_a_step_without_a_last_token_samples_nothing(tiny_model_dir: Path) -> None:
    scheduler, runner = make(tiny_model_dir, random_prompts([30]), replace(greedy(4), seed=0))
    assert runner.run(scheduler.schedule()) == {}


def test_logits_that_are_not_finite_fail_their_sequence_only(tiny_model_dir: Path) -> None:
    poisoned, healthy = random_prompts([4, 5])
    scheduler, runner = make(tiny_model_dir, [poisoned, healthy], replace(greedy(4), seed=0))
    output = scheduler.schedule()
    clean = runner.run(output)
    only_in_first = next(token for token in poisoned if token not in healthy)
    with torch.no_grad():
        # An infinite embedding would also make that token's own logit infinite for everybody.
        runner._decoder.register_forward_hook(
            lambda module, args, hidden: _spoil(args[0], hidden, only_in_first)
        )
    results = runner.run(output)
    assert isinstance(results["0"], SampleError)
    assert results["1"] == clean["1"]


def test_a_request_without_a_seed_is_a_bug(tiny_model_dir: Path) -> None:
    scheduler, runner = make(tiny_model_dir, random_prompts([4]), SamplingParams())
    with pytest.raises(ValueError, match="seed"):
        runner.run(scheduler.schedule())


def _spoil(input_ids: torch.Tensor, hidden: torch.Tensor, token: int) -> torch.Tensor:
    """NaN in every row up to the first sequence's end, where `token` stands in it."""
    spoiled = hidden.clone()
    assert token in input_ids[:4]
    spoiled[:4] = torch.nan
    return spoiled
