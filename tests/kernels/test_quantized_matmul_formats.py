"""Every format, those that checkpoints hold included, by every implementation.

Codes are any of the format's, not those that rounding gives: -128 for one; scales may be negative.
"""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quantized_matmul_checks as checks
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from sweep import IN_SWEEP

from kernels import device, quantized_matmul
from kernels.quantized_matmul import FORMATS, LAYOUTS, QFormat, QTensor, cpu, dequantize, prepare
from kernels.quantized_matmul.format import take_rows
from kernels.quantized_matmul.specs import FILE_FORMATS

ALL_FORMATS = {**FORMATS, **FILE_FORMATS}
# Those that share least with what the specs of each implementation's own tests have.
UNLIKE = ("int8-offset-g32-f16", "uint4-g16", "mxfp4")
NUM_ROWS, NUM_COLUMNS, NUM_TOKENS = 128, 256, 3
# What the lowering of Triton itself looks at, where it looks for more than the platform.
MESH = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice("NVIDIA A100", 108, "gpu"))

RUN = {
    "xla": ("gpu", None, None),
    "cpu": ("cpu", None, None),
    "pallas_tpu": ("tpu", "v6e", True),
    "pallas_triton": ("gpu", "a100", True),
    "pallas_mosaic_gpu": ("gpu", "h200", "mosaic"),
}
"""Platform, assumed device and interpreter of each implementation."""

LOWER = {
    "pallas_tpu": ("tpu", "v5e", "tpu_custom_call"),
    "pallas_triton": ("gpu", "a100", "xla.gpu.triton"),
    "pallas_mosaic_gpu": ("gpu", "h200", "mosaic_gpu_v2"),
}
"""Platform, device and what a kernel is called in the program."""

pytestmark = [
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
    pytest.mark.usefixtures("quick_compilation"),
]


