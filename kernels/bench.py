"""Time an operation's implementations on its named shapes: `python -m kernels.bench OP`.

Prints a table, then one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

PLATFORMS = {"cuda": "gpu", "rocm": "gpu"}


def main(argv: Sequence[str] | None = None) -> None:
    """Times what the command line asks for; without names, every spec and implementation."""
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description=__doc__)
    parser.add_argument("op", choices=["paged_attention"])
    parser.add_argument("--spec", action="append", help="name of a spec (repeatable)")
    parser.add_argument("--implementation", action="append", help="repeatable")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args(argv)

    op = import_module(f"kernels.{args.op}")
    specs = import_module(f"kernels.{args.op}.specs").SPECS
    for name in set(args.spec or ()) - set(specs):
        parser.error(f"{args.op} has no spec {name!r}: pass one of {', '.join(specs)}")
    platform = PLATFORMS.get(jax.default_backend(), jax.default_backend())
    peak = measured_bandwidth()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, reads {peak / 1e9:.1f} GB/s")
    print(f"{'spec':32}{'implementation':16}{'ms':>10}{'GB/s':>8}{'% of peak':>11}")
    results = []
    for name in args.spec or specs:
        for implementation in args.implementation or op.IMPLEMENTATIONS[platform]:
            call, inputs = specs[name].prepare(platform, implementation)
            seconds = median_seconds(call, inputs, args.repeats)
            rate = specs[name].num_bytes / seconds
            print(f"{name:32}{implementation:16}{seconds * 1e3:10.3f}{rate / 1e9:8.1f}", end="")
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
    compiled = jax.jit(function).lower(*inputs).compile()
    compiled(*inputs).block_until_ready()
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        compiled(*inputs).block_until_ready()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
