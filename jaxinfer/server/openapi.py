"""GET /openapi.json: the server's own description, made from the tables that read its requests."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from aiohttp import web

from jaxinfer.server.embeddings import EMBEDDINGS
from jaxinfer.server.fields import Field, schema_of
from jaxinfer.server.middlewares import LIVE_PATHS, READY_PATHS
from jaxinfer.server.models_api import NAMED
from jaxinfer.server.openapi_schemas import BY_HAND, SCHEMAS, nullable, ref
from jaxinfer.server.protocol_chat import CHAT
from jaxinfer.server.protocol_completions import COMPLETIONS
from jaxinfer.server.responses_protocol import RESPONSES
from jaxinfer.server.sse import json_response
from jaxinfer.server.state import CONFIG, MODELS
from jaxinfer.server.tokenizer_api import DETOKENIZE, TOKENIZE

_JSON = "application/json"
_EVENTS = "text/event-stream"

_GET_ERRORS = {
    400: "The request is not valid HTTP.",
    401: "A key is needed, and none or a wrong one was sent.",
    404: "There is no such model or path.",
    405: "The path does not take this method.",
    500: "A fault of the server.",
    503: "Loading, draining or stopped; Retry-After tells when to come back.",
}
_POST_ERRORS = {
    **_GET_ERRORS,
    400: "The body is no JSON object, or a parameter is missing, wrong or not supported.",
    403: "A page of another site may not ask.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is compressed.",
    429: "The queue is full; Retry-After tells when to come back.",
    504: "The request did not finish within the server's time limit.",
}


@dataclass(frozen=True)
class _Operation:
    """What an endpoint takes and gives.

    Attributes:
      reply: name of the reply's schema; empty for replies that are not JSON.
      table: the parameters of its body; None if it reads none.
      required: parameters it cannot do without.
      streams: whether `stream` turns the reply into events.
      media_type: of the reply.
      may_conflict: whether it is refused in some states of the server.
    """

    reply: str = ""
    table: Mapping[str, Field] | None = None
    required: Sequence[str] = ()
    streams: bool = False
    media_type: str = _JSON
    may_conflict: bool = False


_OPERATIONS: Mapping[tuple[str, str], _Operation] = {
    ("post", "/v1/chat/completions"): _Operation("ChatCompletion", CHAT, ("messages",), True),
    ("post", "/v1/completions"): _Operation("Completion", COMPLETIONS, ("prompt",), True),
    ("post", "/v1/responses"): _Operation("Response", RESPONSES, ("input",), True),
    ("post", "/v1/embeddings"): _Operation("Embeddings", EMBEDDINGS, ("input",)),
    ("get", "/v1/models"): _Operation("ModelList"),
    ("get", "/v1/models/{id}"): _Operation("Model"),
    ("post", "/v1/models/load"): _Operation("Model", NAMED, ("model",)),
    ("post", "/v1/models/unload"): _Operation("Model", NAMED, ("model",), may_conflict=True),
    ("post", "/v1/tokenize"): _Operation("Tokens", TOKENIZE),
    ("post", "/v1/detokenize"): _Operation("Text", DETOKENIZE, ("tokens",)),
    ("get", "/v1/tokenizer_info"): _Operation("TokenizerInfo"),
    ("post", "/v1/reset_prefix_cache"): _Operation("Status"),
    **{("get", path): _Operation("Status") for path in (*READY_PATHS, *LIVE_PATHS)},
    ("get", "/health_generate"): _Operation("Status"),
    ("get", "/version"): _Operation("Version"),
    ("get", "/metrics"): _Operation(media_type="text/plain"),
    ("get", "/openapi.json"): _Operation("Object"),
    ("get", "/"): _Operation(media_type="text/html"),
    ("get", "/page/{name}"): _Operation(media_type="*/*"),
}
_PREFIX = "/v1"
"""Paths below it are served without it too."""


async def openapi(request: web.Request) -> web.Response:
    """GET /openapi.json: this document."""
    return json_response(document(request.app))


def document(app: web.Application) -> dict[str, Any]:
    """Returns the OpenAPI 3.1 document of an application, of all its routes."""
    paths: dict[str, dict[str, Any]] = {}
    for method, path, handler in _routes(app):
        operation = _OPERATIONS.get((method, path), _Operation("Object"))
        paths.setdefault(path, {})[method] = _describe(method, path, handler, operation)
    models = app[MODELS].names
    components: dict[str, Any] = {"schemas": {**SCHEMAS, **_bodies(models)}}
    keyed: dict[str, Any] = {}
    if app[CONFIG].api_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        keyed = {"security": [{"key": []}]}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "jaxinfer",
            "version": metadata.version("jaxinfer"),
            "description": f"OpenAI's API; paths below {_PREFIX} are also served without it.",
        },
        "paths": paths,
        "components": components,
        **keyed,
    }


def undescribed(app: web.Application) -> list[tuple[str, str]]:
    """Returns the routes this file says nothing about, and what it says about no route."""
    known = {(method, path) for method, path, _ in _routes(app)}
    return sorted(known.symmetric_difference(_OPERATIONS))


def _routes(app: web.Application) -> Iterator[tuple[str, str, Any]]:
    """Yields (method, path, handler), once for paths with and without the prefix."""
    found = {}
    for route in app.router.routes():
        if route.resource is not None and route.method != "HEAD":
            found[route.method.lower(), route.resource.canonical] = route.handler
    for (method, path), handler in found.items():
        if (method, _PREFIX + path) not in found:
            yield method, path, handler


def _describe(method: str, path: str, handler: Any, operation: _Operation) -> dict[str, Any]:
    errors = _GET_ERRORS if method == "get" else _POST_ERRORS
    failure = {_JSON: {"schema": ref("ErrorResponse")}}
    responses: dict[str, Any] = {"200": _success(operation)}
    if operation.may_conflict:
        errors = {**errors, 409: "The state of the model does not allow it."}
    for status, about in errors.items():
        responses[str(status)] = {"description": about, "content": failure}
    described: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method}{path}").strip("_"),
        "summary": _summary(path, handler),
        "responses": responses,
    }
    names = re.findall(r"\{(\w+)\}", path)
    if names:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if operation.table is not None:
        body = {_JSON: {"schema": ref(_body_name(path))}}
        described["requestBody"] = {"required": True, "content": body}
    return described


def _success(operation: _Operation) -> dict[str, Any]:
    schema = {"schema": ref(operation.reply)} if operation.reply else {}
    content: dict[str, Any] = {operation.media_type: schema}
    about = "The answer."
    if operation.streams:
        # Without a schema: events are many objects, and this version cannot say so.
        content[_EVENTS] = {}
        about = "The answer; with stream=true a sequence of events, of which [DONE] is the last."
    return {"description": about, "content": content}


def _summary(path: str, handler: Any) -> str:
    """Returns what a handler's docstring says of it beside its path, or else the path's words."""
    first = (handler.__doc__ or "").partition("\n")[0]
    said = re.sub(r"^[A-Z]+ \S+[:.]? ?", "", first)
    return said or " ".join(re.findall(r"\w+", path.removeprefix(_PREFIX))).capitalize()


def _body_name(path: str) -> str:
    words = re.findall(r"[a-z]+", path.removeprefix(_PREFIX))
    return "".join(word.capitalize() for word in words) + "Request"


def _bodies(models: Sequence[str]) -> dict[str, Any]:
    return {
        _body_name(path): _body(operation.table, operation.required, models)
        for (_, path), operation in _OPERATIONS.items()
        if operation.table is not None
    }


def _body(
    table: Mapping[str, Field], required: Sequence[str], models: Sequence[str]
) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for name, field in table.items():
        schema = schema_of(field.read) or BY_HAND.get(name, {})
        if name == "model":
            schema = {"type": "string", "enum": list(models)}
        schema = dict(schema) if name in required else nullable(schema)
        if field.name is not None:
            schema["description"] = f"Another name of {field.name}."
        elif not field.is_honoured:
            schema["description"] = "Checked, and without effect on the answer."
        properties[name] = schema
    return {"type": "object", "properties": properties, "required": list(required)}
