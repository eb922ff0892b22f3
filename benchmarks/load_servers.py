"""Our server under load beside those of vLLM and llama.cpp, over HTTP with one client.

    python benchmarks/load_servers.py --model SmolLM2-135M-Instruct.Q4_1.gguf
        --llama-server BINARY --vllm PYTHON --vllm-model DIRECTORY [--quick]

One server after the other: output tokens per second at several concurrencies, time to the first
token of many clients whose prompts begin alike, and gaps between the tokens of streams beside a
long prompt. Prints a markdown table; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import aiohttp

from jaxinfer.load_test.client import LoadClient, Target, first_model, make_session
from jaxinfer.load_test.metrics import Summary, percentile
from jaxinfer.load_test.record import RequestRecord
from jaxinfer.load_test.spawn import spawned_server
from jaxinfer.load_test.workload import LoadRequest, RandomLengths

ROOT = str(Path(__file__).resolve().parent.parent)
MAX_CLIENTS = 64
TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Plan:
    """What is measured; lengths are in tokens.

    Attributes:
      levels: concurrencies.
      waves, min_requests: requests of a level, as a multiple of it, and at least.
      prompt_len, output_len: of the requests of a level.
      prefix_len, own_len: what prompts share, and what follows it.
      num_clients: that share a prefix.
      num_streams, idle_len, stream_len: streams, their length alone and beside the long prompt.
      long_prompt: its length.
      vocab_size: random ids are below it.
    """

    levels: tuple[int, ...] = (1, 2, 4, 8, 16, 32, MAX_CLIENTS)
    waves: int = 2
    min_requests: int = 8
    prompt_len: int = 64
    output_len: int = 64
    prefix_len: int = 400
    own_len: int = 16
    num_clients: int = MAX_CLIENTS
    num_streams: int = 4
    idle_len: int = 100
    stream_len: int = 400
    long_prompt: int = 4_000
    vocab_size: int = 32_000

    @property
    def max_model_len(self) -> int:
        """Tokens that the longest request has, with some room."""
        return self.long_prompt + 96


QUICK = Plan(
    levels=(1, 4), waves=1, min_requests=1, output_len=16, num_clients=8, idle_len=20,
    stream_len=60, long_prompt=600,
)  # fmt: skip


@dataclass(frozen=True)
class Server:
    """How one is started.

    Attributes:
      command: None is `jaxinfer serve`.
      needs: a file that must be there.
    """

    name: str
    flags: tuple[str, ...]
    command: tuple[str, ...] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    needs: str | None = None


def servers(args: argparse.Namespace, plan: Plan) -> list[Server]:
    """Returns ours and those whose programs were given, each with room for all clients at once."""
    length, cores = plan.max_model_len, os.cpu_count() or 1
    ours = ["--max-num-seqs", str(MAX_CLIENTS), "--max-model-len", str(length)]
    path = os.pathsep.join([ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
    if args.model:
        ours += ["--model", args.model]
    found = [Server("jaxinfer", tuple(ours), env={"PYTHONPATH": path})]
    if args.llama_server:
        found.append(
            Server(
                "llama.cpp",
                # Without unified KV each of the slots would have but its share of the context.
                ("--model", args.model or "", "--parallel", str(MAX_CLIENTS), "--kv-unified",
                 "--ctx-size", str(MAX_CLIENTS * 544), "--threads", str(cores), "--no-webui"),
                (args.llama_server,),
                needs=args.model,
            )
        )  # fmt: skip
    if args.vllm:
        found.append(
            Server(
                "vllm",
                ("--model", args.vllm_model or "", "--dtype", "bfloat16",
                 "--max-model-len", str(length), "--max-num-seqs", str(MAX_CLIENTS)),
                (args.vllm, "-m", "vllm.entrypoints.openai.api_server"),
                {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": f"0-{cores - 1}",
                 "HF_HUB_OFFLINE": "1"},
                needs=args.vllm_model,
            )
        )  # fmt: skip
    return found


class Measurement:
    """Measures one running server.

    Raises:
      ValueError: a request failed, or got fewer tokens than it asked for.
    """

    def __init__(self, session: aiohttp.ClientSession, target: Target, plan: Plan) -> None:
        self._client = LoadClient(session, target, lambda: None)
        self._plan = plan
        self._seeds = itertools.count()

    async def everything(self) -> dict[str, Any]:
        """Returns all numbers."""
        plan = self._plan
        await self._tokens_per_s(max(plan.levels))  # warms up
        found: dict[str, Any] = {"tok_s": {}}
        for level in plan.levels:
            found["tok_s"][level] = await self._tokens_per_s(level)
            _tell(f"{level} at once: {found['tok_s'][level]} tok/s")
        for part in (self._shared_prefix, self._long_prompt):
            values = await part()
            _tell(", ".join(f"{name} {value}" for name, value in values.items()))
            found |= values
        return found

    def _requests(self, count: int, *lengths: int) -> list[LoadRequest]:
        """Requests that no earlier ones begin like."""
        prompt, output, prefix = (*lengths, 0)[:3]
        kind = RandomLengths(prompt, output, shared_prefix_len=prefix)
        return kind.requests(count, self._plan.vocab_size, next(self._seeds))

    async def _tokens_per_s(self, level: int) -> float:
        plan = self._plan
        count = max(plan.waves * level, plan.min_requests)
        requests = self._requests(count, plan.prompt_len, plan.output_len)
        summary = Summary.of(await self._answers(requests, level))
        return round(summary.per_second(summary.output_tokens), 1)

    async def _shared_prefix(self) -> dict[str, float]:
        plan = self._plan
        first, *others = self._requests(plan.num_clients + 1, plan.own_len, 1, plan.prefix_len)
        await self._answers([first], 1)
        records = await self._answers(others, plan.num_clients)
        # The one token may be no whole character; then its end is all there is to see of it.
        seconds = sorted(record.ttft_s or record.e2e_s for record in records)
        return {
            "shared_ttft_p50_s": round(percentile(seconds, 50.0), 4),
            "shared_ttft_p99_s": round(percentile(seconds, 99.0), 4),
        }

    async def _long_prompt(self) -> dict[str, float]:
        plan = self._plan
        idle = await self._streams(plan.idle_len)
        [long] = self._requests(1, plan.long_prompt, 1)
        streams = asyncio.create_task(self._streams(plan.stream_len))
        # A quarter of their way: all of them are running by then.
        alone_s = max(record.e2e_s for record in idle)
        await asyncio.sleep(alone_s * plan.stream_len / plan.idle_len / 4)
        [prompt] = await self._answers([long], 1)
        running = max(record.token_s[0] for record in idle)
        calm = gaps(idle, running, float("inf"))
        busy = gaps(await streams, prompt.start_s, prompt.end_s)
        if not busy:
            raise ValueError("the streams had ended before the long prompt; make them longer")
        return {
            "idle_p99_ms": round(1e3 * percentile(sorted(calm), 99.0), 2),
            "busy_p99_ms": round(1e3 * percentile(sorted(busy), 99.0), 2),
            "busy_max_ms": round(1e3 * max(busy), 2),
            "long_prompt_s": round(prompt.e2e_s, 3),
            "tokens_meanwhile": len(busy),
        }

    async def _streams(self, output_len: int) -> list[RequestRecord]:
        plan = self._plan
        requests = self._requests(plan.num_streams, plan.prompt_len, output_len)
        return await self._answers(requests, plan.num_streams)

    async def _answers(self, requests: list[LoadRequest], concurrency: int) -> list[RequestRecord]:
        """Sends requests of one length and returns what came of them."""
        records = await self._client.closed_loop(requests, concurrency)
        wanted = requests[0].output_tokens
        for record in records:
            if record.error is not None:
                raise ValueError(f"a request failed: {record.error}: {record.message}")
            if record.output_tokens != wanted:
                raise ValueError(f"{record.output_tokens} tokens came, {wanted} were asked for")
        return records


def _tell(progress: str) -> None:
    """A slow server takes many minutes."""
    print(f"  {progress}", file=sys.stderr, flush=True)


def gaps(records: Sequence[RequestRecord], first: float, last: float) -> list[float]:
    """Seconds between two tokens, of all gaps that a span of time has a part of."""
    return [
        later - earlier
        for record in records
        for earlier, later in itertools.pairwise(record.token_s)
        if later > first and earlier < last
    ]


async def measured(url: str, plan: Plan) -> dict[str, Any]:
    """Returns what one running server does."""
    async with make_session(None) as session:
        target = Target(url, await first_model(session, url), TIMEOUT_S)
        found = await Measurement(session, target, plan).everything()
        return {"version": await _version(session, url), **found}


async def _version(session: aiohttp.ClientSession, url: str) -> str:
    """What the server says of itself: ours and vLLM's at /version, llama.cpp's at /props."""
    for path, key in (("/version", "version"), ("/props", "build_info")):
        async with session.get(url + path) as response:
            if response.status == 200:
                return str((await response.json()).get(key, ""))
    return ""


def result(server: Server, plan: Plan) -> dict[str, Any]:
    """Starts, measures and stops a server; returns its numbers, or {"error": why not}."""
    if server.needs is None and server.command is not None:
        return {"error": "no model was given for it"}
    with tempfile.TemporaryFile() as log:
        try:
            with spawned_server(server.flags, server.command, server.env, log) as url:
                return asyncio.run(measured(url, plan))
        except* (ValueError, OSError, aiohttp.ClientError) as errors:
            reason = str(next(_leaves(errors)))
        log.seek(0)
        lines = log.read().decode(errors="replace").strip().splitlines()
    return {"error": reason, "log": lines[-8:]}


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def table(found: Mapping[str, Mapping[str, Any]], plan: Plan) -> str:
    """The results as markdown, a server a line."""
    head = ["server", *(f"tok/s at {level}" for level in plan.levels)]
    head += [f"TTFT p50 of {plan.num_clients}, s", "p99", "ITL p99 idle, ms"]
    head += [f"beside {plan.long_prompt:,}", "longest gap", "that prompt, s"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    names = ("shared_ttft_p50_s", "shared_ttft_p99_s", "idle_p99_ms", "busy_p99_ms")
    for server, row in found.items():
        if "error" in row:
            reason = row["error"].replace("|", "/").replace("\n", " ")
            cells = [server, f"failed: {reason}", *[""] * (len(head) - 2)]
        else:
            cells = [server, *(f"{speed:,.1f}" for speed in row["tok_s"].values())]
            cells += [shown(row[name]) for name in (*names, "busy_max_ms", "long_prompt_s")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def shown(value: float) -> str:
    """Three digits, or all of those before the point."""
    return f"{value:,.0f}" if value >= 1_000 else f"{value:.3g}"


def main() -> int:
    """Measures every server that was named; 1 if any of them failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", metavar="FILE.gguf", help="of ours and of llama.cpp")
    parser.add_argument("--llama-server", metavar="BINARY", help="measure llama.cpp's server")
    parser.add_argument("--vllm", metavar="PYTHON", help="that has vLLM: measure its server")
    parser.add_argument("--vllm-model", metavar="DIRECTORY", help="the same model's safetensors")
    parser.add_argument("--without-ours", action="store_true")
    parser.add_argument("--quick", action="store_true", help="see that it works; measures little")
    args = parser.parse_args()
    plan = QUICK if args.quick else Plan()
    found = {}
    for server in servers(args, plan)[1 if args.without_ours else 0 :]:
        print(f"measuring {server.name} ...", file=sys.stderr, flush=True)
        found[server.name] = result(server, plan)
    print(table(found, plan))
    print(json.dumps({"quick": args.quick, "servers": found}))
    return 1 if any("error" in row for row in found.values()) else 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
