"""How codes are chosen: ggml's bits, half-quadratic zero points, and each row by itself."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.quantized_matmul import FORMATS, QFormat, dequantize, prepare, quantize

ORACLE = Path(__file__).with_name("rounding_oracle.npz")
GGML = {
    "Q8_0": QFormat("int8", 32, rounding="ggml", scale_dtype="float16"),
    "Q4_0": QFormat("int4", 32, rounding="ggml", scale_dtype="float16"),
}
HQQ8 = QFormat("int8", 64, has_offset=True, rounding="hqq")
HQQ4 = QFormat("uint4", 64, has_offset=True, rounding="hqq", scale_dtype="float16")
HQQ = {"HQQ8": HQQ8, "HQQ4": HQQ4}

on_cpu = jax.jit(lambda weight, fmt: prepare(quantize(weight, fmt), "cpu"), static_argnums=1)


def ggml_blocks(weight, fmt):
    """What a GGUF file would hold: a scale, then 32 codes, block after block."""
    w = on_cpu(weight, fmt)
    scale = np.asarray(w.scale).reshape(-1, 1).view(np.uint8)
    codes = np.asarray(w.qvalue).view(np.uint8).reshape(len(scale), -1)
    return np.concatenate([scale, codes], axis=1).reshape(len(weight), -1)


@pytest.mark.parametrize("name", GGML)
def test_the_bits_of_ggml(name):
    oracle = np.load(ORACLE)
    np.testing.assert_array_equal(ggml_blocks(oracle["weight"], GGML[name]), oracle[name])


@pytest.mark.oracle
@pytest.mark.parametrize("name", GGML)
@pytest.mark.parametrize("size", [1.0, 0.02, 1e-4])
def test_the_bits_of_gguf_py(name, size):
    """Enough weights that a division or a sum rounded in another way would show."""
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(1)
    weight = rng.standard_normal((1024, 2048)).astype(np.float32) * np.float32(size)
    expected = gguf.quantize(weight, gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(ggml_blocks(weight, GGML[name]), expected)


def heavy_tails():
    rng = np.random.default_rng(7)
    return (rng.standard_t(2.5, (64, 256)) * 0.02).astype(np.float32)


def errors(weight, fmt, importance):
    """The mean absolute error, and the mean square weighted by what each column is fed."""
    difference = np.asarray(dequantize(on_cpu(weight, fmt))) - weight
    return np.abs(difference).mean(), (difference**2 * importance).mean()


@pytest.mark.parametrize("name", HQQ)
def test_half_quadratic_beats_the_range(name):
    weight = heavy_tails()
    importance = np.random.default_rng(8).gamma(1.0, size=weight.shape[1])
    found = errors(weight, HQQ[name], importance)
    symmetric = QFormat("int8" if name == "HQQ8" else "int4", 64)
    with_offset = dataclasses.replace(HQQ[name], rounding="absmax")
    for plain, gain in ((symmetric, 1.1), (with_offset, 1.02)):
        for ours, theirs in zip(found, errors(weight, plain, importance), strict=True):
            assert ours * gain < theirs


@pytest.mark.parametrize("name", HQQ)
def test_equal_and_two_valued_groups_are_exact(name):
    """Of a group of one value the offset is all there is, in 16 bits where scales are."""
    weight = np.zeros((64, 256), np.float32)
    weight[1] = 0.375
    weight[2, ::3] = -0.5
    weight[3] = np.where(np.arange(256) % 2, 1.5, -1.5)
    found = np.asarray(dequantize(on_cpu(weight, HQQ[name])))
    np.testing.assert_allclose(found, weight, atol=1e-3 if name == "HQQ4" else 1e-6)
    np.testing.assert_array_equal(found[:2], weight[:2])


@pytest.mark.parametrize("fmt", [HQQ4, FORMATS["int4"]], ids=["HQQ4", "int4"])
def test_a_row_does_not_depend_on_the_others(fmt):
    """What is quantized in pieces is what is quantized whole."""
    weight = heavy_tails()
    whole = jax.tree.map(np.asarray, on_cpu(weight, fmt))
    part = jax.tree.map(np.asarray, on_cpu(weight[5:14], fmt))
    for name in ("qvalue", "scale", "offset"):
        if getattr(whole, name) is not None:
            np.testing.assert_array_equal(getattr(whole, name)[5:14], getattr(part, name))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"code": "uint4", "has_offset": True, "rounding": "ggml"}, "without offset"),
        ({"code": "fp8", "rounding": "ggml"}, "int8 and int4"),
        ({"code": "int8", "rounding": "hqq"}, "has_offset"),
    ],
)
def test_roundings_that_do_not_go_with_a_code(change, words):
    with pytest.raises(ValueError, match=words):
        QFormat(group_size=32, **change)


def test_the_formats_own_scale_dtype_may_be_overridden():
    weight = jax.ShapeDtypeStruct((2, 64), jnp.float32)
    for asked, given in ((None, jnp.float16), (jnp.float32, jnp.float32)):
        w = jax.eval_shape(lambda weight, asked=asked: quantize(weight, HQQ4, asked), weight)
        assert w.scale.dtype == w.offset.dtype == given
