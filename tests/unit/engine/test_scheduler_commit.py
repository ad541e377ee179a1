"""What becomes of a step: commit, rollback, and aborts in every phase of a sequence."""

from collections.abc import Callable

import pytest

from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.engine.scheduler import Scheduler
from tessera_cli.engine.scheduler_output import SchedulerOutput
from tessera_cli.engine.sequence import FinishReason, SampleError, Sequence, SequenceKey, SequenceStatus
from tests.factories import (
    EOS_TOKEN_ID,
    FakeModel,
    expected_tokens,
    make_scheduler,
    make_sequences,
    run_all,
    run_step,
    scheduled_lengths,
    start_sequences,
)

MODEL_LEN = 32


class TestCommit:
    def test_steps_do_not_overlap(self) -> None:
        scheduler, model = make_scheduler(), FakeModel(4)
        start_sequences(scheduler, [3])
        output = scheduler.schedule()
        with pytest.raises(RuntimeError, match="neither committed nor rolled back"):
            scheduler.schedule()
        sampled = model.run(output)
        scheduler.commit(output, sampled)
        with pytest.raises(RuntimeError, match="not the outstanding one"):
            scheduler.commit(output, sampled)
        scheduler.schedule()
        with pytest.raises(RuntimeError, match="not the outstanding one"):
            scheduler.commit(output, {("r0", 0): [1]})
        scheduler.rollback()
        scheduler.check_invariants()

    @pytest.mark.parametrize(
        "sampled",
        [{}, {("r0", 0): [1], ("r1", 0): [2]}, {("r1", 0): [2]}, {("r0", 0): [1, 2]}, {("r0", 1): [1]}],
    )
    def test_tokens_must_be_those_of_the_step(self, sampled: dict[SequenceKey, list[int]]) -> None:
        scheduler = make_scheduler(max_num_batched_tokens=6)
        first, _ = start_sequences(scheduler, [3, 10])  # r1 is between its chunks and samples nothing
        output = scheduler.schedule()
        with pytest.raises(ValueError, match="r0"):
            scheduler.commit(output, sampled)
        assert first.num_computed_tokens == 0
        scheduler.rollback()
        scheduler.check_invariants()

    def test_an_idle_step_is_empty(self) -> None:
        scheduler = make_scheduler()
        output = scheduler.schedule()
        assert output == SchedulerOutput((), (), (), 0)
        assert scheduler.commit(output, {}) == []

    def test_a_sample_error_ends_its_sequence_alone(self) -> None:
        scheduler, model = make_scheduler(), FakeModel(4)
        first, second = start_sequences(scheduler, [3, 3])
        output = scheduler.schedule()
        sampled = model.run(output) | {("r0", 0): [SampleError("logits are NaN")]}
        assert scheduler.commit(output, sampled) == [first]
        assert (first.finish_reason, first.error) == (FinishReason.ERROR, "logits are NaN")
        assert first.num_output_tokens == 0
        assert run_all(scheduler, model) == [second]
        assert second.finish_reason is FinishReason.LENGTH

    def test_eos_ends_a_sequence_and_stays_its_last_token(self) -> None:
        scheduler = make_scheduler()
        (sequence,) = make_sequences([3], ignore_eos=False)
        scheduler.add(sequence)
        assert scheduler.commit(scheduler.schedule(), {("r0", 0): [EOS_TOKEN_ID]}) == [sequence]
        assert (sequence.finish_reason, sequence.output_token_ids) == (FinishReason.STOP, [EOS_TOKEN_ID])

    def test_max_model_len_ends_a_sequence(self) -> None:
        scheduler, model = make_scheduler(), FakeModel(4)
        (sequence,) = start_sequences(scheduler, [30], max_tokens=100)
        assert run_all(scheduler, model) == [sequence]
        assert (sequence.num_tokens, sequence.finish_reason) == (MODEL_LEN, FinishReason.LENGTH)


class TestRollback:
    def test_an_admission_is_undone(self) -> None:
        scheduler = make_scheduler(max_num_batched_tokens=6)
        first, second = start_sequences(scheduler, [3, 10])
        output = scheduler.schedule()
        (late,) = make_sequences([1], prefix="late")
        scheduler.add(late)
        scheduler.rollback()
        scheduler.check_invariants()
        assert scheduler.block_pool.num_free_blocks == 8
        assert first.status is second.status is SequenceStatus.PREEMPTED
        assert scheduled_lengths(scheduler.schedule()) == scheduled_lengths(output)

    def test_a_decode_keeps_what_was_computed_before(self) -> None:
        scheduler, model = make_scheduler(), FakeModel(4)
        (sequence,) = start_sequences(scheduler, [4])
        run_step(scheduler, model)
        before = list(sequence.block_table)
        output = scheduler.schedule()
        assert len(sequence.block_table) == 2
        model.fail(output)
        scheduler.rollback()
        assert (sequence.block_table[:1], sequence.num_computed_tokens) == (before, 4)
        scheduler.check_invariants()
        run_all(scheduler, model)
        assert sequence.token_ids == expected_tokens(sequence, max_model_len=MODEL_LEN)

    def test_a_victim_stays_preempted_and_a_readmitted_one_is_a_victim_again(self) -> None:
        scheduler, model = make_scheduler(), FakeModel(4)
        start_sequences(scheduler, [4, 4, 4], max_tokens=20)
        num_victims = num_readmitted = 0
        while scheduler.has_unfinished():
            waiting_before = scheduler.num_waiting
            output = scheduler.schedule()
            readmitted = [
                item.sequence
                for item in output.scheduled
                if item.start == item.sequence.num_cached_tokens and item.sequence.num_output_tokens
            ]
            model.fail(output)
            scheduler.rollback()
            scheduler.check_invariants()
            assert scheduler.num_waiting == waiting_before + len(output.preempted)
            for sequence in [*output.preempted, *readmitted]:
                assert sequence.status is SequenceStatus.PREEMPTED
            num_victims += len(output.preempted)
            num_readmitted += len(readmitted)
            run_step(scheduler, model)
        assert scheduler.num_preemptions == num_victims > 0
        assert num_readmitted > 0


