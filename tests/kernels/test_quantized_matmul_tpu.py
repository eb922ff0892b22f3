"""The TPU kernel of quantized matmul: interpreted against the reference, and lowered for TPUs."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quantized_matmul_checks as checks
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from kernels import device, tuning
from kernels.quantized_matmul import (
    FORMATS,
    QFormat,
    dequantize,
    matmul,
    pallas_tpu,
    prepare,
    quantize,
)
from kernels.quantized_matmul.format import NF4
from kernels.quantized_matmul.pallas_tpu import Config
from kernels.quantized_matmul.specs import LARGE_SPECS, SPECS, Spec, make_inputs
from kernels.quantized_matmul.tpu_unpack import as_loadable, to_float32

NAME = "pallas_tpu"
# 4-bit codes are unpacked in another way on v5e, and only in bfloat16.
BY_WORDS = ["int4-decode-64", "int4-row-decode-4", "uint4-g64-decode-5"]


pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize("name", SPECS)
def test_it_matches_the_reference(name):
    checks.check_against_reference(SPECS[name], "tpu", NAME, on="v6e", interpret=True)


@pytest.mark.parametrize("name", ["int8-decode-16", "fp8-g128-prefill-64"])
def test_it_rounds_products_only(name):
    checks.check_rounding(SPECS[name], "tpu", NAME, on="v6e", interpret=True)


@pytest.mark.parametrize("name", BY_WORDS)
def test_codes_unpacked_by_words_are_the_same(name):
    checks.check_rounding(SPECS[name], "tpu", NAME, on="v5e", interpret=True)


@pytest.mark.parametrize("fmt", [FORMATS["int4"], FORMATS["uint4-g32"]], ids=["int4", "uint4"])
def test_words_give_every_row_and_column_its_own_code(fmt):
    # x is the identity: the result is the weight, and an error in the order of rows is large.
    weight = np.random.default_rng(0).standard_normal((192, 128)).astype(np.float32)
    w = prepare(quantize(jnp.asarray(weight), fmt), "tpu")
    x = jnp.eye(128, dtype=jnp.bfloat16)
    with tuning.force(Config(block_out=128, block_tokens=128)):
        result = checks.run(x, w, "tpu", NAME, "v5e", interpret=True)
    np.testing.assert_allclose(result.T, dequantize(w), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["int8-g128-decode-8", "int4-prefill-150"])
def test_rows_are_independent(name):
    checks.check_rows_are_independent(SPECS[name], "tpu", NAME, on="v6e", interpret=True)


@pytest.mark.parametrize(
    "spec",
    [  # neither a multiple of a register's, nor of a block's size
        Spec(5, 200, 96, QFormat("uint4", has_offset=True)),
        Spec(300, 40, 96, QFormat("uint4", has_offset=True)),
        Spec(70, 36, 48, QFormat("int4", 16)),
        Spec(3, 36, 144, QFormat("uint4", 16, codebook=NF4, activations="int8")),
        Spec(40, 200, 192, QFormat("uint4", 64, has_offset=True, activations="int8")),
        Spec(300, 130, 256, QFormat("fp8", 128, activations="int8")),
    ],
    ids=["one-group", "one-group-dequantized", "g16", "codebook", "g64-w4a8", "fp8-a8"],
)
def test_odd_shapes_match_the_reference(spec):
    checks.check_against_reference(spec, "tpu", NAME, on="v6e", interpret=True)


@pytest.mark.parametrize(
    ("fmt", "dequantize"), [("int8-g128", False), ("uint4-g32", True), ("nf4", True)]
)
def test_every_config_computes_the_same(fmt, dequantize):
    # 3 blocks of rows and 3 of tokens, both with a ragged last one.
    spec = Spec(80, 320, 192 if fmt != "int8-g128" else 256, FORMATS[fmt])
    x, w = make_inputs(spec, platform="tpu")
    wanted = checks.run(x, prepare(w, "cpu"), "cpu", "reference")
    config = Config(block_out=128, block_tokens=32, sub_out=128, dequantize=dequantize)
    with tuning.force(config):
        result = checks.run(x, w, "tpu", NAME, "v6e", interpret=True)
    np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["w8a8-decode-16", "uint4-g64-decode-5", "fp8-g128-prefill-64"])
def test_no_races(name):
    pltpu.reset_tpu_interpret_mode_state()
    mode = pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager")
    with tuning.force(Config(block_out=128, block_tokens=32, dequantize="prefill" in name)):
        checks.check_against_reference(SPECS[name], "tpu", NAME, on="v6e", interpret=mode)
    assert not interpret_pallas_call.races.races_found


def test_float16_bits_are_read_exactly():
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = bits.view(np.float16)
    values = values[np.isfinite(values)]
    read = to_float32(as_loadable(jnp.asarray(values)))
    np.testing.assert_array_equal(np.asarray(read), values.astype(np.float32))


def shapes_of(spec: Spec):
    return jax.eval_shape(lambda: prepared_zeros(spec))


def prepared_zeros(spec: Spec):
    w = quantize(jnp.zeros((spec.out_features, spec.in_features)), spec.fmt)
    x = jnp.zeros((spec.num_tokens, spec.in_features), spec.dtype)
    return x, prepare(w, "tpu")


def lower(spec: Spec, chip: str):
    with device.assume(device.KNOWN_DEVICES[chip]):
        traced = jax.jit(lambda x, w: matmul(x, w, platform="tpu", implementation=NAME)).trace(
            *shapes_of(spec)
        )
        return traced.lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize("name", checks.LOWERED)
def test_it_lowers(name):
    assert "tpu_custom_call" in lower({**SPECS, **LARGE_SPECS}[name], "v6e")


@pytest.mark.parametrize("name", [*BY_WORDS, "llama8b-up-int4-16", "llama8b-up-uint4-g32-64"])
def test_it_lowers_for_v5e(name):
    spec = dataclasses.replace({**SPECS, **LARGE_SPECS}[name], dtype="bfloat16")
    assert "tpu_custom_call" in lower(spec, "v5e")


def test_heuristic_blocks_fit_in_the_smallest_vmem():
    # 64 MB on tpu7x, of which XLA keeps some.
    for spec in (*LARGE_SPECS.values(), Spec(4096, 8192, 28672, FORMATS["int8"], "bfloat16")):
        x, w = shapes_of(spec)
        for chip in ("TPU v5 lite", "TPU v6 lite", "unknown"):
            config = Config.for_call(spec.num_tokens, w, x.dtype, chip)
            used = config.block_out * spec.in_features * 2
            used += 2 * x.dtype.itemsize * config.block_tokens * spec.in_features
            assert used < 40 << 20
            assert config.block_out % 128 == 0
            assert config.block_tokens % 32 == 0 or config.block_tokens == spec.num_tokens


def test_it_says_what_it_refuses():
    x, w = make_inputs(SPECS["int4-decode-1"], platform="cpu")
    with pytest.raises(NotImplementedError, match=r'prepare\(w, "tpu"\)'):
        matmul(x, w, platform="tpu", implementation=NAME)
    with pytest.raises(NotImplementedError, match="float16"):
        pallas_tpu.supports(x.astype(jnp.float16), prepare(w, "tpu"))
