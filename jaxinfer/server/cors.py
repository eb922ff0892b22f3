"""Which web pages may ask: cross-origin resource sharing, off unless origins are allowed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from jaxinfer.server.errors import ApiError
from jaxinfer.server.state import CONFIG

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_METHODS = "GET, HEAD, POST, OPTIONS"
_MAX_AGE_S = 600
_MOST_HEADERS = 500


def mark(request: web.Request, response: web.StreamResponse) -> None:
    """Adds what lets an allowed page read the answer and its request id.

    Credentials (cookies) are never asked for: keys travel in a header of the page's own.
    """
    allowed = request.app[CONFIG].allowed_origins
    if not allowed:
        return
    response.headers.add("Vary", "Origin")
    if _is_allowed(request):
        origin = "*" if "*" in allowed else request.headers["Origin"]
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Access-Control-Expose-Headers"] = "X-Request-Id, Retry-After"


@web.middleware
async def answer_preflights(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers the question browsers ask before a request; refuses what foreign pages slip in.

    A page may POST text without asking, and never sees the answer: so it could unload models of a
    server on its reader's machine. Browsers mark such requests.

    Raises:
      ApiError: 403; it comes from a page of another site that is not allowed.
    """
    is_preflight = "Access-Control-Request-Method" in request.headers
    if request.method == "OPTIONS" and is_preflight and _is_allowed(request):
        wanted = request.headers.get("Access-Control-Request-Headers", "Authorization")
        headers = {
            "Access-Control-Allow-Methods": _METHODS,
            "Access-Control-Allow-Headers": wanted[:_MOST_HEADERS],
            "Access-Control-Max-Age": str(_MAX_AGE_S),
        }
        return web.Response(status=204, headers=headers)
    is_foreign = request.headers.get("Sec-Fetch-Site") == "cross-site"
    if request.method == "POST" and is_foreign and not _is_allowed(request):
        message = "pages of other sites may not ask; --allowed-origins names those that may"
        raise ApiError(403, message, code="origin_not_allowed")
    return await handler(request)


def _is_allowed(request: web.Request) -> bool:
    allowed = request.app[CONFIG].allowed_origins
    origin = request.headers.get("Origin")
    return origin is not None and ("*" in allowed or origin in allowed)
