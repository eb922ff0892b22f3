"""Blocks taken apart and dequantized give the same bits as gguf-py's reading of them."""

from __future__ import annotations

import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoint.builders import GgufBuilder, assert_same_format

from jaxinfer.checkpoint.gguf import GgufFile
from jaxinfer.checkpoint.gguf_blocks import (
    CHUNK_WEIGHTS,
    GGML_TYPES,
    UNSUPPORTED_TYPE_NAMES,
    abstract_blocks,
    decode_blocks,
)
from jaxinfer.quantized_array import QuantizedArray

ORACLE = Path(__file__).with_name("oracle.npz")
QUANTIZED = {kind.name: (number, kind) for number, kind in GGML_TYPES.items() if kind.format}
BECOMES = {  # code, group size, scale, whether with offsets
    "Q4_0": ("int4", 32, np.float16, False),
    "Q4_1": ("uint4", 32, np.float16, True),
    "Q5_0": ("int8", 32, np.float16, False),
    "Q5_1": ("int8", 32, np.float16, True),
    "Q8_0": ("int8", 32, np.float16, False),
    "Q2_K": ("uint4", 16, np.float32, True),
    "Q3_K": ("int4", 16, np.float32, False),
    "Q4_K": ("uint4", 32, np.float32, True),
    "Q5_K": ("int8", 32, np.float32, True),
    "Q6_K": ("int8", 16, np.float32, False),
    "MXFP4": ("uint4", 32, ml_dtypes.bfloat16, False),
}


def bits(array):
    return np.ascontiguousarray(array, np.float32).reshape(-1).view(np.uint32)


def assert_same_bits(found, expected, message=""):
    """Equal bit for bit, but for what a NaN holds."""
    is_nan = np.isnan(expected).reshape(-1)
    np.testing.assert_array_equal(np.isnan(found).reshape(-1), is_nan, err_msg=message)
    np.testing.assert_array_equal(bits(found)[~is_nan], bits(expected)[~is_nan], err_msg=message)


