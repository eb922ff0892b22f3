"""What an application and its requests hold, behind typed keys."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aiohttp import web

from jaxinfer.async_engine import AsyncEngine
from jaxinfer.config import ServerConfig
from jaxinfer.server.lifecycle import Lifecycle
from jaxinfer.server.metrics import Metrics

ENGINE = web.AppKey("engine", AsyncEngine)
CONFIG = web.AppKey("config", ServerConfig)
LIFECYCLE = web.AppKey("lifecycle", Lifecycle)
METRICS = web.AppKey("metrics", Metrics)
EXECUTOR = web.AppKey("executor", ThreadPoolExecutor)
"""A few threads for what must not block the event loop: parsing, templates, tokenizing."""

REQUEST_ID = web.RequestKey("request_id", str)
"""Names the request in logs and replies."""
REQUEST_LOG = web.RequestKey("request_log", dict[str, Any])
"""What the request's log line will say."""
