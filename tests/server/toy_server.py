"""A server for the page alone: a scheduler without tensors, whose every token is a word of its prompt."""

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Iterator
from itertools import count
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from tessera_cli.engine.engine import EngineStats
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.engine.sequence import FinishReason, Sequence
from tessera_cli.engine.snapshot import EngineSnapshot, take_snapshot
from tessera_cli.engine.stats import LatencyTotals, RequestMetrics
from tessera_cli.serving.api import errors
from tessera_cli.serving.api.live_view import mount_page
from tessera_cli.serving.async_llm import Health, Status
from tests.factories import make_scheduler

PREFIX = list(range(1, 13))  # three blocks that every prompt begins with


class ToyLLM:
    """Stands in for `AsyncLLM`; its steps are run one by one, so that a test sees what it wants to see."""

    def __init__(self, **sizes: Any) -> None:
        defaults = {"num_blocks": 97, "max_model_len": 128, "max_num_batched_tokens": 256, "max_num_seqs": 64}
        self.scheduler = make_scheduler(**defaults | sizes)
        self.status = Status.OK
        self._generation_tokens = 0
        self._latencies = LatencyTotals()
        self._metrics: dict[tuple[str, int], RequestMetrics] = {}
        self._ids = count()
        self._now = 0.0

    def add(self, *, num_tokens: int = 4, max_tokens: int = 8, n: int = 1, request_id: str = "") -> str:
        """Queue a request whose prompt is the common prefix and `num_tokens` of its own; its id."""
        number = next(self._ids)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, n=n)
        prompt = PREFIX + [100 + number] * num_tokens
        sequence = Sequence(request_id or f"request-{number}", prompt, params)
        self.scheduler.add(sequence)
        return sequence.request_id

    def step(self) -> list[Sequence]:
        """Run one step, which takes a twentieth of a second of the toy's own time; who ended."""
        self._now += 0.05
        output = self.scheduler.schedule()
        tokens = {i.sequence.key: [7] * i.num_samples for i in output.scheduled if i.num_samples}
        for request_id, first in tokens:
            for index in range(first, first + len(tokens[request_id, first])):
                metrics = self._metrics.setdefault((request_id, index), RequestMetrics(self._now - 0.12))
                metrics.token_times.append(self._now)
                self._latencies.count_last_of(metrics)
                self._generation_tokens += 1
        return self.scheduler.commit(output, tokens)

    async def snapshot(self) -> EngineSnapshot:
        scheduler, pool = self.scheduler, self.scheduler.block_pool
        usable = scheduler.config.num_usable_blocks
        stats = EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_preemptions=scheduler.num_preemptions,
            num_finished=0,
            num_failed=0,
            num_blocks=usable,
            num_used_blocks=usable - pool.num_free_blocks,
            num_cached_blocks=pool.num_cached_blocks,
            block_size=scheduler.config.block_size,
            prompt_tokens=0,
            generation_tokens=self._generation_tokens,
            num_steps=0,
        )
        return take_snapshot(scheduler.queues, pool, stats, self._latencies)

    def health(self) -> Health:
        return Health(self.status, 0.0, 0, None)


class ToyServer:
    """The page, its events, and a chat that says the last message again, word by word.

    Attributes:
        llm: what the page watches.
        url: where the page is.
        bodies: the chat requests so far.
        keys: the Authorization header of each request to `/live`.
        required_key: the API key without which nothing is answered.
        refusal: in place of an answer, a 400 with this message.
        pause: seconds between two words.
    """

    def __init__(self) -> None:
        self.llm = ToyLLM()
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.required_key: str | None = None
        self.refusal: str | None = None
        self.pause = 0.001
        self.app = FastAPI()
        self.app.state.async_llm = self.llm
        errors.install(self.app)
        self.app.middleware("http")(self._guard)
        self.app.get("/v1/models")(self._models)
        self.app.post("/v1/chat/completions")(self._chat)
        mount_page(self.app)
        self.url = ""

    async def _guard(self, request: Request, go_on: Any) -> Any:
        given = request.headers.get("authorization")
        path = request.url.path
        if path == "/live":
            self.keys.append(given)
        is_public = path == "/" or path.startswith("/page/")
        if self.required_key and not is_public and given != f"Bearer {self.required_key}":
            return JSONResponse({"error": {"message": "no key"}}, 401)
        return await go_on(request)

    async def _models(self) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "toy-student", "object": "model"}]}

    async def _chat(self, request: Request) -> Any:
        body = await request.json()
        self.bodies.append(body)
        if self.refusal:
            return JSONResponse({"error": {"message": self.refusal}}, 400)
        return StreamingResponse(self._answer(body), media_type="text/event-stream")

    async def _answer(self, body: dict[str, Any]) -> AsyncIterator[str]:
        words = body["messages"][-1]["content"].split(" ")
        request_id = self.llm.add(max_tokens=len(words))
        try:
            for place, word in enumerate(words):
                self.llm.step()
                yield _chunk({"content": (" " if place else "") + word}, None)
                await asyncio.sleep(self.pause)
            yield _chunk({}, FinishReason.STOP)
            yield f"data: {json.dumps({'choices': [], 'usage': {'completion_tokens': len(words)}})}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            self.llm.scheduler.abort(request_id)


def _chunk(delta: dict[str, str], reason: str | None) -> str:
    return f"data: {json.dumps({'choices': [{'delta': delta, 'finish_reason': reason}]})}\n\n"


@contextlib.contextmanager
def serving() -> Iterator[ToyServer]:
    """A `ToyServer` on a free port of this machine."""
    toy = ToyServer()
    config = uvicorn.Config(toy.app, port=0, log_level="warning", timeout_graceful_shutdown=1, ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server has not started"
        threading.Event().wait(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    toy.url = f"http://127.0.0.1:{port}/"
    try:
        yield toy
    finally:
        toy.llm.status = Status.DEAD  # ends the streams of events
        server.should_exit = True
        thread.join(10)
