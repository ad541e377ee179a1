"""The same tokens, in whatever pieces a prompt is computed and whatever size blocks have."""

from pathlib import Path

import pytest

from tessera_cli.engine.sampling_params import SamplingParams
from tests.engines import greedy, make_engine, random_prompts, run_requests, tiny_decoder


@pytest.mark.parametrize("max_num_batched_tokens", [1, 3, 7, 16])
def test_chunk_size(tiny_model_dir: Path, max_num_batched_tokens: int) -> None:
    decoder = tiny_decoder(tiny_model_dir)
    requests = {str(i): (prompt, greedy(5)) for i, prompt in enumerate(random_prompts([1, 6, 16, 35]))}
    whole = run_requests(
        make_engine(decoder, max_num_batched_tokens=128, enable_chunked_prefill=False), requests
    )
    chunked = run_requests(make_engine(decoder, max_num_batched_tokens=max_num_batched_tokens), requests)
    assert chunked == whole


@pytest.mark.parametrize("block_size", [1, 2, 5, 32])
def test_block_size(tiny_model_dir: Path, block_size: int) -> None:
    decoder = tiny_decoder(tiny_model_dir)
    requests = {str(i): (prompt, greedy(8)) for i, prompt in enumerate(random_prompts([1, 15, 16, 17, 33]))}
    expected = run_requests(make_engine(decoder, block_size=16), requests)
    assert run_requests(make_engine(decoder, block_size=block_size), requests) == expected


@pytest.mark.parametrize("max_num_batched_tokens", [1, 5])
def test_chunk_size_with_sampling_and_penalties(tiny_model_dir: Path, max_num_batched_tokens: int) -> None:
    decoder = tiny_decoder(tiny_model_dir)
    params = SamplingParams(
        temperature=1.1, frequency_penalty=0.5, seed=6, max_tokens=6, ignore_eos=True, logprobs=0
    )
    requests = {str(i): (prompt, params) for i, prompt in enumerate(random_prompts([1, 7, 22]))}
    engines = [make_engine(decoder), make_engine(decoder, max_num_batched_tokens=max_num_batched_tokens)]
    whole, chunked = (run_requests(engine, requests) for engine in engines)
    assert {i: f.token_ids for i, f in chunked.items()} == {i: f.token_ids for i, f in whole.items()}
