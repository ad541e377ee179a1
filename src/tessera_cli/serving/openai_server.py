"""A running server with OpenAI's routes, as its client sees it: one streamed answer at a time."""

import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
from httpx_sse import EventSource, SSEError

from tessera_cli.errors import RunError, UsageError
from tessera_cli.serving.server_request import ServerRequest
from tessera_cli.serving.streamed_answer import StreamedAnswer

CONNECT_SECONDS = 10.0
_SUCH_AS = "such as http://127.0.0.1:8000"


@dataclass(frozen=True)
class Server:
    """A server that answers and the model that it is asked for.

    `url` is where `/completions` and `/chat/completions` are, such as ``http://127.0.0.1:8000/v1``.
    """

    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)

    @classmethod
    def find(cls, base_url: str, *, model: str | None, api_key: str | None) -> "Server":
        """The server at `base_url`, with or without ``/v1``; without `model` it has to serve just one.

        Raises:
            UsageError: that is no http address, or its server has not this key or this model.
            RunError: no model server answers there, or not yet.
        """
        url = _api_url(base_url)
        served = _served_models(url, api_key)
        if model is None:
            if len(served) != 1:
                raise UsageError(
                    f"{url} serves {len(served)} models: {', '.join(served) or 'none'}",
                    hint="name one as MODEL",
                )
            model = served[0]
        elif model not in served:
            raise UsageError(
                f"{url} does not serve {model!r}", hint=f"it serves {', '.join(served) or 'none'}"
            )
        return cls(url, model, api_key)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[httpx.AsyncClient]:
        """A client for any number of requests at a time; answers may take as long as they take."""
        async with httpx.AsyncClient(
            base_url=self.url,
            headers=_headers(self.api_key),
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        ) as client:
            yield client

    async def answer(
        self,
        client: httpx.AsyncClient,
        request: ServerRequest,
        *,
        arrival_time: float | None = None,
        on_chunk: Callable[[int, str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> StreamedAnswer:
        """Ask and read the stream to its end.

        Args:
            arrival_time: when the request counts as submitted; now by default.
            on_chunk: gets the sample's number and the text that it goes on with.

        Raises:
            RunError: the request was refused, or its stream broke, ended early or came without `usage`.
        """
        answer = StreamedAnswer(clock() if arrival_time is None else arrival_time, request.params.n)
        try:
            async with client.stream("POST", request.route, json=request.body(self.model)) as response:
                if response.is_error:
                    await response.aread()
                    raise RunError(_told(response))
                async for event in EventSource(response).aiter_sse():
                    if event.data == "[DONE]":
                        break
                    for index, text in answer.take(event.data, clock()):
                        if on_chunk is not None:
                            on_chunk(index, text)
        except (httpx.HTTPError, SSEError) as error:
            raise RunError(f"no whole answer from the server: {_reason(error)}") from error
        answer.check_complete()
        return answer


def _api_url(base_url: str) -> str:
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL as error:
        raise UsageError(f"{base_url!r} is no address: {error}", hint=_SUCH_AS) from None
    if url.scheme not in ("http", "https") or not url.host or url.query or url.fragment:
        raise UsageError(f"{base_url!r} is no server's address", hint=_SUCH_AS)
    path = url.path.rstrip("/")
    return str(url.copy_with(path=path or "/v1"))


def _served_models(url: str, api_key: str | None) -> list[str]:
    try:
        response = httpx.get(f"{url}/models", headers=_headers(api_key), timeout=CONNECT_SECONDS)
    except (httpx.HTTPError, ssl.SSLError) as error:
        raise RunError(
            f"no server answers at {url}: {_reason(error)}", hint="start one: `tessera serve MODEL`"
        ) from error
    if response.is_server_error:
        raise RunError(f"{url}/models: {_told(response)}", hint="wait until it is ready")
    if response.is_error:
        hint = "give --api-key or $TESSERA_API_KEY" if response.status_code in (401, 403) else None
        raise UsageError(f"{url}/models: {_told(response)}", hint=hint)
    try:
        return [str(model["id"]) for model in response.json()["data"]]
    except (ValueError, KeyError, TypeError):
        raise UsageError(
            f"{url}/models does not answer as OpenAI's does", hint="is --base-url a model server's?"
        ) from None


def _headers(api_key: str | None) -> dict[str, str]:
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


def _told(response: httpx.Response) -> str:
    """What a server says of a request that it does not answer, on one line."""
    try:
        told = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        told = response.text
    line = " ".join(str(told).split())[:300]
    return f"HTTP {response.status_code}: {line or response.reason_phrase}"


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
