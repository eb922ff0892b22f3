"""`jaxinfer bench`: generation at several concurrencies and prefill, by the protocol of the peers.

For each concurrency C, C distinct prompts of ids, greedy, end-of-sequence ignored; the best of
three runs. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import sys
import time
from importlib.metadata import version
from pathlib import Path

from jaxinfer.async_engine import AsyncEngine
from jaxinfer.config import EngineConfig
from jaxinfer.request import EngineRequest
from jaxinfer.sampling_params import SamplingParams

REPEATS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `jaxinfer bench`."""
    parser.add_argument("--model", "-m", help="hub id, directory or .gguf file")
    parser.add_argument(
        "--concurrency",
        type=_levels,
        default=[1, 8, 32],
        metavar="N,N,...",
        help="prompts at once (default: 1,8,32)",
    )
    for flag, default, about in (
        ("--prompt-len", 64, "tokens of each prompt"),
        ("--gen-len", 64, "tokens generated per prompt"),
        ("--prefill-len", 512, "tokens of the long prompt"),
    ):
        help_text = f"{about} (default: {default})"
        parser.add_argument(flag, type=_positive, default=default, metavar="N", help=help_text)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--decode-steps", type=int, default=1)
    parser.add_argument("--pipeline-depth", type=int, choices=(0, 1))
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--num-threads", type=int, help="CPU threads of XLA")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--json", action="store_true", help="print only the JSON line")


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Returns how to load the model: just large enough for what is measured.

    Raises:
      ConfigError: a flag's value cannot be used.
    """
    return EngineConfig(
        model=args.model,
        dtype=args.dtype,
        kv_cache_dtype=args.kv_cache_dtype,
        decode_steps=args.decode_steps,
        pipeline_depth=args.pipeline_depth,
        tensor_parallel=args.tensor_parallel,
        num_threads=args.num_threads,
        exact=args.exact,
        max_num_seqs=max(args.concurrency),
        max_model_len=max(args.prompt_len + args.gen_len, args.prefill_len + 1),
        max_queued_requests=1,
    )


def run(config: EngineConfig, args: argparse.Namespace) -> int:
    """Runs the benchmark and prints its results; returns the exit code."""
    began = time.perf_counter()
    engine = AsyncEngine(config)
    engine.load()
    load_s = time.perf_counter() - began
    wave(engine, 1, min(8, args.prompt_len), min(4, args.gen_len))
    generation: dict[str, float] = {}
    for level in args.concurrency:
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
        "rss_mb": round(_peak_rss_bytes() / 1e6),
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
      InvalidParameter: a prompt does not fit the model.
      RuntimeError: a request ended early.
    """
    params = SamplingParams(temperature=0.0, max_tokens=gen_len, ignore_eos=True)
    requests = [
        EngineRequest(
            f"bench-{index}",
            tuple(1000 + (index * 7 + p * 13) % 30000 for p in range(prompt_len)),
            params,
        )
        for index in range(concurrency)
    ]
    began = time.perf_counter()
    num_tokens = sum(len(delta.token_ids) for delta in engine.stream(requests))
    seconds = time.perf_counter() - began
    if num_tokens != concurrency * gen_len:
        raise RuntimeError(f"{num_tokens} tokens came, expected {concurrency * gen_len}")
    return seconds


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1 (got {value})")
    return value


def _levels(text: str) -> list[int]:
    return [_positive(level) for level in text.split(",")]


def _peak_rss_bytes() -> int:
    status = Path("/proc/self/status")
    if status.exists():
        # Unlike getrusage, this does not count what the parent held when it forked.
        [line] = (line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _say(args: argparse.Namespace, line: str) -> None:
    if not args.json:
        print(line, flush=True)
