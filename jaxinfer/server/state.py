"""What an application and its requests hold, behind typed keys."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aiohttp import web

from jaxinfer.config import ServerConfig
from jaxinfer.server.deep_check import DeepCheck
from jaxinfer.server.lifecycle import Lifecycle
from jaxinfer.server.metrics import Metrics
from jaxinfer.server.served_model import Models, ServedModel
from jaxinfer.server.turnstile import Turnstile

MODELS = web.AppKey("models", Models)
CONFIG = web.AppKey("config", ServerConfig)
LIFECYCLE = web.AppKey("lifecycle", Lifecycle)
METRICS = web.AppKey("metrics", Metrics)
DEEP_CHECK = web.AppKey("deep_check", DeepCheck)
TURNSTILE = web.AppKey("turnstile", Turnstile)
EXECUTOR = web.AppKey("executor", ThreadPoolExecutor)
"""A few threads for what must not block the event loop: parsing, templates, tokenizing."""

REQUEST_ID = web.RequestKey("request_id", str)
"""Names the request in logs and replies."""
MODEL = web.RequestKey("model", ServedModel)
"""The model a request asks, once `routing` has found it."""
REQUEST_LOG = web.RequestKey("request_log", dict[str, Any])
"""What the request's log line will say."""
