"""Servers that answer by a script, for what a client makes of it."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse


def event(data: object) -> str:
    return f"data: {json.dumps(data)}\n\n"


def chunk(text: str, reason: str | None = None) -> str:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": reason}]})


USAGE = event({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 3}})
DONE = "data: [DONE]\n\n"
GOOD = [chunk("a b"), chunk(" c"), chunk("", "length"), USAGE, DONE]


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """The URL of `app` on a free port."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, ws="none"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        threading.Event().wait(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)


@contextmanager
def scripted(*answers: list[str]) -> Iterator[str]:
    """A server whose answers are these streams, one after the other; its URL."""
    remaining = list(answers)
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> dict[str, object]:
        return {"data": [{"id": "scripted"}]}

    @app.post("/v1/completions")
    async def completions(request: Request) -> object:
        await request.body()
        events = remaining.pop(0)
        if events == ["refuse"]:
            return JSONResponse({"error": {"message": "too\nmany"}}, 429)

        async def stream() -> object:
            for event in events:
                yield event
                await asyncio.sleep(0.01)

        return StreamingResponse(stream(), media_type="text/event-stream")

    with serving(app) as url:
        yield url
