"""bitsandbytes files packed by loops: nf4, fp4, nested scales, int8, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from checkpoint.builders import read_quantized, refusal, write_quantized

from jaxinfer.checkpoint import open_checkpoint

O, I = 6, 128  # noqa: E741
NAME = "model.layers.0.mlp.up_proj"
TABLE = np.linspace(-1, 1, 16).astype(np.float32) ** 3
IN_4BIT = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
IN_8BIT = {"quant_method": "bitsandbytes", "load_in_8bit": True}


def state(**more):
    values = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [O, I]} | more
    return np.frombuffer(json.dumps(values).encode(), np.uint8)


def numbers(seed=0, block=64):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 16, (O, I)), rng.random(O * I // block).astype(np.float32)


def pack(codes):
    """`[O, I]` codes, two a byte in row order, the first of them in the high half."""
    flat = codes.reshape(-1)
    return np.array(
        [[int(flat[i]) << 4 | int(flat[i + 1])] for i in range(0, flat.size, 2)], np.uint8
    )


def tensors_4bit(codes, absmax, kind="nf4", **more):
    return {
        f"{NAME}.weight": pack(codes),
        f"{NAME}.weight.absmax": absmax,
        f"{NAME}.weight.quant_map": TABLE,
        f"{NAME}.weight.quant_state.bitsandbytes__{kind}": state(quant_type=kind, **more),
    }


def expected(codes, absmax):
    """One rounding in float32: table value times the scale of its block."""
    flat = codes.reshape(-1)
    block = flat.size // absmax.size
    return np.array(
        [TABLE[code] * absmax[i // block] for i, code in enumerate(flat)], np.float32
    ).reshape(O, I)


@pytest.mark.parametrize("block", [32, 64, 128])
def test_nf4(tmp_path, block):
    codes, absmax = numbers(block=block)
    path = write_quantized(tmp_path, IN_4BIT, tensors_4bit(codes, absmax, blocksize=block))
    weight = read_quantized(path, f"{NAME}.weight")
    np.testing.assert_array_equal(weight.dequantize(), expected(codes, absmax))
    assert (weight.code, weight.group_size, weight.scale.dtype) == ("uint4", block, np.float32)
    np.testing.assert_array_equal(weight.codebook, TABLE)
    info = open_checkpoint(path).tensor_infos[f"{NAME}.weight"]
    assert (info.dtype, info.loaded_bytes) == ("BNB-NF4", weight.num_bytes)


def test_one_known_byte(tmp_path):
    """0x1F holds the codes 1 and 15, in this order."""
    tensors = tensors_4bit(np.zeros((O, I), int), np.ones(12, np.float32))
    tensors[f"{NAME}.weight"][0] = 0x1F
    weight = read_quantized(write_quantized(tmp_path, IN_4BIT, tensors), f"{NAME}.weight")
    np.testing.assert_array_equal(weight.dequantize()[0, :3], TABLE[[1, 15, 0]])


def test_fp4_is_the_default(tmp_path):
    codes, absmax = numbers(1)
    config = {"load_in_4bit": True, "llm_int8_skip_modules": ["lm_head"]}  # nor quant_method
    path = write_quantized(tmp_path, config, tensors_4bit(codes, absmax, "fp4"))
    weight = read_quantized(path, f"{NAME}.weight")
    np.testing.assert_array_equal(weight.dequantize(), expected(codes, absmax))


@pytest.mark.parametrize("dtype", [np.int8, np.float16, np.float32])
def test_storage_of_another_type(tmp_path, dtype):
    codes, absmax = numbers(2)
    tensors = tensors_4bit(codes, absmax)
    tensors[f"{NAME}.weight"] = tensors[f"{NAME}.weight"].reshape(-1).view(dtype)[:, None]
    weight = read_quantized(write_quantized(tmp_path, IN_4BIT, tensors), f"{NAME}.weight")
    np.testing.assert_array_equal(weight.dequantize(), expected(codes, absmax))


def nested_tensors():
    rng = np.random.default_rng(3)
    codes, _ = numbers(3)
    nested = {
        "nested_absmax": rng.random(3).astype(np.float32),
        "nested_quant_map": rng.normal(size=256).astype(np.float32),
    }
    more = {"nested_blocksize": 5, "nested_dtype": "float32", "nested_offset": 0.0321}
    tensors = tensors_4bit(codes, rng.integers(0, 256, 12).astype(np.uint8), **more)
    return tensors | {f"{NAME}.weight.{part}": array for part, array in nested.items()}, codes


def test_nested_scales(tmp_path):
    tensors, codes = nested_tensors()
    absmax = [
        tensors[f"{NAME}.weight.nested_quant_map"][code]
        * tensors[f"{NAME}.weight.nested_absmax"][i // 5]
        + np.float32(0.0321)
        for i, code in enumerate(tensors[f"{NAME}.weight.absmax"])
    ]
    weight = read_quantized(write_quantized(tmp_path, IN_4BIT, tensors), f"{NAME}.weight")
    np.testing.assert_array_equal(weight.dequantize(), expected(codes, np.array(absmax)))


def test_larger_blocks_are_split(tmp_path):
    rng = np.random.default_rng(4)
    codes, absmax = rng.integers(0, 16, (2, 512)), rng.random(4).astype(np.float32)
    tensors = tensors_4bit(codes, absmax, blocksize=256, shape=[2, 512])
    weight = read_quantized(write_quantized(tmp_path, IN_4BIT, tensors), f"{NAME}.weight")
    assert (weight.group_size, weight.scale.shape) == (128, (2, 4))
    np.testing.assert_array_equal(
        weight.dequantize(), TABLE[codes] * np.repeat(absmax, 256).reshape(2, 512)
    )


def tensors_8bit():
    rng = np.random.default_rng(5)
    return {
        f"{NAME}.weight": rng.integers(-127, 128, (O, I)).astype(np.int8),
        f"{NAME}.SCB": rng.random(O).astype(np.float32),
        f"{NAME}.weight_format": np.array(0, np.uint8),
    }


def test_int8(tmp_path):
    tensors = tensors_8bit() | {f"{NAME}.bias": np.ones(O, np.float16)}
    path = write_quantized(tmp_path, IN_8BIT, tensors)
    weight = read_quantized(path, f"{NAME}.weight")
    scale = tensors[f"{NAME}.SCB"] / np.float32(127)
    np.testing.assert_array_equal(
        weight.dequantize(), tensors[f"{NAME}.weight"].astype(np.float32) * scale[:, None]
    )
    assert (weight.code, weight.group_size, weight.activations) == ("int8", I, "float")
    assert open_checkpoint(path).tensor_infos[f"{NAME}.weight"].loaded_bytes == weight.num_bytes
    assert dict(open_checkpoint(path).tensors())[f"{NAME}.bias"].dtype == np.float16


def test_scale_that_is_a_signalling_nan(tmp_path):
    """It stays what it is, without a warning, and spoils its row only."""
    tensors = tensors_8bit()
    tensors[f"{NAME}.SCB"].view(np.uint32)[2] = 0x7F810000
    weight = read_quantized(write_quantized(tmp_path, IN_8BIT, tensors), f"{NAME}.weight")
    np.testing.assert_array_equal(np.isnan(weight.scale[:, 0]), np.arange(O) == 2)


STATE = "weight.quant_state.bitsandbytes__nf4"
BOTH = IN_4BIT | {"load_in_8bit": True}
CHANGES = {
    "neither": ({"quant_method": "bitsandbytes"}, {}, "either it or load_in_8bit must be true"),
    "both": (BOTH, {}, "either it or load_in_8bit must be true"),
    "kind": (IN_4BIT | {"bnb_4bit_quant_type": "nf3"}, {}, "bnb_4bit_quant_type is 'nf3'"),
    "other kind": (IN_4BIT | {"bnb_4bit_quant_type": "fp4"}, {}, "bitsandbytes__fp4 is missing"),
    "as 8 bit": (IN_8BIT, {}, "weight': has the dtype U8, not I8"),
    "no absmax": (IN_4BIT, {"weight.absmax": None}, "weight.absmax is missing"),
    "no table": (IN_4BIT, {"weight.quant_map": None}, "weight.quant_map is missing"),
    "no state": (IN_4BIT, {STATE: None}, "bitsandbytes__nf4 is missing"),
    "no codes": (IN_4BIT, {"weight": None}, "up_proj.weight is missing"),
    "table": (IN_4BIT, {"weight.quant_map": np.ones(15, np.float32)}, "shape [15], not [16]"),
    "absmax": (IN_4BIT, {"weight.absmax": np.ones(11, np.float32)}, "shape [11], not [12]"),
    "absmax bytes": (IN_4BIT, {"weight.absmax": np.ones(12, np.uint8)}, "dtype U8, not F32"),
    "codes": (IN_4BIT, {"weight": np.ones((9, 1), np.uint8)}, "has 9 bytes, but 4-bit codes of"),
    "json": (IN_4BIT, {STATE: np.frombuffer(b"{'a'", np.uint8)}, "not valid JSON"),
    "json long": (IN_4BIT, {STATE: np.zeros(1 << 17, np.uint8)}, "larger than 65536 bytes"),
    "shape": (IN_4BIT, {STATE: state(shape=[O, -I])}, "shape is a list: must be two positive"),
    "shape huge": (IN_4BIT, {STATE: state(shape=[1 << 40, 1])}, "must be two positive sizes"),
    "shape none": (IN_4BIT, {STATE: state(shape=None)}, "shape is None"),
    "block": (IN_4BIT, {STATE: state(blocksize=0)}, "blocksize is 0"),
    "block over rows": (IN_4BIT, {STATE: state(blocksize=256)}, "blocks over several rows are not"),
    "type": (IN_4BIT, {STATE: state(quant_type="fp4")}, "quant_type is 'fp4': supported are nf4"),
    "width": (IN_4BIT, {STATE: state(shape=[16, 48])}, "a 4-bit matrix 48 wide"),
    "surplus": (IN_4BIT, {"SCB": np.ones(O, np.float32)}, "SCB': does not belong to a weight"),
    "half nested": (IN_4BIT, {"weight.nested_absmax": np.ones(1, np.float32)}, "F32, not U8"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_refused_when_opened(tmp_path, case):
    config, changes, message = CHANGES[case]
    tensors = tensors_4bit(*numbers())
    for part, array in changes.items():
        tensors.pop(f"{NAME}.{part}", None)
        if array is not None:
            tensors[f"{NAME}.{part}"] = array
    assert message in refusal(write_quantized(tmp_path, config, tensors))


@pytest.mark.parametrize(
    ("part", "array", "message"),
    [
        ("nested_quant_map", np.ones(255, np.float32), "has the shape [255], not [256]"),
        ("nested_absmax", np.ones(4, np.float32), "has the shape [4], not [3]"),
        ("nested_absmax", np.ones(3, np.float16), "has the dtype F16, not F32"),
        ("absmax", np.ones(12, np.float32), "has the dtype F32, not U8"),
    ],
)
def test_nested_scales_that_do_not_fit(tmp_path, part, array, message):
    tensors, _ = nested_tensors()
    tensors[f"{NAME}.weight.{part}"] = array
    assert message in refusal(write_quantized(tmp_path, IN_4BIT, tensors))


@pytest.mark.parametrize("offset", [None, "1", float("nan"), 1e40])
def test_nested_offset(tmp_path, offset):
    tensors, _ = nested_tensors()
    tensors[f"{NAME}.{STATE}"] = state(
        nested_blocksize=5, nested_dtype="float32", nested_offset=offset
    )
    assert "nested_offset" in refusal(write_quantized(tmp_path, IN_4BIT, tensors))


def test_8bit_that_does_not_fit(tmp_path):
    for part, array, message in (
        ("SCB", np.ones(5, np.float32), "has the shape [5], not [6]"),
        ("SCB", None, "up_proj.SCB is missing"),
        ("weight", np.ones((O, I, 1), np.int8), "not [any, any]"),
        ("weight_format", np.array(2, np.uint8), "the layout 2 is not supported"),
    ):
        tensors = tensors_8bit()
        del tensors[f"{NAME}.{part}"]
        if array is not None:
            tensors[f"{NAME}.{part}"] = array
        assert message in refusal(write_quantized(tmp_path, IN_8BIT, tensors), read=True)
