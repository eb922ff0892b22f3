"""Runs the application as a process: socket, signals, draining, exit code."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import signal
import ssl
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

from jaxinfer.async_engine import AsyncEngine
from jaxinfer.config import ServerConfig
from jaxinfer.config_file import ModelEntry
from jaxinfer.effective_settings import one_line, shown
from jaxinfer.server.app import make_app, make_metrics_app
from jaxinfer.server.connection import accept, listen
from jaxinfer.server.served_model import Models, ServedModel
from jaxinfer.server.state import LIFECYCLE, MODELS

_log = logging.getLogger("jaxinfer")

_KEEPALIVE_S = 75.0
_POLL_S = 0.2
_LAST_EVENTS_S = 2.0
"""How long requests get to tell their clients that the engine died."""
_LAST_HANDLERS_S = 1.0
"""How long handlers get that were not yet generating when draining began."""
_FILES = 65536
_LAST_STEP_S = 10.0
"""How long the engine gets to end the step it is in, once nobody waits for its results."""

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_ADDRESS = 2


def serve(entries: Sequence[ModelEntry], server_config: ServerConfig) -> int:
    """Serves until a signal; returns 0, or 1 if an engine failed, or 2 if the port is taken."""
    models = Models(
        [
            ServedModel(AsyncEngine(entry.config), entry.names, loads_at_start=entry.loads_at_start)
            for entry in entries
        ]
    )
    app = make_app(models, server_config)
    _allow_connections()
    return asyncio.run(run(app, server_config))


def _allow_connections() -> None:
    """Lets the process have as many open files as it may: the usual 1024 are too few clients."""
    current, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _FILES if most == resource.RLIM_INFINITY else min(most, _FILES)
    if current != resource.RLIM_INFINITY and current < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))


async def run(app: web.Application, config: ServerConfig) -> int:
    """Serves `app` until a signal or until an engine stops; returns the exit code."""
    try:
        doors = await _open_doors(app, config)
    except _CannotListen as error:
        print(f"jaxinfer serve: {error}", file=sys.stderr)
        return EXIT_ADDRESS
    stopping = _stop_on_signals()
    for runner, server in doors:
        await runner.setup()
        await accept(server)
    _log.info("listening on %s (loading the model)", _address(doors[0][1], config))
    exit_code = await _supervise(app, config, stopping)
    if any(model.is_loading for model in app[MODELS]):
        # A thread inside XLA's compiler cannot be stopped, and would keep the process alive.
        _exit_now(exit_code)
    for _, server in doors:
        server.close()
    if config.uds is not None:
        Path(config.uds).unlink(missing_ok=True)
    try:
        async with asyncio.timeout(_LAST_STEP_S):
            await asyncio.gather(*(runner.cleanup() for runner, _ in doors))
    except TimeoutError:
        _log.error("the engine did not end its last step within %g s", _LAST_STEP_S)
        _exit_now(EXIT_FAILURE)
    if any(model.engine.is_hung for model in app[MODELS]):
        _exit_now(exit_code)
    return exit_code


class _CannotListen(Exception):
    """An address cannot be had; the message says which and why."""


async def _open_doors(
    app: web.Application, config: ServerConfig
) -> list[tuple[web.AppRunner, asyncio.Server]]:
    """Binds the addresses of the application and, if it has one of its own, of its metrics."""
    apps = [(app, config.port, config.uds)]
    if config.metrics_port is not None:
        apps.append((make_metrics_app(app), config.metrics_port, None))
    tls = _tls(config)
    doors: list[tuple[web.AppRunner, asyncio.Server]] = []
    for served, port, uds in apps:
        # Disconnects must cancel handlers: that is what aborts a request nobody waits for.
        runner = web.AppRunner(
            served, handler_cancellation=True, access_log=None, shutdown_timeout=_LAST_HANDLERS_S
        )
        options = {"keepalive_timeout": _KEEPALIVE_S, "access_log": None}
        try:
            server = await listen(runner, config.host, port, uds=uds, tls=tls, **options)
        except OSError as error:
            for _, other in doors:
                other.close()
            raise _CannotListen(_explain(uds or f"{config.host}:{port}", error)) from None
        doors.append((runner, server))
    return doors


def _tls(config: ServerConfig) -> ssl.SSLContext | None:
    if config.ssl_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except OSError as error:
        message = f"ssl_certfile {config.ssl_certfile!r} and its key cannot be used: {error}"
        raise _CannotListen(message) from None
    return context


def _address(server: asyncio.Server, config: ServerConfig) -> str:
    if config.uds is not None:
        return f"unix:{config.uds}"
    host, port = server.sockets[0].getsockname()[:2]
    scheme = "http" if config.ssl_certfile is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _exit_now(exit_code: int) -> None:
    """Ends the process although a thread is in a call that may never return."""
    sys.stderr.flush()
    os._exit(exit_code)


async def _supervise(app: web.Application, config: ServerConfig, stopping: asyncio.Event) -> int:
    """Waits for the end, and lets requests finish if it came by a signal."""
    lifecycle = app[LIFECYCLE]
    was_ready = False
    while not stopping.is_set() and not lifecycle.is_dead:
        if not was_ready and lifecycle.is_ready:
            was_ready = True
            _log.info("server settings: %s", one_line(shown(config)))
            loaded = (model.name for model in app[MODELS] if model.status == "loaded")
            _log.info("ready: %s", ", ".join(loaded))
        try:
            async with asyncio.timeout(_POLL_S):
                await stopping.wait()
        except TimeoutError:
            continue
    if lifecycle.is_dead:
        if lifecycle.load_error is not None:
            _report(lifecycle.load_error)
            return EXIT_FAILURE
        _log.error("the engine has stopped; exiting")
        await lifecycle.drain(_LAST_EVENTS_S)
        return EXIT_FAILURE
    _log.info("stopping: %d requests are running", lifecycle.num_running)
    await lifecycle.drain(config.shutdown_timeout)
    return EXIT_OK


def _stop_on_signals() -> asyncio.Event:
    """Returns the event the first SIGTERM or SIGINT sets; a second one ends the process at once."""
    stopping = asyncio.Event()

    def on_signal(number: int) -> None:
        if stopping.is_set():
            os._exit(128 + number)
        stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stopping


def _explain(where: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"cannot listen on {where}: the port is in use; stop that program or choose another"
    return f"cannot listen on {where}: {error.strerror or error}"


def _report(error: BaseException) -> None:
    """Prints why the engine did not start; faults of ours come with a traceback."""
    _log.debug("the engine did not start", exc_info=error)
    if not isinstance(error, ValueError | OSError):
        traceback.print_exception(error)
    print(f"jaxinfer serve: {error}", file=sys.stderr)
