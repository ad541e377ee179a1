"""Many requests to a server at once: one task and one connection each, all in one process."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import httpx

from tessera_cli.errors import RunError
from tessera_cli.serving.openai_server import Server
from tessera_cli.serving.server_request import ServerRequest
from tessera_cli.serving.streamed_answer import StreamedAnswer

PROGRESS_SECONDS = 0.1


@dataclass
class ServerProgress:
    """What a client knows of its load: how many answers wait for their first text or stream, and tokens.

    Tokens are those of the completed requests, as only their end tells.
    """

    num_waiting: int = 0
    num_running: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    peak: int = 0


class ServerLoad:
    """Requests that are put on a server.

    Args:
        limit: at most this many are in flight.
        arrivals: seconds after the start at which requests are due; None: as soon as there is a place.
        on_answer: gets each request's index with its answer or the reason why there is none.
        on_text: gets each request's index and the text that an answer of it goes on with.
    """

    def __init__(
        self,
        server: Server,
        requests: Sequence[ServerRequest],
        *,
        limit: int,
        on_answer: Callable[[int, StreamedAnswer | RunError], None],
        on_text: Callable[[int, str], None] | None = None,
        arrivals: Sequence[float] | None = None,
    ) -> None:
        self.server, self.requests, self.arrivals, self.limit = server, requests, arrivals, limit
        self.on_answer, self.on_text = on_answer, on_text
        self.progress = ServerProgress()

    def run(self, on_progress: Callable[[ServerProgress], None] | None = None) -> float:
        """Ask everything; seconds from the first submission to the last end.

        `on_progress` is called ten times a second and at the end. What `on_answer` raises ends all requests.
        """
        duration = asyncio.run(self._run(on_progress))
        if on_progress is not None:
            on_progress(self.progress)
        return duration

    async def _run(self, on_progress: Callable[[ServerProgress], None] | None) -> float:
        ticker = None if on_progress is None else asyncio.create_task(self._tick(on_progress))
        try:
            async with self.server.connected() as client:
                start = time.monotonic()
                await self._submit(client, start)
                return time.monotonic() - start
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            if ticker is not None:
                ticker.cancel()
                with suppress(asyncio.CancelledError):
                    await ticker

    async def _tick(self, on_progress: Callable[[ServerProgress], None]) -> None:
        while True:
            on_progress(self.progress)
            await asyncio.sleep(PROGRESS_SECONDS)

    async def _submit(self, client: httpx.AsyncClient, start: float) -> None:
        places = asyncio.Semaphore(self.limit)
        async with asyncio.TaskGroup() as tasks:
            for index in range(len(self.requests)):
                due = None if self.arrivals is None else start + self.arrivals[index]
                if due is not None:
                    await asyncio.sleep(max(0.0, due - time.monotonic()))
                await places.acquire()
                # A request that had to wait for a place counts from when it was due.
                arrival = time.monotonic() if due is None else due
                task = tasks.create_task(self._ask(client, index, arrival))
                task.add_done_callback(lambda _: places.release())

    async def _ask(self, client: httpx.AsyncClient, index: int, arrival: float) -> None:
        progress, streams = self.progress, False
        progress.num_waiting += 1
        progress.peak = max(progress.peak, progress.num_waiting + progress.num_running)

        def on_chunk(_: int, text: str) -> None:
            nonlocal streams
            if not streams:
                streams = True
                progress.num_waiting -= 1
                progress.num_running += 1
            if self.on_text is not None:
                self.on_text(index, text)

        answer: StreamedAnswer | RunError
        try:
            answer = await self.server.answer(
                client, self.requests[index], arrival_time=arrival, on_chunk=on_chunk
            )
            progress.prompt_tokens += answer.num_prompt_tokens
            progress.generation_tokens += answer.num_output_tokens
        except RunError as error:
            answer = error
        finally:
            if streams:
                progress.num_running -= 1
            else:
                progress.num_waiting -= 1
        self.on_answer(index, answer)
