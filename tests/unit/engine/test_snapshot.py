"""A snapshot tells what every block and every sequence is at, and changes with nothing afterwards."""

from collections import Counter

import pytest

from tessera_cli.engine.scheduler import Scheduler
from tessera_cli.engine.sequence import SequenceStatus
from tessera_cli.engine.snapshot import EngineSnapshot, take_snapshot
from tessera_cli.engine.stats import EngineStats, LatencyTotals, RequestMetrics
from tests.factories import FakeModel, make_scheduler, make_sequences, run_all, run_step

STATS = EngineStats(*[0] * 11)


def snapshot_of(scheduler: Scheduler) -> EngineSnapshot:
    return take_snapshot(scheduler.queues, scheduler.block_pool, STATS, LatencyTotals())


def test_a_block_is_held_as_often_as_tables_name_it() -> None:
    scheduler, model = make_scheduler(), FakeModel(4)
    for sequence in make_sequences([9, 6], n=3):
        scheduler.add(sequence)
    run_step(scheduler, model)
    snapshot = snapshot_of(scheduler)
    entries = Counter(block for one in snapshot.sequences for block in one.block_table)
    pool = scheduler.block_pool
    assert max(entries.values()) == 3
    assert {block: pool.ref_count(block) for block in range(pool.num_blocks)} == {
        block: entries[block] for block in range(pool.num_blocks)
    }


def test_every_block_that_is_not_held_or_cached_is_free() -> None:
    scheduler, model = make_scheduler(), FakeModel(4)
    for sequence in make_sequences([9, 6]):
        scheduler.add(sequence)
    run_all(scheduler, model)
    snapshot = snapshot_of(scheduler)
    assert not snapshot.sequences
    assert len(set(snapshot.cached_blocks)) == scheduler.block_pool.num_cached_blocks > 0


def test_who_lost_its_blocks_is_preempted_and_who_never_ran_waits() -> None:
    scheduler, model = make_scheduler(max_num_seqs=3), FakeModel(4)
    for sequence in make_sequences([8, 8, 8, 8], max_tokens=20):
        scheduler.add(sequence)
    while not scheduler.num_preemptions:
        run_step(scheduler, model)
    statuses = {one.key[0]: one.status for one in snapshot_of(scheduler).sequences}
    assert statuses["r0"] is SequenceStatus.RUNNING
    assert statuses["r2"] is SequenceStatus.PREEMPTED
    assert statuses["r3"] is SequenceStatus.WAITING


def test_a_later_step_does_not_change_a_snapshot() -> None:
    scheduler, model = make_scheduler(), FakeModel(4)
    (sequence,) = make_sequences([4])
    scheduler.add(sequence)
    run_step(scheduler, model)
    (before,) = snapshot_of(scheduler).sequences
    run_step(scheduler, model)
    (after,) = snapshot_of(scheduler).sequences
    assert (before.num_tokens, before.num_computed_tokens, len(before.block_table)) == (5, 4, 1)
    assert (after.num_tokens, after.num_computed_tokens, len(after.block_table)) == (6, 5, 2)


def test_the_totals_are_the_sums_of_what_requests_measure() -> None:
    totals = LatencyTotals()
    all_metrics = [RequestMetrics(1.0), RequestMetrics(2.0)]
    for metrics, times in zip(all_metrics, ([2.0, 2.5, 4.0], [6.0]), strict=True):
        for time in times:
            metrics.token_times.append(time)
            totals.count_last_of(metrics)
    assert totals.ttft == pytest.approx(sum(metrics.ttft or 0 for metrics in all_metrics))
    assert totals.itl == pytest.approx(sum(sum(metrics.itl) for metrics in all_metrics))
    assert (totals.num_first_tokens, totals.num_later_tokens) == (2, 2)
