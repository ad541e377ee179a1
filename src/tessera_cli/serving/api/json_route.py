"""Routes that read their bodies with pydantic's own JSON parser: strict, quick, and not to be overrun."""

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json


class _JsonRequest(Request):
    async def json(self) -> Any:
        """The body as JSON.

        Raises:
            JSONDecodeError: it is not JSON in UTF-8, has NaN or Infinity, or is nested too deeply.
        """
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from None


class JsonRoute(APIRoute):
    """A route whose body is read by `pydantic_core.from_json`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def read_and_handle(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return read_and_handle
