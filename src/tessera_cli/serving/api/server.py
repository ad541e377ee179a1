"""uvicorn with our own end: one signal drains, a second one leaves at once."""

import logging
import os
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from tessera_cli.errors import RunError, UsageError
from tessera_cli.serving.api.app import Load, create_app
from tessera_cli.serving.api.bounded_http import BoundedHttp
from tessera_cli.serving.api.config import ServerConfig

_LOG = logging.getLogger(__name__)

_BACKLOG = 2048  # connections that the kernel keeps waiting
# Longer than clients keep an idle connection (httpx 5 s, proxies 60 s): who hangs up first must not be the
# server, or it may do so while the next request is on its way.
_KEEP_ALIVE = 75


@dataclass(frozen=True)
class Endpoint:
    """Where a server listens, and for how long it drains.

    Attributes:
        host: the address, loopback unless others are to reach it.
        port: 0 is any that is free.
        ssl_certfile: with `ssl_keyfile`, speaks TLS.
        ssl_keyfile: the certificate's key.
        drain_timeout: seconds that requests have to end once a signal has come.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    drain_timeout: int = 30

    def bind(self) -> socket.socket:
        """A socket that is bound and does not yet listen.

        Raises:
            UsageError: the address means nothing here, or the port is taken.
        """
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, kind, protocol, _, address = found[0]
            bound = socket.socket(family, kind, protocol)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError as error:
            raise UsageError(
                f"cannot listen on {self.host} port {self.port}: {error.strerror}",
                hint="choose another --port (0 is any free one), or another --host",
            ) from None
        bound.set_inheritable(True)
        return bound

    def check_tls(self) -> None:
        """Read the certificate and its key, where there are any.

        Raises:
            UsageError: one cannot be read, they do not belong together, or the key wants a password.
        """
        if self.ssl_certfile is None or self.ssl_keyfile is None:
            return
        try:
            for file in (self.ssl_certfile, self.ssl_keyfile):
                file.read_bytes()
            # OpenSSL would ask for a password on the terminal; an empty one is a wrong one.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, password=lambda: "")
        except ssl.SSLError as error:
            cause = "not PEM, or with a password"
            if error.reason:
                cause = error.reason.lower().replace("_", " ")
            raise UsageError(
                f"no TLS with certificate {self.ssl_certfile} and key {self.ssl_keyfile}: {cause}",
                hint="give two PEM files that belong together, the key without a password",
            ) from error
        except OSError as error:
            raise UsageError(f"no TLS: {error.filename} cannot be read: {error.strerror}") from error

    def url(self, bound: socket.socket) -> str:
        """What a client calls."""
        scheme = "http" if self.ssl_certfile is None else "https"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{bound.getsockname()[1]}"


class Server(uvicorn.Server):
    """Ends on the first SIGINT or SIGTERM when what is in flight has ended, on the second at once."""

    error: BaseException | None = None

    def __init__(self, app: FastAPI, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._app = app

    def end(self, error: BaseException) -> None:
        """Stop because of `error`."""
        self.error = error
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {
            number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(128 + number)
        llm = self._app.state.async_llm
        if llm is None:
            os._exit(0)  # nothing is in flight, and nothing interrupts the loading
        _LOG.warning("draining; another signal ends at once")
        self.should_exit = True
        llm.drain()


def serve(
    load: Load,
    config: ServerConfig,
    endpoint: Endpoint,
    bound: socket.socket,
    *,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve until a signal comes; `bound` answers 503 until the model is loaded.

    Raises:
        TesseraError: the model cannot be loaded.
    """
    app = create_app(load, config, on_ready=on_ready, on_failure=lambda error: server.end(error))
    server = Server(
        app,
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="on",
            http=BoundedHttp,
            ws="none",
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=endpoint.drain_timeout,
            ssl_certfile=endpoint.ssl_certfile,
            ssl_keyfile=endpoint.ssl_keyfile,
        ),
    )
    server.run(sockets=[bound])
    if server.error is not None:
        raise server.error
    if not server.started:
        raise RunError("the server could not start")
