"""The engine for asyncio: requests in, chunks of text out, while one thread runs the steps."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from typing import TypeVar

from tessera_cli.engine.engine import Engine
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.engine.snapshot import EngineSnapshot
from tessera_cli.engine.stats import EngineStats
from tessera_cli.errors import TesseraError
from tessera_cli.models.tokenizer import Tokenizer
from tessera_cli.serving.engine_events import EngineError, Event
from tessera_cli.serving.engine_thread import EngineThread, NewRequest
from tessera_cli.serving.generation import Generation
from tessera_cli.serving.text_stream import TextStream

# So many steps in a row may fail before the engine is called unhealthy.
_MAX_CONSECUTIVE_FAULTS = 3

T = TypeVar("T")


class QueueFullError(TesseraError):
    """As many requests as may wait for their first token already do."""


class DrainingError(TesseraError):
    """No more requests are taken."""


class Status(StrEnum):
    """How an engine is; all but OK are reasons to send requests elsewhere."""

    OK = "ok"
    DRAINING = "draining"
    STALLED = "stalled"
    FAILING = "failing"
    DEAD = "dead"


@dataclass(frozen=True)
class Health:
    """An engine's status, and what has gone wrong since it was made.

    `seconds_since_progress` is 0 while there is no work.
    """

    status: Status
    seconds_since_progress: float
    num_faults: int
    last_fault: str | None


class AsyncLLM:
    """A model with its tokenizer, and a thread that runs its engine; made and used within one event loop.

    Attributes:
        tokenizer: the model's.
        max_model_len: tokens of one sequence, prompt and output together.
        token_bytes: the bytes of a token id.
        num_rejected: requests refused because the queue was full.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        token_bytes: Callable[[int], bytes],
        *,
        max_queue: int = 1024,
        stall_after: float = 60.0,
    ) -> None:
        """Start the thread that owns `engine` from here on.

        Args:
            engine: used by nobody else.
            tokenizer: the model's.
            token_bytes: the bytes of a token id, for log-probabilities.
            max_queue: requests that may wait for their first token.
            stall_after: seconds of work without the end of a step after which the engine counts as stalled.
        """
        self.tokenizer = tokenizer
        self.max_model_len = engine.config.max_model_len
        self.token_bytes = token_bytes
        self.num_rejected = 0
        self._max_queue = max_queue
        self._stall_after = stall_after
        self._eos_token_ids = frozenset(engine.model_config.eos_token_ids)
        self._is_draining = False
        self._numbers = count()
        self._generations: dict[str, Generation] = {}
        self._waiting: set[str] = set()
        self._loop = asyncio.get_running_loop()
        self._thread = EngineThread(engine, token_bytes, self._deliver_later)
        self._thread.start()

    @property
    def stats(self) -> EngineStats:
        """The engine after its last step."""
        return self._thread.stats

    @property
    def num_waiting(self) -> int:
        """Requests without their first token."""
        return len(self._waiting)

    def health(self) -> Health:
        """Whether the engine does its work."""
        thread = self._thread
        idle = time.monotonic() - thread.last_progress if thread.is_busy else 0.0
        status = Status.OK
        if not thread.is_alive:
            status = Status.DEAD
        elif self._is_draining:
            status = Status.DRAINING
        elif idle > self._stall_after:
            status = Status.STALLED
        elif thread.num_consecutive_faults >= _MAX_CONSECUTIVE_FAULTS:
            status = Status.FAILING
        return Health(status, idle, thread.num_faults, thread.last_fault)

    async def generate(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout: float | None = None,
    ) -> "Generation":
        """Begin to continue `prompts`, token ids; all of them are taken, or none.

        Args:
            prompts: each becomes a request of its own.
            params: for all of them.
            priority: as `Engine.add_request` takes it.
            cache_salt: as `Engine.add_request` takes it.
            timeout: seconds, after which the generation ends with `RequestTimeoutError`; None is for ever.

        Raises:
            QueueFullError: too many requests already wait.
            DrainingError: the server is shutting down.
            EngineError: the engine's thread has ended.
            UsageError: the engine refuses one of them.
            CapacityError: one does not fit.
        """
        if not self._thread.is_alive:
            raise EngineError("the engine has ended", hint="restart the server")
        if self._is_draining:
            raise DrainingError("the server is shutting down", hint="ask another one")
        if len(self._waiting) + len(prompts) > self._max_queue:
            self.num_rejected += 1
            raise QueueFullError(
                f"{len(self._waiting)} requests wait, and {self._max_queue} may",
                hint="try again later, or raise --max-queue",
            )
        requests = [self._request(prompt, params, priority, cache_salt) for prompt in prompts]
        generation = Generation([request.request_id for request in requests], timeout, self._forget)
        for request in requests:
            self._generations[request.request_id] = generation
            self._waiting.add(request.request_id)
        try:
            futures = [asyncio.wrap_future(self._thread.add(request)) for request in requests]
            for result in await asyncio.gather(*futures, return_exceptions=True):
                if isinstance(result, BaseException):
                    raise result
        except BaseException:  # cancelled while the thread is busy with a step
            generation.close()
            raise
        return generation

    async def call(self, work: Callable[[Engine], T]) -> T:
        """What `work` makes of the engine between two of its steps."""
        return await asyncio.wrap_future(self._thread.call(work))

    async def snapshot(self) -> EngineSnapshot:
        """What the engine holds at this moment, block by block."""
        return await self.call(Engine.snapshot)

    def drain(self) -> None:
        """Take no more requests; those that are there go on."""
        self._is_draining = True

    async def stop(self, timeout: float = 10.0) -> bool:
        """End the thread after its present step, with whatever is unfinished; False if it does not end."""
        return await asyncio.to_thread(self._thread.stop, timeout)

    def _request(
        self, prompt: list[int], params: SamplingParams, priority: int, cache_salt: str | None
    ) -> NewRequest:
        arrival_time = time.monotonic()

        def new_stream(sample: int) -> TextStream:
            return TextStream(
                sample,
                params,
                self.tokenizer.stream(),
                eos_token_ids=self._eos_token_ids,
                token_bytes=self.token_bytes,
                arrival_time=arrival_time,
            )

        request_id = f"request-{next(self._numbers)}"
        return NewRequest(request_id, prompt, params, new_stream, priority, cache_salt)

    def _deliver_later(self, events: list[Event]) -> None:
        with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
            self._loop.call_soon_threadsafe(self._deliver, events)

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            self._waiting.discard(event.request_id)
            generation = self._generations.get(event.request_id)
            if generation is not None:  # else its reader has gone meanwhile
                generation.take(event)

    def _forget(self, request_id: str, abort: bool) -> None:
        self._waiting.discard(request_id)
        if self._generations.pop(request_id, None) is not None and abort:
            self._thread.abort(request_id)
