"""A real server on a free port, in a thread of the test's process, over an engine that tests can break."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from tessera_cli.engine.engine import Engine
from tessera_cli.serving.api.app import create_app
from tessera_cli.serving.api.bounded_http import BoundedHttp
from tessera_cli.serving.api.config import ServerConfig
from tessera_cli.serving.async_llm import AsyncLLM
from tessera_cli.serving.llm import LLM
from tessera_cli.serving.token_bytes import TokenBytes

MODEL = "tiny"


@dataclass
class Running:
    """A server that answers at `url`; `http` is a client of it."""

    url: str
    engine: Engine
    llm: AsyncLLM
    http: httpx.Client
    failures: list[Exception] = field(default_factory=list)

    def wait_until_idle(self, seconds: float = 20.0) -> None:
        """Wait until nothing is unfinished and no sequence holds a block, then check the books."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            thread, stats = self.llm._thread, self.llm.stats
            if not (self.llm._generations or thread.is_busy or not thread._commands.empty()):
                assert stats.num_running == stats.num_used_blocks == self.llm.num_waiting == 0
                self.engine._scheduler.check_invariants()
                assert not self.engine._records.requests
                return
            time.sleep(0.005)
        raise AssertionError(f"not idle after {seconds} s: {self.llm.stats}")

    def metric(self, line: str) -> float:
        """The value of a line of /metrics, named with its labels."""
        text = self.http.get("/metrics").text
        return next(float(row.split()[-1]) for row in text.splitlines() if row.startswith(f"{line} "))


@contextmanager
def running(
    model_dir: Path, *, llm_options: Any = None, engine_options: Any = None, **config: Any
) -> Iterator[Running]:
    """Serve the model in `model_dir`; the options are those of `AsyncLLM`, `LLM` and `ServerConfig`."""
    sizes = {"device": "cpu", "num_blocks": 200, "max_model_len": 256} | (engine_options or {})
    model = LLM(model_dir, **sizes)
    token_bytes = TokenBytes.from_dir(model_dir)
    failures: list[Exception] = []
    app = create_app(
        lambda: lambda: AsyncLLM(model.engine, model.tokenizer, token_bytes, **(llm_options or {})),
        ServerConfig(**{"model_names": (MODEL,)} | config),
        on_ready=lambda: None,
        on_failure=failures.append,
    )
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            port=0,
            http=BoundedHttp,
            log_config=None,
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=2,
        )
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        deadline = time.monotonic() + 30
        while not (server.started and app.state.async_llm is not None):
            assert not failures, failures
            assert time.monotonic() < deadline
            time.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, timeout=30) as http:
            yield Running(url, model.engine, app.state.async_llm, http, failures)
    finally:
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()
