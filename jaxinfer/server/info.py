"""Endpoints about the server itself: health, version, metrics, models."""

from __future__ import annotations

import time
from importlib import metadata
from typing import Any

from aiohttp import web

from jaxinfer.server.served_model import served_name, served_names
from jaxinfer.server.sse import dumps
from jaxinfer.server.state import ENGINE, LIFECYCLE, METRICS

_STARTED = int(time.time())


async def ready(request: web.Request) -> web.Response:
    """GET /health: 200 when a request would be served, 503 otherwise."""
    request.app[LIFECYCLE].check_ready()
    return _json({"status": "ok"})


async def live(request: web.Request) -> web.Response:
    """GET /health/live: 200 while the process can still become or stay ready."""
    if request.app[LIFECYCLE].is_dead:
        request.app[LIFECYCLE].check_ready()
    return _json({"status": "ok"})


async def version(request: web.Request) -> web.Response:
    """GET /version."""
    return _json({"version": metadata.version("jaxinfer")})


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics, in Prometheus' text format."""
    return web.Response(
        body=request.app[METRICS].render(),
        headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
    )


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """POST /reset_prefix_cache: requests that come after the answer find nothing cached."""
    request.app[LIFECYCLE].check_ready()
    request.app[ENGINE].clear_prefix_cache()
    return _json({"status": "ok"})


async def list_models(request: web.Request) -> web.Response:
    """GET /v1/models."""
    request.app[LIFECYCLE].check_ready()
    models = [_model(request.app, name) for name in served_names(request.app)]
    return _json({"object": "list", "data": models})


async def get_model(request: web.Request) -> web.Response:
    """GET /v1/models/{id}; ids may contain slashes."""
    request.app[LIFECYCLE].check_ready()
    return _json(_model(request.app, served_name(request.app, request.match_info["id"])))


def _model(app: web.Application, name: str) -> dict[str, Any]:
    engine = app[ENGINE]
    return {
        "id": name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "jaxinfer",
        "root": engine.model_name,
        "parent": None,
        "max_model_len": engine.max_model_len,
    }


def _json(body: Any) -> web.Response:
    return web.json_response(body, dumps=dumps)
