"""float8 files: blocks, rows and whole tensors; activation scales are left alone; refusals."""

from __future__ import annotations

import logging

import ml_dtypes
import numpy as np
import pytest
from checkpoint.builders import read_quantized, refusal, write_quantized

from jaxinfer.checkpoint import open_checkpoint

NAME = "model.layers.0.self_attn.q_proj"
CODES = ml_dtypes.float8_e4m3fn
FP8 = {"quant_method": "fp8"}
BLOCKS = FP8 | {"activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}


def weight_of(rows, columns, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, columns)).astype(CODES)


def scales(*shape):
    return np.asarray(np.random.default_rng(1).uniform(0.5, 2, shape), np.float32)


def named(**tensors):
    return {f"{NAME}.{part}": array for part, array in tensors.items()}


@pytest.mark.parametrize(
    ("rows", "columns", "group_size"),
    [(256, 256, 128), (200, 384, 128), (8, 64, 64), (136, 320, 64), (130, 48, 48)],
)
def test_blocks(tmp_path, rows, columns, group_size):
    """The last blocks may be cut, along both axes."""
    q = weight_of(rows, columns)
    scale = scales(-(-rows // 128), -(-columns // 128))
    path = write_quantized(tmp_path, BLOCKS, named(weight=q, weight_scale_inv=scale))
    weight = read_quantized(path, f"{NAME}.weight")
    expected = np.zeros((rows, columns), np.float32)
    for row in range(rows):
        for i in range(0, columns, 16):
            piece = q[row, i : i + 16].astype(np.float32)
            expected[row, i : i + 16] = piece * scale[row // 128, i // 128]
    np.testing.assert_array_equal(weight.dequantize(), expected)
    assert (weight.code, weight.group_size, weight.activations) == ("fp8", group_size, "float")
    assert open_checkpoint(path).tensor_infos[f"{NAME}.weight"].loaded_bytes == weight.num_bytes


@pytest.mark.parametrize("part", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (24,), (24, 1)])
def test_tensors_and_rows(tmp_path, part, shape):
    q, scale = weight_of(24, 40), scales(*shape)
    method = "fbgemm_fp8" if len(shape) == 2 else "fp8"
    path = write_quantized(tmp_path, {"quant_method": method}, named(**{"weight": q, part: scale}))
    weight = read_quantized(path, f"{NAME}.weight")
    column = np.broadcast_to(scale.reshape(-1, 1), (24, 1))
    np.testing.assert_array_equal(weight.dequantize(), q.astype(np.float32) * column)
    assert (weight.group_size, weight.scale.shape) == (40, (24, 1))


def test_scales_of_activations_are_said_to_be_unused(tmp_path, caplog):
    config = FP8 | {"activation_scheme": "static"}
    tensors = named(weight=weight_of(2, 32), weight_scale=scales(), input_scale=scales())
    tensors |= {"model.layers.0.self_attn.k_scale": scales(), "lm_head.weight": scales(2, 2)}
    path = write_quantized(tmp_path, config, tensors)
    with caplog.at_level(logging.WARNING, "jaxinfer"):
        read = dict(open_checkpoint(path).tensors())
    assert "are not used: model.layers.0.self_attn.q_proj.input_scale, model.l" in caplog.text
    assert list(read) == [f"{NAME}.weight", "lm_head.weight"]


CHANGES = {
    "scheme": (FP8 | {"activation_scheme": "odd"}, {}, "activation_scheme is 'odd'"),
    "format": (FP8 | {"fmt": "e5m2"}, {}, "fmt is 'e5m2': supported are e4m3"),
    "block": (FP8 | {"weight_block_size": [128]}, {}, "weight_block_size is a list: must be"),
    "block zero": (FP8 | {"weight_block_size": [0, 128]}, {}, "two positive sizes"),
    "block odd": (
        FP8 | {"weight_block_size": [24, 24]},
        {"weight_scale": scales(1, 3)},
        "24 weights sh",
    ),
    "no scale": (FP8, {"weight_scale": None}, "q_proj.weight_scale_inv is missing"),
    "no weight": (FP8, {"weight": None}, "q_proj.weight is missing"),
    "two scales": (FP8, {"weight_scale_inv": scales(1)}, "weight_scale': does not belong"),
    "scale": (FP8, {"weight_scale": scales(3)}, "has the shape [3], not [24, 1]"),
    "blocks": (BLOCKS, {"weight_scale": scales(2, 1)}, "has the shape [2, 1], not [1, 1]"),
    "scale type": (FP8, {"weight_scale": scales(1).astype(np.int32)}, "has the dtype I32"),
    "float": (FP8, {"weight": np.ones((24, 64), np.float16)}, "has the dtype F16, not F8_E4M3"),
    "deep": (FP8, {"weight": np.ones((24, 64, 1), CODES)}, "not [any, any]"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_refused_when_opened(tmp_path, case):
    config, changes, message = CHANGES[case]
    tensors = named(weight=weight_of(24, 64), weight_scale=scales(1))
    for part, array in changes.items():
        tensors.pop(f"{NAME}.{part}", None)
        if array is not None:
            tensors[f"{NAME}.{part}"] = array
    assert message in refusal(write_quantized(tmp_path, config, tensors))


def test_float8_without_a_configuration(tmp_path):
    tensors = named(weight=weight_of(24, 64), weight_scale=scales(1))
    text = refusal(write_quantized(tmp_path, None, tensors))
    assert "has the dtype F8_E4M3" in text
    assert "quantization_config" in text
