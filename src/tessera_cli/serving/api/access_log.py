"""One line of JSON for each request, and an id by which the client can ask about it."""

import json
import logging
import re
import time
import uuid
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOG = logging.getLogger("tessera.access")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class AccessLog:
    """Gives each request an id, its own if that is harmless text, and writes a line once it is over.

    What routes put into `request.state.log` joins the line: token counts, the model, the finish reason.
    """

    def __init__(self, app: ASGIApp, *, log_prompts: bool) -> None:
        self._app = app
        self._log_prompts = log_prompts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state["log"] = {}
        started = time.monotonic()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            # 499 is nginx's word for a client that left before its answer.
            self._write(scope, 499 if state.get("is_disconnected") else status, time.monotonic() - started)

    def _write(self, scope: Scope, status: int, duration: float) -> None:
        state = scope["state"]
        line: dict[str, Any] = {
            "time": time.time(),
            "request_id": state["request_id"],
            "client": scope["client"][0] if scope.get("client") else None,
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "duration": round(duration, 6),
            **state["log"],
        }
        if self._log_prompts:
            line["body"] = state.get("body", b"").decode(errors="replace")
        LOG.info("%s", json.dumps(line, ensure_ascii=True, default=str))
