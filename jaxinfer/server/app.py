"""Assembles the application: state, middlewares, routes, and the engine's life."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

from aiohttp import web

from jaxinfer.async_engine import AsyncEngine
from jaxinfer.config import ServerConfig
from jaxinfer.effective_settings import shown
from jaxinfer.server import handlers, info, middlewares, tokenizer_api
from jaxinfer.server.lifecycle import Lifecycle
from jaxinfer.server.metrics import Metrics
from jaxinfer.server.state import CONFIG, ENGINE, EXECUTOR, LIFECYCLE, METRICS

_NUM_THREADS = 4


def make_app(async_engine: AsyncEngine, server_config: ServerConfig) -> web.Application:
    """Returns the application; it starts the engine when it starts, and stops it when it ends."""
    app = web.Application(
        middlewares=[middlewares.observe, middlewares.errors, middlewares.authenticate],
        client_max_size=server_config.max_body_bytes,
    )
    app[ENGINE] = async_engine
    app[CONFIG] = server_config
    app[LIFECYCLE] = Lifecycle(async_engine)
    app[METRICS] = Metrics(async_engine, shown(server_config))
    app.on_response_prepare.append(middlewares.mark_response)
    app.cleanup_ctx.append(_threads)
    app.cleanup_ctx.append(_engine)
    _add_routes(app.router)
    return app


def _add_routes(router: web.UrlDispatcher) -> None:
    for prefix in ("/v1", ""):
        router.add_post(f"{prefix}/chat/completions", handlers.chat_completions)
        router.add_post(f"{prefix}/completions", handlers.completions)
        router.add_post(f"{prefix}/reset_prefix_cache", info.reset_prefix_cache)
        router.add_get(f"{prefix}/models", info.list_models)
        router.add_get(prefix + "/models/{id:.+}", info.get_model)
    router.add_get("/health", info.ready)
    router.add_get("/health/ready", info.ready)
    router.add_get("/health/live", info.live)
    router.add_get("/ping", info.ready)
    router.add_get("/version", info.version)
    router.add_get("/metrics", info.metrics)
    router.add_post("/tokenize", tokenizer_api.tokenize)
    router.add_post("/detokenize", tokenizer_api.detokenize)
    router.add_get("/tokenizer_info", tokenizer_api.tokenizer_info)


async def _threads(app: web.Application) -> AsyncIterator[None]:
    app[EXECUTOR] = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="jaxinfer-server")
    yield
    app[EXECUTOR].shutdown(wait=False, cancel_futures=True)


async def _engine(app: web.Application) -> AsyncIterator[None]:
    """Loads the engine beside the open socket, so that health checks are answered meanwhile."""
    loading = asyncio.create_task(app[LIFECYCLE].load())
    yield
    loading.cancel()
    await asyncio.gather(loading, return_exceptions=True)
    await app[ENGINE].shutdown(0.0)
