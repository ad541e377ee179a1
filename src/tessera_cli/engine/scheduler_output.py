"""What one step runs: all that passes from the scheduler to the runner."""

from dataclasses import dataclass

from tessera_cli.engine.sequence import Sequence


@dataclass(frozen=True)
class ScheduledSequence:
    """One sequence's share of a step: positions `start` up to `start + num_scheduled_tokens`.

    `samples` says that the step reaches the sequence's last token, so that a token is sampled after it.
    """

    sequence: Sequence
    num_scheduled_tokens: int
    start: int
    samples: bool


@dataclass(frozen=True)
class SchedulerOutput:
    """What one step runs, oldest first, and who lost its blocks for it, newest first."""

    scheduled: tuple[ScheduledSequence, ...]
    preempted: tuple[Sequence, ...]
    num_scheduled_tokens: int
