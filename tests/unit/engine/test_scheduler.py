"""Admission, budgets, preemption, commit, rollback and abort, each on a pool small enough to see through."""

from collections.abc import Callable

import pytest

from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.engine.scheduler import Scheduler
from tessera_cli.engine.scheduler_output import SchedulerOutput
from tessera_cli.engine.sequence import FinishReason, SampleError, Sequence, SequenceStatus
from tessera_cli.errors import CapacityError, UsageError
from tests.factories import (
    EOS_TOKEN_ID,
    FakeModel,
    expected_tokens,
    make_scheduler,
    make_sequences,
    run_all,
    run_step,
)

MODEL_LEN = 32


def _start(scheduler: Scheduler, prompt_lens: list[int], *, max_tokens: int = 8) -> list[Sequence]:
    sequences = make_sequences(prompt_lens, max_tokens=max_tokens)
    for sequence in sequences:
        scheduler.add(sequence)
    return sequences


def _lengths(output: SchedulerOutput) -> dict[str, int]:
    return {item.sequence.request_id: item.num_scheduled_tokens for item in output.scheduled}


class TestAdd:
    def test_an_empty_prompt_is_refused(self) -> None:
        with pytest.raises(UsageError, match="'a' has an empty prompt"):
            make_scheduler().add(Sequence("a", [], SamplingParams()))

    def test_a_prompt_must_leave_room_for_one_token(self) -> None:
        scheduler = make_scheduler()
        _start(scheduler, [MODEL_LEN - 1])
        with pytest.raises(CapacityError, match=r"32 tokens.*max_model_len=32"):
            scheduler.add(make_sequences([MODEL_LEN], prefix="long")[0])

    def test_an_id_is_free_again_after_its_sequence_ends(self) -> None:
        scheduler, model = make_scheduler(), FakeModel(4)
        _start(scheduler, [3], max_tokens=2)
        with pytest.raises(UsageError, match="'r0' is already in the engine"):
            _start(scheduler, [3])
        run_all(scheduler, model)
        _start(scheduler, [3])

    def test_a_refused_sequence_leaves_no_trace(self) -> None:
        scheduler = make_scheduler()
        with pytest.raises(CapacityError):
            _start(scheduler, [MODEL_LEN])
        assert not scheduler.has_unfinished()
        scheduler.check_invariants()


class TestBudgets:
    def test_decodes_come_before_prefill_chunks_in_one_batch(self) -> None:
        scheduler, model = make_scheduler(max_num_batched_tokens=6), FakeModel(4)
        _start(scheduler, [3, 10])
        assert _lengths(run_step(scheduler, model)[0]) == {"r0": 3, "r1": 3}
        assert _lengths(run_step(scheduler, model)[0]) == {"r0": 1, "r1": 5}
        output, _ = run_step(scheduler, model)
        assert _lengths(output) == {"r0": 1, "r1": 2}
        assert [item.samples for item in output.scheduled] == [True, True]
        assert _lengths(run_step(scheduler, model)[0]) == {"r0": 1, "r1": 1}

    def test_all_blocks_of_a_prompt_are_reserved_before_its_first_chunk(self) -> None:
        scheduler, model = make_scheduler(max_num_batched_tokens=2), FakeModel(4)
        (sequence,) = _start(scheduler, [13])
        for _ in range(6):
            run_step(scheduler, model)
            assert len(sequence.block_table) == 4

    def test_a_decode_takes_a_block_only_at_a_boundary(self) -> None:
        scheduler, model = make_scheduler(), FakeModel(4)
        (sequence,) = _start(scheduler, [3], max_tokens=12)
        held = []
        for _ in range(7):
            run_step(scheduler, model)
            held.append(len(sequence.block_table))
        assert held == [1, 1, 2, 2, 2, 2, 3]

    def test_no_more_than_max_num_seqs_run(self) -> None:
        scheduler, model = make_scheduler(max_num_seqs=2), FakeModel(4)
        _start(scheduler, [2, 2, 2], max_tokens=3)
        for _ in range(3):
            assert _lengths(run_step(scheduler, model)[0]).keys() == {"r0", "r1"}
        assert _lengths(run_step(scheduler, model)[0]).keys() == {"r2"}

    def test_without_chunks_a_prompt_runs_whole_or_not_at_all(self) -> None:
        scheduler = make_scheduler(num_blocks=17, max_num_batched_tokens=32, enable_chunked_prefill=False)
        model = FakeModel(4)
        _start(scheduler, [20, 13], max_tokens=3)
        assert _lengths(run_step(scheduler, model)[0]) == {"r0": 20}
        assert _lengths(run_step(scheduler, model)[0]) == {"r0": 1, "r1": 13}

    def test_small_requests_wait_behind_a_large_head(self) -> None:
        scheduler, model = make_scheduler(max_num_batched_tokens=32), FakeModel(4)
        _start(scheduler, [20, 16, 2])  # 5 blocks run, 4 do not fit into the other 3, 1 would
        assert _lengths(run_step(scheduler, model)[0]) == {"r0": 20}
        assert scheduler.num_waiting == 2

    def test_a_step_that_could_schedule_nothing_is_an_error_and_not_a_stall(self) -> None:
        scheduler = make_scheduler()
        _start(scheduler, [2])
        scheduler.block_pool.allocate(8)  # as if they had been leaked
        with pytest.raises(RuntimeError, match="nothing can be scheduled"):
            scheduler.schedule()

    def test_the_stats_count_who_runs_and_who_waits(self) -> None:
        scheduler = make_scheduler(max_num_seqs=1)
        _start(scheduler, [2, 2], max_tokens=1)
        assert (scheduler.num_running, scheduler.num_waiting) == (0, 2)
        scheduler.schedule()
        assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)


