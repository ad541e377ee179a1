"""Who looks on while the engine steps."""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Protocol

from tessera_cli.engine.scheduler_output import SchedulerOutput
from tessera_cli.engine.sequence import SampleError, Sequence, SequenceKey
from tessera_cli.engine.stats import EngineStats


class StepObserver(Protocol):
    """Hears of every committed step, and changes nothing; a step that was rolled back is not told."""

    def on_step(
        self,
        output: SchedulerOutput,
        tokens: Mapping[SequenceKey, SequenceOf[int | SampleError]],
        finished: SequenceOf[Sequence],
        timings: Mapping[str, float],
        stats: EngineStats,
    ) -> None:
        """Take one step.

        Args:
            output: what ran.
            tokens: what was sampled.
            finished: the sequences that the step ended, their blocks already freed.
            timings: seconds of the parts of the step: `schedule`, `run`, `commit`.
            stats: the engine after the commit.
        """
        ...
