"""Real client packages against a running server: a matrix of what each can do, passed of all.

Clients whose package is missing are left out, so that packages that exclude each other can each
have a run. The exit code is 1 if less than `--share` of the cells pass or the server is not well
afterwards. The last line is one JSON object.

    pip install openai langchain-openai litellm "pydantic-ai-slim[openai]" aiohttp
    python benchmarks/conformance/clients.py --url http://127.0.0.1:8080 --model NAME
    pip install llama-index-llms-openai-like llama-index-embeddings-openai-like   # openai < 3
    python benchmarks/conformance/clients.py --url ... --model NAME --only llama-index
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import inspect
import json
import logging
import os
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cells_agents  # noqa: F401
import cells_http  # noqa: F401
import cells_langchain_litellm  # noqa: F401
import cells_openai  # noqa: F401
from cells import CELLS

PACKAGES = {
    "openai": "openai",
    "langchain": "langchain-openai",
    "litellm": "litellm",
    "pydantic-ai": "pydantic-ai-slim",
    "llama-index": "llama-index-llms-openai-like",
    "aiohttp": "aiohttp",
    "curl": None,
}
LIMIT_S = 180


@dataclass(frozen=True)
class Target:
    """Where the server is."""

    url: str
    model: str

    @property
    def v1(self) -> str:
        """Base URL of the API."""
        return f"{self.url}/v1"


def version(client: str) -> str | None:
    """Returns the version of a client's package, or None if it is missing."""
    package = PACKAGES[client]
    if package is None:
        return "system"
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def run(cell: Callable[[Target], Any], target: Target) -> str | None:
    """Runs one cell; returns what went wrong."""

    async def bounded() -> None:
        await asyncio.wait_for(cell(target), LIMIT_S)

    try:
        if inspect.iscoroutinefunction(cell):
            asyncio.run(bounded())
        else:
            cell(target)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if os.environ.get("CONFORMANCE_TRACEBACK"):
            traceback.print_exc()
        text = f"{type(error).__name__}: {error}".replace("\n", " ")
        return text[:160]
    return None


def is_well(target: Target) -> bool:
    """Whether the server is ready."""
    try:
        with urllib.request.urlopen(f"{target.url}/health", timeout=10) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--model", required=True)
    parser.add_argument("--only", help="clients, separated by commas")
    parser.add_argument("--share", type=float, default=0.95, help="of cells that must pass")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    target = Target(args.url, args.model)
    wanted = args.only.split(",") if args.only else list(PACKAGES)
    versions = {client: version(client) for client in wanted}
    results = {}
    for (client, name), cell in CELLS.items():
        if versions.get(client) is None:
            continue
        began = time.perf_counter()
        fault = run(cell, target)
        results[f"{client}: {name}"] = fault
        seconds = time.perf_counter() - began
        print(f"{client:12} {name:34} {'ok' if fault is None else 'FAIL'} {seconds:6.1f} s"
              f"  {fault or ''}", flush=True)  # fmt: skip
    passed = sum(fault is None for fault in results.values())
    well = is_well(target)
    print(f"{passed} of {len(results)} cells pass; the server is {'well' if well else 'NOT WELL'}")
    print(json.dumps({"versions": versions, "passed": passed, "results": results}))
    return int(not results or passed < args.share * len(results) or not well)


if __name__ == "__main__":
    sys.exit(main())
