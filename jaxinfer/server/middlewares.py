"""What surrounds every handler: request id, log line, counters, OpenAI-shaped errors, the key."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import secrets
import time
from typing import Any

from aiohttp import web

from jaxinfer.server import cors, page
from jaxinfer.server.connection import connection_of
from jaxinfer.server.cors import Handler
from jaxinfer.server.errors import ApiError, internal
from jaxinfer.server.sse import json_response
from jaxinfer.server.state import CONFIG, METRICS, MODEL, REQUEST_ID, REQUEST_LOG, TURNSTILE

_log = logging.getLogger(__name__)
_access_log = logging.getLogger("jaxinfer.access")

_MAX_REQUEST_ID = 128
_CLIENT_GONE = 499
READY_PATHS = ("/health", "/health/ready", "/ready", "/readyz", "/ping")
LIVE_PATHS = ("/health/live", "/healthz", "/livez")
_OPEN_ROUTES = frozenset({*READY_PATHS, *LIVE_PATHS}) | page.PATHS
_QUIET_METHODS = ("GET", "HEAD", "OPTIONS")
_CODES = {413: "request_too_large"}


@web.middleware
async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Names the request, and counts and logs it when it ends, however it ends."""
    request[REQUEST_ID] = _request_id(request)
    log = request[REQUEST_LOG] = {"request_id": request[REQUEST_ID]}
    start = time.monotonic()
    status = _CLIENT_GONE
    try:
        response = await handler(request)
        status = response.status
        return response
    finally:
        seconds = time.monotonic() - start
        resource = request.match_info.route.resource
        route = "other" if resource is None else resource.canonical
        metrics = request.app[METRICS]
        metrics.http_request(route, request.method, status, seconds)
        model = request.get(MODEL)
        if model is not None:
            log["model"] = model.name
            metrics.model_request()
            if status == 429:
                metrics.rejections(model.name, "queue_full")
        log.update(route=route, status=status, e2e_s=round(seconds, 4), client=request.remote)
        level = logging.DEBUG if request.method in _QUIET_METHODS else logging.INFO
        # What collects logs takes the fields as they are, people read them as one JSON object.
        _access_log.log(level, "%s", _Json(log), extra={"fields": log})


@web.middleware
async def take_turns(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Lets requests that are work begin a few at a time; health checks and metrics do not wait."""
    if request.method not in _QUIET_METHODS:
        await request.app[TURNSTILE].enter()
    return await handler(request)


class _Json:
    """Becomes text only if a line of the log is made of it."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def __str__(self) -> str:
        return json.dumps(self._fields)


def _request_id(request: web.Request) -> str:
    given = request.headers.get("X-Request-Id", "")
    if 0 < len(given) <= _MAX_REQUEST_ID and given.isascii() and given.isprintable():
        return given
    return f"req-{secrets.token_hex(12)}"


async def mark_response(request: web.Request, response: web.StreamResponse) -> None:
    """Adds the headers every reply has, just before they are sent."""
    response.headers["Server"] = "jaxinfer"
    cors.mark(request, response)
    if REQUEST_ID in request:
        response.headers["X-Request-Id"] = request[REQUEST_ID]
    connection = connection_of(request)
    if connection is not None:
        connection.response_started()


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns every failure into an error object; only here are statuses of errors decided."""
    try:
        return await handler(request)
    except ApiError as error:
        return _error_response(error)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        code = _CODES.get(error.status)
        return _error_response(
            ApiError(error.status, _explain(request, error), code=code, headers=headers)
        )
    except ConnectionError:
        raise
    except Exception:
        _log.exception("request %s failed", request[REQUEST_ID])
        return _error_response(internal(request[REQUEST_ID]))


def _error_response(error: ApiError) -> web.Response:
    response = json_response(error.body, status=error.status, headers=error.headers)
    if error.headers.get("Connection") == "close":
        response.force_close()
    return response


def _explain(request: web.Request, error: web.HTTPException) -> str:
    path = request.path[:100]
    if error.status == 404:
        return f"there is no {path!r} here; the API is below /v1"
    if error.status == 405:
        allowed = error.headers.get("Allow", "")
        return f"{path!r} does not take {request.method[:20]}; use {allowed}"
    if error.status == 413:
        limit = request.app[CONFIG].max_body_bytes
        return f"the request body is larger than {limit} bytes"
    return error.reason


@web.middleware
async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Asks for a key, if any is configured, everywhere but on health checks."""
    config = request.app[CONFIG]
    if config.api_key and not _is_open(request, protects_metrics=config.protect_metrics):
        scheme, _, credentials = request.headers.get("Authorization", "").partition(" ")
        given = credentials.strip() if scheme.lower() == "bearer" else ""
        if not _is_known(given or request.headers.get("X-Api-Key", ""), config.api_key):
            raise ApiError(
                401,
                "a valid key is needed: send the header 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
    return await handler(request)


def _is_open(request: web.Request, *, protects_metrics: bool) -> bool:
    is_metrics = request.path == "/metrics" and not protects_metrics
    return request.path in _OPEN_ROUTES or is_metrics or request.method == "OPTIONS"


def _is_known(given: str, keys: tuple[str, ...]) -> bool:
    """Compares with every key, in a time that depends on none of them."""
    digest = hashlib.sha256(given.encode("utf-8", "surrogateescape")).digest()
    matches = [hmac.compare_digest(digest, hashlib.sha256(key.encode()).digest()) for key in keys]
    return any(matches)
