"""The reference against loops in plain numpy, the XLA implementation against the reference."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quantized_matmul_checks as checks
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import quantized_matmul
from kernels.quantized_matmul import FORMATS, LAYOUTS, QFormat, prepare, quantize
from kernels.quantized_matmul.format import CANONICAL, NF4, pack_nibbles, unpack_nibbles
from kernels.quantized_matmul.specs import SPECS, abstract_inputs, make_inputs

pytestmark = pytest.mark.usefixtures("quick_compilation")


def codes_by_hand(w) -> np.ndarray:
    """The codes as numbers, column by column, from the bytes of a layout with rows first."""
    num_rows, num_columns = w.shape
    stored = np.asarray(w.qvalue)
    if not w.is_4bit:
        return stored.astype(np.float64)
    codes = np.empty((num_rows, num_columns))
    for column in range(num_columns):
        chunk, place = divmod(column, w.layout.nibble_chunk)
        is_high, byte_of_chunk = divmod(place, w.layout.nibble_chunk // 2)
        byte = stored[:, chunk * (w.layout.nibble_chunk // 2) + byte_of_chunk].astype(int)
        codes[:, column] = byte // 16 if is_high else byte % 16
    return codes - 8 if w.code == "int4" else codes


def matmul_by_hand(x, w) -> np.ndarray:
    x, codes = np.asarray(x, np.float64), codes_by_hand(w)
    num_rows, num_columns = w.shape
    weight = np.empty((num_rows, num_columns))
    for column in range(num_columns):
        group = column // w.group_size
        scale = np.asarray(w.scale, np.float64)[:, group]
        code = codes[:, column]
        if w.codebook is not None:
            code = np.asarray(w.codebook, np.float64)[code.astype(int)]
        weight[:, column] = scale * code
        if w.offset is not None:
            weight[:, column] += np.asarray(w.offset, np.float64)[:, group]
    if w.perm is not None:
        x = x[:, np.asarray(w.perm)]
    if w.activations == "int8":
        largest = np.abs(x).max(1, keepdims=True)
        x = np.round(x / largest * 127) * largest / 127
    return np.stack([weight @ row for row in x])


@pytest.mark.parametrize("name", SPECS)
def test_the_reference_is_what_a_loop_computes(name):
    spec = dataclasses.replace(SPECS[name], dtype="float32", num_tokens=2)
    x, w = make_inputs(spec)
    result = checks.run(x, w, "cpu", "reference")
    np.testing.assert_allclose(result, matmul_by_hand(x, w), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SPECS)
def test_xla_matches_the_reference(name):
    # A layout a spec, in turn: layouts are held to each other below.
    platform = [*LAYOUTS][[*SPECS].index(name) % len(LAYOUTS)]
    checks.check_against_reference(SPECS[name], platform, "xla")
    checks.check_rounding(SPECS[name], platform, "xla")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("source", "target"), [("gpu", "tpu"), ("tpu", "gpu"), ("cpu", "tpu")])
def test_layouts_hold_the_same_weight(name, source, target):
    rng = np.random.default_rng(0)
    weight = jnp.asarray(rng.standard_normal((48, 256)), jnp.float32)
    w = quantize(weight, FORMATS[name])
    moved = prepare(prepare(w, source), target)
    assert moved.shape == (48, 256)
    assert moved.num_bytes == w.num_bytes
    back = prepare(moved, CANONICAL)
    np.testing.assert_array_equal(back.qvalue, w.qvalue)
    np.testing.assert_array_equal(back.scale, w.scale)
    np.testing.assert_array_equal(
        quantized_matmul.dequantize(moved), quantized_matmul.dequantize(w)
    )


@given(st.integers(1, 4), st.integers(1, 4), st.sampled_from([2, 16, 64]), st.randoms())
@settings(max_examples=8, deadline=None)  # each compiles
def test_nibbles_unpack_to_what_was_packed(rows, chunks, chunk, random):
    codes = np.array(
        [[random.randrange(16) for _ in range(chunks * chunk)] for _ in range(rows)], np.uint8
    )
    packed = pack_nibbles(jnp.asarray(codes), chunk)
    assert packed.shape == (rows, chunks * chunk // 2)
    np.testing.assert_array_equal(unpack_nibbles(packed, chunk), codes)
    # Byte j of a chunk: column j low, column j + chunk/2 high.
    np.testing.assert_array_equal(packed[:, 0], codes[:, 0] + 16 * codes[:, chunk // 2])


@pytest.mark.parametrize(
    ("name", "half_steps"),
    [("int8", 1 / 127), ("int4", 1 / 7), ("int4-g32", 1 / 7), ("uint4-g32", 2 / 15)],
)
def test_rounding_is_to_the_nearest_step(name, half_steps):
    weight = np.random.default_rng(1).uniform(-1, 1, (8, 256)).astype(np.float32)
    w = quantize(jnp.asarray(weight), FORMATS[name])
    error = np.abs(np.asarray(quantized_matmul.dequantize(w)) - weight)
    assert error.max() <= half_steps / 2 + 1e-6


def test_a_codebook_gives_the_nearest_of_its_values():
    weight = np.random.default_rng(2).uniform(-1, 1, (4, 64)).astype(np.float32)
    w = quantize(jnp.asarray(weight), FORMATS["nf4"])
    scale = np.abs(weight).max(1, keepdims=True)
    nearest = np.abs(weight[..., None] / scale[..., None] - np.array(NF4, np.float32)).argmin(-1)
    np.testing.assert_array_equal(unpack_nibbles(w.qvalue), nearest)


def test_a_group_of_zeros_stays_zero():
    for fmt in FORMATS.values():
        w = quantize(jnp.zeros((2, 256), jnp.float32), fmt)
        assert not np.asarray(quantized_matmul.dequantize(w)).any()


def test_bad_formats_and_shapes_are_refused_by_name():
    with pytest.raises(ValueError, match="group_size 48"):
        QFormat("int8", 48)
    with pytest.raises(ValueError, match="either an offset or a codebook"):
        QFormat("uint4", 32)
    with pytest.raises(ValueError, match="only int8 and uint4 codes have an offset, not int4"):
        QFormat("int4", 32, has_offset=True)
    with pytest.raises(ValueError, match="only uint4 codes have a codebook, not int8"):
        QFormat("int8", 32, codebook=NF4)
    with pytest.raises(ValueError, match="multiple of the group size"):
        quantize(jnp.zeros((2, 100), jnp.float32), FORMATS["int4-g32"])
    w = quantize(jnp.zeros((2, 96), jnp.float32), FORMATS["int4-g32"])
    with pytest.raises(ValueError, match="multiple of 64"):
        prepare(w, "gpu")
    with pytest.raises(ValueError, match="does not fit a weight"):
        quantized_matmul.matmul(jnp.zeros((1, 64)), w, platform="cpu")


@pytest.mark.parametrize(
    "name", ["int8-perm-decode-3", "int4-g32-decode-8", "uint4-g64-decode-5", "nf4-decode-8"]
)
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_abstract_inputs_are_the_shapes_of_the_real_ones(name, platform):
    real = make_inputs(SPECS[name], platform=platform)
    abstract = abstract_inputs(SPECS[name], platform)
    assert jax.tree.structure(real) == jax.tree.structure(abstract)
    for array, struct in zip(jax.tree.leaves(real), jax.tree.leaves(abstract), strict=True):
        assert (array.shape, array.dtype) == (struct.shape, struct.dtype)
