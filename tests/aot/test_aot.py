"""Kernels and whole steps, really compiled for chips that are not here.

What these prove: the compilers of TPUs and GPUs take every kernel; nothing copies the KV cache;
workspaces stay small; no kernel but those of SPILLS spills registers. What they cannot: numbers
and speed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))
import target as targets  # noqa: E402

pytestmark = [pytest.mark.aot, pytest.mark.slow]

MAX_TEMP_BYTES = 64 << 20
MAX_COMPILE_SECONDS = 60

KERNELS = [
    *[
        (t, op, "pallas_tpu")
        for t in targets.TOPOLOGIES
        for op in ("paged_attention", "quantized_matmul")
    ],
    *[
        (t, op, "pallas_triton")
        for t in targets.ARCHITECTURES
        for op in ("paged_attention", "quantized_matmul")
    ],
    *[("h200", op, "pallas_mosaic_gpu") for op in ("paged_attention", "quantized_matmul")],
]

SPILLS = {
    ("pallas_mosaic_gpu", "h200", "gemma3-local-mixed-512-bfloat16"): 84,
    ("pallas_mosaic_gpu", "h200", "gemma3-local-mixed-512-int8"): 164,
    ("pallas_triton", "a100", "gemma3-local-mixed-512-int8"): 32,
}
"""Bytes that a tile of queries with head_dim 256 spills: its sums, 64 x 256 float32 or as many a
thread, take 128 registers of at most 255; scores, and int8 values being converted, the rest."""

STEPS = [
    *[
        ("v6e", scheme, kind)
        for scheme in ("bf16", "int8", "int4")
        for kind in ("decode", "ragged")
    ],
    ("v5e", "int8", "decode"),
    ("v5e", "int4", "decode"),
    ("tpu7x", "int8", "decode"),
    ("v5e", "int8", "decode", "--tensor-parallel", "4"),
    ("v6e", "int8", "decode", "--tensor-parallel", "4"),
    *[
        ("h200", scheme, kind)
        for scheme in ("bf16", "int8", "int4")
        for kind in ("decode", "ragged")
    ],
    ("a100", "int4", "decode"),
    ("rtx4090", "int4", "decode"),
    ("v6e", "int4", "decode", "--layers", "32"),
    ("h200", "bf16", "decode", "--layers", "32"),
]

OUR_CALLS = {"tpu_custom_call", "mosaic_gpu_v2", "__gpu$xla.gpu.triton"}
"""What Pallas kernels are called in a program."""


def run(script: str, *args: str) -> list[dict]:
    reason = targets.missing(args[0])
    if reason is not None:
        pytest.skip(reason)
    process = subprocess.run(
        [sys.executable, FOLDER / script, *args],
        env=os.environ | {"PYTHONPATH": str(FOLDER.parents[1])},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    lines = process.stdout.splitlines()
    print(process.stdout)
    return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.mark.parametrize(("target", "operation", "implementation"), KERNELS)
def test_kernels_compile(target, operation, implementation):
    reports = run("compile_kernels.py", target, operation, implementation)
    assert reports
    for report in reports:
        assert report["copies"] == [], report
        assert report["temp_bytes"] < MAX_TEMP_BYTES, report
        allowed = SPILLS.get((implementation, target, report["program"]), 0)
        for kernel in report.get("kernels", []):
            assert kernel["spill_bytes"] <= allowed, (report["program"], kernel)


@pytest.mark.parametrize("arguments", STEPS, ids=" ".join)
def test_steps_compile(arguments):
    [report] = run("compile_step.py", *arguments)
    assert OUR_CALLS & {*report["kernels"]}, report
    assert report["copies"] == [], report
    assert report["temp_bytes"] < MAX_TEMP_BYTES, report
    if "32" in arguments:
        assert report["compile_s"] < MAX_COMPILE_SECONDS, report
