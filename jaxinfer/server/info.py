"""Endpoints about the server itself: health, version, metrics."""

from __future__ import annotations

from importlib import metadata

from aiohttp import web

from jaxinfer.server.sse import json_response
from jaxinfer.server.state import DEEP_CHECK, LIFECYCLE, METRICS, MODELS


async def ready(request: web.Request) -> web.Response:
    """GET /health: 200 when a request would be served, 503 otherwise."""
    request.app[LIFECYCLE].check_ready()
    return json_response({"status": "ok"})


async def live(request: web.Request) -> web.Response:
    """GET /health/live: 200 while the process can still become or stay ready."""
    if request.app[LIFECYCLE].is_dead:
        request.app[LIFECYCLE].check_ready()
    return json_response({"status": "ok"})


async def generates(request: web.Request) -> web.Response:
    """GET /health_generate: 200 when every model generates a token; at most once a second."""
    request.app[LIFECYCLE].check_ready()
    await request.app[DEEP_CHECK].run()
    return json_response({"status": "ok"})


async def version(request: web.Request) -> web.Response:
    """GET /version."""
    return json_response({"version": metadata.version("jaxinfer")})


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics, in Prometheus' text format."""
    return web.Response(
        body=request.app[METRICS].render(),
        headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
    )


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """POST /reset_prefix_cache: requests that come after the answer find nothing cached."""
    request.app[LIFECYCLE].check_open()
    for model in request.app[MODELS]:
        if model.status == "loaded":
            model.engine.clear_prefix_cache()
    return json_response({"status": "ok"})
