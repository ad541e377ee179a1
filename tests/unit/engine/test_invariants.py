"""The check of the books notices each way in which they can be wrong."""

from collections.abc import Callable

import pytest

from tessera_cli.engine.scheduler import Scheduler
from tessera_cli.engine.sequence import SequenceStatus
from tests.factories import FakeModel, make_scheduler, make_sequences, run_step


def make_books() -> Scheduler:
    """Two sequences run and two wait."""
    scheduler = make_scheduler(max_num_seqs=2)
    for sequence in make_sequences([5, 6, 7, 8]):
        scheduler.add(sequence)
    run_step(scheduler, FakeModel(4))
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 2)
    return scheduler


def lose(scheduler: Scheduler) -> None:
    scheduler.queues.waiting.pop()


def queue_twice(scheduler: Scheduler) -> None:
    scheduler.queues.waiting.append(scheduler.queues.running[0])


def forget_samples(scheduler: Scheduler) -> None:
    scheduler.queues.requests["gone"] = []


def swap_running(scheduler: Scheduler) -> None:
    scheduler.queues.running.reverse()


def overtake(scheduler: Scheduler) -> None:
    newest = scheduler.queues.running[-1]
    newest.rank = (0, 99, 0)


def run_too_many(scheduler: Scheduler) -> None:
    scheduler.queues.running[0].num_pending_forks = 1


def wait_with_tokens(scheduler: Scheduler) -> None:
    scheduler.queues.waiting[0].num_computed_tokens = 1


def wait_as_running(scheduler: Scheduler) -> None:
    scheduler.queues.waiting[0].status = SequenceStatus.RUNNING


def run_as_waiting(scheduler: Scheduler) -> None:
    scheduler.queues.running[0].status = SequenceStatus.WAITING


def run_with_nothing_to_do(scheduler: Scheduler) -> None:
    sequence = scheduler.queues.running[0]
    sequence.num_computed_tokens = sequence.num_tokens


def compute_beyond_the_blocks(scheduler: Scheduler) -> None:
    sequence = scheduler.queues.running[0]
    sequence.token_ids += [1] * 20
    sequence.num_computed_tokens = 20


def publish_too_early(scheduler: Scheduler) -> None:
    scheduler.queues.running[0].num_published_blocks = 2


def leak(scheduler: Scheduler) -> None:
    scheduler.block_pool.allocate(1)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lose, "every live sequence once"),
        (queue_twice, "every live sequence once"),
        (forget_samples, "no live sequence"),
        (swap_running, "out of order"),
        (overtake, "behind a newer one"),
        (run_too_many, "3 sequences run"),
        (wait_with_tokens, "holds something"),
        (wait_as_running, "is not waiting"),
        (run_as_waiting, "is not running"),
        (run_with_nothing_to_do, "nothing left to compute"),
        (compute_beyond_the_blocks, "more than its blocks hold"),
        (publish_too_early, "has not computed"),
        (leak, "references"),
    ],
)
def test_wrong_books_are_noticed(spoil: Callable[[Scheduler], None], message: str) -> None:
    scheduler = make_books()
    scheduler.check_invariants()
    spoil(scheduler)
    with pytest.raises(AssertionError, match=message):
        scheduler.check_invariants()
