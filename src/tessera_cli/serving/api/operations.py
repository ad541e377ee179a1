"""What operators ask: which model, is it well, how much does it do."""

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from tessera_cli import __version__
from tessera_cli.serving.api.service import Serving
from tessera_cli.serving.async_llm import Status

router = APIRouter()


@router.get("/v1/models")
async def list_models(service: Serving) -> dict[str, Any]:
    """The served model under each of its names."""
    return {"object": "list", "data": [_model(service, name) for name in service.config.model_names]}


@router.get("/v1/models/{name:path}")
async def get_model(name: str, service: Serving) -> dict[str, Any]:
    """The served model under one of its names."""
    service.check_model(name)
    return _model(service, name)


@router.get("/health")
async def health(request: Request) -> JSONResponse:
    """200 while the engine does its work; 503 while it is loaded, stalled, failing or dead."""
    llm = request.app.state.async_llm
    if llm is None:
        return JSONResponse({"status": "loading"}, 503, {"Retry-After": "1"})
    state = llm.health()
    body = {
        "status": state.status,
        "seconds_since_progress": round(state.seconds_since_progress, 3),
        "num_faults": state.num_faults,
        "last_fault": state.last_fault,
    }
    return JSONResponse(body, 200 if state.status is Status.OK else 503)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus's text format."""
    registry = request.app.state.metrics.registry
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


@router.get("/version")
async def version() -> dict[str, str]:
    """Tessera's version."""
    return {"version": __version__}


def _model(service: Serving, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "tessera",
        "root": service.model,
        "max_model_len": service.llm.max_model_len,
    }
