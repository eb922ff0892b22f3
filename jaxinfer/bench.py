"""`jaxinfer bench`: generation at several concurrencies and prefill, by the protocol of the peers.

For each concurrency C, C distinct prompts of ids, greedy, end-of-sequence ignored; the best of
three runs. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import queue
import resource
import time
from importlib.metadata import version

from jaxinfer.async_engine import AsyncEngine
from jaxinfer.config import EngineConfig
from jaxinfer.outputs import OutputDelta
from jaxinfer.request import EngineRequest
from jaxinfer.sampling_params import SamplingParams

REPEATS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `jaxinfer bench`."""
    parser.add_argument("--model", "-m", help="hub id, directory or .gguf file")
    parser.add_argument("--concurrency", default="1,8,32", help="comma-separated (default: 1,8,32)")
    parser.add_argument("--prompt-len", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--gen-len", type=int, default=64, help="tokens generated per prompt")
    parser.add_argument("--prefill-len", type=int, default=512, help="tokens of the long prompt")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--decode-steps", type=int, default=1)
    parser.add_argument("--pipeline-depth", type=int, choices=(0, 1))
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--num-threads", type=int, help="CPU threads of XLA")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--json", action="store_true", help="print only the JSON line")


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark and prints its results; returns the exit code."""
    levels = [int(level) for level in args.concurrency.split(",")]
    config = EngineConfig(
        model=args.model,
        dtype=args.dtype,
        kv_cache_dtype=args.kv_cache_dtype,
        decode_steps=args.decode_steps,
        pipeline_depth=args.pipeline_depth,
        tensor_parallel=args.tensor_parallel,
        exact=args.exact,
        max_num_seqs=max(levels),
        max_model_len=max(args.prompt_len + args.gen_len, args.prefill_len + 1),
        max_queued_requests=max(levels) + 1,
    )
    began = time.perf_counter()
    engine = AsyncEngine(config)
    engine.load()
    load_s = time.perf_counter() - began
    wave(engine, 1, 8, 4)
    generation: dict[str, float] = {}
    for level in levels:
        seconds = min(wave(engine, level, args.prompt_len, args.gen_len) for _ in range(REPEATS))
        generation[str(level)] = round(level * args.gen_len / seconds, 1)
        _say(args, f"gen[{level}]   {generation[str(level)]:8.1f} tok/s")
    prefill = args.prefill_len / min(wave(engine, 1, args.prefill_len, 1) for _ in range(REPEATS))
    _say(args, f"prefill  {prefill:8.1f} tok/s")
    ttft = min(wave(engine, 1, args.prompt_len, 1) for _ in range(REPEATS))
    stats = engine.stats()
    result = {
        "engine": "jaxinfer",
        "model": engine.model_name,
        "gen": generation,
        "prefill": round(prefill, 1),
        "ttft_ms": round(ttft * 1e3, 1),
        "rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "load_s": round(load_s, 1),
        "compiles_after_warmup": stats.num_compilations_after_warmup,
        "device": engine.loaded.device_kind,
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("jax", "jaxlib", "flax")},
        },
    }
    engine.close()
    print(json.dumps(result))
    return 0


def wave(engine: AsyncEngine, concurrency: int, prompt_len: int, gen_len: int) -> float:
    """Seconds to generate `gen_len` tokens for each of `concurrency` prompts sent together.

    Raises:
      RuntimeError: a request ended early.
    """
    params = SamplingParams(temperature=0.0, max_tokens=gen_len, ignore_eos=True)
    arrived: queue.SimpleQueue[list[OutputDelta]] = queue.SimpleQueue()
    began = time.perf_counter()
    for index in range(concurrency):
        prompt = tuple(1000 + (index * 7 + p * 13) % 30000 for p in range(prompt_len))
        engine.submit(EngineRequest(f"bench-{index}", prompt, params), arrived.put)
    num_open, num_tokens = concurrency, 0
    while num_open:
        for delta in arrived.get():
            num_tokens += len(delta.token_ids)
            num_open -= delta.finish_reason is not None
    seconds = time.perf_counter() - began
    if num_tokens != concurrency * gen_len:
        raise RuntimeError(f"{num_tokens} tokens came, expected {concurrency * gen_len}")
    return seconds


def _say(args: argparse.Namespace, line: str) -> None:
    if not args.json:
        print(line, flush=True)
