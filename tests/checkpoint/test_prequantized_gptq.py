"""GPTQ and AWQ files packed by loops from known integers, in every order and convention."""

from __future__ import annotations

import numpy as np
import pytest
from checkpoint.builders import read_quantized, refusal, write_quantized

from jaxinfer.checkpoint import open_checkpoint

O, I = 16, 128  # noqa: E741
NAME = "model.layers.0.mlp.up_proj"
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}


def gptq(**more):
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False} | more


def pack_down(codes, bits):
    """Words along the first axis: code i of a word in bits i * bits."""
    per_word = 32 // bits
    words = np.zeros((len(codes) // per_word, codes.shape[1]), np.uint32)
    for i in range(codes.shape[0]):
        for o in range(codes.shape[1]):
            words[i // per_word, o] |= np.uint32(int(codes[i, o]) << (i % per_word * bits))
    return words.view(np.int32)


def integers(rng, bits=4, group_size=32, symmetric=False):
    """Codes `[I, O]`, zero points `[groups, O]` and float16 scales `[groups, O]`."""
    groups = I // group_size
    q = rng.integers(0, 1 << bits, (I, O))
    zero = np.full((groups, O), 1 << (bits - 1))
    if not symmetric:
        zero = rng.integers(1, 1 << bits, (groups, O))
    scale = rng.uniform(0.001, 0.02, (groups, O)).astype(np.float16)
    return q, zero, scale


def expected(q, zero, scale, group_of):
    """The real numbers scale * (q - zero) `[O, I]`; float32 holds them exactly."""
    weight = np.zeros((O, I), np.float32)
    for i in range(I):
        for o in range(O):
            group = group_of[i]
            weight[o, i] = float(scale[group, o]) * (int(q[i, o]) - int(zero[group, o]))
    return weight


def gptq_tensors(q, zero, scale, bits=4, stored_zero=-1, g_idx=None):
    tensors = {
        f"{NAME}.qweight": pack_down(q, bits),
        f"{NAME}.qzeros": np.ascontiguousarray(pack_down((zero + stored_zero).T, bits).T),
        f"{NAME}.scales": scale,
    }
    if g_idx is not None:
        tensors[f"{NAME}.g_idx"] = g_idx.astype(np.int32)
    return tensors


@pytest.mark.parametrize("group_size", [16, 32, 64, 128, -1])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [False, True])
def test_gptq(tmp_path, bits, group_size, symmetric):
    block = I if group_size == -1 else group_size
    q, zero, scale = integers(np.random.default_rng(bits + block), bits, block, symmetric)
    config = gptq(bits=bits, group_size=group_size, sym=symmetric)
    path = write_quantized(tmp_path, config, gptq_tensors(q, zero, scale, bits))
    weight = read_quantized(path, f"{NAME}.weight")
    np.testing.assert_array_equal(
        weight.dequantize(), expected(q, zero, scale, np.arange(I) // block)
    )
    assert weight.code == ("int8" if bits == 8 else "int4" if symmetric else "uint4")
    assert (weight.offset is None) == symmetric
    assert weight.scale.dtype == (np.float16 if symmetric else np.float32)
    assert weight.group_size == block
    assert open_checkpoint(path).tensor_infos[f"{NAME}.weight"].loaded_bytes == weight.num_bytes


def test_one_known_word(tmp_path):
    """One word by hand: 0x76543210 holds the codes 0 to 7 of rows 0 to 7, lowest bits first."""
    tensors = {
        "m.qweight": np.full((4, 8), 0x76543210, np.int32),
        "m.qzeros": np.array([[0x76543210]], np.int32),  # zero points 1 to 8, stored less one
        "m.scales": np.ones((1, 8), np.float16),
    }
    path = write_quantized(tmp_path, gptq(), tensors)
    weight = read_quantized(path, "m.weight").dequantize()
    for row in range(8):
        np.testing.assert_array_equal(weight[row], np.tile(np.arange(8) - (row + 1), 4))


@pytest.mark.parametrize("bits", [4, 8])
def test_second_format_stores_zeros_as_they_are(tmp_path, bits):
    q, zero, scale = integers(np.random.default_rng(1), bits)
    zero[0, :3] = 0  # which the first format has no room for
    config = gptq(bits=bits, checkpoint_format="gptq_v2")
    path = write_quantized(tmp_path, config, gptq_tensors(q, zero, scale, bits, stored_zero=0))
    weight = read_quantized(path, f"{NAME}.weight")
    np.testing.assert_array_equal(weight.dequantize(), expected(q, zero, scale, np.arange(I) // 32))


def test_first_format_with_zeros_of_zero_as_its_writers_borrow(tmp_path):
    """GPTQModel subtracts 0x11111111 from whole words: a zero point 0 borrows from the next one."""
    q, zero, scale = integers(np.random.default_rng(2))
    zero[:, 1::3] = 0
    tensors = gptq_tensors(q, zero, scale, stored_zero=0)
    words = tensors[f"{NAME}.qzeros"].view(np.uint32) - np.uint32(0x11111111)
    tensors[f"{NAME}.qzeros"] = words.view(np.int32)
    weight = read_quantized(write_quantized(tmp_path, gptq(), tensors), f"{NAME}.weight")
    np.testing.assert_array_equal(weight.dequantize(), expected(q, zero, scale, np.arange(I) // 32))


@pytest.mark.parametrize("bits", [4, 8])
def test_act_order(tmp_path, bits):
    rng = np.random.default_rng(3)
    q, zero, scale = integers(rng, bits)
    g_idx = rng.permutation(np.arange(I) // 32)
    config = gptq(bits=bits, desc_act=True)
    path = write_quantized(tmp_path, config, gptq_tensors(q, zero, scale, bits, g_idx=g_idx))
    weight = read_quantized(path, f"{NAME}.weight")
    np.testing.assert_array_equal(weight.perm, np.argsort(g_idx, kind="stable"))
    np.testing.assert_array_equal(weight.dequantize(), expected(q, zero, scale, g_idx))
    assert open_checkpoint(path).tensor_infos[f"{NAME}.weight"].loaded_bytes == weight.num_bytes


@pytest.mark.parametrize("group_size", [32, -1])
def test_columns_in_order_need_no_permutation(tmp_path, group_size):
    block = I if group_size == -1 else group_size
    q, zero, scale = integers(np.random.default_rng(4), 4, block)
    g_idx = np.arange(I) // block
    config = gptq(group_size=group_size, desc_act=True)
    path = write_quantized(tmp_path, config, gptq_tensors(q, zero, scale, g_idx=g_idx))
    weight = read_quantized(path, f"{NAME}.weight")
    assert weight.perm is None
    np.testing.assert_array_equal(weight.dequantize(), expected(q, zero, scale, g_idx))


def test_larger_groups_are_split(tmp_path):
    """Groups of 256 are no group size of ours: their scales are repeated for groups of 128."""
    rng = np.random.default_rng(5)
    q, scale = rng.integers(0, 16, (512, 8)), rng.random((2, 8)).astype(np.float16)
    tensors = gptq_tensors(q, np.full((2, 8), 8), scale)
    path = write_quantized(tmp_path, gptq(group_size=256, sym=True), tensors)
    weight = read_quantized(path, f"{NAME}.weight")
    assert (weight.group_size, weight.scale.shape) == (128, (8, 4))
    rows = np.repeat(scale.astype(np.float32), 256, axis=0)
    np.testing.assert_array_equal(weight.dequantize(), (rows * (q - 8)).T.astype(np.float32))


def test_rows_beyond_one_block_of_the_repacker(tmp_path):
    rng = np.random.default_rng(6)
    q, scale = rng.integers(0, 16, (32, 136)), np.ones((1, 136), np.float16)
    tensors = gptq_tensors(q, np.full((1, 136), 8), scale)
    weight = read_quantized(write_quantized(tmp_path, gptq(), tensors), f"{NAME}.weight")
    np.testing.assert_array_equal(weight.dequantize(), (q - 8).T)


def test_other_tensors_stay_floats(tmp_path):
    tensors = gptq_tensors(*integers(np.random.default_rng(7)))
    tensors |= {
        f"{NAME}.bias": np.arange(O, dtype=np.float16),
        "lm_head.weight": np.arange(32, dtype=np.float16).reshape(2, 16),
    }
    read = dict(open_checkpoint(write_quantized(tmp_path, gptq(), tensors)).tensors())
    assert list(read) == [f"{NAME}.weight", f"{NAME}.bias", "lm_head.weight"]
    for name in (f"{NAME}.bias", "lm_head.weight"):
        np.testing.assert_array_equal(read[name], tensors[name])


def test_dynamic_overrides(tmp_path):
    """GPTQModel's rules by pattern: `+:` changes a setting, `-:` leaves modules as they are."""
    rng = np.random.default_rng(8)
    four, eight = integers(rng), integers(rng, 8, 64)
    tensors = gptq_tensors(*four)
    for name, array in gptq_tensors(*eight, bits=8).items():
        tensors[name.replace("up_proj", "down_proj")] = array
    tensors["model.layers.0.mlp.gate_proj.weight"] = np.ones((2, 2), np.float16)
    dynamic = {r"+:.*\.down_proj$": {"bits": 8, "group_size": 64}, r"-:.*\.gate_proj": {}}
    path = write_quantized(tmp_path, gptq(dynamic=dynamic), tensors)
    for name, numbers, block in (("up", four, 32), ("down", eight, 64)):
        weight = read_quantized(path, f"model.layers.0.mlp.{name}_proj.weight")
        np.testing.assert_array_equal(
            weight.dequantize(), expected(*numbers, np.arange(I) // block)
        )


def pack_awq(codes):
    """`[R, O]` codes, eight outputs a word: nibble 0 to 7 holds output 0 2 4 6 1 3 5 7."""
    words = np.zeros((len(codes), codes.shape[1] // 8), np.uint32)
    for row in range(len(codes)):
        for word in range(words.shape[1]):
            for nibble, output in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
                words[row, word] |= np.uint32(int(codes[row, 8 * word + output]) << (4 * nibble))
    return words.view(np.int32)


def awq_tensors(q, zero, scale):
    tensors = {"qweight": pack_awq(q), "qzeros": pack_awq(zero), "scales": scale}
    return {f"{NAME}.{part}": array for part, array in tensors.items()}


@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize("symmetric", [False, True])
def test_awq(tmp_path, group_size, symmetric):
    block = I if group_size == -1 else group_size
    q, zero, scale = integers(np.random.default_rng(block), 4, block, symmetric)
    config = AWQ | {"group_size": group_size}
    path = write_quantized(tmp_path, config, awq_tensors(q, zero, scale))
    weight = read_quantized(path, f"{NAME}.weight")
    np.testing.assert_array_equal(
        weight.dequantize(), expected(q, zero, scale, np.arange(I) // block)
    )
    assert weight.code == ("int4" if symmetric else "uint4")


def test_one_known_awq_word(tmp_path):
    """0x76543210 by hand: outputs 0 2 4 6 1 3 5 7 have the codes 0 to 7."""
    tensors = {
        "m.qweight": np.full((32, 1), 0x76543210, np.int32),
        "m.qzeros": np.zeros((1, 1), np.int32),
        "m.scales": np.ones((1, 8), np.float16),
    }
    weight = read_quantized(write_quantized(tmp_path, AWQ, tensors), "m.weight").dequantize()
    np.testing.assert_array_equal(weight[:, 0], [0, 4, 1, 5, 2, 6, 3, 7])


def test_awq_first_key_names(tmp_path):
    q, zero, scale = integers(np.random.default_rng(9))
    config = {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "GEMM"}
    path = write_quantized(tmp_path, config, awq_tensors(q, zero, scale))
    weight = read_quantized(path, f"{NAME}.weight")
    np.testing.assert_array_equal(weight.dequantize(), expected(q, zero, scale, np.arange(I) // 32))


CHANGES = {
    "bits": (gptq(bits=3), {}, "quantization_config.bits is 3: supported are 4, 8"),
    "bits missing": (gptq(bits=None), {}, "bits is None"),
    "bits a truth": (gptq(bits=True), {}, "bits is True"),
    "group": (gptq(group_size=24), {}, "group_size is 24: must be -1"),
    "group list": (gptq(group_size=[32]), {}, "group_size is a list"),
    "group no divisor": (gptq(group_size=48), {}, "groups of 48 do not divide its width, 128"),
    "marlin": (gptq(checkpoint_format="marlin"), {}, "checkpoint_format is 'marlin'"),
    "marlin flag": (gptq(is_marlin_format=True), {}, "only plain GPTQ"),
    "sym text": (gptq(sym="yes"), {}, "sym is 'yes': must be true or false"),
    "pack type": (gptq(pack_dtype="int16"), {}, "pack_dtype is 'int16'"),
    "slow pattern": (gptq(dynamic={"(a+)+$": {}}), {}, "the pattern '(a+)+$' is not supported"),
    "bad pattern": (gptq(dynamic={"(a": {}}), {}, "the pattern '(a' is not valid"),
    "no zeros": (gptq(), {"qzeros": None}, "up_proj.qzeros is missing"),
    "no codes": (gptq(), {"qweight": None}, "up_proj.qweight is missing"),
    "scales cut": (
        gptq(),
        {"scales": np.ones((3, O), np.float16)},
        "has the shape [3, 16], not [4",
    ),
    "scales integer": (gptq(), {"scales": np.ones((4, O), np.int32)}, "has the dtype I32, not F16"),
    "codes long": (gptq(), {"qweight": np.ones((16, O), np.int64)}, "has the dtype I64, not I32"),
    "codes deep": (gptq(), {"qweight": np.ones((16, O, 1), np.int32)}, "not [any, any]"),
    "odd width": (gptq(), {"qweight": np.ones((6, O), np.int32)}, "a 4-bit matrix 48 wide"),
    "odd rows": (gptq(), {"qweight": np.ones((16, 12), np.int32)}, "do not fill int32 words"),
    "index short": (gptq(), {"g_idx": np.zeros(5, np.int32)}, "has the shape [5], not [128]"),
    "weight twice": (gptq(), {"weight": np.ones((O, I), np.float16)}, "an unquantized weight as"),
    "awq version": (AWQ | {"version": "gemv"}, {}, "version is 'gemv': supported are gemm"),
    "awq marlin": (AWQ | {"version": "marlin"}, {}, "version is 'marlin'"),
    "awq backend": (AWQ | {"backend": "llm-awq"}, {}, "backend is 'llm-awq'"),
    "awq bits": (AWQ | {"bits": 8}, {}, "bits is 8: supported are 4"),
    "awq surplus": (AWQ | {}, {"g_idx": np.zeros(I, np.int32)}, "g_idx': has the dtype I32"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_refused_when_opened(tmp_path, case):
    config, changes, message = CHANGES[case]
    numbers = integers(np.random.default_rng(10))
    tensors = (gptq_tensors if config["quant_method"] == "gptq" else awq_tensors)(*numbers)
    for part, array in changes.items():
        tensors.pop(f"{NAME}.{part}", None)
        if array is not None:
            tensors[f"{NAME}.{part}"] = array
    text = refusal(write_quantized(tmp_path, config, tensors))
    assert message in text
    assert ("config.json" if not changes and "divide" not in message else "model.safe") in text


@pytest.mark.parametrize(
    ("g_idx", "message"),
    [
        (np.full(I, -1), "group -1 is not one of the 4 groups of 32 columns"),
        (np.arange(I), "group 127 is not one of"),
        (np.arange(I) // 32 * (np.arange(I) > 40), "group 0 has 41 columns instead of 32"),
    ],
)
def test_group_indices_are_checked_when_read(tmp_path, g_idx, message):
    tensors = gptq_tensors(*integers(np.random.default_rng(11)), g_idx=g_idx)
    assert message in refusal(write_quantized(tmp_path, gptq(), tensors), read=True)


def test_zero_points_that_sym_denies(tmp_path):
    tensors = gptq_tensors(*integers(np.random.default_rng(12)))
    text = refusal(write_quantized(tmp_path, gptq(sym=True), tensors), read=True)
    assert "holds the zero point" in text
    assert "sym: true, which means 8" in text
