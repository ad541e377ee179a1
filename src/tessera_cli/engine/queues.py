"""Who waits and who runs, in the one order of all sequences."""

from bisect import insort
from collections.abc import Iterator
from itertools import count
from operator import attrgetter

from tessera_cli.engine.sequence import FinishReason, Sequence, SequenceStatus

_rank = attrgetter("rank")


class Queues:
    """The live sequences of all requests, best rank first in either queue.

    Attributes:
        requests: the live sequences of each request.
        running: those that hold blocks.
        waiting: those that hold none: not yet admitted, or preempted.
    """

    def __init__(self) -> None:
        self.requests: dict[str, list[Sequence]] = {}
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self._arrivals = count()

    def add(self, sequence: Sequence) -> None:
        """Let a new request wait behind all others of its priority."""
        sequence.rank = (sequence.priority, next(self._arrivals), sequence.child_index)
        self.requests[sequence.request_id] = [sequence]
        insort(self.waiting, sequence, key=_rank)

    def live(self) -> Iterator[Sequence]:
        """All of them, in no certain order."""
        return (sequence for sequences in self.requests.values() for sequence in sequences)

    def ordered(self) -> list[Sequence]:
        """All of them, best rank first."""
        return sorted(self.live(), key=_rank)

    def admit_head(self, index: int) -> None:
        """Let the head of the waiting run, in place `index`."""
        sequence = self.waiting.pop(0)
        sequence.status = SequenceStatus.RUNNING
        self.running.insert(index, sequence)

    def preempt_worst(self) -> Sequence:
        """Let the worst of the running wait, in its place among the waiting."""
        sequence = self.running.pop()
        sequence.status = SequenceStatus.PREEMPTED
        insort(self.waiting, sequence, key=_rank)
        return sequence

    def add_children(self, parent: Sequence, children: list[Sequence]) -> None:
        """Let `children` run right after their parent, which runs."""
        self.requests[parent.request_id] += children
        index = self.running.index(parent) + 1
        self.running[index:index] = children

    def forget(self, sequence: Sequence) -> None:
        """Drop a sequence from its request; `sweep` has to follow. Doing it twice changes nothing."""
        sequences = self.requests.get(sequence.request_id, [])
        if sequence in sequences:
            sequences.remove(sequence)
        if not sequences:
            self.requests.pop(sequence.request_id, None)
        sequence.status = SequenceStatus.FINISHED

    def end(self, sequence: Sequence, reason: FinishReason) -> None:
        """Drop a sequence that has ended; `sweep` has to follow. Doing it twice changes nothing."""
        sequence.block_table.clear()
        self.forget(sequence)
        sequence.finish_reason = reason

    def sweep(self) -> None:
        """Drop the finished from both queues."""
        self.running = [s for s in self.running if s.status is SequenceStatus.RUNNING]
        if any(s.status is SequenceStatus.FINISHED for s in self.waiting):
            self.waiting = [s for s in self.waiting if s.status is not SequenceStatus.FINISHED]

    def rebuild(self) -> None:
        """Make both queues anew: those of the live sequences that hold blocks run."""
        ordered = self.ordered()
        self.running = [sequence for sequence in ordered if sequence.block_table]
        self.waiting = [sequence for sequence in ordered if not sequence.block_table]
        for sequence in self.running:
            sequence.status = SequenceStatus.RUNNING
        for sequence in self.waiting:
            if sequence.status is SequenceStatus.RUNNING:
                sequence.status = SequenceStatus.PREEMPTED
