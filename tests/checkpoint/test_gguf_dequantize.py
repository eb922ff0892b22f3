"""The decoders give the same bits as gguf-py's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxinfer.checkpoint.gguf_dequantize import (
    CHUNK_WEIGHTS,
    GGML_TYPES,
    UNSUPPORTED_TYPE_NAMES,
    dequantize,
)

ORACLE = Path(__file__).with_name("oracle.npz")
QUANTIZED = {kind.name: (number, kind) for number, kind in GGML_TYPES.items() if kind.decode}


def bits(array):
    return np.ascontiguousarray(array, np.float32).reshape(-1).view(np.uint32)


@pytest.mark.parametrize("name", QUANTIZED)
def test_same_bits_as_the_oracle(name):
    oracle = np.load(ORACLE)
    found = dequantize(oracle[f"{name}_blocks"], QUANTIZED[name][1])
    np.testing.assert_array_equal(bits(found), bits(oracle[f"{name}_weights"]))


@pytest.mark.parametrize("name", QUANTIZED)
def test_chunks_do_not_show(name):
    """More blocks than one chunk, the last chunk partial: the same as block by block."""
    kind = QUANTIZED[name][1]
    blocks = np.load(ORACLE)[f"{name}_blocks"]
    repeats = CHUNK_WEIGHTS // kind.block_size // len(blocks) + 2
    found = dequantize(np.tile(blocks, (repeats, 1)), kind).reshape(repeats, -1)
    np.testing.assert_array_equal(bits(found), np.tile(bits(dequantize(blocks, kind)), repeats))


@pytest.mark.oracle
@pytest.mark.parametrize("name", QUANTIZED)
def test_same_bits_as_gguf_py(name):
    gguf = pytest.importorskip("gguf")
    number, kind = QUANTIZED[name]
    rng = np.random.default_rng(number)
    blocks = rng.integers(0, 256, (20000, kind.block_bytes), dtype=np.uint8)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType(number)).reshape(-1)
    found = dequantize(blocks, kind)
    is_nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), is_nan)
    np.testing.assert_array_equal(bits(found)[~is_nan], bits(expected)[~is_nan])


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
def test_tensors_of_smollm2_as_gguf_py_reads_them(smollm2_path):
    gguf = pytest.importorskip("gguf")
    from jaxinfer.checkpoint.gguf import GgufFile

    file = GgufFile(smollm2_path)
    for tensor in gguf.GGUFReader(smollm2_path).tensors[1::30]:
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        found = file.read(file.tensors[tensor.name])
        assert found.shape == expected.shape
        np.testing.assert_array_equal(bits(found), bits(expected), err_msg=tensor.name)
