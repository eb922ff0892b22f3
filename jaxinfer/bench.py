"""`jaxinfer bench`: generation at several concurrencies and prefill, by the protocol of the peers.

For each concurrency C, C distinct prompts of ids, greedy, end-of-sequence ignored; the best of
three runs. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace

from jaxinfer.async_engine import AsyncEngine
from jaxinfer.config import EngineConfig
from jaxinfer.flag_values import add_counts, positive
from jaxinfer.machine import peak_rss_bytes, versions
from jaxinfer.request import EngineRequest
from jaxinfer.sampling_params import SamplingParams

REPEATS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `jaxinfer bench` beside those of the engine."""
    parser.add_argument(
        "--concurrency",
        type=_levels,
        default=[1, 8, 32],
        metavar="N,N,...",
        help="prompts at once (default: 1,8,32)",
    )
    flags = (
        ("--prompt-len", 64, "tokens of each prompt"),
        ("--gen-len", 64, "tokens generated per prompt"),
        ("--prefill-len", 512, "tokens of the long prompt"),
    )
    add_counts(parser, flags)
    parser.add_argument("--json", action="store_true", help="print only the JSON line")


def engine_config(config: EngineConfig, args: argparse.Namespace) -> EngineConfig:
    """Returns how to load the model: as asked, and just large enough for what is measured."""
    lengths = max(args.prompt_len + args.gen_len, args.prefill_len + 1)
    return replace(
        config,
        max_num_seqs=max(args.concurrency),
        max_model_len=lengths if config.max_model_len is None else config.max_model_len,
        max_queued_requests=1,
        prefix_cache=False,  # runs repeat their prompts
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
        "rss_mb": round(peak_rss_bytes() / 1e6),
        "load_s": round(load_s, 1),
        "compiles_after_warmup": stats.num_compilations_after_warmup,
        "device": engine.loaded.device_kind,
        "versions": versions(),
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


def _levels(text: str) -> list[int]:
    return [positive(level) for level in text.split(",")]


def _say(args: argparse.Namespace, line: str) -> None:
    if not args.json:
        print(line, flush=True)
