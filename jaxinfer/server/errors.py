"""Errors as clients see them: a status and OpenAI's error object, nothing else."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any


class ApiError(Exception):
    """An answer that is an error; raised anywhere, turned into a response in one middleware.

    Attributes:
      status: the HTTP status.
      headers: extra response headers.
      body: the JSON body, with all four keys of OpenAI's error object.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        error = {"message": message, "type": kind, "param": param, "code": code, **(extra or {})}
        self.body: dict[str, Any] = {"error": error}


def invalid(param: str | None, message: str, code: str | None = "invalid_value") -> ApiError:
    """Returns a 400 for one parameter."""
    return ApiError(400, message, code=code, param=param)


def missing(param: str) -> ApiError:
    """Returns the 400 for a parameter, or a part of one, that must be there."""
    return invalid(param, f"{param} is required", "missing_required_parameter")


def unsupported(param: str, message: str) -> ApiError:
    """Returns the 400 for a parameter this server knows and does not honour."""
    return invalid(param, message, "unsupported_parameter")


def unavailable(message: str, *, retry_after_s: int, closes: bool = False) -> ApiError:
    """Returns a 503 that tells when to come back, and whether to use another connection."""
    headers = {"Retry-After": str(retry_after_s)}
    if closes:
        headers["Connection"] = "close"
    return ApiError(503, message, kind="server_error", code="unavailable", headers=headers)


def queue_full(message: str) -> ApiError:
    """Returns the 429 of a full queue."""
    return ApiError(
        429, message, kind="rate_limit_error", code="queue_full", headers={"Retry-After": "1"}
    )


def internal(request_id: str) -> ApiError:
    """Returns the 500 of a fault of ours; it carries nothing but the request's id."""
    message = f"internal error while answering request {request_id}"
    return ApiError(500, message, kind="server_error", code="internal_error")


def shown(value: object) -> str:
    """Returns a value as an error message shows it: cut short, whatever its size."""
    if isinstance(value, int) and value.bit_length() > 300:
        return f"an integer of {value.bit_length()} bits"
    return _SHORT.repr(value).encode("utf-8", "backslashreplace").decode()


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100
