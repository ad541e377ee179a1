"""The one thread that owns the engine: takes commands between steps, and tells what each step did."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from tessera_cli.engine.engine import Engine, SequenceOutput
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.engine.stats import EngineStats
from tessera_cli.errors import TesseraError
from tessera_cli.serving.engine_events import Chunk, EngineError, Event, RequestFailed
from tessera_cli.serving.outputs import Logprob
from tessera_cli.serving.text_stream import TextStream

_LOG = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class NewRequest:
    """A request on its way into the engine.

    `new_stream` makes the stream of a sample, once the engine has found that there may be so many.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    new_stream: Callable[[int], TextStream]
    priority: int = 0
    cache_salt: str | None = None
    streams: list[TextStream] = field(default_factory=list)
    num_told: list[int] = field(default_factory=list)

    def begin(self) -> None:
        """Make the streams."""
        self.streams = [self.new_stream(sample) for sample in range(self.params.n)]
        self.num_told = [0] * self.params.n

    @property
    def is_over(self) -> bool:
        return all(stream.output.finish_reason is not None for stream in self.streams)


class EngineThread:
    """Runs an engine while there is work, and otherwise waits for commands.

    Nothing else may touch the engine while the thread lives; `call` lets it do something between two steps.
    The attributes may be read from any thread.

    Attributes:
        stats: the engine after the last step or command.
        last_progress: when a step last ended, or work last began, in seconds on the monotonic clock.
        is_busy: whether it has work.
        num_faults: steps that failed.
        num_consecutive_faults: those since the last step that did not.
        last_fault: what the last of them said; None before the first.
        error: what ended the thread, where that was not `stop`.
    """

    def __init__(
        self, engine: Engine, token_bytes: Callable[[int], bytes], deliver: Callable[[list[Event]], None]
    ) -> None:
        """Make the thread for `engine`; `deliver` is called in it with all that a step did."""
        self._engine = engine
        self._token_bytes = token_bytes
        self._deliver = deliver
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._live: dict[str, NewRequest] = {}
        self._thread = threading.Thread(target=self._run, name="tessera-engine", daemon=True)
        self.stats: EngineStats = engine.stats()
        self.last_progress = time.monotonic()
        self.is_busy = False
        self.num_faults = 0
        self.num_consecutive_faults = 0
        self.last_fault: str | None = None
        self.error: BaseException | None = None

    def start(self) -> None:
        """Begin; once."""
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """End after the present step; what is unfinished is aborted. False if that took over `timeout` s."""
        self._commands.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        """Whether commands are still taken."""
        return self._thread.is_alive() and self.error is None

    def call(self, work: Callable[[Engine], T]) -> "Future[T]":
        """Let the thread do `work` between two steps; the future has its result or its exception."""
        future: Future[T] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return  # whoever asked has gone
            try:
                future.set_result(work(self._engine))
            except Exception as error:
                future.set_exception(error)

        self._commands.put(command)
        return future

    def add(self, request: NewRequest) -> "Future[None]":
        """Let the engine take a request; the future has the engine's refusal as its exception."""

        def work(engine: Engine) -> None:
            engine.add_request(
                request.request_id,
                request.prompt_token_ids,
                request.params,
                priority=request.priority,
                cache_salt=request.cache_salt,
            )
            request.begin()
            self._live[request.request_id] = request

        return self.call(work)

    def abort(self, request_id: str) -> None:
        """Forget a request before the next step; nothing more is told of it."""

        def work(engine: Engine) -> None:
            if self._live.pop(request_id, None) is not None:
                engine.abort(request_id)

        self.call(work)

    def _run(self) -> None:
        try:
            while self._take_commands():
                if self._engine.has_unfinished():
                    self._step()
                self._note_progress()
            self._fail(list(self._live), TesseraError("the server has shut down"))
        except BaseException as error:  # whatever it is, those who wait have to hear of it
            _LOG.exception("the engine's thread has ended")
            self.error = error
            self._fail(list(self._live), EngineError(f"the engine has ended: {_one_line(error)}"))

    def _take_commands(self) -> bool:
        """Do what has been asked; without work wait for it. False once the thread is to end."""
        may_wait = not self._engine.has_unfinished()
        self.is_busy = not may_wait
        while True:
            try:
                command = self._commands.get(block=may_wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            if may_wait:
                self.last_progress = time.monotonic()
                self.is_busy, may_wait = True, False
            command()

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception as error:
            _LOG.exception("a step failed")
            self.num_faults += 1
            self.num_consecutive_faults += 1
            self.last_fault = _one_line(error)
            # Where nothing was scheduled, scheduling itself failed, and anybody may be the cause.
            failed = dict.fromkeys(self._engine.scheduled_request_ids or self._live)
            self._fail(
                [i for i in failed if i in self._live], EngineError(f"the engine failed: {self.last_fault}")
            )
            return
        self.num_consecutive_faults = 0
        events: list[Event] = [self._take(output) for output in outputs]
        if events:
            self._deliver(events)

    def _take(self, output: SequenceOutput) -> Chunk:
        """A step's tokens as text; ends the sample in the engine where a stop string has come."""
        request = self._live[output.request_id]
        stream = request.streams[output.index]
        text = stream.take(output)
        whole = stream.output
        if whole.finish_reason is not None and output.finish_reason is None:
            self._engine.finish(output.request_id, output.index)
        if output.metrics is not None and whole.metrics is not None:
            whole.metrics.first_scheduled_time = output.metrics.first_scheduled_time
            whole.metrics.num_cached_tokens = output.metrics.num_cached_tokens
        told, request.num_told[output.index] = request.num_told[output.index], len(whole.token_ids)
        if request.is_over:
            del self._live[output.request_id]
        prompt_logprobs = None
        if output.prompt_logprobs is not None:
            prompt_logprobs = tuple(
                None if row is None else Logprob.of(row, self._token_bytes) for row in output.prompt_logprobs
            )
        return Chunk(
            output.request_id,
            output.index,
            text,
            tuple(whole.token_ids[told:]),
            logprobs=tuple(whole.logprobs[told:]) if whole.logprobs else (),
            prompt_logprobs=prompt_logprobs,
            output=whole if whole.finish_reason is not None else None,
            is_last=request.is_over,
        )

    def _fail(self, request_ids: list[str], error: TesseraError) -> None:
        for request_id in request_ids:
            del self._live[request_id]
            self._engine.abort(request_id)
        if request_ids:
            self._deliver([RequestFailed(request_id, error) for request_id in request_ids])

    def _note_progress(self) -> None:
        self.last_progress = time.monotonic()
        self.stats = self._engine.stats()


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
