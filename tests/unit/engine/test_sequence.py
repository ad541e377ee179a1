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


@pytest.mark.parametrize("token_id", [9, 7])
def test_no_token_stops_below_min_tokens(token_id: int) -> None:
    params = SamplingParams(min_tokens=2, max_tokens=3, stop_token_ids=(7,))
    sequence = Sequence("a", [1], params)
    reasons = []
    for _ in range(2):
        sequence.token_ids.append(token_id)
        reasons.append(sequence.reason_to_finish(frozenset({9}), max_model_len=32))
    assert reasons == [None, FinishReason.STOP]


def test_min_tokens_do_not_lift_the_limits() -> None:
    sequence = Sequence("a", [1, 2, 3], SamplingParams(min_tokens=9, max_tokens=9))
    sequence.token_ids.append(4)
    assert sequence.reason_to_finish(frozenset(), max_model_len=4) is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("token_id", "ignore_eos", "reason"), [(9, False, None), (9, True, 9), (8, False, 8)]
)
def test_the_stop_reason_is_the_requests_own_token(
    token_id: int, ignore_eos: bool, reason: int | None
) -> None:
    sequence = Sequence("a", [1], SamplingParams(ignore_eos=ignore_eos, stop_token_ids=(8, 9)))
    sequence.token_ids.append(token_id)
    assert sequence.reason_to_finish(frozenset({9}), max_model_len=32) is FinishReason.STOP
    assert sequence.stop_reason == reason


def test_a_fork_shares_nothing_that_either_may_change() -> None:
    parent = Sequence("a", [1, 2, 3], SamplingParams(n=3), priority=2, cache_salt="s")
    parent.block_table, parent.num_computed_tokens, parent.block_digests = [4, 5], 3, [b"d"]
    parent.rank = (2, 7, 0)
    child = parent.fork(2)
    assert (child.key, child.rank, child.num_pending_forks) == (("a", 2), (2, 7, 2), 0)
    assert (child.block_table, child.num_computed_tokens, child.cache_salt) == ([4, 5], 3, "s")
    child.token_ids.append(9)
    child.block_table.append(6)
    child.block_digests.append(b"e")
    assert (parent.token_ids, parent.block_table, parent.block_digests) == ([1, 2, 3], [4, 5], [b"d"])


def test_its_text_says_where_it_is() -> None:
    sequence = Sequence("a", [1, 2, 3], SamplingParams(), child_index=1)
    assert repr(sequence) == "Sequence('a'/1, WAITING, computed 0 of 3+0 tokens, 0 blocks)"
