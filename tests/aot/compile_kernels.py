"""Compiles one implementation of an operation for a chip, at the shapes of 8B models and others.

    python tests/aot/compile_kernels.py TARGET OPERATION IMPLEMENTATION [PROGRAM ...]

Prints one JSON object a program. One process per implementation and GPU: Mosaic GPU keeps what it
compiled by module alone, and a second architecture would get the first one's code.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import target as targets
from jax.sharding import SingleDeviceSharding

from kernels import device, paged_attention, quantized_matmul
from kernels.paged_attention import specs as attention_specs
from kernels.quantized_matmul import specs as matmul_specs

Program = tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]
"""A function, its abstract arguments, and which of them are donated."""

_LARGE = 1 << 22  # elements of an array that is a cache or a weight, never x or scales

_LLAMA_8B = partial(attention_specs.Spec, 32, 8, 128, dtype="bfloat16")
_GEMMA3 = partial(attention_specs.Spec, 4, 1, 256, window=512, dtype="bfloat16")
_UNLIKE_FORMATS = ("int8-g16", "int8-offset-g32", "uint4-g16", "mxfp4")
_MIXED_ROWS = (*[(1, 1000)] * 20, (300, 900), (180, 180))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=targets.TARGETS)
    parser.add_argument("operation", choices=["paged_attention", "quantized_matmul"])
    parser.add_argument("implementation")
    parser.add_argument("program", nargs="*")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        targets.prepare(
            XLA_FLAGS=f"--xla_dump_to={folder}",
            MOSAIC_GPU_DUMP_PTX="1",
            MOSAIC_GPU_DUMP_TO=folder,
        )
        make = {"paged_attention": attention_programs, "quantized_matmul": matmul_programs}
        programs = make[args.operation](args.target, args.implementation)
        for name in args.program or programs:
            report = compile_program(args.target, programs[name](), Path(folder))
            print(json.dumps({"program": name} | report), flush=True)


def attention_programs(target: str, implementation: str) -> dict[str, Callable[[], Program]]:
    """Returns write-then-attend steps: decode and mixed, every head size, bf16 and int8 caches."""
    page_size = 128 if target in targets.TOPOLOGIES else 16
    specs: dict[str, attention_specs.Spec] = {}
    for kv_dtype in ("bfloat16", "int8"):
        name = f"llama8b-decode-64-context-2048-page-{page_size}-{kv_dtype}"
        specs[name] = attention_specs.LARGE_SPECS[name]
        specs[f"llama8b-mixed-512-{kv_dtype}"] = _LLAMA_8B(
            _MIXED_ROWS, 512, 32, 8192 // page_size, page_size, kv_dtype=kv_dtype
        )
        specs[f"gemma3-local-mixed-512-{kv_dtype}"] = _GEMMA3(
            _MIXED_ROWS, 512, 32, 8192 // page_size, page_size, kv_dtype=kv_dtype
        )
        specs[f"gemma3-local-decode-32-{kv_dtype}"] = _GEMMA3(
            ((1, 2000),) * 32, 32, 32, 8192 // page_size, page_size, kv_dtype=kv_dtype
        )
    for name, (heads, kv_heads, head_dim, window, cap) in {
        "smollm2": (9, 3, 64, None, None),
        "phi2-head-80": (32, 32, 80, None, None),
        "phi3-head-96": (32, 32, 96, None, None),
        "gemma2-soft-cap": (8, 4, 256, 4096, 50.0),
    }.items():
        specs[f"{name}-decode-32"] = attention_specs.Spec(
            heads,
            kv_heads,
            head_dim,
            ((1, 2000),) * 32,
            32,
            32,
            8192 // page_size,
            page_size,
            window,
            cap,
            dtype="bfloat16",
            kv_dtype="bfloat16",
        )

    def make(spec: attention_specs.Spec) -> Program:
        platform = device.KNOWN_DEVICES[target].platform
        q, kv, metadata = jax.eval_shape(
            partial(attention_specs.make_inputs, spec, platform=platform)
        )
        new_kv = jax.ShapeDtypeStruct(
            (spec.num_tokens, spec.num_kv_heads, 2, spec.head_dim), q.dtype
        )

        def step(q, new_kv, kv, metadata):
            kv = paged_attention.write(
                kv,
                new_kv,
                metadata.slot_mapping[0],
                platform=platform,
                implementation=implementation,
            )
            out = paged_attention.attend(
                q,
                kv,
                metadata,
                group=0,
                scale=spec.scale,
                window=spec.window,
                soft_cap=spec.soft_cap,
                platform=platform,
                implementation=implementation,
            )
            return out, kv

        return step, (q, new_kv, kv, metadata), (2,)

    return {name: partial(make, spec) for name, spec in specs.items()}


def matmul_programs(target: str, implementation: str) -> dict[str, Callable[[], Program]]:
    """Returns one layer's products of an 8B model, decode and prefill.

    Every format, but of those that only files have the ones that are least like another.
    """
    files = matmul_specs.FILE_FORMATS
    like_another = {*files.values()} - {files[name] for name in _UNLIKE_FORMATS}

    def make(spec: matmul_specs.Spec) -> Program:
        platform = device.KNOWN_DEVICES[target].platform
        inputs = matmul_specs.abstract_inputs(spec, platform)
        call = partial(quantized_matmul.matmul, platform=platform, implementation=implementation)
        return call, inputs, ()

    return {
        name: partial(make, spec)
        for name, spec in matmul_specs.LARGE_SPECS.items()
        if spec.num_tokens in (16, 512)
        and name.startswith("llama8b-up")
        and spec.fmt not in like_another
    }


def compile_program(target: str, program: Program, folder: Path) -> dict[str, Any]:
    """Compiles for a target; returns times, bytes, copies of donated arrays, and ptxas' reports."""
    function, inputs, donated = program
    sharding = SingleDeviceSharding(targets.devices(target)[0])
    inputs = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), inputs
    )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    begin = time.perf_counter()
    with device.assume(device.KNOWN_DEVICES[target]):
        compiled = jax.jit(function, donate_argnums=donated).lower(*inputs).compile()
    seconds = time.perf_counter() - begin
    memory = compiled.memory_analysis()
    large = [leaf for leaf in jax.tree.leaves(inputs) if leaf.size > _LARGE]
    report = {
        "compile_s": round(seconds, 2),
        "argument_bytes": memory.argument_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "copies": targets.copies(compiled.as_text(), large),
    }
    if target in targets.ARCHITECTURES:
        files = sorted(folder.rglob("*.ptx"))
        kernels = [k for f in files for k in targets.ptxas(f, targets.ARCHITECTURES[target])]
        report["kernels"] = [vars(kernel) for kernel in kernels]
    return report


if __name__ == "__main__":
    main()
