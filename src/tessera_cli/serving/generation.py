"""One caller's requests while the engine's thread works on them: their chunks, as they come."""

import asyncio
from collections import deque
from collections.abc import Callable

from tessera_cli.errors import TesseraError
from tessera_cli.serving.engine_events import Chunk, Event, RequestFailed

# Told of a request that is over, and whether the engine is to abort it.
Forget = Callable[[str, bool], None]


class RequestTimeoutError(TesseraError):
    """A request took longer than it may."""


class Generation:
    """The chunks of one or more requests as they come; iterate over it, and close it in any case.

    Each turn gives the list of all chunks that have come since the last, so that a slow reader is not
    further behind than it has to be.
    """

    def __init__(self, request_ids: list[str], timeout: float | None, forget: Forget) -> None:
        self._forget = forget
        self._places = {request_id: place for place, request_id in enumerate(request_ids)}
        self._open = set(request_ids)
        self._chunks: deque[Chunk] = deque()
        self._failure: TesseraError | None = None
        self._news = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        if timeout is not None:
            self._timer = asyncio.get_running_loop().call_later(timeout, self._time_out, timeout)

    def place(self, chunk: Chunk) -> int:
        """Which of the prompts `chunk` continues."""
        return self._places[chunk.request_id]

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> list[Chunk]:
        """The chunks since the last call, at least one.

        Raises:
            EngineError: a step with one of the requests has failed.
            RequestTimeoutError: the time is up.
        """
        while not self._chunks:
            if self._failure is not None:
                raise self._failure
            if not self._open:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        chunks = list(self._chunks)
        self._chunks.clear()
        return chunks

    def close(self) -> None:
        """Abort what is unfinished; its blocks are free before the next step. May be called twice."""
        if self._timer is not None:
            self._timer.cancel()
        for request_id in self._open:
            self._forget(request_id, True)
        self._open.clear()
        self._news.set()

    def take(self, event: Event) -> None:
        """Add what a step did for one of the requests."""
        if isinstance(event, RequestFailed):
            self._end(event.request_id)
            self._fail(event.error)
            return
        self._chunks.append(event)
        if event.is_last:
            self._end(event.request_id)
        self._news.set()

    def _end(self, request_id: str) -> None:
        self._open.discard(request_id)
        self._forget(request_id, False)
        if not self._open and self._timer is not None:
            self._timer.cancel()

    def _time_out(self, timeout: float) -> None:
        self._fail(
            RequestTimeoutError(
                f"not finished after {timeout:g} seconds", hint="ask for fewer tokens, or later"
            )
        )

    def _fail(self, error: TesseraError) -> None:
        self._failure = error
        self.close()