@cache
def weight_of(name: str) -> QTensor:
    """A weight in the layout of checkpoints: numpy arrays, any codes, columns permuted."""
    fmt = ALL_FORMATS[name]
    rng = np.random.default_rng(0)
    is_4bit = fmt.code.endswith("int4")
    stored = rng.integers(0, 256, (NUM_ROWS, NUM_COLUMNS // (2 if is_4bit else 1)), np.uint8)
    if fmt.code == "fp8":
        stored = np.where(stored & 0x7F == 0x7F, 0, stored).astype(np.uint8)  # not NaN
    stored = stored.view({"int8": np.int8, "fp8": jnp.float8_e4m3fn}.get(fmt.code, np.uint8))
    largest = {"int8": 128, "fp8": 448, "int4": 8, "uint4": 15}[fmt.code]
    groups = (NUM_ROWS, NUM_COLUMNS // (fmt.group_size or NUM_COLUMNS))
    scale, offset = rng.uniform(-1, 1, (2, *groups)) / [[[largest]], [[2]]]
    return QTensor(
        stored,
        scale.astype(fmt.scale_dtype),
        offset.astype(fmt.scale_dtype) if fmt.has_offset else None,
        None if fmt.codebook is None else np.array(fmt.codebook, np.float32),
        rng.permutation(NUM_COLUMNS).astype(np.int32),
        code=fmt.code,
        group_size=fmt.group_size or NUM_COLUMNS,
        activations=fmt.activations,
        layout=LAYOUTS["cpu"],
    )


@cache
def tokens_of() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((NUM_TOKENS, NUM_COLUMNS), np.float32)


def by_hand(w: QTensor) -> np.ndarray:
    """The matrix in float64, columns in logical order, from the bytes of `LAYOUTS["cpu"]`."""
    codes = np.asarray(w.qvalue)
    if w.is_4bit:
        halves = codes.reshape(NUM_ROWS, -1, 16)
        codes = np.concatenate([halves % 16, halves // 16], axis=2).reshape(NUM_ROWS, -1)
    numbers = codes.astype(np.float64) - (8 if w.code == "int4" else 0)
    if w.codebook is not None:
        numbers = w.codebook.astype(np.float64)[codes]
    matrix = numbers * w.scale.astype(np.float64).repeat(w.group_size, 1)
    if w.offset is not None:
        matrix += w.offset.astype(np.float64).repeat(w.group_size, 1)
    return matrix[:, np.argsort(w.perm)]


def wanted(name: str) -> np.ndarray:
    x, w = tokens_of().astype(np.float64), weight_of(name)
    if w.activations == "int8":
        unit = np.abs(x).max(1, keepdims=True) / 127
        x = np.round(x / unit) * unit
    return x @ by_hand(w).T


@pytest.mark.parametrize("name", ALL_FORMATS)
def test_the_reference_and_rows_taken_are_what_the_definition_says(name):
    w = weight_of(name)
    result = checks.run(tokens_of(), w, "cpu", "reference")
    np.testing.assert_allclose(result, wanted(name), rtol=1e-5, atol=1e-5)

    @jax.jit
    def taken(w, rows):
        tables = [prepare(w, layout) for layout in LAYOUTS]
        return dequantize(w), *(take_rows(table, rows, jnp.bfloat16) for table in tables)

    rows = np.array([5, 0, 127, 5, -3, 900], np.int32)
    matrix, *found = taken(w, rows)
    logical = np.asarray(matrix)[:, np.argsort(w.perm)]
    np.testing.assert_allclose(logical, by_hand(w), rtol=1e-6, atol=1e-6)
    for of_layout in found:
        np.testing.assert_array_equal(of_layout, logical[rows.clip(0, 127)].astype(jnp.bfloat16))


def cases(implementations, always):
    """Every format and implementation, in the sweep but for `always`."""
    return [
        pytest.param(implementation, name, marks=() if always(implementation, name) else IN_SWEEP)
        for implementation in implementations
        for name in ALL_FORMATS
    ]


@pytest.mark.parametrize(
    ("implementation", "name"),
    cases(RUN, lambda implementation, name: implementation in ("xla", "cpu") or name in UNLIKE),
)
def test_every_implementation_computes_it(implementation, name, request):
    if implementation == "cpu" and (reason := cpu.unavailable()):
        pytest.skip(reason)
    platform, on, interpret = RUN[implementation]
    x, tolerance = tokens_of(), 2e-5
    if implementation == "pallas_mosaic_gpu":
        interpret = request.getfixturevalue("mosaic_gpu_interpreter")()
        if ALL_FORMATS[name].codebook is not None:
            x, tolerance = x.astype(jnp.bfloat16), 2**-6  # all that it takes
        if ALL_FORMATS[name].code == "fp8":
            # Its subnormals pass through bfloat16's, which XLA:CPU, not a GPU, takes for zeros.
            tolerance = 5e-4
    w = prepare(weight_of(name), platform)
    result = checks.run(jnp.asarray(x), w, platform, implementation, on, interpret)
    np.testing.assert_allclose(result, wanted(name), rtol=1e-5, atol=tolerance)


@pytest.mark.parametrize(
    ("implementation", "name"), cases(LOWER, lambda implementation, name: name in UNLIKE)
)
def test_every_kernel_lowers(implementation, name):
    platform, on, call_name = LOWER[implementation]
    w = jax.eval_shape(partial(prepare, weight_of(name), platform))
    x = jax.ShapeDtypeStruct((NUM_TOKENS, NUM_COLUMNS), jnp.bfloat16)
    call = partial(quantized_matmul.matmul, platform=platform, implementation=implementation)
    with use_abstract_mesh(MESH), device.assume(device.KNOWN_DEVICES[on]):
        traced = jax.jit(call).trace(x, w)
        text = traced.lower(lowering_platforms=("tpu" if platform == "tpu" else "cuda",)).as_text()
    assert call_name in text


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_made_alike_inside_jit_and_of_numpy_arrays(layout):
    w = weight_of("uint4-g32-f16")
    eager = prepare(w, layout)
    compiled = jax.jit(partial(prepare, layout=layout))(w)
    assert jax.tree.structure(eager) == jax.tree.structure(compiled)
    for one, other in zip(jax.tree.leaves(eager), jax.tree.leaves(compiled), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_4_bit_codes_whose_width_fits_no_chunk_are_refused():
    w = quantized_matmul.quantize(jnp.zeros((4, 48), jnp.float32), QFormat("int4", 16))
    with pytest.raises(ValueError, match=r"\(4, 48\) of 4-bit codes.*multiple of 32"):
        prepare(w, "cpu")
