"""Every way a GGUF file can lie is answered by a CheckpointError, quickly, in little memory."""

from __future__ import annotations

import contextlib
import struct
import warnings

import numpy as np
import pytest
from checkpoint.builders import (
    ARRAY,
    BOOL,
    F32,
    STRING,
    U8,
    U16,
    U32,
    U64,
    GgufBuilder,
    gguf_string,
    refusal,
    tiny_gguf,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxinfer.checkpoint import CheckpointError, open_checkpoint


def with_fields(**fields):
    builder = tiny_gguf()
    for name, value in fields.items():
        setattr(builder, name, value)
    return builder


def with_tensor(dims, number, data=b"", name="blk.0.attn_v.weight"):
    return tiny_gguf().raw_tensor(name, dims, number, data)


def with_offset(offset, name="blk.0.attn_v.weight"):
    builder = tiny_gguf()
    builder.offsets[name] = offset
    return builder


def without_tensor(name):
    builder = tiny_gguf()
    del builder.tensors[name]
    return builder


def without_key(key):
    builder = tiny_gguf()
    del builder.keys[key]
    return builder


def put(key, value_type, value):
    return tiny_gguf().put(key, value_type, value)


def put_raw(key, value_type, payload):
    return tiny_gguf().put_raw(key, value_type, payload)


def array_head(item_type, count):
    return struct.pack("<IQ", item_type, count)


REFUSED = {
    "wrong magic": (with_fields(magic=b"GGML"), "not a GGUF file"),
    "version 1": (with_fields(version=1), "version 1 is not supported"),
    "version 4": (with_fields(version=4), "version 4 is not supported"),
    "byte-swapped": (with_fields(version=3 << 24), "big-endian version 3"),
    "2^63 tensors": (with_fields(num_tensors=1 << 63), "tensor count is 9223372036854775808"),
    "2^40 keys": (with_fields(num_keys=1 << 40), "key count is 1099511627776"),
    "more tensors than bytes": (with_fields(num_tensors=60000), "only .* are left"),
    "key length 2^62": (
        with_fields(extra_keys=struct.pack("<Q", 1 << 62), num_keys=15),
        "length of metadata key 14 is 4611686018427387904",
    ),
    "string length 2^63-1": (
        put_raw("general.name", STRING, struct.pack("<Q", (1 << 63) - 1)),
        "length of the value of 'general.name' is 9223372036854775807",
    ),
    "string beyond the end": (
        put_raw("general.name", STRING, struct.pack("<Q", 1 << 23)),
        "needs 8388608 bytes, but only",
    ),
    "array of 2^61 strings": (
        put_raw("general.tags", ARRAY, array_head(STRING, 1 << 61)),
        "length of 'general.tags' is 2305843009213693952",
    ),
    "array of more numbers than bytes": (
        put_raw("general.tags", ARRAY, array_head(U64, 1 << 21)),
        "needs 16777216 bytes",
    ),
    "array string too long": (
        put_raw("general.tags", ARRAY, array_head(STRING, 1) + struct.pack("<Q", 1 << 60)),
        "string 0 of 1 in the value of 'general.tags'",
    ),
    "nested array": (
        put_raw("general.tags", ARRAY, array_head(ARRAY, 1) + array_head(U8, 1) + b"\0"),
        r"array of arrays \(nested\)",
    ),
    "array item type 99": (
        put_raw("general.tags", ARRAY, array_head(99, 1)),
        "items of the unknown type 99",
    ),
    "value type 99": (put_raw("general.name", 99, b""), "unknown type 99"),
    "key not UTF-8": (
        with_fields(extra_keys=gguf_string(b"\xff") + struct.pack("<IB", U8, 0), num_keys=15),
        "metadata key 14 is not UTF-8",
    ),
    "string not UTF-8": (put("general.name", STRING, b"\xc3"), "'general.name' is not UTF-8"),
    "token not UTF-8": (
        put_raw("general.tags", ARRAY, array_head(STRING, 1) + gguf_string(b"\xff")),
        "a string in the value of 'general.tags' is not UTF-8",
    ),
    "truth value 2": (put_raw("tokenizer.ggml.add_bos_token", BOOL, b"\2"), "neither 0 nor 1"),
    "duplicate key": (
        with_fields(
            extra_keys=gguf_string("llama.block_count") + struct.pack("<II", U32, 2), num_keys=15
        ),
        "'llama.block_count' occurs twice",
    ),
    "alignment 0": (put("general.alignment", U32, 0), "general.alignment is 0"),
    "alignment 3": (put("general.alignment", U32, 3), "general.alignment is 3"),
    "alignment 2^40": (put("general.alignment", U64, 1 << 40), "general.alignment is 10995"),
    "alignment text": (put("general.alignment", STRING, "32"), "general.alignment is '32'"),
    "0 dimensions": (with_tensor((), 0), "has 0 dimensions"),
    "5 dimensions": (with_tensor((1,) * 5, 0), "has 5 dimensions"),
    "dimension 0": (with_tensor((64, 0), 0), r"impossible dimensions \[64, 0\]"),
    "dimensions overflow": (with_tensor((1 << 62, 1 << 62), 0), "impossible dimensions"),
    "type NVFP4": (with_tensor((64, 32), 40), "'blk.0.attn_v.weight' has the type NVFP4; supp"),
    "type IQ3_S": (
        with_tensor((256, 32), 21),
        "IQ3_S; supported are F32, F16, .*Q6_K, BF16, MXFP4",
    ),
    "type 255": (with_tensor((64, 32), 255), r"type unknown \(255\); supported are F32"),
    "Q4_K rows not of 256": (
        with_tensor((64, 32), 12),
        "rows of 64 weights, not a multiple of 256",
    ),
    "MXFP4 rows not of 32": (with_tensor((48, 32), 39), "rows of 48 weights, not a multiple of 32"),
    "MXFP4 blocks cut off": (
        with_tensor((96, 64), 39, bytes(17 * 192 - 64), name="blk.1.ffn_down.weight"),
        "beyond the end of the file",
    ),
    "2^50 Q2_K blocks": (with_tensor((1 << 30, 1 << 28), 10), "beyond the end of the file"),
    "offset not aligned": (with_offset(4), "offset 4 is not aligned to 32"),
    "offset of another tensor": (with_offset(0), "overlap"),
    "offset beyond the end": (with_offset(1 << 20), "beyond the end of the file"),
    "offset 2^64-32": (with_offset((1 << 64) - 32), "beyond the end of the file"),
    "architecture absent": (without_key("general.architecture"), "architecture is None; supported"),
    "architecture unknown": (
        put("general.architecture", STRING, "mamba"),
        "architecture is 'mamba'; supported are llama, qwen2, qwen3, gemma3",
    ),
    "architecture number": (put("general.architecture", U32, 3), "architecture is 3"),
    "adapter": (put("general.type", STRING, "adapter"), "holds 'adapter'"),
    "no embedding": (without_tensor("token_embd.weight"), "'token_embd.weight' is missing"),
    "unknown tensor": (
        tiny_gguf().tensor("blk.0.ffn_gate_exps.weight", np.zeros((2, 2))),
        "no use for the tensors blk.0.ffn_gate_exps.weight",
    ),
    "no layer count": (without_key("llama.block_count"), "llama.block_count is None"),
    "2^31-1 layers": (put("llama.block_count", U32, (1 << 31) - 1), "has only 21 tensors"),
    "0 heads": (put("llama.attention.head_count", U32, 0), "head_count is 0: must lie between 1"),
    "heads text": (put("llama.attention.head_count", STRING, "4"), "an integer is needed"),
    "heads differ by layer": (
        tiny_gguf().put_array("llama.attention.head_count", U32, [4, 2]),
        "head_count is a list of 2: an integer is needed",
    ),
    "epsilon NaN": (put("llama.attention.layer_norm_rms_epsilon", F32, float("nan")), "finite"),
    "rope base 0": (put("llama.rope.freq_base", F32, 0.0), "positive and finite"),
    "value size differs": (put("llama.attention.value_length", U32, 8), "only 16, the size of a"),
    "partial rotary": (put("llama.rope.dimension_count", U32, 8), "only 16, the size of a head"),
    "yarn": (put("llama.rope.scaling.type", STRING, "yarn"), "is 'yarn': only 'none' and 'linear'"),
    "experts": (put("llama.expert_count", U32, 8), "llama.expert_count is 8: not supported"),
    "logit scale": (put("llama.logit_scale", F32, 2.0), "llama.logit_scale is 2.0: not supported"),
    "rope factors of no known kind": (
        tiny_gguf().tensor("rope_freqs.weight", np.arange(1.0, 9.0)),
        "holds no Llama 3 factors",
    ),
    "rope factors of another size": (
        tiny_gguf().tensor("rope_freqs.weight", np.full(4, 8.0)),
        "holds no Llama 3 factors",
    ),
    "rope factors by the million": (
        tiny_gguf().raw_tensor("rope_freqs.weight", (1 << 22, 1), 8, bytes(34 << 17)),
        r"'rope_freqs.weight' has the shape \(1, 4194304\)",
    ),
    "more tokens than rows": (
        tiny_gguf().put_array("tokenizer.ggml.tokens", STRING, ["x"] * 97),
        "has 96 rows, but tokenizer.ggml.tokens has 97 entries",
    ),
    "split with another name": (put("split.count", U16, 3), "the name must end in NNNNN-of-NNNNN"),
    "split count text": (put("split.count", STRING, "3"), "split.count is '3'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case, tmp_path):
    builder, message = REFUSED[case]
    path = builder.write(tmp_path / "bad.gguf")
    text = refusal(path)
    assert str(path) in text
    with pytest.raises(CheckpointError, match=message):
        raise CheckpointError(text)


def test_many_dimensions_are_refused_before_they_are_read(tmp_path):
    raw = tiny_gguf().build()
    name = gguf_string("token_embd.weight")
    at = raw.index(name) + len(name)
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw[:at] + struct.pack("<I", 1 << 31) + raw[at + 4 :])
    assert "has 2147483648 dimensions" in refusal(path)


def test_two_tensors_with_one_name(tmp_path):
    raw = tiny_gguf().build().replace(b"blk.1.attn_v.weight", b"blk.0.attn_v.weight")
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw)
    assert "'blk.0.attn_v.weight' occurs twice" in refusal(path)


def test_cut_anywhere(tmp_path):
    builder = tiny_gguf()
    builder.tensors = {
        name: tensor
        for name, tensor in builder.tensors.items()
        if "norm" in name or name == "token_embd.weight"
    }
    raw = builder.build()
    path = builder.write(tmp_path / "cut.gguf")
    open_checkpoint(path)
    for length in [*range(0, len(raw), 64), len(raw) - 1]:
        path.write_bytes(raw[:length])
        with pytest.raises(CheckpointError):
            open_checkpoint(path)


def with_quantized_matrices():
    """The tiny model with random blocks of a type of 32 weights in each of its matrices."""
    builder = tiny_gguf()
    rng = np.random.default_rng(3)
    block_bytes = {2: 18, 3: 20, 6: 22, 7: 24, 8: 34, 39: 17}
    for index, (name, (dims, _, _)) in enumerate(builder.tensors.items()):
        if len(dims) == 2:
            number = list(block_bytes)[index % len(block_bytes)]
            data = rng.bytes(dims[0] // 32 * dims[1] * block_bytes[number])
            builder.raw_tensor(name, dims, number, data)
    return builder


@pytest.mark.parametrize("dims", [(256,), (256, 2), (256, 2, 2)])
def test_any_type_number_is_refused_or_read(dims, tmp_path):
    data = np.random.default_rng(4).bytes(4096)
    for number in [*range(42), 255, (1 << 32) - 1]:
        builder = with_tensor(dims, number, data, name="blk.0.ffn_norm.weight")
        path = builder.write(tmp_path / "model.gguf")
        with contextlib.suppress(CheckpointError):
            read = dict(open_checkpoint(path).tensors())
            assert read["model.layers.0.post_attention_layernorm.weight"].shape == dims[::-1]


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    flips=st.lists(st.tuples(st.integers(0, 3200), st.integers(0, 255)), min_size=1, max_size=4),
    cut=st.none() | st.integers(0, 6000),
)
def test_damage_is_refused_or_harmless(tmp_path, flips, cut):
    """Any bytes changed in the header: a CheckpointError or a checkpoint that reads to its end."""
    raw = bytearray(with_quantized_matrices().build())
    for at, byte in flips:
        raw[at] = byte
    path = tmp_path / "damaged.gguf"
    path.write_bytes(raw[:cut])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with contextlib.suppress(CheckpointError):
            for _ in open_checkpoint(path).tensors():
                pass


def test_heads_that_do_not_divide_the_rows(tmp_path):
    builder = put("llama.attention.head_count", U32, 3)
    checkpoint = open_checkpoint(builder.write(tmp_path / "bad.gguf"))
    with pytest.raises(CheckpointError, match=r"attn_q.weight': 64 rows are not 3 heads"):
        list(checkpoint.tensors())


def write_parts(directory, count=3):
    whole = tiny_gguf()
    paths = []
    for number in range(count):
        part = GgufBuilder() if number else with_fields(tensors={})
        part.put("split.no", U16, number).put("split.count", U16, count)
        part.put("split.tensors.count", U32, len(whole.tensors))
        part.tensors = dict(list(whole.tensors.items())[number::count])
        paths.append(part.write(directory / f"m-{number + 1:05}-of-{count:05}.gguf"))
    return paths


def test_split_model_is_the_whole_model(tmp_path):
    paths = write_parts(tmp_path)
    whole = dict(open_checkpoint(tiny_gguf().write(tmp_path / "whole.gguf")).tensors())
    split = dict(open_checkpoint(paths[1]).tensors())
    assert split.keys() == whole.keys()
    for name, array in whole.items():
        np.testing.assert_array_equal(split[name], array)


def test_split_model_with_a_part_missing(tmp_path):
    paths = write_parts(tmp_path)
    paths[1].unlink()
    assert "1 of 3 parts are missing: m-00002-of-00003.gguf" in refusal(paths[0])


def test_split_model_with_parts_swapped(tmp_path):
    paths = write_parts(tmp_path)
    paths[2].write_bytes(paths[1].read_bytes())
    assert "split.no and split.count are (1, 3), but the name says (2, 3)" in refusal(paths[0])


def test_split_model_with_a_tensor_twice(tmp_path):
    paths = write_parts(tmp_path)
    part = GgufBuilder().put("split.no", U16, 2).put("split.count", U16, 3)
    part.tensors = {"token_embd.weight": tiny_gguf().tensors["token_embd.weight"]}
    part.write(paths[2])
    assert "'token_embd.weight' is also in m-00001-of-00003.gguf" in refusal(paths[0])


def test_split_model_with_a_tensor_lost(tmp_path):
    paths = write_parts(tmp_path)
    GgufBuilder().put("split.no", U16, 2).put("split.count", U16, 3).write(paths[2])
    assert "split.tensors.count is 21, but the parts hold 14" in refusal(paths[0])
