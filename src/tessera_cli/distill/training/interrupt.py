"""Ctrl-C while weights change: the step is finished first, so that it can be saved."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class DeferredInterrupt:
    """A context in which Ctrl-C waits for the end of a `step`, and is immediate anywhere else.

    A second Ctrl-C in a step does not wait: `forced` tells that the step was cut through and its weights are
    torn. Outside the main thread signals are never delivered, and nothing is changed.

    Args:
        on_deferred: called, inside the signal handler, when a Ctrl-C has to wait.
        agree: asked at the end of each step with whether this process was interrupted; whether any was. With
            it Ctrl-C waits outside of steps too: processes that meet in a step have to leave after the same.
    """

    def __init__(
        self, on_deferred: Callable[[], None], *, agree: Callable[[bool], bool] | None = None
    ) -> None:
        self.forced = False
        self._on_deferred, self._agree = on_deferred, agree
        self._in_step = self._pending = False

    @contextmanager
    def installed(self) -> Iterator["DeferredInterrupt"]:
        """Handle Ctrl-C here until the context ends."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = signal.signal(signal.SIGINT, self._handle)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, before)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Nothing in here is cut short by a first Ctrl-C; it is raised at the end."""
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False
        if self._pending if self._agree is None else self._agree(self._pending):
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._in_step and self._agree is None:
            raise KeyboardInterrupt
        if self._pending:
            self.forced = True
            raise KeyboardInterrupt
        self._pending = True
        self._on_deferred()
