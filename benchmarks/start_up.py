"""Seconds from `python serve.py` to a first token, with an empty and a full compilation cache.

The model must have been fetched before. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def first_token_seconds(cache: str, flags: list[str]) -> float:
    """Starts a server, asks for one token until it answers, and stops it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    began = time.perf_counter()
    command = [sys.executable, "serve.py", "--port", str(port), "--compilation-cache-dir", cache]
    server = subprocess.Popen([*command, *flags], cwd=ROOT, stderr=subprocess.DEVNULL)
    body = json.dumps({"prompt": "The capital of France is", "max_tokens": 1}).encode()
    url = f"http://127.0.0.1:{port}/v1/completions"
    try:
        while server.poll() is None:
            try:
                request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
                with urllib.request.urlopen(request) as reply:
                    json.load(reply)
                return time.perf_counter() - began
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.02)
        raise RuntimeError(f"serve.py ended with exit code {server.returncode}")
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()


def main() -> None:
    """Prints the seconds of one cold and several warm starts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--warm", type=int, default=3, help="warm starts (default: 3)")
    args, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as cache:
        cold = first_token_seconds(cache, flags)
        warm = [first_token_seconds(cache, flags) for _ in range(args.warm)]
    print(json.dumps({"cold_s": round(cold, 1), "warm_s": [round(s, 1) for s in warm]}))


if __name__ == "__main__":
    main()
