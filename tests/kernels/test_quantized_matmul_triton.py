"""The Triton kernel of quantized matmul: interpreted against the reference, lowered for CUDA."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quantized_matmul_checks as checks
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from sweep import IN_SWEEP

from kernels import device, tuning
from kernels.quantized_matmul import FORMATS, QFormat, QTensor, choose, dequantize, matmul, prepare
from kernels.quantized_matmul.format import NF4
from kernels.quantized_matmul.pallas_triton import Config
from kernels.quantized_matmul.specs import LARGE_SPECS, SPECS, Spec, abstract_inputs, make_inputs

NAME = "pallas_triton"
CHIPS = {name: chip for name, chip in device.KNOWN_DEVICES.items() if chip.platform == "gpu"}
# What the lowering itself looks at, where it looks for more than the platform.
MESH = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))

pytestmark = [
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
    pytest.mark.usefixtures("quick_compilation"),
]


@pytest.mark.parametrize("name", SPECS)
def test_it_matches_the_reference(name):
    checks.check_against_reference(SPECS[name], "gpu", NAME, on="a100", interpret=True)


@pytest.mark.parametrize(
    "name",
    [
        "int8-decode-16",
        pytest.param("fp8-decode-8", marks=IN_SWEEP),
        "int4-decode-64",
        pytest.param("int4-g16-decode-2", marks=IN_SWEEP),
        pytest.param("uint4-g32-decode-8", marks=IN_SWEEP),
        "nf4-decode-8",
    ],
)
def test_it_rounds_products_only(name):
    checks.check_rounding(SPECS[name], "gpu", NAME, on="a100", interpret=True)


@pytest.mark.parametrize("name", ["w8a8-decode-16", "uint4-g32-prefill-70"])
def test_rows_are_independent(name):
    checks.check_rows_are_independent(SPECS[name], "gpu", NAME, on="a100", interpret=True)


@pytest.mark.parametrize(
    "spec",
    [
        Spec(3, 36, 100, QFormat("int8")),
        Spec(20, 72, 144, QFormat("fp8", 16)),
        Spec(5, 200, 192, QFormat("uint4", has_offset=True)),
        Spec(70, 40, 192, QFormat("int4", 16)),
        Spec(3, 36, 192, QFormat("uint4", 16, codebook=NF4, activations="int8")),
        Spec(9, 100, 320, QFormat("uint4", 64, has_offset=True, activations="int8")),
        Spec(33, 130, 256, QFormat("fp8", 128, activations="int8")),
        Spec(9, 96, 256, QFormat("int8", 16, activations="int8")),
    ],
    ids=lambda spec: f"{spec.fmt.code}-{spec.num_tokens}x{spec.in_features}",
)
def test_odd_shapes_match_the_reference(spec):
    checks.check_against_reference(spec, "gpu", NAME, on="a100", interpret=True)


@pytest.mark.parametrize("scale_sums", [False, True])
@pytest.mark.parametrize("fmt", ["int8-g128", "int4", "uint4-g32", "nf4"])
def test_every_config_computes_the_same(fmt, scale_sums):
    # Ragged blocks of rows and of tokens; I is 3 steps, which 2 parts share unevenly.
    spec = Spec(40, 96, 384, FORMATS[fmt])
    x, w = make_inputs(spec, platform="gpu")
    wanted = checks.run(x, prepare(w, "cpu"), "cpu", "reference")
    with tuning.force(Config(32, 64, 128, 2, scale_sums)):
        result = checks.run(x, w, "gpu", NAME, "a100", interpret=True)
    np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(("dtype", "scale_sums"), [("bfloat16", True), ("float16", False)])
@pytest.mark.parametrize(
    ("code", "has_offset"),
    [("int8", False), ("int8", True), ("fp8", False), ("int4", False), ("uint4", True)],
)
def test_every_code_is_decoded_exactly(code, has_offset, dtype, scale_sums):
    # One row of x per column: the result is the weight, whose numbers either dtype holds.
    stored = jnp.asarray(np.arange(16 * 128, dtype=np.int32).reshape(16, 128) * 77 % 256, jnp.uint8)
    stored = stored.view({"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}.get(code, jnp.uint8))
    if code == "fp8":
        stored = jnp.where(jnp.isnan(stored), jnp.zeros_like(stored), stored)
    columns = 256 if code.endswith("int4") else 128
    scale = jnp.full((16, columns // 32), 0.5, jnp.float32)
    offset = -4 * scale if has_offset else None
    w = prepare(QTensor(stored, scale, offset, code=code, group_size=32), "gpu")
    with tuning.force(Config(64, 16, 128, 1, scale_sums)):
        result = checks.run(jnp.eye(columns, dtype=dtype), w, "gpu", NAME, "a100", interpret=True)
    np.testing.assert_array_equal(result.T, dequantize(w))


@pytest.mark.parametrize("name", checks.LOWERED)
def test_heuristics_are_legal(name):
    spec = SPECS.get(name) or LARGE_SPECS[name]
    x, w = shapes_of(spec)
    for chip in CHIPS.values():
        config = Config.for_call(x, w, chip)
        sizes = config.block_t, config.block_o, config.block_i, config.split_i, config.num_warps
        assert all(size > 0 and size & (size - 1) == 0 for size in sizes)
        # Every part of I has columns.
        steps = -(-spec.in_features // config.block_i)
        assert (config.split_i - 1) * -(-steps // config.split_i) < steps


def test_few_rows_are_split_over_more_blocks():
    few, many = (
        shapes_of(Spec(1, rows, 8192, FORMATS["int4"], "bfloat16")) for rows in (64, 1 << 17)
    )
    assert Config.for_call(*few, CHIPS["h200"]).split_i > 4
    assert Config.for_call(*many, CHIPS["h200"]).split_i <= 2


def test_what_it_cannot_do_is_refused_with_a_reason():
    x, w = make_inputs(SPECS["int4-decode-1"], platform="gpu")
    with (
        device.assume(device.Device("gpu", "Tesla T4", 40, (7, 5))),
        pytest.raises(NotImplementedError, match=r"compute capability \(7, 5\)"),
    ):
        choose(x, w, platform="gpu", implementation=NAME)
    with pytest.raises(NotImplementedError, match="prepare"):
        choose(x, prepare(w, "cpu"), platform="gpu", implementation=NAME)
    with pytest.raises(NotImplementedError, match="int32"):
        choose(x.astype(jnp.int32), w, platform="gpu", implementation=NAME)


def shapes_of(spec: Spec):
    return abstract_inputs(spec, "gpu")


@pytest.mark.parametrize("name", checks.LOWERED)
def test_it_lowers_for_cuda(name):
    spec = SPECS.get(name) or LARGE_SPECS[name]
    call = partial(matmul, platform="gpu", implementation=NAME)
    with use_abstract_mesh(MESH), device.assume(CHIPS["a100"]):
        traced = jax.jit(call).trace(*shapes_of(spec))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("xla.gpu.triton") == 1
