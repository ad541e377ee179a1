"""What holds for a scheduler's books between any two calls."""

from itertools import pairwise

from tessera_cli.engine.block_pool import BlockPool
from tessera_cli.engine.config import EngineConfig
from tessera_cli.engine.queues import Queues
from tessera_cli.engine.sequence import Sequence, SequenceStatus


def check_books(config: EngineConfig, queues: Queues, pool: BlockPool) -> None:
    """Check queues, sequences and blocks against each other.

    Raises:
        AssertionError: the books do not balance.
    """
    _check_queues(config, queues)
    for sequence in queues.running:
        _check_running(sequence, config.block_size)
    for sequence in queues.waiting:
        if sequence.status not in (SequenceStatus.WAITING, SequenceStatus.PREEMPTED):
            raise AssertionError(f"waits and is not waiting: {sequence}")
        if sequence.block_table or sequence.num_computed_tokens or sequence.num_published_blocks:
            raise AssertionError(f"waits and holds something: {sequence}")
    pool.check_invariants([sequence.block_table for sequence in queues.running])


def _check_queues(config: EngineConfig, queues: Queues) -> None:
    queued = [*queues.running, *queues.waiting]
    live = list(queues.live())
    if len(queued) != len(live) or {id(s) for s in queued} != {id(s) for s in live}:
        raise AssertionError("the queues do not hold every live sequence once")
    if not all(queues.requests.values()):
        raise AssertionError("a request has no live sequence")
    for queue in (queues.running, queues.waiting):
        if any(left.rank >= right.rank for left, right in pairwise(queue)):
            raise AssertionError(f"a queue is out of order: {queue}")
    if config.scheduling_policy == "fcfs" and queues.running and queues.waiting:
        newest, head = queues.running[-1], queues.waiting[0]
        if newest.rank > head.rank:
            raise AssertionError(f"{head} waits behind a newer one: {newest}")
    num_slots = sum(1 + sequence.num_pending_forks for sequence in queues.running)
    if num_slots > config.max_num_slots:
        raise AssertionError(f"{num_slots} sequences run or are about to, of {config.max_num_slots}")


def _check_running(sequence: Sequence, block_size: int) -> None:
    num_computed = sequence.num_computed_tokens
    if sequence.status is not SequenceStatus.RUNNING or not sequence.block_table:
        raise AssertionError(f"runs and is not running: {sequence}")
    if not num_computed < sequence.num_tokens:
        raise AssertionError(f"has nothing left to compute: {sequence}")
    if num_computed > len(sequence.block_table) * block_size:
        raise AssertionError(f"has computed more than its blocks hold: {sequence}")
    if sequence.num_published_blocks * block_size > num_computed:
        raise AssertionError(f"has published what it has not computed: {sequence}")
