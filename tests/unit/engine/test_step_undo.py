"""A step that is undone leaves its sequences as they were, and takes no more from anyone than it must."""

from typing import Any

import pytest

from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.engine.sequence import FinishReason, SampleError, Sequence
from tests.factories import (
    VOCAB_SIZE,
    FakeModel,
    expected_tokens,
    make_scheduler,
    make_sequences,
    run_all,
    run_step,
)


@pytest.mark.parametrize("fails", [True, False])
def test_no_reason_to_end_outlives_an_interrupted_commit(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    scheduler, model = make_scheduler(), FakeModel(4)
    stops = SamplingParams(max_tokens=3, stop_token_ids=() if fails else tuple(range(1, VOCAB_SIZE)))
    first, second = Sequence("first", [3] * 4, stops), make_sequences([8])[0]
    scheduler.add(first)
    scheduler.add(second)
    output = scheduler.schedule()
    tokens = model.run(output)
    if fails:
        tokens[first.key] = [SampleError("not finite")]

    def publish(sequence: Sequence) -> None:
        if sequence is second:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(scheduler.prefix_cache, "publish", publish)
        with pytest.raises(KeyboardInterrupt):
            scheduler.commit(output, tokens)
    assert (first.error is not None) == fails
    assert (first.stop_reason is None) == fails
    scheduler.rollback()
    scheduler.check_invariants()
    assert (first.error, first.stop_reason, first.finish_reason) == (None, None, None)
    for sequence in run_all(scheduler, model):
        assert sequence.error is None
        assert sequence.token_ids == expected_tokens(sequence, max_model_len=32)


def test_an_aborted_sequence_makes_nobody_behind_it_begin_again() -> None:
    scheduler, model = make_scheduler(), FakeModel(4)
    old, new = make_sequences([6, 7])
    scheduler.add(old)
    scheduler.add(new)
    run_step(scheduler, model)
    model.fail(scheduler.schedule())
    scheduler.abort("r0")
    scheduler.rollback()
    scheduler.check_invariants()
    assert old.finish_reason is FinishReason.ABORT
    assert new.num_computed_tokens == 7
    assert run_all(scheduler, model) == [new]
    assert new.token_ids == expected_tokens(new, max_model_len=32)


@pytest.mark.parametrize("call", ["abort", "finish"])
def test_an_end_between_steps_that_is_interrupted_is_carried_out(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    scheduler, model = make_scheduler(), FakeModel(4)
    for sequence in make_sequences([6, 7]):
        scheduler.add(sequence)
    run_step(scheduler, model)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(scheduler.block_pool, "free", interrupt)
        with pytest.raises(KeyboardInterrupt):
            scheduler.abort("r0") if call == "abort" else scheduler.finish("r0", 0, FinishReason.STOP)
    scheduler.rollback()
    scheduler.check_invariants()
    assert list(scheduler.queues.requests) == ["r1"]
    assert [sequence.request_id for sequence in run_all(scheduler, model)] == ["r1"]


def test_a_step_that_is_undone_leaves_memory_that_was_never_used_alone() -> None:
    scheduler, model = make_scheduler(num_blocks=30, num_kept_blocks=0), FakeModel(4)
    for sequence in make_sequences([6, 7]):
        scheduler.add(sequence)
        run_all(scheduler, model)
    num_used = scheduler.block_pool.num_used_ever
    assert num_used < 10
    again = make_sequences([9])[0]
    scheduler.add(again)
    scheduler.schedule()
    scheduler.rollback()
    for _ in range(3):
        run_all(scheduler, model)
        scheduler.add(Sequence("next", [5] * 9, SamplingParams(max_tokens=4)))
    assert scheduler.block_pool.num_used_ever <= num_used + 1
