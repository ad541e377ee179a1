"""One order of all sequences: who goes first, who gives way, and how long anyone waits."""

import pytest

from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.engine.scheduler import Scheduler
from tessera_cli.engine.sequence import Sequence, SequenceStatus
from tessera_cli.errors import UsageError
from tests.factories import FakeModel, expected_tokens, make_scheduler, make_sequences, run_all, run_step

MODEL_LEN = 32


def add(
    scheduler: Scheduler, request_id: str, length: int, priority: int = 0, max_tokens: int = 8
) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    sequence = Sequence(request_id, [len(request_id)] * length, params, priority=priority)
    scheduler.add(sequence)
    return sequence


def running(scheduler: Scheduler) -> list[str]:
    return [sequence.request_id for sequence in scheduler.queues.running]


@pytest.mark.parametrize("priority", [-1, 1])
def test_a_priority_under_fcfs_is_refused(priority: int) -> None:
    scheduler = make_scheduler()
    with pytest.raises(UsageError, match=f"priority is {priority}") as caught:
        add(scheduler, "a", 3, priority)
    assert caught.value.hint is not None
    assert not scheduler.has_unfinished()


def test_the_waiting_go_by_priority_and_then_by_arrival() -> None:
    scheduler, model = make_scheduler(max_num_seqs=1, scheduling_policy="priority"), FakeModel(4)
    for request_id, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -1), ("e", 0)):
        add(scheduler, request_id, 3, priority, max_tokens=1)
    assert [sequence.request_id for sequence in run_all(scheduler, model)] == list("dbeac")


def test_an_urgent_request_takes_the_slot_of_the_worst_running_one() -> None:
    scheduler, model = make_scheduler(max_num_seqs=2, scheduling_policy="priority"), FakeModel(4)
    sequences = [add(scheduler, "low", 3, 5), add(scheduler, "middle", 3, 3)]
    run_step(scheduler, model)
    assert running(scheduler) == ["middle", "low"]
    sequences.append(add(scheduler, "high", 3, 1))
    output, _ = run_step(scheduler, model)
    assert (output.preempted, running(scheduler)) == ((sequences[0],), ["high", "middle"])
    assert sequences[0].status is SequenceStatus.PREEMPTED
    run_all(scheduler, model)
    for sequence in sequences:
        assert sequence.token_ids == expected_tokens(sequence, max_model_len=MODEL_LEN)


def test_an_urgent_request_takes_the_blocks_of_worse_ones_and_no_more_than_it_needs() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=32, scheduling_policy="priority")
    model = FakeModel(4)
    for request_id in ("a", "bb", "ccc"):
        add(scheduler, request_id, 8, 1)  # two blocks each, and a third soon
    run_step(scheduler, model)
    add(scheduler, "dddd", 15)
    output, _ = run_step(scheduler, model)
    assert [sequence.request_id for sequence in output.preempted] == ["ccc", "bb"]
    assert running(scheduler) == ["dddd", "a"]


def test_nobody_is_preempted_for_who_cannot_run_all_the_same() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=32, scheduling_policy="priority")
    model = FakeModel(4)
    add(scheduler, "first", 22, -1)  # six of the eight blocks
    add(scheduler, "last", 2, 1)
    run_step(scheduler, model)
    add(scheduler, "big", 12)
    output, _ = run_step(scheduler, model)
    assert (output.preempted, running(scheduler)) == ((), ["first", "last"])


def test_equals_do_not_displace_each_other() -> None:
    scheduler, model = make_scheduler(max_num_seqs=1, scheduling_policy="priority"), FakeModel(4)
    add(scheduler, "a", 3, 1)
    run_step(scheduler, model)
    add(scheduler, "b", 3, 1)
    assert not run_step(scheduler, model)[0].preempted


def test_a_victim_is_not_admitted_again_in_the_same_step() -> None:
    scheduler, model = make_scheduler(max_num_seqs=2, scheduling_policy="priority"), FakeModel(4)
    add(scheduler, "a", 3, 1)
    add(scheduler, "b", 3, 1)
    run_step(scheduler, model)
    (urgent,) = make_sequences([3], n=2, prefix="urgent")
    scheduler.add(urgent)
    output, _ = run_step(scheduler, model)
    assert len(output.preempted) == 2
    assert [item.sequence for item in output.scheduled] == [urgent]
    assert len(run_all(scheduler, model)) == 4


