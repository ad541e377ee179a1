"""What the engine tells of probabilities is what one plain forward of the whole text says."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.engine.step_result import TokenLogprobs
from tessera_cli.models.decoder import Decoder
from tests.engines import Finished, make_engine, random_prompts, run_requests, tiny_decoder

PARAMS = SamplingParams(
    temperature=1.2,
    top_k=50,
    repetition_penalty=1.2,
    logit_bias={9: 3.0},
    seed=4,
    max_tokens=24,
    ignore_eos=True,
    logprobs=3,
    prompt_logprobs=2,
)
PROMPTS = random_prompts([1, 2, 16, 17, 33])


@torch.inference_mode()
def plain_logprobs(decoder: Decoder, token_ids: list[int]) -> Tensor:
    """Row i is the distribution of position i + 1."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        future = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), v)

    hidden = decoder(torch.tensor(token_ids), torch.arange(len(token_ids)), attend)
    return decoder.logits(hidden).log_softmax(-1)


def check(entry: TokenLogprobs | None, token_id: int, row: Tensor, num_top: int) -> None:
    assert entry is not None
    assert entry.token_id == token_id
    assert math.isfinite(entry.logprob)
    assert entry.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
    # Nearly equal tokens may change places.
    assert int((row > entry.logprob + 2e-4).sum()) < entry.rank <= 1 + int((row > entry.logprob - 2e-4).sum())
    best = row.topk(num_top).values.tolist()
    assert [value for _, value in entry.top] == pytest.approx(best, abs=1e-4)
    assert all(value == pytest.approx(float(row[token]), abs=1e-4) for token, value in entry.top)


def check_all(decoder: Decoder, prompt: list[int], finished: Finished) -> None:
    rows = plain_logprobs(decoder, prompt + finished.token_ids)
    assert len(finished.logprobs) == len(finished.token_ids) == PARAMS.max_tokens
    for position, (token, entry) in enumerate(
        zip(finished.token_ids, finished.logprobs, strict=True), len(prompt)
    ):
        check(entry, token, rows[position - 1], 3)
    assert finished.prompt_logprobs is not None
    assert len(finished.prompt_logprobs) == len(prompt)
    assert finished.prompt_logprobs[0] is None
    for position, entry in enumerate(finished.prompt_logprobs[1:], 1):
        check(entry, prompt[position], rows[position - 1], 2)


@pytest.mark.parametrize(
    "sizes",
    [{}, {"max_num_batched_tokens": 5}, {"num_blocks": 33}, {"num_blocks": 33, "max_num_batched_tokens": 9}],
    ids=["roomy", "chunks", "preempted", "chunks and preempted"],
)
def test_output_and_prompt(tiny_model_dir: Path, sizes: dict[str, Any]) -> None:
    decoder = tiny_decoder(tiny_model_dir)
    engine = make_engine(decoder, **sizes)
    outputs = run_requests(engine, {str(i): (prompt, PARAMS) for i, prompt in enumerate(PROMPTS)})
    assert (engine.stats().num_preemptions > 0) == ("num_blocks" in sizes)
    for index, prompt in enumerate(PROMPTS):
        check_all(decoder, prompt, outputs[str(index)])


def test_a_prompt_in_the_prefix_cache_has_them_whole(tiny_model_dir: Path) -> None:
    decoder = tiny_decoder(tiny_model_dir)
    engine = make_engine(decoder)
    (prompt,) = random_prompts([33])
    first = run_requests(engine, {"first": (prompt, replace(PARAMS, prompt_logprobs=None))})["first"]
    again = run_requests(engine, {"again": (prompt, PARAMS)})["again"]
    cached = run_requests(engine, {"cached": (prompt, replace(PARAMS, prompt_logprobs=None))})["cached"]
    assert engine.stats().prefix_cache_hits > 0
    assert first.token_ids == again.token_ids == cached.token_ids
    check_all(decoder, prompt, again)


def test_asking_for_them_changes_no_token(tiny_model_dir: Path) -> None:
    decoder = tiny_decoder(tiny_model_dir)
    silent = replace(PARAMS, logprobs=None, prompt_logprobs=None)
    told, untold = (
        run_requests(make_engine(decoder), {str(i): (prompt, params) for i, prompt in enumerate(PROMPTS)})
        for params in (PARAMS, silent)
    )
    assert [f.token_ids for f in told.values()] == [f.token_ids for f in untold.values()]
    assert all(not f.logprobs and f.prompt_logprobs is None for f in untold.values())


@pytest.mark.parametrize("max_num_batched_tokens", [5, 64])
@pytest.mark.parametrize("start", [1, 2, 16, 17, 32, 33])
def test_from_a_position_on_they_are_those_of_the_whole_prompt(
    tiny_model_dir: Path, start: int, max_num_batched_tokens: int
) -> None:
    decoder = tiny_decoder(tiny_model_dir)
    engine = make_engine(decoder, max_num_batched_tokens=max_num_batched_tokens)
    (prompt,) = random_prompts([33])
    rows = plain_logprobs(decoder, prompt)
    for request_id in ("computed", "found"):
        params = replace(PARAMS, prompt_logprobs_start=start)
        told = run_requests(engine, {request_id: (prompt, params)})[request_id].prompt_logprobs
        assert told is not None
        assert [position for position, entry in enumerate(told) if entry is not None] == [*range(start, 33)]
        for position in range(start, 33):
            check(told[position], prompt[position], rows[position - 1], 2)
    assert engine.stats().prefix_cache_hits == min(start - 1, 32) // 4 * 4
