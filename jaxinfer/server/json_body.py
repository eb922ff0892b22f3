"""Reads a request body as a JSON object, or says in a 400 why it is none."""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

from aiohttp import web

from jaxinfer.server.errors import ApiError, invalid

ResultT = TypeVar("ResultT")

READ_TIMEOUT_S = 30.0
MAX_DEPTH = 100
_INLINE_BYTES = 32 * 1024
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_body(
    request: web.Request, executor: Executor, convert: Callable[[dict[str, Any]], ResultT]
) -> ResultT:
    """Returns the body, parsed and converted; large ones in `executor`.

    Raises:
      ApiError: 400 not a JSON object in UTF-8 or not what `convert` accepts, 408 too slow, 415
        compressed.
      web.HTTPRequestEntityTooLarge: larger than the application's limit.
    """
    encoding = request.headers.get("Content-Encoding", "identity").lower()
    if encoding != "identity":
        raise ApiError(415, f"Content-Encoding {encoding[:40]!r} is not accepted; send plain JSON")
    most, length = request.client_max_size, request.content_length
    if most and length is not None and length > most:  # its bytes need not be waited for
        raise web.HTTPRequestEntityTooLarge(max_size=most, actual_size=length)
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            body = await request.read()
    except TimeoutError:
        raise ApiError(
            408,
            f"the body did not arrive within {READ_TIMEOUT_S:g} s",
            kind="timeout_error",
            code="request_timeout",
            headers={"Connection": "close"},
        ) from None
    except web.RequestPayloadError:
        raise invalid(None, "the request body ended early or is not well encoded", None) from None
    if len(body) <= _INLINE_BYTES:
        return convert(parse_object(body))
    work = functools.partial(_parse_and_convert, body, convert)
    return await asyncio.get_running_loop().run_in_executor(executor, work)


def _parse_and_convert(body: bytes, convert: Callable[[dict[str, Any]], ResultT]) -> ResultT:
    return convert(parse_object(body))


def parse_object(body: bytes) -> dict[str, Any]:
    """Returns the JSON object in `body`.

    Raises:
      ApiError: 400; it is no JSON object, nests too deeply or holds half a surrogate pair.
    """
    if not body.strip():
        raise invalid(None, "the request body is empty; send a JSON object", None)
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise invalid(
            None, f"the request body is not UTF-8: bad byte at {error.start}", None
        ) from None
    try:
        value = _loads(text)
    except json.JSONDecodeError as error:
        message = f"the request body is not JSON: {error.msg} at line {error.lineno} "
        raise invalid(None, f"{message}column {error.colno}", None) from None
    except RecursionError:
        raise _too_deep() from None
    if not isinstance(value, dict):
        raise invalid(None, "the request body must be a JSON object", None)
    _check_depth(value)
    if _SURROGATE_ESCAPE.search(body):
        _check_strings(value, "")
    return value


def _loads(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError:
        raise
    except ValueError:
        # An integer beyond Python's digit limit: cut, it is still far outside every range.
        return json.loads(
            text, parse_constant=_refuse_constant, parse_int=lambda digits: int(digits[:400])
        )


def _refuse_constant(name: str) -> float:
    raise invalid(None, f"the request body is not JSON: {name} is not a JSON number", None)


def _check_depth(value: dict[str, Any]) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> ApiError:
    return invalid(None, f"the request body nests deeper than {MAX_DEPTH} levels", None)


def _check_strings(value: Any, path: str) -> None:
    if isinstance(value, str):
        if any("\ud800" <= character <= "\udfff" for character in value):
            name = path or "a key"
            raise invalid(path or None, f"{name} holds half of a surrogate pair; send valid text")
    elif isinstance(value, dict):
        for key, child in value.items():
            _check_strings(key, "")
            _check_strings(child, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, child in enumerate(value):
            _check_strings(child, f"{path}[{index}]")
