"""Endpoints about the models of the server: which there are, loading and unloading them."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from aiohttp import web

from jaxinfer.config import ConfigError
from jaxinfer.server.errors import ApiError, missing, shown
from jaxinfer.server.fields import Field, read_object, string
from jaxinfer.server.json_body import read_body
from jaxinfer.server.served_model import ServedModel
from jaxinfer.server.sse import json_response
from jaxinfer.server.state import CONFIG, EXECUTOR, LIFECYCLE, MODELS

_log = logging.getLogger(__name__)
_STARTED = int(time.time())

NAMED = {"model": Field(string())}


async def list_models(request: web.Request) -> web.Response:
    """GET /v1/models: all of them; who polls it while the server starts waits until it is ready."""
    lifecycle = request.app[LIFECYCLE]
    if lifecycle.is_starting:
        lifecycle.check_ready()
    lifecycle.check_open()
    models = [_as_json(model, name) for model in request.app[MODELS] for name in model.names]
    return json_response({"object": "list", "data": models})


async def get_model(request: web.Request) -> web.Response:
    """GET /v1/models/{id}: at any time; ids may contain slashes."""
    name = request.match_info["id"]
    return json_response(_as_json(request.app[MODELS].find(name), name))


async def load_model(request: web.Request) -> web.Response:
    """POST /v1/models/load: answers when the model is loaded, which goes on without the client."""
    name, model = await _named(request)
    try:
        await asyncio.shield(request.app[LIFECYCLE].load_model(model))
    except (ValueError, OSError) as error:
        _log.error("model %s could not be loaded: %s", model.name, error)
        # What a checkpoint's error says may name files; a setting's names settings.
        why = str(error) if isinstance(error, ConfigError) else "the server's log says why"
        message = f"model {shown(name)} could not be loaded: {why}"
        raise ApiError(400, message, code="model_load_failed", param="model") from None
    return json_response(_as_json(model, name))


async def unload_model(request: web.Request) -> web.Response:
    """POST /v1/models/unload: answers when running requests have ended and memory is free."""
    name, model = await _named(request)
    if model.status == "loading":
        message = f"model {shown(name)} is loading, which cannot be stopped; unload it afterwards"
        raise ApiError(409, message, code="model_loading", param="model")
    timeout_s = request.app[CONFIG].shutdown_timeout
    await asyncio.shield(request.app[LIFECYCLE].unload_model(model, timeout_s))
    return json_response(_as_json(model, name))


async def _named(request: web.Request) -> tuple[str, ServedModel]:
    app = request.app
    values = await read_body(
        request,
        app[EXECUTOR],
        lambda body: read_object(body, NAMED, strict=app[CONFIG].strict_params),
    )
    name = values.get("model")
    if name is None:
        raise missing("model")
    app[LIFECYCLE].check_alive()
    return name, app[MODELS].find(name)


def _as_json(model: ServedModel, name: str) -> dict[str, Any]:
    is_loaded = model.status == "loaded"
    return {
        "id": name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "jaxinfer",
        "root": model.engine.model_name,
        "parent": None,
        "max_model_len": model.engine.max_model_len if is_loaded else None,
        "status": model.status,
    }
