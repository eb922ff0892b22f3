"""Time an operation's implementations on its named shapes: `python -m kernels.bench OP`.

Prints a table, then one JSON object as the last line. `--tune` first looks for the fastest block
sizes of each kernel and saves them where `kernels.tuning` finds them.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kernels import tuning

PLATFORMS = {"cuda": "gpu", "rocm": "gpu"}


def main(argv: Sequence[str] | None = None) -> None:
    """Times what the command line asks for; without names, every spec and implementation."""
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description=__doc__)
    parser.add_argument("op", choices=["paged_attention", "quantized_matmul"])
    parser.add_argument("--spec", action="append", help="name of a spec (repeatable)")
    parser.add_argument("--implementation", action="append", help="repeatable")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--tune", action="store_true", help="save the fastest block sizes")
    parser.add_argument("--tuned-folder", type=Path, default=tuning.TUNED_FOLDER)
    args = parser.parse_args(argv)

    op = import_module(f"kernels.{args.op}")
    module = import_module(f"kernels.{args.op}.specs")
    specs = module.SPECS | module.LARGE_SPECS
    for name in set(args.spec or ()) - set(specs):
        parser.error(f"{args.op} has no spec {name!r}: pass one of {', '.join(specs)}")
    platform = PLATFORMS.get(jax.default_backend(), jax.default_backend())
    peak = measured_bandwidth()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, reads {peak / 1e9:.1f} GB/s")
    print(f"{'spec':36}{'implementation':18}{'ms':>10}{'GB/s':>8}{'% of peak':>11}")
    results = []
    for name in args.spec or module.SPECS:
        for implementation in args.implementation or op.IMPLEMENTATIONS[platform]:
            call, inputs = specs[name].prepare(platform, implementation)
            try:
                if args.tune:
                    tune(call, inputs, args.repeats, args.tuned_folder)
                seconds = median_seconds(call, inputs, args.repeats)
            except NotImplementedError as refusal:
                print(f"{name:36}{implementation:18}{refusal}", flush=True)
                continue
            rate = specs[name].num_bytes / seconds
            print(f"{name:36}{implementation:18}{seconds * 1e3:10.3f}{rate / 1e9:8.1f}", end="")
            print(f"{100 * rate / peak:11.1f}", flush=True)
            result = {"spec": name, "implementation": implementation, "ms": seconds * 1e3}
            results.append(result | {"gb_per_s": rate / 1e9, "of_peak": rate / peak})
    summary = {"op": args.op, "platform": platform, "device": jax.devices()[0].device_kind}
    summary |= {"jax": jax.__version__, "peak_gb_per_s": peak / 1e9, "results": results}
    print(json.dumps(summary))


def measured_bandwidth() -> float:
    """Returns how many bytes per second a reduction over 256 MB reads on the default device."""
    data = jnp.ones((1 << 14, 1 << 12), jnp.float32)
    return data.nbytes / median_seconds(jnp.max, (data,), 10)


def median_seconds(function: Callable[..., Array], inputs: tuple[Any, ...], repeats: int) -> float:
    """Returns the median wall time of a compiled call, after one that is not counted."""
    # A function of its own: jit would keep the trace of an earlier config.
    compiled = jax.jit(lambda *args: function(*args)).lower(*inputs).compile()
    compiled(*inputs).block_until_ready()
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        compiled(*inputs).block_until_ready()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def tune(
    function: Callable[..., Array], inputs: tuple[Any, ...], repeats: int, folder: Path
) -> None:
    """Finds the fastest config of each kernel a call runs, and saves those that changed."""
    with tuning.record() as asked:
        median_seconds(function, inputs, 1)
    for request in dict.fromkeys(asked):

        def seconds(config: Any) -> float:
            try:
                with tuning.force(config):
                    return median_seconds(function, inputs, repeats)
            except Exception:
                # Compilers refuse illegal sizes each in their own way.
                return math.inf

        fastest = tuning.climb(request.config, seconds)
        if fastest != request.config:
            path = tuning.save(request.device_kind, request.kernel, {request.call: fastest}, folder)
            print(f"{request.kernel} {request.call}: {fastest}, saved in {path}")


if __name__ == "__main__":
    main()
