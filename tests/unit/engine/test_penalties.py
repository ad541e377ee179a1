"""Biases, forbidden ends and penalties: their formulas, and no other logit touched."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from tessera_cli.engine.penalties import add_biases, forbid_ends, penalise
from tessera_cli.engine.sampling_params import SamplingParams

VOCAB_SIZE = 30
TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=12)


def some_logits(rows: int = 1) -> Tensor:
    return 3 * torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))


@given(prompt=TOKENS.filter(bool), output=TOKENS, penalty=st.sampled_from([0.5, 1.1, 3.0]))
@settings(deadline=None)
def test_repetition_is_that_of_transformers(prompt: list[int], output: list[int], penalty: float) -> None:
    logits = some_logits()
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits.clone())
    penalise(logits[0], SamplingParams(repetition_penalty=penalty), prompt, output)
    assert torch.equal(logits, expected)


@given(prompt=TOKENS, output=TOKENS, presence=st.sampled_from([-2.0, 0.0, 0.7]), frequency=st.floats(-2, 2))
@settings(deadline=None)
def test_presence_and_frequency_are_openais_and_leave_the_prompt_alone(
    prompt: list[int], output: list[int], presence: float, frequency: float
) -> None:
    logits = some_logits()
    expected = [
        value - frequency * output.count(token) - presence * (token in output)
        for token, value in enumerate(logits[0].tolist())
    ]
    params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency)
    penalise(logits[0], params, prompt, output)
    torch.testing.assert_close(logits[0], torch.tensor(expected))


def test_the_repetition_penalty_comes_before_the_others() -> None:
    logits = torch.tensor([4.0, -4.0, 1.0])
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.5)
    penalise(logits, params, prompt=[1], output=[0, 0])
    assert logits.tolist() == [4.0 / 2 - 2 * 0.5 - 1.0, -4.0 * 2, 1.0]


def test_biases_are_added_where_they_belong_and_nowhere_else() -> None:
    logits = some_logits(3)
    expected = logits.clone()
    expected[0, 5] += 1.5
    expected[2, 5] -= 100
    expected[2, 0] += 3
    params = [SamplingParams(logit_bias=bias) for bias in ({5: 1.5}, {}, {5: -100, 0: 3})]
    add_biases(logits, params)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize(
    ("params", "num_output_tokens", "forbidden"),
    [
        (SamplingParams(min_tokens=3), 2, {1, 2}),
        (SamplingParams(min_tokens=3), 3, set()),
        (SamplingParams(min_tokens=3, stop_token_ids=(7, 1)), 0, {1, 2, 7}),
        (SamplingParams(min_tokens=3, stop_token_ids=(7,), ignore_eos=True), 0, {7}),
        (SamplingParams(stop_token_ids=(7,)), 0, set()),
    ],
)
def test_nothing_ends_an_output_before_min_tokens(
    params: SamplingParams, num_output_tokens: int, forbidden: set[int]
) -> None:
    logits = some_logits(2)
    expected = logits.clone()
    expected[1, list(forbidden)] = -torch.inf
    forbid_ends(logits, [SamplingParams(), params], [0, num_output_tokens], {1, 2})
    assert torch.equal(logits, expected)
