"""`jaxinfer plan`: what a model would take of each device; loads no weights, compiles nothing."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace

from jaxinfer.checkpoint import open_checkpoint, resolve_model
from jaxinfer.checkpoint.checkpoint import TensorInfo
from jaxinfer.config import ConfigError, EngineConfig, parse_bytes
from jaxinfer.memory_plan import check_plan, make_plan
from jaxinfer.model_loading import context_length
from jaxinfer.models import load_model_module
from jaxinfer.platforms import Platform, free_bytes, make_platform, why_not_quantized
from jaxinfer.quant_choice import decide_quant
from jaxinfer.runner.kv_cache import available_memory

EXIT_FITS = 0
EXIT_DOES_NOT_FIT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what `jaxinfer plan` takes beside the engine's own flags."""
    parser.add_argument(
        "positional_model", nargs="?", metavar="MODEL", help="the same as --model MODEL"
    )
    parser.add_argument(
        "--device-memory",
        type=parse_bytes,
        metavar="BYTES",
        help="memory of each device, for example 16GiB (default: what is free here)",
    )
    parser.add_argument(
        "--platform",
        choices=("cpu", "gpu", "tpu"),
        help="what it would run on (default: this machine's)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(config: EngineConfig, args: argparse.Namespace) -> int:
    """Prints the plan; returns 0 if it fits and 1, after what would, if it does not.

    Raises:
      ValueError: the checkpoint cannot be used, or a flag does not fit it.
    """
    if args.positional_model is not None:
        config = replace(config, model=args.positional_model)
    checkpoint = open_checkpoint(resolve_model(config.model, config.revision))
    model = load_model_module(checkpoint.model_type).Config.from_hf(checkpoint.hf_config)
    context_length(config, model)
    infos = checkpoint.tensor_infos
    where = _platform(config, args, infos)
    config = decide_quant(config, infos, where, why_not_quantized(where.name))
    plan = make_plan(config, model, infos, where)
    problem = None
    try:
        check_plan(plan, config, model, infos, where)
    except ConfigError as error:
        problem = str(error)
    if args.json:
        print(json.dumps({**plan.as_json(), "quant": config.quant, "problem": problem}))
    else:
        print(plan.table())
        if problem is not None:
            print(problem)
    return EXIT_FITS if problem is None else EXIT_DOES_NOT_FIT


def _platform(
    config: EngineConfig, args: argparse.Namespace, infos: Mapping[str, TensorInfo]
) -> Platform:
    """Where it would run: what flags say, else what is here.

    Raises:
      ConfigError: the memory of devices that are not here was not given.
    """
    name, free = args.platform, args.device_memory
    if name is None or (free is None and name != "cpu"):
        name, free = _here(config, name, free)
    elif free is None:
        free = available_memory()
    elif name != "cpu":
        free = int(free * config.gpu_memory_utilization)
    return make_platform(config, name, config.tensor_parallel, free, infos.values())


def _here(config: EngineConfig, name: str | None, free: int | None) -> tuple[str, int]:
    """The platform of this machine, and the free memory of its devices unless it was given."""
    import jax

    devices = jax.devices()
    found = devices[0].platform
    if name not in (None, found):
        raise ConfigError(f"platform {name}: there is none here; give --device-memory as well")
    if free is not None:
        return found, free if found == "cpu" else int(free * config.gpu_memory_utilization)
    free = free_bytes(devices[: config.tensor_parallel], config.gpu_memory_utilization)
    if free is None:
        raise ConfigError(f"{devices[0]} does not tell its memory; give --device-memory")
    return found, free
