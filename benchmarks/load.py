"""The engine under load: throughput by concurrency, shared prefixes, a long prompt beside streams.

Runs in one process on the engine's own thread, as the server does but for HTTP. The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxinfer.async_engine import AsyncEngine
from jaxinfer.cli import prepare_process
from jaxinfer.config import EngineConfig
from jaxinfer.load_test.metrics import percentile
from jaxinfer.outputs import OutputDelta
from jaxinfer.request import EngineRequest
from jaxinfer.sampling_params import SamplingParams

LEVELS = (1, 2, 4, 8, 16, 32, 64)
PROMPT_LEN, OUTPUT_LEN = 64, 64
PREFIX_LEN, OWN_LEN, NUM_CLIENTS = 400, 16, 64
LONG_PROMPT, NUM_STREAMS, STREAM_LEN = 4_000, 4, 400

_names = itertools.count()


@dataclass
class Client:
    """One request and when its tokens came, in seconds after it was sent."""

    engine: AsyncEngine
    prompt: list[int]
    max_tokens: int
    began: float = 0.0
    times: list[float] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    error: str | None = None

    def send(self) -> Client:
        """Submits the request."""
        params = SamplingParams(temperature=0, max_tokens=self.max_tokens, ignore_eos=True)
        self.began = time.perf_counter()
        self.engine.submit(EngineRequest(f"c{next(_names)}", self.prompt, params), self._take)
        return self

    def wait(self) -> Client:
        """Blocks until the last token.

        Raises:
          RuntimeError: the request failed.
        """
        self.ended.wait()
        if self.error is not None:
            raise RuntimeError(self.error)
        return self

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.times[0]

    def _take(self, batch: list[OutputDelta] | Exception) -> None:
        if isinstance(batch, Exception):
            self.error = str(batch)
            self.ended.set()
            return
        now = time.perf_counter() - self.began
        for delta in batch:
            self.times += [now] * len(delta.token_ids)
            if delta.finish_reason is not None:
                self.error = delta.error
                self.ended.set()


def tokens(seed: int, count: int) -> list[int]:
    """Ids that no other seed shares a page with."""
    return [1_000 + (seed * 7_919 + i * 104_729) % 30_000 for i in range(count)]


_fresh = itertools.count()


def fresh(count: int) -> list[int]:
    """Ids that no earlier prompt began with."""
    return tokens(next(_fresh), count)


def throughput(engine: AsyncEngine, level: int) -> float:
    """Tokens per second of `level` requests at once, prompts included."""
    began = time.perf_counter()
    clients = [Client(engine, fresh(PROMPT_LEN), OUTPUT_LEN).send() for _ in range(level)]
    for client in clients:
        client.wait()
    return level * OUTPUT_LEN / (time.perf_counter() - began)


def shared_prefix(engine: AsyncEngine, is_warm: bool) -> float:
    """Median seconds to a first token of many clients whose prompts begin alike."""
    prefix = fresh(PREFIX_LEN)
    if is_warm:
        Client(engine, prefix + fresh(OWN_LEN), 1).send().wait()
    clients = [Client(engine, prefix + fresh(OWN_LEN), 1).send() for _ in range(NUM_CLIENTS)]
    return statistics.median(client.wait().ttft for client in clients)


def gaps(clients: list[Client], first: float, last: float) -> list[float]:
    """Seconds between tokens of streams, of those that came within a span of time."""
    found = []
    for client in clients:
        times = [client.began + at for at in client.times]
        found += [b - a for a, b in itertools.pairwise(times) if a >= first and b <= last]
    return found


def long_prompt(engine: AsyncEngine) -> dict[str, float]:
    """p99 between tokens of running streams, idle and while a long prompt is computed, in ms."""
    clients = [Client(engine, fresh(PROMPT_LEN), STREAM_LEN).send() for _ in range(NUM_STREAMS)]
    while any(len(client.times) < STREAM_LEN // 4 for client in clients):
        time.sleep(0.01)
    began = time.perf_counter()
    prompt = Client(engine, fresh(LONG_PROMPT), 1).send().wait()
    ended = time.perf_counter()
    for client in clients:
        client.wait()
    idle = gaps(clients, max(client.began + client.ttft for client in clients), began)
    busy = gaps(clients, began, ended)
    return {
        "idle_p99_ms": percentile(sorted(idle), 99) * 1e3,
        "busy_p99_ms": percentile(sorted(busy), 99) * 1e3,
        "prompt_s": prompt.ttft,
        "tokens_meanwhile": len(busy),
    }


def run(model: str | None, rounds: int, flags: dict[str, Any]) -> dict[str, Any]:
    """All measurements, with a prefix cache and without one."""
    found: dict[str, Any] = {}
    for name, has_cache in (("cached", True), ("uncached", False)):
        engine = AsyncEngine(EngineConfig(model=model, prefix_cache=has_cache, **flags))
        engine.load()
        throughput(engine, NUM_CLIENTS)  # warms up
        if has_cache:
            found["tok_s"] = {
                level: round(max(throughput(engine, level) for _ in range(rounds)), 1)
                for level in LEVELS
            }
            found["long_prompt"] = {
                key: round(value, 2) for key, value in long_prompt(engine).items()
            }
            found["ttft_warm_s"] = round(shared_prefix(engine, is_warm=True), 4)
        found[f"ttft_cold_{name}_s"] = round(shared_prefix(engine, is_warm=False), 4)
        found["compiles_after_warmup"] = engine.stats().num_compilations_after_warmup
        engine.close()
    return found


def main() -> None:
    """Prints each measurement and whether it is what a user may expect."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None, help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--rounds", type=int, default=2, help="of each throughput")
    args = parser.parse_args()
    flags = {"max_num_seqs": NUM_CLIENTS, "max_model_len": LONG_PROMPT + 96}
    prepare_process(EngineConfig(**flags), "warning")
    found = run(args.model, args.rounds, flags)
    speeds = found["tok_s"]
    for level, speed in speeds.items():
        print(f"{level:3} at once: {speed:8,.1f} tok/s")
    falls = min(b / a for a, b in itertools.pairwise(speeds.values()))
    print(f"from each level to the next at least {falls:.2f} times")
    cold, none = found["ttft_cold_cached_s"], found["ttft_cold_uncached_s"]
    warm = found["ttft_warm_s"]
    print(
        f"{NUM_CLIENTS} clients, {PREFIX_LEN} tokens shared, median time to a first token: "
        f"{none:.3f} s without the cache, {cold:.3f} cold ({none / cold:.1f} times as fast), "
        f"{warm:.3f} warm ({none / warm:.1f})"
    )
    long = found["long_prompt"]
    print(
        f"{NUM_STREAMS} streams, p99 between tokens: {long['idle_p99_ms']:.1f} ms, beside a prompt "
        f"of {LONG_PROMPT:,} {long['busy_p99_ms']:.1f} "
        f"({long['busy_p99_ms'] / long['idle_p99_ms']:.1f} times)"
    )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
