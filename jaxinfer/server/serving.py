"""Runs the application as a process: socket, signals, draining, exit code."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import sys
import traceback

from aiohttp import web

from jaxinfer.async_engine import AsyncEngine
from jaxinfer.config import EngineConfig, ServerConfig
from jaxinfer.effective_settings import one_line, shown
from jaxinfer.server.app import make_app
from jaxinfer.server.connection import listen
from jaxinfer.server.lifecycle import Lifecycle
from jaxinfer.server.state import ENGINE, LIFECYCLE

_log = logging.getLogger("jaxinfer")

_KEEPALIVE_S = 75.0
_POLL_S = 0.2
_LAST_EVENTS_S = 2.0
"""How long requests get to tell their clients that the engine died."""
_LAST_HANDLERS_S = 1.0
"""How long handlers get that were not yet generating when draining began."""
_LAST_STEP_S = 10.0
"""How long the engine gets to end the step it is in, once nobody waits for its results."""

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_ADDRESS = 2


def serve(engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Serves until a signal; returns 0, or 1 if the engine failed, or 2 if the port is taken."""
    app = make_app(AsyncEngine(engine_config), server_config)
    return asyncio.run(run(app, server_config))


async def run(app: web.Application, config: ServerConfig) -> int:
    """Serves `app` until a signal or until the engine stops; returns the exit code."""
    # Disconnects must cancel handlers: that is what aborts a request nobody waits for.
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=_LAST_HANDLERS_S
    )
    try:
        server = await listen(
            runner, config.host, config.port, keepalive_timeout=_KEEPALIVE_S, access_log=None
        )
    except OSError as error:
        print(_explain(config, error), file=sys.stderr)
        return EXIT_ADDRESS
    stopping = _stop_on_signals()
    await runner.setup()
    await server.start_serving()
    address = server.sockets[0].getsockname()
    _log.info("listening on http://%s:%d (loading the model)", *address[:2])
    exit_code = await _supervise(app[LIFECYCLE], app[ENGINE], config, stopping)
    if app[ENGINE].state == "loading":
        # A thread inside XLA's compiler cannot be stopped, and would keep the process alive.
        _exit_now(exit_code)
    server.close()
    try:
        async with asyncio.timeout(_LAST_STEP_S):
            await runner.cleanup()
    except TimeoutError:
        _log.error("the engine did not end its last step within %g s", _LAST_STEP_S)
        _exit_now(EXIT_FAILURE)
    if app[ENGINE].is_hung:
        _exit_now(exit_code)
    return exit_code


def _exit_now(exit_code: int) -> None:
    """Ends the process although a thread is in a call that may never return."""
    sys.stderr.flush()
    os._exit(exit_code)


async def _supervise(
    lifecycle: Lifecycle, engine: AsyncEngine, config: ServerConfig, stopping: asyncio.Event
) -> int:
    """Waits for the end, and lets requests finish if it came by a signal."""
    was_ready = False
    while not stopping.is_set() and not lifecycle.is_dead:
        if not was_ready and lifecycle.is_ready:
            was_ready = True
            _log.info("server settings: %s", one_line(shown(config)))
            _log.info("ready: %s", engine.model_name)
        try:
            async with asyncio.timeout(_POLL_S):
                await stopping.wait()
        except TimeoutError:
            continue
    if lifecycle.is_dead:
        # The engine is marked dead a moment before its thread tells why it could not load.
        await lifecycle.load_ended.wait()
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


def _explain(config: ServerConfig, error: OSError) -> str:
    where = f"jaxinfer serve: cannot listen on {config.host}:{config.port}"
    if error.errno == errno.EADDRINUSE:
        return f"{where}: the port is in use; stop that program or choose another --port"
    return f"{where}: {error.strerror or error}"


def _report(error: BaseException) -> None:
    """Prints why the engine did not start; faults of ours come with a traceback."""
    _log.debug("the engine did not start", exc_info=error)
    if not isinstance(error, ValueError | OSError):
        traceback.print_exception(error)
    print(f"jaxinfer serve: {error}", file=sys.stderr)
