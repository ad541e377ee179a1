"""Admission, budgets and preemption, each on a pool small enough to see through."""

import pytest

from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.engine.sequence import Sequence, SequenceStatus
from tessera_cli.errors import CapacityError, UsageError
from tests.factories import (
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


class TestAdd:
    def test_an_empty_prompt_is_refused(self) -> None:
        with pytest.raises(UsageError, match="the prompt is empty"):
            make_scheduler().add(Sequence("a", [], SamplingParams()))

    def test_a_prompt_must_leave_room_for_one_token(self) -> None:
        scheduler = make_scheduler()
        start_sequences(scheduler, [MODEL_LEN - 1])
        with pytest.raises(CapacityError, match=r"32 tokens.*max_model_len=32"):
            scheduler.add(make_sequences([MODEL_LEN], prefix="long")[0])

    def test_an_id_is_free_again_after_its_sequence_ends(self) -> None:
        scheduler, model = make_scheduler(), FakeModel(4)
        start_sequences(scheduler, [3], max_tokens=2)
        with pytest.raises(UsageError, match="'r0' is already in the engine"):
            start_sequences(scheduler, [3])
        run_all(scheduler, model)
        start_sequences(scheduler, [3])

    def test_a_refused_sequence_leaves_no_trace(self) -> None:
        scheduler = make_scheduler()
        with pytest.raises(CapacityError):
            start_sequences(scheduler, [MODEL_LEN])
        assert not scheduler.has_unfinished()
        scheduler.check_invariants()


class TestBudgets:
    def test_decodes_come_before_prefill_chunks_in_one_batch(self) -> None:
        scheduler, model = make_scheduler(max_num_batched_tokens=6), FakeModel(4)
        start_sequences(scheduler, [3, 10])
        assert scheduled_lengths(run_step(scheduler, model)[0]) == {"r0": 3, "r1": 3}
        assert scheduled_lengths(run_step(scheduler, model)[0]) == {"r0": 1, "r1": 5}
        output, _ = run_step(scheduler, model)
        assert scheduled_lengths(output) == {"r0": 1, "r1": 2}
        assert [item.samples for item in output.scheduled] == [True, True]
        assert scheduled_lengths(run_step(scheduler, model)[0]) == {"r0": 1, "r1": 1}

    def test_all_blocks_of_a_prompt_are_reserved_before_its_first_chunk(self) -> None:
        scheduler, model = make_scheduler(max_num_batched_tokens=2), FakeModel(4)
        (sequence,) = start_sequences(scheduler, [13])
        for _ in range(6):
            run_step(scheduler, model)
            assert len(sequence.block_table) == 4

    def test_a_decode_takes_a_block_only_at_a_boundary(self) -> None:
        scheduler, model = make_scheduler(), FakeModel(4)
        (sequence,) = start_sequences(scheduler, [3], max_tokens=12)
        held = []
        for _ in range(7):
            run_step(scheduler, model)
            held.append(len(sequence.block_table))
        assert held == [1, 1, 2, 2, 2, 2, 3]

    def test_no_more_than_max_num_seqs_run(self) -> None:
        scheduler, model = make_scheduler(max_num_seqs=2), FakeModel(4)
        start_sequences(scheduler, [2, 2, 2], max_tokens=3)
        for _ in range(3):
            assert scheduled_lengths(run_step(scheduler, model)[0]).keys() == {"r0", "r1"}
        assert scheduled_lengths(run_step(scheduler, model)[0]).keys() == {"r2"}

    def test_without_chunks_a_prompt_runs_whole_or_not_at_all(self) -> None:
        scheduler = make_scheduler(num_blocks=17, max_num_batched_tokens=32, enable_chunked_prefill=False)
        model = FakeModel(4)
        start_sequences(scheduler, [20, 13], max_tokens=3)
        assert scheduled_lengths(run_step(scheduler, model)[0]) == {"r0": 20}
        assert scheduled_lengths(run_step(scheduler, model)[0]) == {"r0": 1, "r1": 13}

    def test_small_requests_wait_behind_a_large_head(self) -> None:
        scheduler, model = make_scheduler(max_num_batched_tokens=32), FakeModel(4)
        start_sequences(scheduler, [20, 16, 2])  # 5 blocks run, 4 do not fit into the other 3, 1 would
        assert scheduled_lengths(run_step(scheduler, model)[0]) == {"r0": 20}
        assert scheduler.num_waiting == 2

    def test_a_step_that_could_schedule_nothing_is_an_error_and_not_a_stall(self) -> None:
        scheduler = make_scheduler()
        start_sequences(scheduler, [2])
        scheduler.block_pool.allocate(8)  # as if they had been leaked
        with pytest.raises(RuntimeError, match="nothing can be scheduled"):
            scheduler.schedule()

    def test_the_stats_count_who_runs_and_who_waits(self) -> None:
        scheduler = make_scheduler(max_num_seqs=1)
        start_sequences(scheduler, [2, 2], max_tokens=1)
        assert (scheduler.num_running, scheduler.num_waiting) == (0, 2)
        scheduler.schedule()
        assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)


class TestPreemption:
    def test_the_newest_loses_its_blocks_and_waits_in_front_with_its_tokens(self) -> None:
        scheduler, model = make_scheduler(max_num_batched_tokens=32), FakeModel(4)
        _, victim = start_sequences(scheduler, [16, 15])  # 4 + 4 blocks: the pool is full
        run_step(scheduler, model)
        (late,) = make_sequences([1], prefix="late")
        scheduler.add(late)
        tokens = list(victim.token_ids)
        output, _ = run_step(scheduler, model)
        assert (output.preempted, scheduled_lengths(output)) == ((victim,), {"r0": 1})
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
        _, victim = start_sequences(scheduler, [13, 16])  # 4 + 4 blocks, and only the newest needs another
        run_step(scheduler, model)
        output, _ = run_step(scheduler, model)
        assert (output.preempted, scheduled_lengths(output)) == ((victim,), {"r0": 1})

    def test_several_victims_return_in_order_of_arrival_before_newcomers(self) -> None:
        scheduler, model = make_scheduler(max_num_batched_tokens=64), FakeModel(4)
        _, _, third, fourth = start_sequences(scheduler, [8, 8, 8, 8], max_tokens=2)
        run_step(scheduler, model)
        (late,) = make_sequences([1], prefix="late")
        scheduler.add(late)
        output, finished = run_step(scheduler, model)
        assert output.preempted == (fourth, third)
        assert [sequence.request_id for sequence in finished] == ["r0", "r1"]
        assert scheduler.num_preemptions == 2
        assert list(scheduled_lengths(run_step(scheduler, model)[0])) == ["r2", "r3", "late0"]

    def test_a_step_that_preempts_admits_nobody(self) -> None:
        scheduler, model = make_scheduler(), FakeModel(4)
        start_sequences(scheduler, [4, 4, 4], max_tokens=20)
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
        older, victim = start_sequences(scheduler, [7, 22], max_tokens=16)  # 2 + 6 blocks: full
        while not scheduler.num_preemptions:
            run_step(scheduler, model)
        assert victim.num_output_tokens == 0
        run_all(scheduler, model)
        for sequence in (older, victim):
            assert sequence.token_ids == expected_tokens(sequence, max_model_len=MODEL_LEN)
