"""The page at `/`, and the stream of events from which it draws the engine."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import FileResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles
from starlette.types import Scope

from tessera_cli.serving.api import sse
from tessera_cli.serving.api.errors import NotReadyError
from tessera_cli.serving.api.live_events import LiveEncoder
from tessera_cli.serving.async_llm import AsyncLLM, Status

PAGE = Path(__file__).parents[1] / "page"
PERIOD = 0.2  # seconds from one event to the next, at least
_MAX_LOAD = 0.1  # of one core for one reader, however large the pool

# Nothing from elsewhere, nothing inline, nobody's frame. A changed page is loaded anew.
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

# A stream without end says nothing in an OpenAPI document, and the page is no part of the API.
router = APIRouter(include_in_schema=False)


def _watched(request: Request) -> AsyncLLM:
    llm: AsyncLLM | None = request.app.state.async_llm
    if llm is None:
        raise NotReadyError("the model is still being loaded", hint="try again later")
    return llm


@router.get("/live")
async def live(llm: Annotated[AsyncLLM, Depends(_watched)]) -> StreamingResponse:
    """Server-sent events, each a `LiveEvent`, for as long as somebody reads and the engine takes requests."""
    return sse.stream(_events(llm))


@router.get("/")
async def index() -> FileResponse:
    """The page."""
    return FileResponse(PAGE / "index.html", headers=HEADERS)


async def _events(llm: AsyncLLM) -> AsyncIterator[bytes]:
    encoder = LiveEncoder()
    while llm.health().status not in (Status.DRAINING, Status.DEAD):
        snapshot = await llm.snapshot()
        started = time.monotonic()
        event = await asyncio.to_thread(encoder.encode, snapshot)  # milliseconds where the pool is large
        took = time.monotonic() - started
        yield sse.event(event)
        await asyncio.sleep(max(PERIOD, took / _MAX_LOAD))


class _PageFiles(StaticFiles):
    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response


def mount_page(app: FastAPI) -> None:
    """Let `app` serve the page at `/`, its files under `/page` and its events at `/live`.

    They read the engine from `app.state.async_llm`, which is None until there is one.
    """
    app.include_router(router)
    app.mount("/page", _PageFiles(directory=PAGE), name="page")