class TestPreemption:
    def test_the_newest_loses_its_blocks_and_waits_in_front_with_its_tokens(self) -> None:
        scheduler, model = make_scheduler(max_num_batched_tokens=32), FakeModel(4)
        _, victim = _start(scheduler, [16, 15])  # 4 + 4 blocks: the pool is full
        run_step(scheduler, model)
        (late,) = make_sequences([1], prefix="late")
        scheduler.add(late)
        tokens = list(victim.token_ids)
        output, _ = run_step(scheduler, model)
        assert (output.preempted, _lengths(output)) == ((victim,), {"r0": 1})
        assert (victim.status, victim.num_computed_tokens, victim.block_table) == (
            SequenceStatus.PREEMPTED,
            0,
            [],
        )
        assert victim.token_ids == tokens
        assert [sequence.request_id for sequence in run_all(scheduler, model)] == ["r0", "r1", "late0"]
        assert victim.token_ids == expected_tokens(victim, max_model_len=MODEL_LEN)

    def test_who_asks_and_is_the_newest_is_preempted_itself(self) -> None:
        scheduler, model = make_scheduler(max_num_batched_tokens=32), FakeModel(4)
        _, victim = _start(scheduler, [13, 16])  # 4 + 4 blocks, and only the newest needs another
        run_step(scheduler, model)
        output, _ = run_step(scheduler, model)
        assert (output.preempted, _lengths(output)) == ((victim,), {"r0": 1})

    def test_several_victims_return_in_order_of_arrival_before_newcomers(self) -> None:
        scheduler, model = make_scheduler(max_num_batched_tokens=64), FakeModel(4)
        _, _, third, fourth = _start(scheduler, [8, 8, 8, 8], max_tokens=2)
        run_step(scheduler, model)
        (late,) = make_sequences([1], prefix="late")
        scheduler.add(late)
        output, finished = run_step(scheduler, model)
        assert output.preempted == (fourth, third)
        assert [sequence.request_id for sequence in finished] == ["r0", "r1"]
        assert scheduler.num_preemptions == 2
        assert list(_lengths(run_step(scheduler, model)[0])) == ["r2", "r3", "late0"]

    def test_a_step_that_preempts_admits_nobody(self) -> None:
        scheduler, model = make_scheduler(), FakeModel(4)
        _start(scheduler, [4, 4, 4], max_tokens=20)
        preempted = 0
        while scheduler.has_unfinished():
            num_running = scheduler.num_running
            output, _ = run_step(scheduler, model)
            if output.preempted:
                preempted += len(output.preempted)
                assert len(output.scheduled) == num_running - len(output.preempted)
        assert preempted > 0

    def test_a_victim_between_its_chunks_starts_again(self) -> None:
        scheduler, model = make_scheduler(max_num_batched_tokens=3), FakeModel(4)
        older, victim = _start(scheduler, [7, 22], max_tokens=16)  # 2 + 6 blocks: full
        while not scheduler.num_preemptions:
            run_step(scheduler, model)
        assert victim.num_output_tokens == 0
        run_all(scheduler, model)
        for sequence in (older, victim):
            assert sequence.token_ids == expected_tokens(sequence, max_model_len=MODEL_LEN)


