"""The errors that a user can cause or has to know about; anything else is a bug and shows a traceback."""

import re
from collections.abc import Sequence
from enum import IntEnum


class ExitCode(IntEnum):
    """What the shell sees. 130 is set by the error boundary when the user presses Ctrl-C."""

    SUCCESS = 0
    FAILED = 1
    USAGE = 2
    GATE = 3
    INTERRUPTED = 130


class TesseraError(Exception):
    """A failure with a one-line message and, where there is one, the way to mend it.

    `message` says what went wrong and where; `hint` says what to do. Neither ends with a period.
    """

    exit_code: ExitCode = ExitCode.FAILED

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(TesseraError):
    """A wrong option, argument, file or environment variable, found before any work starts.

    `param` is the parameter whose value is wrong, where the fault is that of one.
    """

    exit_code = ExitCode.USAGE

    def __init__(self, message: str, *, hint: str | None = None, param: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.param = param

    def renamed(self, name: str) -> "UsageError":
        """The same fault of the parameter that the user knows as `name`."""
        named = re.compile(rf"^{re.escape(self.param or '')}\b")
        hint = None if self.hint is None else named.sub(name, self.hint)
        return UsageError(named.sub(name, self.message), hint=hint, param=name)


class RecipeError(UsageError):
    """One or more faults of a recipe, all told at once.

    `problems` are lines such as ``line 7   train.lr: did you mean `learning_rate`?``.
    """

    def __init__(self, message: str, problems: list[str], *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.problems = problems


class ModelError(UsageError):
    """A model that is missing, broken, or of an architecture that Tessera does not run."""


class DataError(UsageError):
    """A prompt or data file that is missing or cannot be read as what it claims to be."""


class CapacityError(UsageError):
    """A request, or a pool, of a size that can never work; the message has the numbers."""


class RunError(TesseraError):
    """A run that started and could not be finished: out of memory, disk full, diverged."""


class DivergedError(RunError):
    """Loss or gradient of a training step are not finite, in every process of the run alike.

    `micro_batches` are those whose loss is to blame.
    """

    def __init__(self, message: str, micro_batches: Sequence[int]) -> None:
        super().__init__(message, hint="lower train.learning_rate and start a new run")
        self.micro_batches = micro_batches


class GateError(TesseraError):
    """A figure that misses the bound that the user asked for."""

    exit_code = ExitCode.GATE
