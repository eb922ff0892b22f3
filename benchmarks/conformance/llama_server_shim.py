"""Stands in for `llama-server`: takes its flags, starts ours with what they mean here.

The model is the folder or file in JAXINFER_SHIM_MODEL; flags without a counterpart are dropped.
Before its first test the suite starts every kind of server once, to download models: those have no
`--offline`, and get a process that is only healthy.
"""

from __future__ import annotations

import argparse
import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

ROOT = Path(os.environ.get("JAXINFER_ROOT") or Path(__file__).resolve().parents[2])


# What the suite's clients call the model; llama.cpp takes any name, and we refuse unknown ones.
ALIASES = (
    *("gpt-3.5-turbo", "gpt-3.5-turbo-instruct", "gpt-4.1", "davinci-002", "codellama70b"),
    *("text-embedding-3-small", "text-embedding-3-large"),
)
COUNTS_MODELS = "test_basic.py"


class _Healthy(BaseHTTPRequestHandler):
    """Answers every GET with 200."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")


def translate(arguments: list[str]) -> list[str]:
    """Returns the flags of `serve.py`."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in (
        "--port", "--host", "--alias", "--api-key", "--chat-template", "--chat-template-file",
    ):  # fmt: skip
        parser.add_argument(name)
    for name in ("--ctx-size", "--parallel", "--n-predict", "--seed"):
        parser.add_argument(name, type=int)
    given, _ = parser.parse_known_args(arguments)
    slots = given.parallel or 1
    # Its context is shared by its slots.
    flags = ["--max-model-len", str((given.ctx_size or 2048) // slots)]
    flags += ["--max-num-seqs", str(max(2, slots))]
    for value, flag in (
        (given.port, "--port"),
        (given.host, "--host"),
        (given.api_key, "--api-key"),
        (given.n_predict, "--default-max-tokens"),
        (given.seed, "--seed"),
        (given.chat_template or given.chat_template_file, "--chat-template"),
    ):
        if value is not None:
            flags += [flag, str(value)]
    aliases = tuple(given.alias.split(",")) if given.alias else ()
    if COUNTS_MODELS not in os.environ.get("PYTEST_CURRENT_TEST", ""):
        aliases += ALIASES
    for alias in aliases:
        flags += ["--served-model-name", alias]
    return flags


if __name__ == "__main__":
    if "--offline" not in sys.argv:
        port = int(sys.argv[sys.argv.index("--port") + 1])
        HTTPServer(("127.0.0.1", port), _Healthy).serve_forever()
    command = [sys.executable, str(ROOT / "serve.py"), "--model", os.environ["JAXINFER_SHIM_MODEL"]]
    os.execv(sys.executable, command + translate(sys.argv[1:]))
