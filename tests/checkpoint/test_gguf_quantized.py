"""Quantized tensors of a GGUF file: matrices stay as they are stored, vectors become floats."""

from __future__ import annotations

import numpy as np
import pytest
from checkpoint.builders import U32, interleave_halves, tiny_gguf

from jaxinfer.checkpoint import open_checkpoint
from jaxinfer.quantized_array import QuantizedArray


def opened(builder, tmp_path):
    return open_checkpoint(builder.write(tmp_path / "model.gguf"))


def q8_0(codes, scales):
    """Q8_0 blocks of int8 codes `[O, I]` and float16 scales `[O, I / 32]`."""
    codes, scales = np.asarray(codes, np.int8), np.asarray(scales, np.float16)
    blocks = [scales[..., None].view(np.uint8), codes.reshape(*scales.shape, 32).view(np.uint8)]
    return np.concatenate(blocks, axis=-1).tobytes()


def test_quantized_matrix_stays_so(tmp_path):
    codes = np.tile(np.arange(-16, 16), (32, 2))
    scales = np.arange(64).reshape(32, 2) / 8
    builder = tiny_gguf().raw_tensor("blk.0.attn_v.weight", (64, 32), 8, q8_0(codes, scales))
    checkpoint = opened(builder, tmp_path)
    name = "model.layers.0.self_attn.v_proj.weight"
    info, found = checkpoint.tensor_infos[name], dict(checkpoint.tensors())[name]
    assert isinstance(found, QuantizedArray)
    np.testing.assert_array_equal(found.qvalue, codes)
    np.testing.assert_array_equal(found.scale, scales.astype(np.float16), strict=True)
    np.testing.assert_array_equal(found.dequantize(), codes * scales.repeat(32, axis=1))
    assert (info.dtype, info.shape, info.num_bytes) == ("Q8_0", (32, 64), 34 * 64)
    assert (info.loaded_bytes, info.group_size) == (found.num_bytes, 32)
    plain = checkpoint.tensor_infos["model.layers.1.self_attn.v_proj.weight"]
    assert (plain.loaded_bytes, plain.group_size) == (None, None)


def test_quantized_llama_q_and_k_get_their_halves_back(tmp_path):
    rng = np.random.default_rng(2)
    builder, original = tiny_gguf(), {}
    for kind, heads in {"q": 4, "k": 2}.items():
        codes = rng.integers(-128, 128, (16 * heads, 64))
        scales = rng.integers(1, 100, (16 * heads, 2)) / 64
        original[kind] = codes * scales.repeat(32, axis=1)
        blocks = q8_0(interleave_halves(codes, heads), interleave_halves(scales, heads))
        builder.raw_tensor(f"blk.1.attn_{kind}.weight", (64, 16 * heads), 8, blocks)
    read = dict(opened(builder, tmp_path).tensors())
    for kind, weight in original.items():
        found = read[f"model.layers.1.self_attn.{kind}_proj.weight"]
        np.testing.assert_array_equal(found.dequantize(), weight)


@pytest.mark.parametrize("dims", [(64,), (64, 1)])
def test_quantized_norm_is_floats(dims, tmp_path):
    codes, scales = np.arange(64) - 32, [0.25, 0.5]
    builder = tiny_gguf("gemma3").raw_tensor("blk.0.attn_norm.weight", dims, 8, q8_0(codes, scales))
    found = dict(opened(builder, tmp_path).tensors())["model.layers.0.input_layernorm.weight"]
    assert found.shape == dims[::-1]
    np.testing.assert_array_equal(found.ravel(), codes * np.repeat(scales, 32) - 1)


@pytest.mark.parametrize("dims", [(32,), (32, 1)])
def test_quantized_rope_factors(dims, tmp_path):
    builder = tiny_gguf().raw_tensor("rope_freqs.weight", dims, 8, q8_0([8] * 32, [0.125]))
    for key in ("attention.key_length", "attention.value_length"):
        builder.put(f"llama.{key}", U32, 64)
    if len(dims) == 1:
        assert opened(builder, tmp_path).hf_config["rope_scaling"] is None
    else:
        with pytest.raises(ValueError, match="holds no Llama 3 factors"):
            opened(builder, tmp_path)
