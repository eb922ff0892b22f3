"""Runs a server, `jaxinfer serve` or another, for as long as it is measured."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

COMMAND = (sys.executable, "-m", "jaxinfer", "serve")
_POLL_S = 0.1
_START_S = 1800.0
_STOP_S = 40.0


@contextlib.contextmanager
def spawned_server(
    flags: Sequence[str],
    command: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
    log: IO[bytes] | None = None,
    *,
    ends_well: bool = False,
) -> Iterator[str]:
    """Starts a server on a free port, yields its URL when it is ready, and stops it.

    Args:
      flags: for it, beside --host and --port.
      command: another program that takes these two and has /health; None is ours.
      env: variables beside our own.
      log: where its standard error goes; None is ours.
      ends_well: whether it must exit with 0 when it is told to stop.

    Raises:
      ValueError: it ended before it was ready, takes too long, or did not end well.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    # The last of a flag counts: the port is ours whatever was asked for.
    own = ["--host", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen(
        [*(command or COMMAND), *flags, *own],
        stdout=subprocess.DEVNULL,
        stderr=log,
        env={**os.environ, **(env or {})},
    )
    try:
        _wait_until_ready(server, url)
        yield url
    finally:
        server.terminate()
        try:
            server.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
    if ends_well and server.returncode:
        raise ValueError(f"the server ended with exit code {server.returncode}")


def _wait_until_ready(server: subprocess.Popen[bytes], url: str) -> None:
    end = time.monotonic() + _START_S
    while time.monotonic() < end:
        code = server.poll()
        if code is not None:
            raise ValueError(f"the server ended with exit code {code} before it was ready")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=10):
                return
        except urllib.error.HTTPError as error:  # it is loading
            error.close()
        except OSError:  # it does not listen yet
            pass
        time.sleep(_POLL_S)
    raise ValueError(f"the server was not ready after {_START_S:.0f} s")
