"""`jaxinfer profile`: time and bytes of a decode and a prefill step, by kind of operation."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

from jaxinfer.config import ConfigError, EngineConfig
from jaxinfer.flag_values import add_counts
from jaxinfer.machine import versions
from jaxinfer.pool_size import MAX_BULK_STEPS
from jaxinfer.step_driver import WARM_STEPS, StepDriver
from jaxinfer.step_profile import Profiler


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `jaxinfer profile` beside those of the engine."""
    flags = (
        ("--concurrency", 1, "sequences that a step decodes"),
        ("--prompt-tokens", 64, "tokens of each one's prompt"),
        ("--prefill-tokens", 512, "tokens of the prefill step"),
        ("--steps", 32, "decode steps to average"),
    )
    add_counts(parser, flags)
    parser.add_argument("--json", action="store_true", help="print only one JSON object")


def engine_config(config: EngineConfig, args: argparse.Namespace) -> EngineConfig:
    """Returns how to load the model: as asked, with room for what is measured.

    Raises:
      ConfigError: the context that was asked for is too short for it.
    """
    generated = (WARM_STEPS + 2 * args.steps + 4) * (config.decode_steps or MAX_BULK_STEPS)
    length = max(args.prompt_tokens + generated, args.prefill_tokens + 1)
    if config.max_model_len is not None and config.max_model_len < length:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, and what is measured needs {length}; "
            "leave it out, or lower --prompt-tokens, --steps or --prefill-tokens"
        )
    return replace(
        config,
        max_num_seqs=args.concurrency,
        max_model_len=config.max_model_len or length,
        max_num_batched_tokens=max(args.prefill_tokens, args.concurrency),
        max_prefill_chunk_tokens=args.prefill_tokens,
        max_queued_requests=args.concurrency,
        prefix_cache=False,
    )


def run(config: EngineConfig, args: argparse.Namespace) -> int:
    """Prints what both steps take and returns the exit code.

    Raises:
      ValueError: the model cannot be used, or its context is too short for what is measured.
    """
    driver = StepDriver.load(config, not args.json)
    profiler = Profiler(driver)
    steps = [
        profiler.decode(args.concurrency, args.prompt_tokens, args.steps),
        profiler.prefill(args.prefill_tokens),
    ]
    if args.json:
        found = {"steps": [step.as_json() for step in steps], "device": driver.device_kind}
        print(json.dumps({**found, "versions": versions()}))
    else:
        print("\n\n".join(step.table() for step in steps))
    return 0
