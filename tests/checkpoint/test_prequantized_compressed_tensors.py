"""compressed-tensors files packed by loops: formats, strategies, targets, and what is refused."""

from __future__ import annotations

import json
import logging

import ml_dtypes
import numpy as np
import pytest
from checkpoint.builders import read_quantized, refusal, write_quantized

from jaxinfer.checkpoint import open_checkpoint

O, I = 24, 128  # noqa: E741
NAME = "model.layers.0.mlp.up_proj"
BF16 = ml_dtypes.bfloat16
FP8 = ml_dtypes.float8_e4m3fn


def config(storage="pack-quantized", activations=None, targets=("Linear",), **weights):
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"} | weights
    if weights["strategy"] == "group":
        weights.setdefault("group_size", 32)
    group = {"targets": list(targets), "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": storage,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def dynamic(**more):
    return {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "dynamic": True,
        "strategy": "token",
    } | (more)


def pack_across(codes, bits):
    """Words along the second axis: signed code i of a word, plus half the range, in its bits."""
    per_word = 32 // bits
    words = np.zeros((len(codes), -(-codes.shape[1] // per_word)), np.uint32)
    for row in range(len(codes)):
        for i in range(codes.shape[1]):
            unsigned = int(codes[row, i]) + (1 << (bits - 1))
            words[row, i // per_word] |= np.uint32(unsigned << (i % per_word * bits))
    return words.view(np.int32)


def integers(bits, scale_shape, dtype=BF16, seed=0):
    """Signed codes `[O, I]`, zero points and scales."""
    rng = np.random.default_rng(seed)
    half = 1 << (bits - 1)
    q = rng.integers(-half, half, (O, I))
    zero = rng.integers(-half, half, scale_shape)
    return q, zero, rng.uniform(0.001, 0.02, scale_shape).astype(dtype)


def packed(q, scale, bits, zero=None, g_idx=None):
    tensors = {
        "weight_packed": pack_across(q, bits),
        "weight_scale": scale,
        "weight_shape": np.array(q.shape, np.int64),
    }
    if zero is not None:
        tensors["weight_zero_point"] = np.ascontiguousarray(pack_across(zero.T, bits).T)
    if g_idx is not None:
        tensors["weight_g_idx"] = g_idx.astype(np.int32)
    return named(tensors)


def named(tensors, name=NAME):
    return {f"{name}.{part}": array for part, array in tensors.items()}


def expected(q, scale, zero=None, group_of=None):
    """The real numbers scale * (q - zero): exact in float32 for 16-bit scales."""
    weight = np.zeros((O, I), np.float32)
    scale = np.broadcast_to(scale, (O, scale.shape[-1]))
    for row in range(O):
        for i in range(I):
            group = group_of[i] if group_of is not None else i * scale.shape[1] // I
            shift = 0 if zero is None else int(np.broadcast_to(zero, scale.shape)[row, group])
            weight[row, i] = float(scale[row, group]) * (int(q[row, i]) - shift)
    return weight


STRATEGIES = {
    "g16": ({"group_size": 16}, (O, 8)),
    "g128": ({"group_size": 128}, (O, 1)),
    "channel": ({"strategy": "channel"}, (O, 1)),
    "implied channel": ({"strategy": None, "group_size": -1}, (O, 1)),
    "tensor": ({"strategy": "tensor"}, (1,)),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("bits", [4, 8])
def test_packed(tmp_path, strategy, bits):
    more, shape = STRATEGIES[strategy]
    q, _, scale = integers(bits, shape)
    path = write_quantized(tmp_path, config(num_bits=bits, **more), packed(q, scale, bits))
    weight = read_quantized(path, f"{NAME}.weight")
    np.testing.assert_array_equal(weight.dequantize(), expected(q, scale))
    assert weight.code == f"int{bits}"
    assert weight.scale.dtype == BF16
    assert open_checkpoint(path).tensor_infos[f"{NAME}.weight"].loaded_bytes == weight.num_bytes


@pytest.mark.parametrize("strategy", ["g16", "channel"])
@pytest.mark.parametrize("bits", [4, 8])
def test_packed_with_zero_points(tmp_path, strategy, bits):
    more, shape = STRATEGIES[strategy]
    q, zero, scale = integers(bits, shape, np.float16, 1)
    tensors = packed(q, scale, bits, zero)
    path = write_quantized(tmp_path, config(num_bits=bits, symmetric=False, **more), tensors)
    weight = read_quantized(path, f"{NAME}.weight")
    np.testing.assert_array_equal(weight.dequantize(), expected(q, scale, zero))
    assert weight.code == ("uint4" if bits == 4 else "int8")
    assert open_checkpoint(path).tensor_infos[f"{NAME}.weight"].loaded_bytes == weight.num_bytes


def test_zero_points_not_packed(tmp_path):
    q, zero, scale = integers(4, (O, 4), seed=2)
    tensors = packed(q, scale, 4) | {f"{NAME}.weight_zero_point": zero.astype(np.int8)}
    path = write_quantized(tmp_path, config(symmetric=False), tensors)
    weight = read_quantized(path, f"{NAME}.weight")
    np.testing.assert_array_equal(weight.dequantize(), expected(q, scale, zero))
    tensors[f"{NAME}.weight_zero_point"][1, 2] = 8
    text = refusal(write_quantized(tmp_path, config(symmetric=False), tensors), read=True)
    assert "holds the zero point 8, outside -8 to 7" in text


def test_activation_order(tmp_path):
    q, _, scale = integers(4, (O, 4), seed=3)
    g_idx = np.random.default_rng(3).permutation(np.arange(I) // 32)
    path = write_quantized(tmp_path, config(actorder="group"), packed(q, scale, 4, g_idx=g_idx))
    weight = read_quantized(path, f"{NAME}.weight")
    np.testing.assert_array_equal(weight.perm, np.argsort(g_idx, kind="stable"))
    np.testing.assert_array_equal(weight.dequantize(), expected(q, scale, group_of=g_idx))


@pytest.mark.parametrize(
    ("activations", "meant"),
    [
        (None, "float"),
        (dynamic(), "int8"),
        (dynamic(symmetric=False), "float"),
        (dynamic(strategy="tensor"), "float"),
    ],
)
@pytest.mark.parametrize("strategy", ["channel", "tensor", "g128"])
def test_int8(tmp_path, strategy, activations, meant):
    more, shape = STRATEGIES[strategy]
    q, _, scale = integers(8, shape, seed=4)
    settings = config("int-quantized", activations, num_bits=8, **more)
    tensors = named({"weight": q.astype(np.int8), "weight_scale": scale})
    weight = read_quantized(write_quantized(tmp_path, settings, tensors), f"{NAME}.weight")
    np.testing.assert_array_equal(weight.dequantize(), expected(q, scale))
    assert (weight.code, weight.activations) == ("int8", meant)


def test_int8_with_zero_points(tmp_path):
    q, zero, scale = integers(8, (O, 1), seed=5)
    tensors = named(
        {
            "weight": q.astype(np.int8),
            "weight_scale": scale,
            "weight_zero_point": zero.astype(np.int8),
        }
    )
    more = {"num_bits": 8, "strategy": "channel", "symmetric": False}
    path = write_quantized(tmp_path, config("int-quantized", **more), tensors)
    weight = read_quantized(path, f"{NAME}.weight")
    np.testing.assert_array_equal(weight.dequantize(), expected(q, scale, zero))
    path = write_quantized(tmp_path, config("int-quantized", dynamic(), **more), tensors)
    assert "zero points of weights with int8 activations" in refusal(path, read=True)
    del tensors[f"{NAME}.weight_zero_point"]
    path = write_quantized(tmp_path, config("int-quantized", **more), tensors)
    assert "weight_zero_point is missing" in refusal(path)


@pytest.mark.parametrize("storage", ["float-quantized", "naive-quantized"])
@pytest.mark.parametrize(
    ("more", "shape", "height", "width"),
    [
        ({"strategy": "channel"}, (O, 1), 1, I),
        ({"strategy": "tensor"}, (1,), O, I),
        ({"strategy": "tensor"}, (), O, I),
        ({"strategy": "block", "block_structure": [16, 64]}, (2, 2), 16, 64),
    ],
)
def test_fp8(tmp_path, storage, more, shape, height, width, caplog):
    rng = np.random.default_rng(6)
    q = rng.normal(size=(O, I)).astype(FP8)
    scale = np.asarray(rng.random(shape), BF16)
    settings = config(storage, {"num_bits": 8, "type": "float"}, num_bits=8, type="float", **more)
    tensors = named({"weight": q, "weight_scale": scale, "input_scale": np.ones(1, BF16)})
    path = write_quantized(tmp_path, settings, tensors)
    with caplog.at_level(logging.WARNING, "jaxinfer"):
        weight = read_quantized(path, f"{NAME}.weight")
    assert "not used: model.layers.0.mlp.up_proj.input_scale" in caplog.text
    blocks = scale.astype(np.float32).reshape(-(-O // height), I // width)
    exact = np.zeros((O, I), np.float32)
    for row in range(O):
        for i in range(0, I, width):
            piece = q[row, i : i + width].astype(np.float32)
            exact[row, i : i + width] = piece * blocks[row // height, i // width]
    np.testing.assert_array_equal(weight.dequantize(), exact)
    assert (weight.code, weight.activations, weight.group_size) == ("fp8", "float", width)


def test_targets_and_formats_by_group(tmp_path):
    """A name goes before a pattern, a pattern before a class; each group may have its format."""
    four, eight = integers(4, (O, 4), seed=7), integers(8, (O, 1), seed=8)
    settings = config(group_size=32)
    first = settings["config_groups"]["group_0"] | {"format": "pack-quantized"}
    by_pattern = config(num_bits=8, strategy="channel", targets=[r"re:.*\.down_proj$"])
    by_pattern = by_pattern["config_groups"]["group_0"] | {"format": "int-quantized"}
    by_name = first | {"targets": ["a.down_proj"]}
    settings |= {"format": "mixed-precision"}
    settings["config_groups"] = {"all": first, "some": by_pattern, "one": by_name}
    tensors = packed(four[0], four[2], 4)
    tensors |= {
        name.replace(NAME, "a.down_proj"): array
        for name, array in packed(four[0], four[2], 4).items()
    }
    eight_bit = {"weight": eight[0].astype(np.int8), "weight_scale": eight[2]}
    tensors |= named(eight_bit, "b.down_proj") | {"lm_head.weight": np.ones((2, 2), BF16)}
    read = dict(open_checkpoint(write_quantized(tmp_path, settings, tensors)).tensors())
    for name in (NAME, "a.down_proj"):
        np.testing.assert_array_equal(
            read[f"{name}.weight"].dequantize(), expected(four[0], four[2])
        )
    weight = read["b.down_proj.weight"].dequantize()
    np.testing.assert_array_equal(weight, expected(eight[0], eight[2]))
    assert read["lm_head.weight"].dtype == BF16


def test_first_name_of_the_configuration(tmp_path):
    q, _, scale = integers(4, (O, 4))
    path = write_quantized(tmp_path, None, packed(q, scale, 4))
    text = json.dumps({"model_type": "llama", "compression_config": config()})
    (path / "config.json").write_text(text)
    weight = read_quantized(path, f"{NAME}.weight")
    np.testing.assert_array_equal(weight.dequantize(), expected(q, scale))


def with_groups(groups):
    return config() | {"config_groups": groups}


STATIC = dynamic(dynamic=False, strategy="tensor")
CHANGES = {
    "format": (config("marlin-24"), {}, "format is 'marlin-24': supported are pack-quantized"),
    "nvfp4": (config("nvfp4-pack-quantized"), {}, "'nvfp4-pack-quantized'"),
    "no groups": (with_groups({}), {}, "config_groups is a dict: must say how"),
    "preset": (with_groups({"W4A16": ["Linear"]}), {}, "W4A16 is a list: must be an object"),
    "no weights": (with_groups({"g": {"targets": ["Linear"]}}), {}, "g.weights is None"),
    "bits": (config(num_bits=3), {}, "config_groups.group_0.weights.num_bits is 3"),
    "type": (config(type="float", num_bits=8), {}, "does not go with the format pack-quantized"),
    "strategy": (config(strategy="tensor_group"), {}, "strategy is 'tensor_group'"),
    "group": (config(group_size=40), {}, "group_size is 40"),
    "group no divisor": (config(group_size=48), {}, "groups of 48 do not divide its width, 128"),
    "dynamic weights": (config(dynamic=True), {}, "weights must have fixed scales"),
    "static": (config("int-quantized", STATIC, num_bits=8), {}, "activations with fixed scales"),
    "int4 activations": (config(activations=dynamic(num_bits=4)), {}, "num_bits is 4"),
    "block": (
        config("float-quantized", num_bits=8, type="float", strategy="block"),
        {},
        "the strat",
    ),
    "rotated": (config() | {"transform_config": {"a": 1}}, {}, "rotated weights are not"),
    "sparse": (config() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, {}, "sparsity_con"),
    "targets": (config(targets=["re:(a|aa)+$"]), {}, "the pattern '(a|aa)+$' is not supported"),
    "no target": (config(targets=["re:nothing"]), {}, "is not among the targets of any group"),
    "ignored": (config() | {"ignore": [NAME]}, {}, "is quantized, but on the list quantization_co"),
    "ignore text": (config() | {"ignore": "lm_head"}, {}, "must be a list of strings"),
    "no scale": (config(), {"weight_scale": None}, "up_proj.weight_scale is missing"),
    "no shape": (config(), {"weight_shape": None}, "up_proj.weight_shape is missing"),
    "no codes": (config(), {"weight_packed": None}, "up_proj.weight_packed is missing"),
    "no zeros": (config(symmetric=False), {}, "up_proj.weight_zero_point is missing"),
    "scale": (
        config(),
        {"weight_scale": np.ones((O, 3), BF16)},
        "has the shape [24, 3], not [24, 4]",
    ),
    "shape": (config(), {"weight_shape": np.array([O, 256])}, "does not hold 4-bit codes of"),
    "rows": (config(), {"weight_shape": np.array([-O, I])}, "does not hold 4-bit codes of"),
    "width": (config(), {"weight_shape": np.array([O, 124])}, "a 4-bit matrix 124 wide"),
    "both": (
        config(),
        {"weight": np.ones((O, I), np.int8)},
        "does not belong to a weight quantized",
    ),
    "surplus": (
        config(symmetric=False, strategy="channel"),
        {"weight_zero_point": np.ones((3, 1), np.int32), "weight_scale": np.ones((O, 1), BF16)}
        | {"weight": np.ones((O, I), BF16)},
        "weight': does not belong",
    ),
    "zeros": (
        config(symmetric=False),
        {"weight_zero_point": np.ones((O, 4), np.int32)},
        "has the shape [24, 4], not [3, 4]",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_refused_when_opened(tmp_path, case):
    settings, changes, message = CHANGES[case]
    q, _, scale = integers(4, (O, 4))
    tensors = packed(q, scale, 4)
    for part, array in changes.items():
        tensors.pop(f"{NAME}.{part}", None)
        if array is not None:
            tensors[f"{NAME}.{part}"] = array
    assert message in refusal(write_quantized(tmp_path, settings, tensors))


def test_8bit_weights_that_are_not(tmp_path):
    settings = config("int-quantized", num_bits=8, strategy="channel")
    scale = np.ones((O, 1), BF16)
    for weight, message in (
        (np.ones((O, I), BF16), "has the dtype BF16, not I8"),
        (np.ones((O, I), FP8), "has the dtype F8_E4M3, not I8"),
        (np.ones((O, I, 1), np.int8), "has the shape [24, 128, 1], not [any, any]"),
        (np.ones((2, I), np.int8), "has the shape [24, 1], not [2, 1]"),
    ):
        tensors = named({"weight": weight, "weight_scale": scale})
        assert message in refusal(write_quantized(tmp_path, settings, tensors))
