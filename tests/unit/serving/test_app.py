"""The application loads its model in a thread that does not outlive the loading."""

import asyncio
import threading
from collections.abc import Callable

from tessera_cli.serving.api.app import create_app
from tessera_cli.serving.api.config import ServerConfig
from tessera_cli.serving.async_llm import AsyncLLM


def test_the_thread_that_loads_ends_and_its_openmp_team_with_it() -> None:
    loaders: list[threading.Thread] = []
    failures: list[Exception] = []

    def load() -> Callable[[], AsyncLLM]:
        loaders.append(threading.current_thread())
        raise ValueError("no model")

    app = create_app(load, ServerConfig(("m",)), on_ready=lambda: None, on_failure=failures.append)

    async def start_and_stop() -> None:
        async with app.router.lifespan_context(app):
            while not failures:
                await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(start_and_stop(), 20))
    (loader,) = loaders
    loader.join(20)
    assert loader is not threading.main_thread()
    assert not loader.is_alive()
