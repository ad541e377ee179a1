"""What one step runs: all that passes from the scheduler to the runner."""

from dataclasses import dataclass
from typing import NamedTuple

from tessera_cli.engine.sequence import Sequence


class ScheduledSequence(NamedTuple):
    """One sequence's share of a step: positions `start` up to `start + num_scheduled_tokens`.

    `num_samples` tokens are sampled after the last of them: none before the sequence's last token, one there,
    and all n of a request at once where its prompt ends and it forks.
    """

    sequence: Sequence
    num_scheduled_tokens: int
    start: int
    num_samples: int

    @property
    def samples(self) -> bool:
        """Whether the step reaches the sequence's last token, so that a token is sampled after it."""
        return self.num_samples > 0


class BlockCopy(NamedTuple):
    """The keys and values of block `source` are to be copied to block `target` before the step writes any."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """What one step runs, best rank first; who lost its blocks for it, worst rank first; what to copy before.

    No block is a target twice, and none that is a target is a later copy's source.
    """

    scheduled: tuple[ScheduledSequence, ...]
    preempted: tuple[Sequence, ...]
    block_copies: tuple[BlockCopy, ...]
    num_scheduled_tokens: int
