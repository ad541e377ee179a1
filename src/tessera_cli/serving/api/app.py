"""The application: every route behind every bound, and the model that is loaded once it runs."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from importlib.util import find_spec

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from tessera_cli import __version__
from tessera_cli.serving.api import chat, completions, errors, operations, responses, tokens
from tessera_cli.serving.api.access_log import AccessLog
from tessera_cli.serving.api.auth import ApiKeys
from tessera_cli.serving.api.config import ServerConfig
from tessera_cli.serving.api.limits import RequestLimits
from tessera_cli.serving.api.metrics import ServerMetrics
from tessera_cli.serving.async_llm import AsyncLLM

Load = Callable[[], Callable[[], AsyncLLM]]


def create_app(
    load: Load,
    config: ServerConfig,
    *,
    on_ready: Callable[[], None],
    on_failure: Callable[[Exception], None],
) -> FastAPI:
    """The server as an ASGI application; it answers 503 until the model is there.

    Args:
        load: reads the model, in a thread of its own, and returns what makes an `AsyncLLM` of it within the
            event loop.
        config: names and bounds.
        on_ready: told once the model is there.
        on_failure: told why, if it cannot be loaded.
    """

    async def load_model(app: FastAPI) -> None:
        # This thread ends, and its OpenMP team with it: with a second team beside the engine's there are more
        # OpenMP threads than cores, and all of them sleep where they would spin, a third of a decode step.
        loader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tessera-loader")
        try:
            make = await asyncio.get_running_loop().run_in_executor(loader, load)
            app.state.async_llm = make()
        except Exception as error:
            on_failure(error)
        else:
            on_ready()
        finally:
            loader.shutdown(wait=False)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loading = asyncio.create_task(load_model(app))
        yield
        loading.cancel()
        if app.state.async_llm is not None:
            await app.state.async_llm.stop()

    app = FastAPI(title="Tessera", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.config = config
    app.state.async_llm = None
    app.state.metrics = ServerMetrics(lambda: app.state.async_llm)
    errors.install(app)
    for module in (operations, completions, chat, responses, tokens):
        app.include_router(module.router)
    if find_spec("tessera_cli.serving.api.live_view") is not None:
        from tessera_cli.serving.api import live_view

        live_view.mount_page(app)
    # The last one added sees a request first.
    app.add_middleware(RequestLimits, max_body_size=config.max_body_size, body_timeout=config.body_timeout)
    if config.api_keys:
        app.add_middleware(ApiKeys, keys=config.api_keys)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    app.add_middleware(AccessLog, log_prompts=config.log_prompts)
    return app
