"""Assembles the application: state, middlewares, routes, and the engine's life."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

from aiohttp import web

from jaxinfer.async_engine import AsyncEngine
from jaxinfer.config import ServerConfig
from jaxinfer.effective_settings import shown
from jaxinfer.server import (
    cors,
    embeddings,
    handlers,
    info,
    middlewares,
    models_api,
    openapi,
    page,
    responses,
    tokenizer_api,
)
from jaxinfer.server.deep_check import DeepCheck
from jaxinfer.server.lifecycle import Lifecycle
from jaxinfer.server.metrics import Metrics
from jaxinfer.server.served_model import Models, ServedModel
from jaxinfer.server.state import (
    CONFIG,
    DEEP_CHECK,
    EXECUTOR,
    LIFECYCLE,
    METRICS,
    MODELS,
    TURNSTILE,
)
from jaxinfer.server.turnstile import Turnstile

_NUM_THREADS = 4


def make_app(models: Models | AsyncEngine, server_config: ServerConfig) -> web.Application:
    """Returns the application; it loads its models when it starts, and frees them when it ends.

    Args:
      models: or the engine of the only one.
      server_config: how they are offered.
    """
    if isinstance(models, AsyncEngine):
        models = Models([ServedModel(models, server_config.served_model_name)])
    app = web.Application(
        middlewares=[
            middlewares.observe,
            middlewares.take_turns,
            middlewares.errors,
            cors.answer_preflights,
            middlewares.authenticate,
        ],
        client_max_size=server_config.max_body_bytes,
    )
    app[MODELS] = models
    app[CONFIG] = server_config
    app[LIFECYCLE] = Lifecycle(models)
    app[METRICS] = Metrics(models, shown(server_config))
    app[DEEP_CHECK] = DeepCheck(models)
    app[TURNSTILE] = Turnstile()
    app.on_response_prepare.append(middlewares.mark_response)
    app.cleanup_ctx.append(_threads)
    app.cleanup_ctx.append(_lag)
    app.cleanup_ctx.append(_models)
    _add_routes(app.router)
    return app


def make_metrics_app(app: web.Application) -> web.Application:
    """Returns an application that offers the metrics of another one, and nothing else."""
    own = web.Application(
        middlewares=[middlewares.observe, middlewares.errors, middlewares.authenticate]
    )
    own[CONFIG], own[METRICS] = app[CONFIG], app[METRICS]
    own.on_response_prepare.append(middlewares.mark_response)
    own.router.add_get("/metrics", info.metrics)
    return own


def _add_routes(router: web.UrlDispatcher) -> None:
    router.add_get("/", page.page)
    router.add_get("/page/{name}", page.page)
    for prefix in ("/v1", ""):
        router.add_post(f"{prefix}/chat/completions", handlers.chat_completions)
        router.add_post(f"{prefix}/completions", handlers.completions)
        router.add_post(f"{prefix}/responses", responses.responses)
        router.add_post(f"{prefix}/embeddings", embeddings.embeddings)
        router.add_post(f"{prefix}/tokenize", tokenizer_api.tokenize)
        router.add_post(f"{prefix}/detokenize", tokenizer_api.detokenize)
        router.add_get(f"{prefix}/tokenizer_info", tokenizer_api.tokenizer_info)
        router.add_post(f"{prefix}/reset_prefix_cache", info.reset_prefix_cache)
        router.add_get(f"{prefix}/models", models_api.list_models)
        router.add_post(f"{prefix}/models/load", models_api.load_model)
        router.add_post(f"{prefix}/models/unload", models_api.unload_model)
        router.add_get(prefix + "/models/{id:.+}", models_api.get_model)
    for path in middlewares.READY_PATHS:
        router.add_get(path, info.ready)
    for path in middlewares.LIVE_PATHS:
        router.add_get(path, info.live)
    router.add_get("/health_generate", info.generates)
    router.add_get("/version", info.version)
    router.add_get("/metrics", info.metrics)
    router.add_get("/openapi.json", openapi.openapi)


async def _threads(app: web.Application) -> AsyncIterator[None]:
    app[EXECUTOR] = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="jaxinfer-server")
    yield
    app[EXECUTOR].shutdown(wait=False, cancel_futures=True)


async def _lag(app: web.Application) -> AsyncIterator[None]:
    watching = asyncio.create_task(app[METRICS].watch_loop())
    yield
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def _models(app: web.Application) -> AsyncIterator[None]:
    """Loads the models beside the open socket, so that health checks are answered meanwhile."""
    loading = asyncio.create_task(app[LIFECYCLE].load())
    yield
    loading.cancel()
    await asyncio.gather(loading, return_exceptions=True)
    await asyncio.gather(*(model.engine.shutdown(0.0) for model in app[MODELS]))
