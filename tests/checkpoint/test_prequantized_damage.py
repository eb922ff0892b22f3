"""Damaged quantized checkpoints of every method: refused or read, quickly, in little memory."""

from __future__ import annotations

import contextlib
import json
import time
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from checkpoint.builders import safetensors_bytes, write_quantized
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxinfer.checkpoint import CheckpointError, open_checkpoint
from jaxinfer.checkpoint.prequantized import METHODS
from jaxinfer.checkpoint.safetensors import SafetensorsFile

O, I = 8, 64  # noqa: E741
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
STATE = {"quant_type": "nf4", "blocksize": 64, "shape": [O, I], "nested_blocksize": 256}
STATE |= {"nested_dtype": "float32", "nested_offset": 0.5}


def compressed(storage, **weights):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": storage,
        "config_groups": {"group_0": group},
        "ignore": ["re:.*lm_head"],
    }


def words(*shape):
    return np.zeros(shape, np.int32)


def floats(*shape):
    return np.ones(shape, np.float32)


def halves(*shape):
    return np.ones(shape, np.float16)


CASES = {
    "gptq": (
        GPTQ,
        {
            "qweight": words(8, O),
            "qzeros": words(2, 1),
            "scales": halves(2, O),
            "g_idx": np.repeat(np.arange(2, dtype=np.int32), 32),
        },
    ),
    "awq": (AWQ, {"qweight": words(I, 1), "qzeros": words(2, 1), "scales": halves(2, O)}),
    "packed": (
        compressed("pack-quantized", num_bits=4, symmetric=False, strategy="group", group_size=32),
        {
            "weight_packed": words(O, 8),
            "weight_scale": halves(O, 2),
            "weight_shape": np.array([O, I]),
            "weight_zero_point": words(1, 2),
        },
    ),
    "int8": (
        compressed("int-quantized", num_bits=8, symmetric=True, strategy="channel"),
        {"weight": np.zeros((O, I), np.int8), "weight_scale": halves(O, 1)},
    ),
    "nf4": (
        NF4,
        {
            "weight": np.zeros((O * I // 2, 1), np.uint8),
            "weight.absmax": np.zeros(O, np.uint8),
            "weight.quant_map": floats(16),
            "weight.nested_absmax": floats(1),
            "weight.nested_quant_map": floats(256),
            "weight.quant_state.bitsandbytes__nf4": np.frombuffer(
                json.dumps(STATE).encode(), np.uint8
            ),
        },
    ),
    "bnb8": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        {
            "weight": np.zeros((O, I), np.int8),
            "SCB": floats(O),
            "weight_format": np.array(0, np.uint8),
        },
    ),
    "fp8": (
        FP8,
        {
            "weight": np.zeros((O, I), ml_dtypes.float8_e4m3fn),
            "weight_scale_inv": floats(1, 1),
        },
    ),
}
VALUES = st.one_of(
    *(st.none(), st.booleans(), st.floats(), st.text(max_size=4), st.integers(-3, 300)),
    *(st.integers(), st.lists(st.integers(-2, 200), max_size=3), st.just({}), st.just({"a": {}})),
    st.sampled_from(["gptq_v2", "gemm", "channel", "group", "tensor", "float", "re:(", "nf4"]),
)
SHAPES = st.lists(st.integers(1, 9).map(lambda n: n * n), max_size=3)
DTYPES = [np.int32, np.int64, np.int8, np.uint8, np.float16, np.float32, ml_dtypes.float8_e4m3fn]
FUZZ = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def named(tensors):
    return {f"a.b.{part}": array for part, array in tensors.items()}


def bounded_read(path):
    """Reads a checkpoint or sees it refused, by a CheckpointError and in bounds."""
    tracemalloc.start()
    begin = time.perf_counter()
    try:
        with contextlib.suppress(CheckpointError):
            for _ in open_checkpoint(path).tensors():
                pass
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()
    assert time.perf_counter() - begin < 1.0


def set_at(config, path, value):
    """Returns a copy of nested objects with one value replaced, added or, if None, removed."""
    config = dict(config)
    key, *rest = path
    if rest:
        config[key] = set_at(config[key], rest, value)
    elif value is None:
        config.pop(key, None)
    else:
        config[key] = value
    return config


def paths_of(config, before=()):
    for key, value in config.items():
        yield (*before, key)
        if isinstance(value, dict):
            yield from paths_of(value, (*before, key))


@pytest.mark.parametrize("case", CASES)
def test_undamaged(tmp_path, case):
    config, tensors = CASES[case]
    read = dict(open_checkpoint(write_quantized(tmp_path, config, named(tensors))).tensors())
    assert read["a.b.weight"].shape == (O, I)


def test_every_foreign_method_is_here():
    methods = {config["quant_method"] for config, _ in CASES.values()}
    assert methods | {"fbgemm_fp8", "jaxinfer"} == METHODS.keys()


@pytest.mark.parametrize("case", CASES)
@FUZZ
@given(data=st.data())
def test_configurations(tmp_path, case, data):
    config, tensors = CASES[case]
    for _ in range(data.draw(st.integers(1, 2))):
        config = set_at(config, data.draw(st.sampled_from([*paths_of(config)])), data.draw(VALUES))
    bounded_read(write_quantized(tmp_path, config, named(tensors)))


@pytest.mark.parametrize("case", CASES)
@FUZZ
@given(data=st.data())
def test_tensors(tmp_path, case, data):
    """A tensor missing, of another type or shape, with other bytes, or one too many."""
    config, tensors = CASES[case]
    tensors = dict(tensors)
    part = data.draw(st.sampled_from([*tensors, "weight", "scales", "g_idx", "weight_zero_point"]))
    change = data.draw(st.sampled_from(["remove", "retype", "reshape", "bytes"]))
    old = tensors.pop(part, floats(4))
    if change == "retype":
        tensors[part] = np.zeros(old.shape, data.draw(st.sampled_from(DTYPES)))
    elif change == "reshape":
        tensors[part] = np.zeros(data.draw(SHAPES), old.dtype)
    elif change == "bytes":
        raw = data.draw(st.binary(min_size=old.nbytes, max_size=old.nbytes))
        tensors[part] = np.frombuffer(raw, old.dtype).reshape(old.shape)
    bounded_read(write_quantized(tmp_path, config, named(tensors)))


@pytest.mark.parametrize("method", METHODS)
@FUZZ
@given(extra=st.dictionaries(st.sampled_from(["bits", "group_size", "config_groups"]), VALUES))
def test_configurations_without_their_tensors(tmp_path, method, extra):
    tensors = {"a.b.weight": halves(2, 2), "a.b.scales": halves(2, 2)}
    bounded_read(write_quantized(tmp_path, {"quant_method": method} | extra, tensors))


@pytest.mark.parametrize(
    "config", ["gptq", 3, ["gptq"], True, {"quant_method": ["gptq"]}, {"a": 1}]
)
def test_configurations_of_no_kind(tmp_path, config):
    path = write_quantized(tmp_path, config, {"a.weight": halves(2, 2)})
    with pytest.raises(CheckpointError, match=r"config\.json: quantization_config"):
        open_checkpoint(path)


@pytest.mark.parametrize("case", CASES)
def test_pages_of_every_part_are_released(tmp_path, case, monkeypatch):
    config, tensors = CASES[case]
    released = []
    monkeypatch.setattr(SafetensorsFile, "release", lambda _, tensor: released.append(tensor.name))
    tensors = named(tensors) | {"norm.weight": floats(4)}
    for _ in open_checkpoint(write_quantized(tmp_path, config, tensors)).tensors():
        pass
    assert sorted(released) == sorted(tensors)


def test_unknown_method_names_those_we_know(tmp_path):
    path = write_quantized(tmp_path, {"quant_method": "aqlm"}, {"a.weight": halves(2, 2)})
    with pytest.raises(CheckpointError, match=r"is 'aqlm': supported are gptq, awq, compressed-te"):
        open_checkpoint(path)


@pytest.mark.parametrize("case", CASES)
def test_parts_in_two_files(tmp_path, case):
    """Companions may lie in different shards; a hole in one of them is found."""
    config, tensors = CASES[case]
    path = write_quantized(tmp_path, config, {})
    (path / "model.safetensors").unlink()
    names = list(named(tensors))
    shards = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(names)}
    for shard in set(shards.values()):
        part = {name: named(tensors)[name] for name in names if shards[name] == shard}
        (path / shard).write_bytes(safetensors_bytes(part))
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    assert dict(open_checkpoint(path).tensors())["a.b.weight"].shape == (O, I)
    del shards[names[0]]
    index.write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(CheckpointError, match="is missing"):
        open_checkpoint(path)
