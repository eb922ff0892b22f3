"""`serve.py` as a process of its own, for tests that talk to it."""

import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[1]
START_S = 240


def free_port():
    """Returns a port that nothing listens on just now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class ServeProcess:
    """A running `serve.py --port 0 ...`; leaving the context stops it, and it must exit 0.

    Args:
      flags: for the program.
      script: another program, by its path from the root.

    Attributes:
      process: the process.
      log: the lines of its standard error so far.
    """

    def __init__(self, *flags, script="serve.py"):
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            [sys.executable, script, "--port", "0", *flags],
            cwd=ROOT,
            # As users start it: one device, the real number of threads.
            env={**os.environ, "PYTHONPATH": path, "XLA_FLAGS": ""},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stderr:
            self.log.append(line.rstrip())

    @property
    def text(self):
        return "\n".join(self.log)

    def __enter__(self):
        try:
            self._wait_until_ready()
        except BaseException:
            self.process.kill()
            raise
        return self

    def __exit__(self, *exc_info):
        self.process.terminate()
        try:
            assert self.process.wait(30) == 0, self.text
        finally:
            self.process.kill()
            self._reader.join(5)
            self.process.stderr.close()

    def _wait_until_ready(self):
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            assert self.process.poll() is None, self.text
            found = re.search(r"listening on (http://[\d.]+:\d+)", self.text)
            if found:
                self.url = found[1]
                try:
                    return self.get("/health")
                except urllib.error.HTTPError as error:
                    error.close()  # 503: loading
            time.sleep(0.05)
        raise AssertionError(f"not ready after {START_S} s:\n{self.text}")

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=10) as reply:
            return reply.read().decode()

    def metrics(self):
        """Values of /metrics by name and labels, without the model's name."""
        values = {}
        for line in self.get("/metrics").splitlines():
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                name = (
                    re.sub(r',?model_name="[^"]*"', "", name).replace("{}", "").replace("{,", "{")
                )
                values[name] = float(value)
        return values