@pytest.mark.parametrize("name", QUANTIZED)
def test_same_bits_as_the_oracle(name):
    oracle = np.load(ORACLE)
    found = decode_blocks(oracle[f"{name}_blocks"], QUANTIZED[name][1], 4).dequantize()
    expected = oracle[f"{name}_weights"]
    assert found.shape == (4, expected.size // 4)
    np.testing.assert_array_equal(bits(found), bits(expected))


@pytest.mark.parametrize("name", QUANTIZED)
def test_fields(name):
    kind = QUANTIZED[name][1]
    found = decode_blocks(np.load(ORACLE)[f"{name}_blocks"], kind, 4)
    code, group_size, scale_dtype, has_offset = BECOMES[name]
    assert (found.code, found.group_size, found.perm) == (code, group_size, None)
    assert found.scale.dtype == scale_dtype
    assert (found.offset is not None) == has_offset
    assert (found.codebook is not None) == (name == "MXFP4")
    assert found.scale.shape == (4, found.shape[1] // group_size)
    assert found.qvalue.dtype == (np.int8 if code == "int8" else np.uint8)
    least = -16 if found.offset is None else 0
    fits = code == "int8" and least <= found.qvalue.min() and found.qvalue.max() < least + 32
    assert found.fits_five_bits == (name in ("Q5_0", "Q5_1", "Q5_K"))
    assert fits or not found.fits_five_bits
    assert_same_format(abstract_blocks(found.shape, kind), found)
    # XLA on CPU adopts aligned arrays without a copy.
    assert (found.qvalue.ctypes.data % 64, found.scale.ctypes.data % 64) == (0, 0)


@pytest.mark.parametrize("name", QUANTIZED)
def test_chunks_do_not_show(name):
    """More blocks than one chunk, the last chunk partial: the same as block by block."""
    kind = QUANTIZED[name][1]
    blocks = np.load(ORACLE)[f"{name}_blocks"]
    repeats = CHUNK_WEIGHTS // kind.block_size // len(blocks) + 2
    found = decode_blocks(np.tile(blocks, (repeats, 1)), kind, repeats)
    alone = decode_blocks(blocks, kind, 1)
    for field in ("qvalue", "scale", "offset"):
        if getattr(alone, field) is not None:
            rows = getattr(found, field)
            assert len(rows) == repeats
            assert (rows.view(np.uint8) == getattr(alone, field).view(np.uint8)).all(), field
    assert (bits(found.dequantize()).reshape(repeats, -1) == bits(alone.dequantize())).all()


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("half", [0x7C00, 0xFC00, 0x7E00, 0x7D01])
def test_scales_that_are_no_numbers_pass_quietly(name, half):
    """Infinite, NaN and signalling NaN scales: no warning, and no number comes of them."""
    kind = QUANTIZED[name][1]
    blocks = np.full((2, kind.block_bytes // 2 + 1), half, "<u2").view(np.uint8)
    found = decode_blocks(blocks[:, : kind.block_bytes].copy(), kind, 2)
    weights = found.dequantize()
    if found.scale.dtype != ml_dtypes.bfloat16:  # e8m0 has none
        assert not np.isfinite(weights).all()


def test_mxfp4_scales_from_the_smallest_to_the_largest():
    exponents = np.array([0, 1, 2, 127, 128, 254, 255], np.uint8)
    blocks = np.full((len(exponents), 17), 0x21, np.uint8)  # codes 1 and 2: 0.5 and 1
    blocks[:, 0] = exponents
    found = decode_blocks(blocks, GGML_TYPES[39], len(exponents))
    halves = np.array([math.ldexp(1.0, int(e) - 128) for e in exponents], np.float32)
    np.testing.assert_array_equal(bits(found.scale.astype(np.float32)), bits(halves))
    weights = found.dequantize()
    np.testing.assert_array_equal(bits(weights[:, 0]), bits(halves))
    with np.errstate(over="ignore"):  # 2**128, as in ggml
        np.testing.assert_array_equal(bits(weights[:, 16]), bits(halves * 2))


@pytest.mark.parametrize("number", [n for n, kind in GGML_TYPES.items() if kind.format])
def test_only_matrices_stay_quantized(number, tmp_path):
    """Vectors and stacks of matrices come as floats, the same as the matrix of their rows."""
    kind = GGML_TYPES[number]
    width, name = 2 * kind.block_size, f"{kind.name}_blocks"
    data = np.load(ORACLE)[name][:12].tobytes()
    builder = GgufBuilder().raw_tensor("matrix", (width, 6), number, data)
    builder.raw_tensor("vector", (6 * width,), number, data)
    builder.raw_tensor("stack", (width, 3, 2), number, data)
    file = GgufFile(builder.write(tmp_path / "model.gguf"))
    read = {key: file.read(tensor) for key, tensor in file.tensors.items()}
    matrix = read["matrix"]
    assert isinstance(matrix, QuantizedArray)
    assert_same_format(file.tensors["matrix"].codes, matrix)
    for key, shape in {"vector": (6 * width,), "stack": (2, 3, width)}.items():
        assert file.tensors[key].codes is None
        assert (read[key].dtype, read[key].shape) == (np.float32, shape)
        np.testing.assert_array_equal(bits(read[key]), bits(matrix.dequantize()))


@pytest.mark.oracle
@pytest.mark.parametrize("name", QUANTIZED)
def test_same_bits_as_gguf_py(name):
    gguf = pytest.importorskip("gguf")
    number, kind = QUANTIZED[name]
    rng = np.random.default_rng(number)
    blocks = rng.integers(0, 256, (20000, kind.block_bytes), dtype=np.uint8)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType(number))
    assert_same_bits(decode_blocks(blocks, kind, 50).dequantize(), expected)


@pytest.mark.oracle
def test_type_table_is_ggml_s():
    gguf = pytest.importorskip("gguf")
    for kind in gguf.GGMLQuantizationType:
        if ours := GGML_TYPES.get(kind.value):
            sizes = (ours.block_size, ours.block_bytes)
            assert (ours.name, sizes) == (kind.name, gguf.GGML_QUANT_SIZES[kind])
        else:
            assert UNSUPPORTED_TYPE_NAMES[kind.value] == kind.name


@pytest.mark.oracle
@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.parametrize("model", ["smollm2_path", "gemma3_path"])
def test_every_tensor_of_a_real_file_as_gguf_py_reads_it(model, request):
    gguf = pytest.importorskip("gguf")
    path = request.getfixturevalue(model)
    file = GgufFile(path)
    for tensor in gguf.GGUFReader(path).tensors:
        found = file.read(file.tensors[tensor.name])
        if found_quantized := isinstance(found, QuantizedArray):
            found = found.dequantize()
        assert found_quantized == (tensor.tensor_type.name in QUANTIZED)
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert found.shape == expected.shape
        assert_same_bits(found, expected, tensor.name)
