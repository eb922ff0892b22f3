"""Our own format: arrays of a QuantizedArray as they are, and what is refused."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from checkpoint.builders import read_quantized, refusal, write_quantized

from jaxinfer.checkpoint import open_checkpoint
from jaxinfer.checkpoint.prequantized.stored import stored_arrays
from jaxinfer.quantized_array import QuantizedArray

O, I = 8, 64  # noqa: E741
NAME = "model.layers.0.mlp.up_proj"
CONFIG = {"quant_method": "jaxinfer", "version": 1}
RNG = np.random.default_rng(4)


def scales(dtype, groups=2):
    return RNG.uniform(0.1, 1, (O, groups)).astype(dtype)


NIBBLES = RNG.integers(0, 256, (O, I // 2), dtype=np.uint8)
BYTES = RNG.integers(-127, 128, (O, I), dtype=np.int8)
WEIGHTS = {
    "int4": QuantizedArray(NIBBLES, scales(np.float16), code="int4", group_size=32),
    "uint4": QuantizedArray(
        NIBBLES, scales(np.float16), scales(np.float16), code="uint4", group_size=32
    ),
    "codebook": QuantizedArray(
        NIBBLES,
        scales(ml_dtypes.bfloat16, 1),
        codebook=np.linspace(-1, 1, 16, dtype=np.float32),
        code="uint4",
        group_size=I,
    ),
    "int8": QuantizedArray(BYTES, scales(np.float32), code="int8", group_size=32),
    "int8 with an offset": QuantizedArray(
        BYTES, scales(np.float32), scales(np.float32), code="int8", group_size=32
    ),
    "fp8": QuantizedArray(
        BYTES.astype(ml_dtypes.float8_e4m3fn), scales(np.float32, 1), code="fp8", group_size=I
    ),
}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_every_kind_reads_back(tmp_path, kind):
    weight = WEIGHTS[kind]
    path = write_quantized(tmp_path, CONFIG, stored_arrays(f"{NAME}.weight", weight))
    found = read_quantized(path, f"{NAME}.weight")
    for field in dataclasses.fields(weight):
        ours, theirs = getattr(found, field.name), getattr(weight, field.name)
        if isinstance(theirs, np.ndarray):
            assert ours.dtype == theirs.dtype
            assert ours.tobytes() == theirs.tobytes()
        else:
            assert ours == theirs
    [info] = open_checkpoint(path).tensor_infos.values()
    assert info.loaded_bytes == weight.num_bytes


def test_activations_are_in_the_configuration(tmp_path):
    arrays = stored_arrays(f"{NAME}.weight", WEIGHTS["int8"])
    path = write_quantized(tmp_path, CONFIG | {"activations": "int8"}, arrays)
    found = read_quantized(path, f"{NAME}.weight")
    assert found.activations == "int8"


def test_permuted_columns_are_not_written():
    permuted = dataclasses.replace(WEIGHTS["int8"], perm=np.arange(I, dtype=np.int32))
    with pytest.raises(ValueError, match="permuted"):
        stored_arrays("a.weight", permuted)


@pytest.mark.parametrize("config", [{"version": 2}, {"activations": "fp8"}])
def test_configurations_that_are_refused(tmp_path, config):
    arrays = stored_arrays(f"{NAME}.weight", WEIGHTS["int8"])
    message = refusal(write_quantized(tmp_path, CONFIG | config, arrays))
    assert f"{next(iter(config))} is " in message


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("int8", {"scale": None}, ["weight.scale is missing"]),
        ("int8", {"scale": scales(np.float32, 3)}, ["3 groups do not divide 64"]),
        ("int8", {"scale": scales(np.float32)[:4]}, ["[4, 2]", f"[{O}, any]"]),
        ("int8", {"scale": scales(np.float32, 8)}, ["share a scale"]),
        ("int8", {"codebook": WEIGHTS["codebook"].codebook}, ["codebook", "4-bit codes"]),
        ("uint4", {"codebook": WEIGHTS["codebook"].codebook}, ["codebook", "without an offset"]),
        ("uint4", {"offset": scales(np.float32)}, ["offset", "F32", "F16"]),
        ("uint4", {"qvalue": NIBBLES[:, :24]}, ["48 wide", "32"]),
        ("fp8", {"offset": scales(np.float32, 1)}, ["offset", "float8"]),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, kind, changes, words):
    arrays = stored_arrays(f"{NAME}.weight", WEIGHTS[kind])
    for part, array in changes.items():
        arrays.pop(f"{NAME}.weight.{part}", None)
        if array is not None:
            arrays[f"{NAME}.weight.{part}"] = np.ascontiguousarray(array)
    message = refusal(write_quantized(tmp_path, CONFIG, arrays))
    assert "model.safetensors" in message
    assert all(word in message for word in words), message
