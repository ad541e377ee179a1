"""What the engine did, step by step, as a file of JSON lines: sizes and times, never text or token ids.

The first line is the header: format, engine sizes, versions, names of the columns. Every other line is one
committed step. Lines are written as they come, so a crash keeps all but the one it interrupts.
"""

import json
import platform
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from tessera_cli.engine.config import EngineConfig
from tessera_cli.engine.scheduler_output import SchedulerOutput
from tessera_cli.engine.sequence import SampleError, Sequence, SequenceKey
from tessera_cli.engine.stats import EngineStats
from tessera_cli.errors import UsageError
from tessera_cli.files import naming

TRACE_FORMAT = "tessera-trace"
TRACE_VERSION = 1
SCHEDULED_COLUMNS = ("request", "child", "start", "num_tokens", "num_samples", "num_blocks")


class TraceWriter:
    """A `StepObserver` that writes one line per step; a context manager.

    Times are seconds: `time` since the file was opened, at the end of the step.
    """

    def __init__(
        self, file: TextIO, config: EngineConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._file = file
        self._config = config
        self._clock = clock
        self._started = clock()
        self._num_steps = 0
        self._write(header(config))

    @classmethod
    def open(cls, path: Path, config: EngineConfig) -> "TraceWriter":
        """Write to a new file, or over an old one.

        Raises:
            UsageError: the file cannot be written.
        """
        try:
            # Line-buffered: what a crash leaves behind ends with the last whole step.
            file = path.open("w", encoding="utf-8", buffering=1)
        except OSError as error:
            raise UsageError(
                f"the trace {path} cannot be written: {error.strerror}",
                hint="name a file in a directory of yours",
            ) from None
        return cls(file, config)

    def __enter__(self) -> "TraceWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    def on_step(
        self,
        output: SchedulerOutput,
        tokens: Mapping[SequenceKey, SequenceOf[int | SampleError]],
        finished: SequenceOf[Sequence],
        timings: Mapping[str, float],
        stats: EngineStats,
    ) -> None:
        """Write the step. `num_blocks` of a sequence counts the blocks that its computed tokens fill."""
        self._num_steps += 1
        blocks_for = self._config.blocks_for
        scheduled = [
            (
                item.sequence.request_id,
                item.sequence.child_index,
                item.start,
                item.num_scheduled_tokens,
                item.num_samples,
                blocks_for(item.start + item.num_scheduled_tokens),
            )
            for item in output.scheduled
        ]
        used = stats.num_used_blocks
        self._write(
            {
                "step": self._num_steps,
                "time": round(self._clock() - self._started, 6),
                "scheduled": scheduled,
                "block_copies": [(copy.source, copy.target) for copy in output.block_copies],
                "preempted": [(sequence.request_id, sequence.child_index) for sequence in output.preempted],
                "finished": [
                    (sequence.request_id, sequence.child_index, str(sequence.finish_reason))
                    for sequence in finished
                ],
                "pool": {
                    "used": used,
                    "cached": stats.num_cached_blocks,
                    "free": stats.num_blocks - used - stats.num_cached_blocks,
                },
                "running": stats.num_running,
                "waiting": stats.num_waiting,
                "timings": {name: round(seconds, 6) for name, seconds in timings.items()},
            }
        )

    def _write(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
        with naming(Path(self._file.name)):
            self._file.write(line + "\n")


def header(config: EngineConfig) -> dict[str, Any]:
    """The first line."""
    return {
        "format": TRACE_FORMAT,
        "version": TRACE_VERSION,
        "config": {name: _plain(value) for name, value in asdict(config).items()},
        "versions": {"tessera": version("tessera-cli"), "python": platform.python_version()},
        "scheduled_columns": SCHEDULED_COLUMNS,
    }


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | None) else str(value)
