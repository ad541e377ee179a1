"""A request's tokens do not depend on who runs beside it."""

from pathlib import Path

import pytest

from tessera_cli.engine.sampling_params import SamplingParams
from tests.engines import greedy, make_engine, random_prompts, run_requests, tiny_decoder

LENGTHS = [1, 2, 4, 5, 17, 40, 63, 64, 65, 90]


@pytest.mark.parametrize("model", ["tiny_model_dir", "tiny_untied_model_dir"])
def test_greedy(model: str, request: pytest.FixtureRequest) -> None:
    decoder = tiny_decoder(request.getfixturevalue(model))
    requests = {
        str(index): (prompt, greedy(6 + index)) for index, prompt in enumerate(random_prompts(LENGTHS))
    }
    together = run_requests(make_engine(decoder), requests)
    alone = {
        request_id: run_requests(make_engine(decoder), {request_id: one})[request_id]
        for request_id, one in requests.items()
    }
    assert together == alone
    assert len({tuple(finished.token_ids[:3]) for finished in together.values()}) > 5


def test_seeded_sampling_with_parameters_of_each_own(tiny_model_dir: Path) -> None:
    decoder = tiny_decoder(tiny_model_dir)
    every = [
        SamplingParams(
            temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, max_tokens=8, ignore_eos=True
        )
        for seed, (temperature, top_k, top_p) in enumerate(
            [(1.0, 0, 1.0), (0.7, 5, 1.0), (1.5, 0, 0.8), (2.0, 30, 0.9), (0.0, 0, 1.0), (1.0, 0, 1.0)]
        )
    ]
    requests = {
        str(index): (prompt, params)
        for index, (prompt, params) in enumerate(
            zip(random_prompts([9, 3, 30, 14, 5, 9]), every, strict=True)
        )
    }
    together = run_requests(make_engine(decoder), requests)
    late = run_requests(make_engine(decoder, max_num_seqs=2), requests)
    alone = {
        request_id: run_requests(make_engine(decoder), {request_id: one})[request_id]
        for request_id, one in requests.items()
    }
    assert together == alone == late
