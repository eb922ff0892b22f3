"""CPU time the server spends per streamed token, with a model that costs nothing.

Everything from the engine thread to the socket is real; only the engine inside answers by itself,
one token a row every few milliseconds, and the clients are another process that only counts bytes.
The last line is one JSON object; the exit code is 1 if a kind of stream is over `--limit`.

    python benchmarks/server_overhead.py --profile
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import json
import pstats
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxinfer.async_engine import AsyncEngine
from jaxinfer.config import ServerConfig
from jaxinfer.engine import EngineStats
from jaxinfer.outputs import OutputDelta, TokenLogprob
from jaxinfer.request import EngineRequest
from jaxinfer.startup import LoadedEngine
from jaxinfer.testing import byte_tokenizer
from jaxinfer.text import ChatTemplate

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
MESSAGES = [{"role": "user", "content": "hi"}]
BODIES = {
    "completions": ("/v1/completions", {"prompt": "hi"}),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES}),
    "chat with logprobs": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "logprobs": True, "top_logprobs": 5},
    ),
}
WARM_UP = 30  # steps
TOP = tuple((token_id, -1.0 - token_id) for token_id in range(97, 102))
WORD = " word"


class ScriptedEngine:
    """What AsyncEngine asks of an engine; each row gets the same word in every step.

    Attributes:
      window: process time and engine thread time at the first and last measured step.
    """

    max_model_len = 1_000_000
    vocab_size = 258
    max_queued_requests = 10_000

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.rows: dict[str, EngineRequest] = {}
        self.left: dict[str, int] = {}
        self.deltas: list[OutputDelta] = []
        self.marks: dict[int, tuple[float, float]] = {}
        self.num_full_steps = 0
        self.num_streams = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.left)

    def check(self, request: EngineRequest) -> None:
        """Accepts everything."""

    def add(self, request: EngineRequest) -> None:
        """Takes a request."""
        self.rows[request.request_id] = request
        self.left[request.request_id] = request.params.max_tokens or 1

    def abort(self, request_id: str) -> list[OutputDelta]:
        """Forgets a request."""
        self.left.pop(request_id, None)
        self.rows.pop(request_id, None)
        return []

    def start_step(self) -> None:
        """Pretends to launch a step."""
        if len(self.left) == self.num_streams:
            self.marks[self.num_full_steps] = (time.process_time(), time.thread_time())
            self.num_full_steps += 1

    def take_deltas(self) -> list[OutputDelta]:
        """Returns what the last step made."""
        deltas, self.deltas = self.deltas, []
        return deltas

    def end_step(self) -> None:
        """Makes a token for every row."""
        time.sleep(self.step_s)
        for request_id in list(self.left):
            self.left[request_id] -= 1
            is_last = self.left[request_id] == 0
            scores = self.rows[request_id].params.logprobs is not None
            self.deltas.append(
                OutputDelta(
                    request_id,
                    0,
                    WORD,
                    (97,),
                    (TokenLogprob(97, -0.5, TOP),) if scores else None,
                    finish_reason="length" if is_last else None,
                )
            )
            if is_last:
                self.abort(request_id)

    def stats(self) -> EngineStats:
        """Returns zeros."""
        return EngineStats(len(self.left), 0, 1, 1, 0, 0, 0, 0, 0, {})

    def measured(self, num_steps: int) -> tuple[float, float]:
        """Returns µs per token of the process without and with the engine's own thread."""
        first, last = self.marks[WARM_UP], self.marks[WARM_UP + num_steps]
        tokens = num_steps * self.num_streams
        process, thread = (
            (after - before) / tokens * 1e6 for before, after in zip(first, last, strict=True)
        )
        return process - thread, process


@contextlib.contextmanager
def clients(url: str, path: str, body: dict[str, Any], num_streams: int) -> Iterator[None]:
    """Streams from another process; ends when all streams have."""
    job = {"url": url, "path": path, "body": body, "num_streams": num_streams}
    process = subprocess.Popen([sys.executable, __file__, "--client", json.dumps(job)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


async def read_streams(job: dict[str, Any]) -> None:
    """What the client process does: opens the streams and reads them to their ends."""
    host, port = job["url"].removeprefix("http://").split(":")
    body = json.dumps(job["body"])
    head = f"POST {job['path']} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"

    async def read() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"{head}Connection: close\r\n\r\n{body}".encode())
        while await reader.read(1 << 16):
            pass
        writer.close()

    await asyncio.gather(*(read() for _ in range(job["num_streams"])))


async def measure(name: str, num_streams: int, num_steps: int, step_s: float) -> dict[str, float]:
    """Returns the numbers of one kind of stream."""
    from aiohttp import web

    from jaxinfer.server.app import make_app
    from jaxinfer.server.connection import listen

    tokenizer = byte_tokenizer(TEMPLATE)
    engine = ScriptedEngine(step_s)
    engine.num_streams = num_streams
    loaded = LoadedEngine(
        engine=engine,  # type: ignore[arg-type]
        model_name="scripted",
        tokenizer=tokenizer,
        chat_template=ChatTemplate.from_tokenizer(tokenizer),
        default_params={},
        device_kind="cpu",
    )
    async_engine = AsyncEngine.from_loaded(loaded)
    async_engine.start = _nothing  # type: ignore[method-assign]
    runner = web.AppRunner(
        make_app(async_engine, ServerConfig()), handler_cancellation=True, access_log=None
    )
    server = await listen(runner, "127.0.0.1", 0, access_log=None)
    await runner.setup()
    await server.start_serving()
    port = server.sockets[0].getsockname()[1]
    path, body = BODIES[name]
    total = num_steps + 2 * WARM_UP
    stream = {**body, "stream": True, "max_tokens": total, "ignore_eos": True}
    async with asyncio.timeout(30 + 3 * total * max(step_s, 0.02)):
        with clients(f"http://127.0.0.1:{port}", path, stream, num_streams):
            while engine.num_full_steps <= num_steps + WARM_UP + 1:
                await asyncio.sleep(0.05)
    server.close()
    await runner.cleanup()
    server_us, process_us = engine.measured(num_steps)
    return {"server_us": round(server_us, 1), "process_us": round(process_us, 1)}


async def _nothing() -> None:
    pass


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200, help="measured ones")
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--limit", type=float, default=50.0, help="µs per token (default: 50)")
    parser.add_argument("--kinds", default="completions,chat", help=f"of {', '.join(BODIES)}")
    parser.add_argument("--profile", action="store_true", help="show what the event loop spends")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        asyncio.run(read_streams(json.loads(args.client)))
        return 0
    profile = cProfile.Profile() if args.profile else contextlib.nullcontext()
    results = {}
    for name in args.kinds.split(","):
        with profile:
            results[name] = asyncio.run(
                measure(name, args.streams, args.steps, args.step_ms / 1000)
            )
        print(f"{name}: {results[name]['server_us']} µs per token, "
              f"{results[name]['process_us']} with the engine's thread")  # fmt: skip
    if isinstance(profile, cProfile.Profile):
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    print(json.dumps({"streams": args.streams, "results": results}))
    return int(any(result["server_us"] > args.limit for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
