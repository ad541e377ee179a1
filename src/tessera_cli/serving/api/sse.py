"""Server-sent events, in OpenAI's manner."""

from collections.abc import AsyncIterator
from typing import Any

from fastapi.responses import StreamingResponse
from pydantic_core import to_json

DONE = b"data: [DONE]\n\n"


def event(value: Any, *, name: str | None = None) -> bytes:
    """One event with a JSON document as its data."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + to_json(value) + b"\n\n"


def stream(events: AsyncIterator[bytes]) -> StreamingResponse:
    """An answer of events, which no proxy is to hold back."""
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)
