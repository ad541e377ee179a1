"""A pool that runs short costs time, never a token: none is lost, repeated or changed by a preemption."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.engines import greedy, make_engine, random_prompts, run_requests, tiny_decoder


@pytest.mark.parametrize("num_blocks", [14, 17, 23])
@pytest.mark.parametrize("max_num_batched_tokens", [5, 64])
def test_tiny_pool(tiny_model_dir: Path, num_blocks: int, max_num_batched_tokens: int) -> None:
    decoder = tiny_decoder(tiny_model_dir)
    sizes = {"num_blocks": num_blocks, "max_model_len": 52, "max_num_batched_tokens": max_num_batched_tokens}
    prompts = random_prompts([7, 16, 3, 11, 20])
    requests = {str(i): (prompt, greedy(16 + 3 * i)) for i, prompt in enumerate(prompts)}
    tight = make_engine(decoder, **sizes)
    outputs = run_requests(tight, requests)
    assert tight.stats().num_preemptions > 0
    roomy = make_engine(decoder, **sizes | {"num_blocks": 200})
    assert outputs == run_requests(roomy, requests)
    assert roomy.stats().num_preemptions == 0


def test_seeded_sampling_survives_preemption_too(tiny_model_dir: Path) -> None:
    decoder = tiny_decoder(tiny_model_dir)
    prompts = random_prompts([7, 16, 3])
    requests = {
        str(i): (prompt, replace(greedy(24), temperature=1.0, top_p=0.9, seed=i))
        for i, prompt in enumerate(prompts)
    }
    tight = make_engine(decoder, num_blocks=14, max_model_len=52)
    outputs = run_requests(tight, requests)
    assert tight.stats().num_preemptions > 0
    assert outputs == run_requests(make_engine(decoder), requests)
