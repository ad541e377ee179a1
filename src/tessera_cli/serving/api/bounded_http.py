"""uvicorn's quick HTTP protocol, with bounds on a request's head, which it leaves open."""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_MAX_HEAD_SIZE = 32 * 1024  # bytes


class _HeadTooLargeError(Exception):
    """Makes the parser give up, which uvicorn answers with a 400."""


class BoundedHttp(HttpToolsProtocol):
    """Hangs up on a client whose request line and headers are too large or too slow to come.

    Attributes:
        head_timeout: seconds from connecting, or from the first byte of a later request, to its head's end.
    """

    head_timeout = 30.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_timer: asyncio.TimerHandle | None = None
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        # The parser keeps a header to itself until it is whole.
        self._num_head_bytes += len(data) if self._reads_head else 0
        super().data_received(data)
        if self._reads_head and self._num_head_bytes > _MAX_HEAD_SIZE and not self.transport.is_closing():
            self.send_400_response("The request's head is too large.")

    def on_message_begin(self) -> None:
        self._begin_head()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_header_bytes += len(name) + len(value)
        if self._num_header_bytes > _MAX_HEAD_SIZE:
            raise _HeadTooLargeError
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._reads_head = False
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._reads_head, self._num_head_bytes = True, 0

    def _begin_head(self) -> None:
        self._reads_head, self._num_head_bytes, self._num_header_bytes = True, 0, 0
        self._stop_timer()
        self._head_timer = self.loop.call_later(self.head_timeout, self.transport.close)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
