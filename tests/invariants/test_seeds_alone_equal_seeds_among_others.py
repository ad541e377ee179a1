"""A seed gives the same tokens alone and among 63 others, whoever these are."""

from dataclasses import replace
from pathlib import Path

import pytest

from tessera_cli.engine.sampling_params import SamplingParams
from tests.engines import add_requests, make_engine, random_prompts, run_samples, tiny_decoder

WATCHED = SamplingParams(
    temperature=1.3, top_p=0.95, min_p=0.001, repetition_penalty=1.1, seed=77, max_tokens=10, ignore_eos=True
)
SIZES = {"num_blocks": 800, "max_num_seqs": 64, "max_num_batched_tokens": 256}


@pytest.mark.parametrize("place", [0, 31, 63])
def test_one_seed(tiny_model_dir: Path, place: int) -> None:
    decoder = tiny_decoder(tiny_model_dir)
    (prompt,) = random_prompts([13], seed=5)
    alone = make_engine(decoder, **SIZES)
    add_requests(alone, {"watched": (prompt, WATCHED)})
    expected = run_samples(alone)["watched"]

    others = random_prompts([1 + index % 17 for index in range(63)], seed=place)
    requests = {
        str(index): (other, replace(WATCHED, seed=index % 3, temperature=0.5 + index / 40))
        for index, other in enumerate(others)
    }
    names = [*[*requests][:place], "watched", *[*requests][place:]]
    together = make_engine(decoder, **SIZES)
    add_requests(together, {name: requests.get(name, (prompt, WATCHED)) for name in names})
    assert run_samples(together)["watched"] == expected


def test_children_of_one_seed_differ_and_repeat(tiny_model_dir: Path) -> None:
    decoder = tiny_decoder(tiny_model_dir)
    (prompt,) = random_prompts([13], seed=5)

    def run(**sizes: int) -> list[list[int]]:
        engine = make_engine(decoder, **sizes)
        add_requests(engine, {"r": (prompt, replace(WATCHED, n=6, logprobs=1))})
        samples = run_samples(engine)["r"]
        assert all([e.token_id for e in sample.logprobs] == sample.token_ids for sample in samples)
        return [sample.token_ids for sample in samples]

    first = run()
    assert len({tuple(tokens) for tokens in first}) == 6
    assert run() == run(num_blocks=34, max_num_batched_tokens=7) == first
