"""The chat page at `/`: an HTML file, its styles and its scripts, and nothing from elsewhere."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

_FOLDER = Path(__file__).with_name("page")
_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
# Scripts come from files only, no text becomes markup, and nothing leaves for another server.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": _POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True)
class _File:
    body: bytes
    content_type: str
    etag: str


def _read(path: Path) -> _File:
    body = path.read_bytes()
    return _File(body, _TYPES[path.suffix], hashlib.sha256(body).hexdigest()[:16])


_FILES = {
    "/" if path.name == "index.html" else f"/page/{path.name}": _read(path)
    for path in sorted(_FOLDER.iterdir())
    if path.suffix in _TYPES
}
PATHS = frozenset(_FILES)
"""What the page consists of; it holds no secret, so it needs no key."""


async def page(request: web.Request) -> web.Response:
    """GET / and /page/{name}: one file of the page; 304 where the browser has it."""
    file = _FILES.get(request.path)
    if file is None:
        raise web.HTTPNotFound
    response = web.Response(headers=_HEADERS)
    response.etag = file.etag
    if any(tag.value in (file.etag, "*") for tag in request.if_none_match or ()):
        response.set_status(304)
        return response
    response.body = file.body
    response.content_type = file.content_type
    response.charset = "utf-8"
    return response
