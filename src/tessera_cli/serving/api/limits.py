"""What every request is held to: a body of bounded size that arrives in time, and a client that is there."""

import asyncio
from collections import deque
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tessera_cli.serving.api.errors import error_response

# So much beyond the limit is read and thrown away, because a client that is cut off sees no answer.
_DISCARD_FACTOR = 32


class _BodyTooLargeError(Exception):
    pass


class _GoneError(Exception):
    pass


class RequestLimits:
    """Reads the whole body before the application sees the request, and cancels it when its client leaves.

    Cancellation is the one way in which a disconnect is told, streamed or not. What a route puts into
    `request.state.at_end` is called when the request is over, however it ended.
    """

    def __init__(self, app: ASGIApp, *, max_body_size: int, body_timeout: float) -> None:
        self._app = app
        self._max_body_size = max_body_size
        self._body_timeout = body_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._body_timeout):
                body = await self._read(receive)
        except TimeoutError:
            text = f"the body was not there after {self._body_timeout:g} seconds"
            await error_response(408, text)(scope, receive, send)
            return
        except _BodyTooLargeError:
            text = f"the body has more than {self._max_body_size} bytes"
            await error_response(413, text)(scope, receive, send)
            return
        except _GoneError:
            return
        scope.setdefault("state", {})["body"] = body
        await self._run(body, scope, receive, send)

    async def _read(self, receive: Receive) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _GoneError
            part = message.get("body", b"")
            size += len(part)
            if size <= self._max_body_size:
                parts.append(part)
            else:
                parts.clear()
            is_whole = not message.get("more_body", False)
            if size > self._max_body_size and (is_whole or size > _DISCARD_FACTOR * self._max_body_size):
                raise _BodyTooLargeError
            if is_whole:
                return b"".join(parts)

    async def _run(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        pending: deque[Message] = deque([{"type": "http.request", "body": body, "more_body": False}])

        async def replay() -> Message:
            if pending:
                return pending.popleft()
            await asyncio.get_running_loop().create_future()  # a disconnect cancels; nothing else comes
            raise AssertionError

        is_answered = False

        async def send_and_note(message: Message) -> None:
            nonlocal is_answered
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                is_answered = True
            await send(message)

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        at_end: list[Callable[[], None]] = []
        scope["state"]["at_end"] = at_end
        answering = asyncio.ensure_future(self._app(scope, replay, send_and_note))
        watching = asyncio.ensure_future(watch())
        try:
            await asyncio.wait((answering, watching), return_when=asyncio.FIRST_COMPLETED)
        finally:
            watching.cancel()
            # To a server an answer that is whole is a disconnect, too.
            if not answering.done() and not is_answered:
                scope["state"]["is_disconnected"] = True
                answering.cancel()
            await asyncio.gather(answering, watching, return_exceptions=True)
            for close in at_end:
                close()
        if not answering.cancelled() and (error := answering.exception()) is not None:
            raise error