@pytest.mark.parametrize("sizes", [{"max_num_seqs": 2}, {"max_num_batched_tokens": 2}])
@pytest.mark.parametrize("n", [1, 2])
def test_no_place_is_kept_by_a_worse_one_whatever_limits_them(sizes: dict[str, int], n: int) -> None:
    """Where the budget is what bounds the places, those that run leave no token to a newcomer."""
    scheduler, model = make_scheduler(scheduling_policy="priority", **sizes), FakeModel(4)
    for sequence in make_sequences([2, 2], max_tokens=20, priority=1, prefix="low"):
        scheduler.add(sequence)
    for _ in range(3):
        run_step(scheduler, model)
    (urgent,) = make_sequences([2], max_tokens=3, n=n, prefix="urgent")
    scheduler.add(urgent)
    output, _ = run_step(scheduler, model)
    assert output.scheduled[0].sequence is urgent
    assert [sequence.request_id for sequence in output.preempted] == ["low1", "low0"][:n]
    assert len(run_all(scheduler, model)) == 2 + n


def test_blocks_that_are_found_and_would_be_freed_are_not_counted_twice() -> None:
    """The urgent one finds blocks of a worse one: giving them up makes no room beside them."""
    scheduler, model = make_scheduler(scheduling_policy="priority"), FakeModel(4)
    add(scheduler, "best", 1, -1, max_tokens=20)
    worse = Sequence("worse", [9] * 17, SamplingParams(max_tokens=8, ignore_eos=True), priority=1)
    scheduler.add(worse)
    for _ in range(3):
        run_step(scheduler, model)
    urgent = Sequence("urgent", [9] * 31, SamplingParams(max_tokens=1))  # all eight blocks
    scheduler.add(urgent)
    assert len(scheduler.prefix_cache.find(urgent)) == 4
    output, _ = run_step(scheduler, model)
    assert not output.preempted
    assert running(scheduler) == ["best", "worse"]
    assert len(run_all(scheduler, model)) == 3


def test_an_urgent_prefill_leaves_each_running_sequence_a_token() -> None:
    scheduler, model = make_scheduler(max_num_batched_tokens=6, scheduling_policy="priority"), FakeModel(4)
    add(scheduler, "a", 3, 1)
    run_step(scheduler, model)
    add(scheduler, "bb", 12)
    output, _ = run_step(scheduler, model)
    assert [item.num_scheduled_tokens for item in output.scheduled] == [5, 1]


def test_without_chunks_an_urgent_prompt_takes_the_budget_of_worse_ones() -> None:
    scheduler = make_scheduler(
        num_blocks=30, max_num_batched_tokens=32, enable_chunked_prefill=False, scheduling_policy="priority"
    )
    model = FakeModel(4)
    add(scheduler, "a", 3, 1)
    run_step(scheduler, model)
    add(scheduler, "bb", 31, 0, max_tokens=1)
    assert not run_step(scheduler, model)[0].preempted  # 31 and 1
    add(scheduler, "c", 3, 1)
    run_step(scheduler, model)
    add(scheduler, "dddd", 31, 0, max_tokens=1)
    output, _ = run_step(scheduler, model)
    assert [sequence.request_id for sequence in output.preempted] == ["c"]


@pytest.mark.parametrize("sizes", [{}, {"max_num_seqs": 2}, {"max_num_batched_tokens": 3}])
def test_who_comes_later_delays_nobody(sizes: dict[str, int]) -> None:
    """Under fcfs a request ends in the same step whether or not others keep arriving behind it."""

    def last_step(*, arrivals: bool) -> dict[str, int]:
        scheduler, model = make_scheduler(enable_prefix_caching=False, **sizes), FakeModel(4)
        old = make_sequences([9, 13, 6, 20], max_tokens=10)
        for sequence in old:
            scheduler.add(sequence)
        ended: dict[str, int] = {}
        for step in range(300):
            if arrivals:
                scheduler.add(make_sequences([1 + step % 25], max_tokens=9, prefix=f"late{step}-")[0])
            if scheduler.has_unfinished():
                ended |= {sequence.request_id: step for sequence in run_step(scheduler, model)[1]}
        # The bound that the scheduler's docstring states, for the last of four.
        assert ended["r3"] < 4 * MODEL_LEN
        return {sequence.request_id: ended[sequence.request_id] for sequence in old}

    assert last_step(arrivals=True) == last_step(arrivals=False)


def test_the_most_urgent_is_delayed_by_nobody() -> None:
    scheduler, model = make_scheduler(scheduling_policy="priority"), FakeModel(4)
    for index in range(6):
        add(scheduler, "x" * (index + 1), 10, 1)
    for _ in range(3):
        run_step(scheduler, model)
    urgent = add(scheduler, "urgent", 20, -1, max_tokens=5)
    steps = 0
    while urgent.finish_reason is None:
        run_step(scheduler, model)
        steps += 1
    assert steps <= 2 + 4  # 20 tokens in chunks of at most 16, then four more