class TestCommit:
    def test_steps_do_not_overlap(self) -> None:
        scheduler, model = make_scheduler(), FakeModel(4)
        _start(scheduler, [3])
        output = scheduler.schedule()
        with pytest.raises(RuntimeError, match="neither committed nor rolled back"):
            scheduler.schedule()
        sampled = model.run(output)
        scheduler.commit(output, sampled)
        with pytest.raises(RuntimeError, match="not the outstanding one"):
            scheduler.commit(output, sampled)
        scheduler.schedule()
        with pytest.raises(RuntimeError, match="not the outstanding one"):
            scheduler.commit(output, {"r0": 1})
        scheduler.rollback()
        scheduler.check_invariants()

    @pytest.mark.parametrize("sampled", [{}, {"r0": 1, "r1": 2}, {"r1": 2}])
    def test_tokens_must_be_those_of_the_step(self, sampled: dict[str, int]) -> None:
        scheduler = make_scheduler(max_num_batched_tokens=6)
        first, _ = _start(scheduler, [3, 10])  # r1 is between its chunks and samples nothing
        output = scheduler.schedule()
        with pytest.raises(ValueError, match="r0"):
            scheduler.commit(output, sampled)
        assert first.num_computed_tokens == 0
        scheduler.rollback()
        scheduler.check_invariants()

    def test_an_idle_step_is_empty(self) -> None:
        scheduler = make_scheduler()
        output = scheduler.schedule()
        assert output == SchedulerOutput((), (), 0)
        assert scheduler.commit(output, {}) == []

    def test_a_sample_error_ends_its_sequence_alone(self) -> None:
        scheduler, model = make_scheduler(), FakeModel(4)
        first, second = _start(scheduler, [3, 3])
        output = scheduler.schedule()
        sampled = model.run(output) | {"r0": SampleError("logits are NaN")}
        assert scheduler.commit(output, sampled) == [first]
        assert (first.finish_reason, first.error) == (FinishReason.ERROR, "logits are NaN")
        assert first.num_output_tokens == 0
        assert run_all(scheduler, model) == [second]
        assert second.finish_reason is FinishReason.LENGTH

    def test_eos_ends_a_sequence_and_stays_its_last_token(self) -> None:
        scheduler = make_scheduler()
        (sequence,) = make_sequences([3], ignore_eos=False)
        scheduler.add(sequence)
        assert scheduler.commit(scheduler.schedule(), {"r0": EOS_TOKEN_ID}) == [sequence]
        assert (sequence.finish_reason, sequence.output_token_ids) == (FinishReason.STOP, [EOS_TOKEN_ID])

    def test_max_model_len_ends_a_sequence(self) -> None:
        scheduler, model = make_scheduler(), FakeModel(4)
        (sequence,) = _start(scheduler, [30], max_tokens=100)
        assert run_all(scheduler, model) == [sequence]
        assert (sequence.num_tokens, sequence.finish_reason) == (MODEL_LEN, FinishReason.LENGTH)


class TestRollback:
    def test_an_admission_is_undone(self) -> None:
        scheduler = make_scheduler(max_num_batched_tokens=6)
        first, second = _start(scheduler, [3, 10])
        output = scheduler.schedule()
        (late,) = make_sequences([1], prefix="late")
        scheduler.add(late)
        scheduler.rollback()
        scheduler.check_invariants()
        assert scheduler.block_pool.num_free_blocks == 8
        assert first.status is second.status is SequenceStatus.PREEMPTED
        assert _lengths(scheduler.schedule()) == _lengths(output)

    def test_a_decode_keeps_what_was_computed_before(self) -> None:
        scheduler, model = make_scheduler(), FakeModel(4)
        (sequence,) = _start(scheduler, [4])
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
        _start(scheduler, [4, 4, 4], max_tokens=20)
        num_victims = num_readmitted = 0
        while scheduler.has_unfinished():
            waiting_before = scheduler.num_waiting
            output = scheduler.schedule()
            readmitted = [
                item.sequence
                for item in output.scheduled
                if item.start == 0 and item.sequence.num_output_tokens
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
    return _start(scheduler, [3])[0]


def _between_chunks(scheduler: Scheduler, model: FakeModel) -> Sequence:
    (sequence,) = _start(scheduler, [25])
    run_step(scheduler, model)
    assert 0 < sequence.num_computed_tokens < 25
    return sequence


def _decoding(scheduler: Scheduler, model: FakeModel) -> Sequence:
    (sequence,) = _start(scheduler, [3])
    run_step(scheduler, model)
    return sequence


def _preempted(scheduler: Scheduler, model: FakeModel) -> Sequence:
    *_, sequence = _start(scheduler, [4, 4, 4], max_tokens=20)
    while not scheduler.num_preemptions:
        run_step(scheduler, model)
    assert sequence.status is SequenceStatus.PREEMPTED
    return sequence


def _last_token(scheduler: Scheduler, model: FakeModel) -> Sequence:
    (sequence,) = _start(scheduler, [3], max_tokens=2)
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
    _start(scheduler, [4, 4, 4], max_tokens=20)
    output = scheduler.schedule()
    while not output.preempted:
        scheduler.commit(output, model.run(output))
        output = scheduler.schedule()
    (victim,) = output.preempted
    assert scheduler.abort(victim.request_id)
    assert scheduler.commit(output, model.run(output)) == [victim]
    assert len(run_all(scheduler, model)) == 2
    assert scheduler.block_pool.num_free_blocks == 8
