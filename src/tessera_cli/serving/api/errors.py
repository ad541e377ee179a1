"""From errors to HTTP answers, in the shape that OpenAI's clients read."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from tessera_cli.errors import TesseraError, UsageError
from tessera_cli.serving.async_llm import DrainingError, QueueFullError
from tessera_cli.serving.engine_events import EngineError
from tessera_cli.serving.generation import RequestTimeoutError

_LOG = logging.getLogger(__name__)

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class NotReadyError(TesseraError):
    """The model is still being loaded."""


class UnknownModelError(UsageError):
    """A request for another model than the one that is served."""


@contextmanager
def named_as(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors speak of a request's fields where it has other names for the engine's parameters."""
    try:
        yield
    except UsageError as error:
        if error.param is None or error.param not in names:
            raise
        raise error.renamed(names[error.param]) from error


def error_body(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The body of an answer with an error."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> JSONResponse:
    """A whole answer with an error."""
    headers = {"Retry-After": "1"} if status in (429, 503) else None
    return JSONResponse(error_body(status, message, param=param, code=code), status, headers)


def status_of(error: TesseraError) -> int:
    """The HTTP status that says whose fault `error` is."""
    match error:
        case QueueFullError():
            return 429
        case NotReadyError() | DrainingError():
            return 503
        case RequestTimeoutError():
            return 504
        case EngineError():
            return 500
        case UnknownModelError():
            return 404
        case UsageError():
            return 400
    return 500


def tell(error: TesseraError) -> dict[str, Any]:
    """The body for `error`, also as the last event of a stream that has begun."""
    message = error.message if error.hint is None else f"{error.message} ({error.hint})"
    code = "model_not_found" if isinstance(error, UnknownModelError) else None
    param = error.param if isinstance(error, UsageError) else None
    return error_body(status_of(error), message, param=param, code=code)


def install(app: FastAPI) -> None:
    """Let every error that a route of `app` raises become an answer."""

    @app.exception_handler(TesseraError)
    async def on_tessera_error(request: Request, error: TesseraError) -> JSONResponse:
        status = status_of(error)
        headers = {"Retry-After": "1"} if status in (429, 503) else None
        return JSONResponse(tell(error), status, headers)

    @app.exception_handler(RequestValidationError)
    async def on_validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
        message, param = _first_fault(error.errors(), error.body)
        return error_response(400, message, param=param)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> JSONResponse:
        answer = error_response(error.status_code, str(error.detail))
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(Exception)
    async def on_bug(request: Request, error: Exception) -> JSONResponse:
        _LOG.exception("a route failed", exc_info=error)
        return error_response(500, f"{type(error).__name__}: this is a bug in Tessera; its log says more")


def _first_fault(faults: Sequence[Any], body: Any) -> tuple[str, str | None]:
    """What is wrong first, in a line, and where."""
    if faults[0]["type"] == "json_invalid":
        return f"the body is not JSON: {faults[0]['ctx']['error']}", None
    for fault in faults:
        if fault["type"] == "extra_forbidden":
            param = _place(fault, body)
            return f"parameter {param!r} is not supported", param
    # A field of several forms has the faults of each; the form that fits furthest is the one that was meant.
    places = [_place(fault, body) for fault in faults]
    first = [place for place in places if place.startswith(places[0])]
    param = max(first, key=lambda place: place.count("[") + place.count("."))
    texts = dict.fromkeys(
        str(fault["msg"]) for fault, place in zip(faults, places, strict=True) if place == param
    )
    message = ", or: ".join(texts)
    return (f"{param}: {message}" if param else message), param or None


def _place(fault: Mapping[str, Any], body: Any) -> str:
    """Where in `body` a fault is, such as ``messages[0].role``; form names, which pydantic adds, are none."""
    place, value = "", body
    for part in fault["loc"][1:]:
        if isinstance(part, int) and isinstance(value, list):
            place, value = f"{place}[{part}]", value[part]
        elif isinstance(value, dict) and part in value:
            place, value = f"{place}.{part}", value[part]
    if fault["type"] == "missing":
        place = f"{place}.{fault['loc'][-1]}"
    return place.removeprefix(".")
