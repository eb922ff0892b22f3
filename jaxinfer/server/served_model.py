"""The names the one model of a server goes by."""

from __future__ import annotations

from aiohttp import web

from jaxinfer.async_engine import AsyncEngine
from jaxinfer.server.errors import ApiError, shown
from jaxinfer.server.state import CONFIG, ENGINE


def served_name(app: web.Application, model: str | None) -> str:
    """Returns the name a request's model is served under; no name means the first one.

    Raises:
      ApiError: 404; no such model is served.
    """
    names = served_names(app)
    if model is None:
        return names[0]
    if model not in names:
        message = f"model {shown(model)} is not served here; use {' or '.join(names)}"
        raise ApiError(404, message, code="model_not_found", param="model")
    return model


def served_names(app: web.Application) -> tuple[str, ...]:
    """Returns the names of the model."""
    return app[CONFIG].served_model_name or (app[ENGINE].model_name,)


def fingerprint(engine: AsyncEngine) -> str:
    """Returns what stays the same while answers are comparable."""
    return f"jaxinfer-{engine.model_name.rsplit('/', 1)[-1]}"
