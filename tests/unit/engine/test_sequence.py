"""A sequence counts its tokens and knows when its last one ends it."""

import pytest

from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.engine.sequence import FinishReason, Sequence


def test_the_callers_prompt_is_copied() -> None:
    prompt = [1, 2, 3]
    sequence = Sequence("a", prompt, SamplingParams())
    sequence.token_ids.append(4)
    assert prompt == [1, 2, 3]
    assert (sequence.num_prompt_tokens, sequence.num_output_tokens, sequence.num_tokens) == (3, 1, 4)
    assert sequence.output_token_ids == [4]


@pytest.mark.parametrize(
    ("params", "token_id", "reason"),
    [
        (SamplingParams(), 7, None),
        (SamplingParams(), 9, FinishReason.STOP),
        (SamplingParams(), 8, FinishReason.STOP),
        (SamplingParams(ignore_eos=True), 9, None),
        (SamplingParams(ignore_eos=True, stop_token_ids=(9,)), 9, FinishReason.STOP),
        (SamplingParams(stop_token_ids=(7,)), 7, FinishReason.STOP),
        (SamplingParams(max_tokens=1), 7, FinishReason.LENGTH),
        (SamplingParams(max_tokens=1), 9, FinishReason.STOP),
    ],
)
def test_every_end_token_stops_and_a_stop_beats_the_limit(
    params: SamplingParams, token_id: int, reason: FinishReason | None
) -> None:
    sequence = Sequence("a", [9, 8, 7], params)
    sequence.token_ids.append(token_id)
    assert sequence.reason_to_finish(frozenset({8, 9}), max_model_len=32) == reason


def test_max_model_len_counts_the_prompt() -> None:
    sequence = Sequence("a", [1, 2, 3], SamplingParams())
    sequence.token_ids.append(4)
    assert sequence.reason_to_finish(frozenset(), max_model_len=5) is None
    assert sequence.reason_to_finish(frozenset(), max_model_len=4) is FinishReason.LENGTH
