"""A request's tokens do not depend on who runs beside it."""

from dataclasses import replace
from pathlib import Path

import pytest

from tessera_cli.engine.sampling_params import SamplingParams, StructuredOutput
from tessera_cli.engine.sequence import FinishReason
from tessera_cli.engine.structured_output import GrammarVocabulary
from tests.engines import (
    VOCAB_SIZE,
    Finished,
    greedy,
    make_engine,
    random_prompts,
    run_requests,
    tiny_decoder,
)

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


EVERY_KIND = [
    SamplingParams(temperature=0.0, repetition_penalty=1.5),
    SamplingParams(temperature=0.0, frequency_penalty=1.0, presence_penalty=-0.5),
    SamplingParams(temperature=0.0, logit_bias={7: 30.0, 9: 30.0}, presence_penalty=2.0),
    SamplingParams(temperature=2.0, min_p=0.05, min_tokens=6, stop_token_ids=tuple(range(100, 384))),
    SamplingParams(temperature=1.0, structured_output=StructuredOutput(regex="[a-f]{3,8}!")),
    SamplingParams(temperature=0.0, structured_output=StructuredOutput(choice=("robot", "robin", "rose"))),
    SamplingParams(temperature=1.5, structured_output=StructuredOutput(regex="(ab|cd)+")),
    SamplingParams(temperature=0.0),
]


@pytest.mark.parametrize("num_blocks", [200, 33], ids=["roomy", "preempted"])
def test_penalties_biases_ends_and_forms_of_each_own(tiny_model_dir: Path, num_blocks: int) -> None:
    decoder = tiny_decoder(tiny_model_dir)
    vocabulary = GrammarVocabulary(
        tiny_model_dir / "tokenizer.json", vocab_size=VOCAB_SIZE, eos_token_ids=decoder.config.eos_token_ids
    )
    options = {"grammar_vocabulary": vocabulary}
    prompts = random_prompts([9, 3, 30, 14, 5, 9, 21, 2])
    requests = {
        str(index): (prompt, replace(params, seed=index, max_tokens=14, logprobs=1))
        for index, (prompt, params) in enumerate(zip(prompts, EVERY_KIND, strict=True))
    }
    engine = make_engine(decoder, options=options, num_blocks=num_blocks)
    together = run_requests(engine, requests)
    assert (engine.stats().num_preemptions > 0) == (num_blocks < 200)
    for request_id, one in requests.items():
        alone = run_requests(make_engine(decoder, options=options), {request_id: one})[request_id]
        assert _told(together[request_id]) == _told(alone)
    ends = together["3"].token_ids
    assert len(ends) >= 6
    assert all(token < 100 for token in ends[:-1][:6])
    assert together["5"].finish_reason is FinishReason.STOP
    assert together["5"].token_ids[-1] in decoder.config.eos_token_ids


def _told(finished: Finished) -> tuple[object, ...]:
    """All but the log-probabilities, whose last bits are the business of the matrix products."""
    return finished.token_ids, finished.finish_reason, [entry.token_id for entry in finished.logprobs]


def test_a_neighbours_content_changes_no_bit(tiny_model_dir: Path) -> None:
    """At equal shapes even the log-probabilities are equal: rows of a batch do not mix."""
    decoder = tiny_decoder(tiny_model_dir)
    watched, *_ = random_prompts([11])
    params = replace(greedy(8), logprobs=5, prompt_logprobs=5, seed=1)
    outputs = []
    for seed in range(3):
        others = random_prompts([4, 11, 20], seed=10 + seed)
        requests = {f"other{i}": (other, greedy(8)) for i, other in enumerate(others)}
        outputs.append(
            run_requests(make_engine(decoder), {"watched": (watched, params), **requests})["watched"]
        )
    assert outputs[0] == outputs[1] == outputs[2]