def _waiting(scheduler: Scheduler, model: FakeModel) -> Sequence:
    return start_sequences(scheduler, [3])[0]


def _between_chunks(scheduler: Scheduler, model: FakeModel) -> Sequence:
    (sequence,) = start_sequences(scheduler, [25])
    run_step(scheduler, model)
    assert 0 < sequence.num_computed_tokens < 25
    return sequence


def _decoding(scheduler: Scheduler, model: FakeModel) -> Sequence:
    (sequence,) = start_sequences(scheduler, [3])
    run_step(scheduler, model)
    return sequence


def _preempted(scheduler: Scheduler, model: FakeModel) -> Sequence:
    *_, sequence = start_sequences(scheduler, [4, 4, 4], max_tokens=20)
    while not scheduler.num_preemptions:
        run_step(scheduler, model)
    assert sequence.status is SequenceStatus.PREEMPTED
    return sequence


def _last_token(scheduler: Scheduler, model: FakeModel) -> Sequence:
    (sequence,) = start_sequences(scheduler, [3], max_tokens=2)
    run_step(scheduler, model)
    return sequence


@pytest.mark.parametrize("phase", [_waiting, _between_chunks, _decoding, _preempted, _last_token])
class TestAbort:
    Phase = Callable[[Scheduler, FakeModel], Sequence]

    def test_outside_a_step_it_frees_at_once(self, phase: Phase) -> None:
        scheduler, model = make_scheduler(), FakeModel(4)
        sequence = phase(scheduler, model)
        assert scheduler.abort(sequence.request_id)
        self._check_ended(scheduler, sequence)
        assert sequence not in run_all(scheduler, model)
        assert scheduler.block_pool.num_free_blocks == 8

    def test_before_commit_it_only_marks_and_commit_reports_it(self, phase: Phase) -> None:
        scheduler, model = make_scheduler(), FakeModel(4)
        sequence = phase(scheduler, model)
        output = scheduler.schedule()
        tokens, blocks = list(sequence.token_ids), list(sequence.block_table)
        free = scheduler.block_pool.num_free_blocks
        assert scheduler.abort(sequence.request_id)
        assert not scheduler.abort(sequence.request_id)
        assert (sequence.block_table, scheduler.block_pool.num_free_blocks) == (blocks, free)
        assert scheduler.commit(output, model.run(output)).count(sequence) == 1
        self._check_ended(scheduler, sequence)
        assert sequence.token_ids == tokens

    def test_before_rollback_it_only_marks_and_rollback_ends_it(self, phase: Phase) -> None:
        scheduler, model = make_scheduler(), FakeModel(4)
        sequence = phase(scheduler, model)
        scheduler.schedule()
        assert scheduler.abort(sequence.request_id)
        scheduler.rollback()
        self._check_ended(scheduler, sequence)
        assert sequence not in run_all(scheduler, model)
        assert scheduler.block_pool.num_free_blocks == 8

    def _check_ended(self, scheduler: Scheduler, sequence: Sequence) -> None:
        scheduler.check_invariants()
        assert (sequence.status, sequence.finish_reason) == (SequenceStatus.FINISHED, FinishReason.ABORT)
        assert sequence.block_table == []
        assert not scheduler.abort(sequence.request_id)


def test_abort_matches_whole_ids() -> None:
    scheduler = make_scheduler()
    scheduler.add(Sequence("ab", [1], SamplingParams()))
    assert not scheduler.abort("a")
    assert scheduler.has_unfinished()


def test_who_loses_its_blocks_in_a_step_can_be_aborted_in_it() -> None:
    scheduler, model = make_scheduler(), FakeModel(4)
    start_sequences(scheduler, [4, 4, 4], max_tokens=20)
    output = scheduler.schedule()
    while not output.preempted:
        scheduler.commit(output, model.run(output))
        output = scheduler.schedule()
    (victim,) = output.preempted
    assert scheduler.abort(victim.request_id)
    assert scheduler.commit(output, model.run(output)) == [victim]
    assert len(run_all(scheduler, model)) == 2
    assert scheduler.block_pool.num_free_blocks == 8
