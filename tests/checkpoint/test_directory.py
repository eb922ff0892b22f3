"""Directories with safetensors: what is read, what is refused, and that links stay inside."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import struct

import ml_dtypes
import numpy as np
import pytest
from checkpoint.builders import refusal, safetensors_bytes, safetensors_file
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxinfer.checkpoint import CheckpointError, open_checkpoint

CONFIG = {"model_type": "llama", "hidden_size": 8}
TENSORS = {
    "model.a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "model.b.weight": np.arange(6, dtype=np.float16).reshape(2, 3),
    "model.c.weight": np.arange(4).astype(ml_dtypes.bfloat16),
    "model.d.weight": np.arange(2, dtype=np.float64),
}
SHARDS = {"model-1.safetensors": ["model.a.weight", "model.b.weight"]}
SHARDS["model-2.safetensors"] = ["model.c.weight", "model.d.weight"]


@pytest.fixture
def directory(tmp_path):
    """A model directory with a config and no weights."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.fixture
def single(directory):
    (directory / "model.safetensors").write_bytes(safetensors_bytes(TENSORS))
    return directory


@pytest.fixture
def sharded(directory):
    for shard, names in SHARDS.items():
        data = safetensors_bytes({name: TENSORS[name] for name in names})
        (directory / shard).write_bytes(data)
    write_index(directory, {name: shard for shard, names in SHARDS.items() for name in names})
    return directory


def write_index(directory, weight_map):
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (directory / "model.safetensors.index.json").write_text(text)


def weight_map_of(directory):
    return json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]


def assert_complete(checkpoint):
    read = dict(checkpoint.tensors())
    assert read.keys() == TENSORS.keys() == checkpoint.tensor_infos.keys()
    for name, array in TENSORS.items():
        assert read[name].dtype == array.dtype
        np.testing.assert_array_equal(read[name], array)


def test_single_file(single):
    checkpoint = open_checkpoint(single)
    assert_complete(checkpoint)
    assert (checkpoint.path, checkpoint.tokenizer_source) == (single, single)
    assert (checkpoint.hf_config, checkpoint.model_type) == (CONFIG, "llama")
    assert checkpoint.generation_config == {}
    info = checkpoint.tensor_infos["model.c.weight"]
    assert (info.shape, info.dtype, info.num_bytes) == ((4,), "BF16", 8)


def test_shards(sharded):
    assert_complete(open_checkpoint(sharded))


def test_generation_config_is_read(single):
    (single / "generation_config.json").write_text('{"temperature": 0.6}')
    assert open_checkpoint(single).generation_config == {"temperature": 0.6}


def test_directory_named_like_a_file(single):
    assert_complete(open_checkpoint(single.rename(single.with_name("x.safetensors"))))


def test_integer_buffers_are_left_out(directory):
    buffer = {"model.position_ids": np.arange(4)}
    (directory / "model.safetensors").write_bytes(safetensors_bytes(TENSORS | buffer))
    assert_complete(open_checkpoint(directory))


def test_missing_shard(sharded):
    (sharded / "model-2.safetensors").unlink()
    assert "1 of 2 files are missing: model-2.safetensors" in refusal(sharded)


def test_indexed_tensor_not_in_its_shard(sharded):
    write_index(sharded, weight_map_of(sharded) | {"model.z": "model-2.safetensors"})
    assert "1 tensors are not in the file" in (text := refusal(sharded))
    assert "model-2.safetensors: model.z" in text


def test_many_lost_tensors_are_counted(sharded):
    lost = {f"model.{i}": "model-1.safetensors" for i in range(20)}
    write_index(sharded, weight_map_of(sharded) | lost)
    assert "20 tensors are not in" in (text := refusal(sharded))
    assert text.endswith("model.4 and 15 more")


def test_tensor_in_two_shards(sharded):
    names = [*SHARDS["model-2.safetensors"], "model.a.weight"]
    data = safetensors_bytes({name: TENSORS[name] + TENSORS[name] for name in names})
    (sharded / "model-2.safetensors").write_bytes(data)
    text = refusal(sharded)
    assert "'model.a.weight' is in two files: model-1.safetensors and model-2" in text


def test_what_the_index_does_not_name_is_not_read(sharded, caplog):
    (sharded / "extra.safetensors").write_bytes(b"rubbish")
    more = TENSORS | {"model.more": np.zeros(2, np.float32)}
    names = [*SHARDS["model-2.safetensors"], "model.more"]
    data = safetensors_bytes({name: more[name] for name in names})
    (sharded / "model-2.safetensors").write_bytes(data)
    with caplog.at_level(logging.WARNING, "jaxinfer"):
        assert_complete(open_checkpoint(sharded))
    assert "extra.safetensors" in caplog.text
    assert "model.more" in caplog.text


@pytest.mark.parametrize(
    "shard", ["../other.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", "a\0b"]
)
def test_index_cannot_leave_the_directory(sharded, shard):
    (sharded.parent / "other.safetensors").write_bytes(safetensors_bytes(TENSORS))
    write_index(sharded, dict.fromkeys(TENSORS, shard))
    assert "is not the plain name of a file" in refusal(sharded)


@pytest.mark.parametrize("name", ["model-1.safetensors", "config.json"])
def test_link_out_of_the_directory(sharded, name):
    outside = sharded.parent / "outside"
    (sharded / name).rename(outside)
    (sharded / name).symlink_to(outside)
    assert f"{name}: is a link to a file outside the directory" in refusal(sharded)


def test_link_inside_the_directory(single):
    (single / "model.safetensors").rename(single / "real")
    (single / "model.safetensors").symlink_to("real")
    assert_complete(open_checkpoint(single))


def test_links_of_the_hub_s_cache(single, tmp_path):
    repository = tmp_path / "models--a--b"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for name in ("config.json", "model.safetensors"):
        (single / name).rename(repository / "blobs" / name)
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    assert_complete(open_checkpoint(snapshot))
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    assert "outside the directory" in refusal(snapshot)


def test_link_that_points_at_itself(single):
    (single / "model.safetensors").unlink()
    (single / "model.safetensors").symlink_to("model.safetensors")
    refusal(single)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ('{"weight_map": {"a": "model-1.safe', "not valid JSON"),
        ('{"a": ' * 100_000, "not valid JSON"),
        ("[1]", "not a JSON object"),
        ('{"weight_map": {}}', "weight_map is missing, empty"),
        ('{"weight_map": ["a"]}', "weight_map is missing, empty"),
        ('{"weight_map": {"a": 1}}', "not a string"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "the key 'a' occurs twice"),
    ],
)
def test_bad_index(sharded, text, message):
    (sharded / "model.safetensors.index.json").write_text(text)
    assert message in refusal(sharded)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type": "lla', "not valid JSON"),
        ("{}", "model_type is None"),
        ('{"model_type": 3}', "model_type is 3"),
        ('{"model_type": "llama", "quantization_config": {"quant_method": "aqlm"}}', "'aqlm'"),
        (f'{{"model_type": {"9" * 5000}}}', "not valid JSON"),
    ],
)
def test_bad_config(single, text, message):
    (single / "config.json").write_text(text)
    assert message in (refused := refusal(single))
    assert "config.json" in refused


def test_bad_generation_config(single):
    (single / "generation_config.json").write_text("{")
    assert "generation_config.json: not valid JSON" in refusal(single)


def test_empty_directory(tmp_path):
    assert "config.json: missing" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (None, "holds no weights"),
        ("pytorch_model.bin", "convert them with transformers"),
        ("consolidated.00.pth", "only pickled weights"),
        ("model.pt", "only pickled weights"),
        ("model.gguf", "give the path of the one to load"),
        ("other.safetensors", "holds other.safetensors but neither"),
    ],
)
def test_no_readable_weights(directory, name, message):
    if name:
        (directory / name).write_bytes(b"\x80\x04.")
    assert message in refusal(directory)


def test_shard_that_is_a_directory(single):
    (single / "model.safetensors").unlink()
    (single / "model.safetensors").mkdir()
    assert "not a regular file" in refusal(single)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file(single):
    (single / "model.safetensors").chmod(0)
    assert "cannot be read" in refusal(single)


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


BAD_FILES = {
    "too short": (b"\x01", "does not fit"),
    "header 2^63": (struct.pack("<Q", 1 << 63) + b"{}", "9223372036854775808 bytes does not fit"),
    "header of 100 MB": (struct.pack("<Q", 100 << 20) + b"{}", "does not fit"),
    "header no JSON": (safetensors_file(b"{'a'}", b""), "not valid JSON"),
    "header not UTF-8": (safetensors_file(b'{"\xff": 1}', b""), "not valid JSON"),
    "header a list": (safetensors_file([], b""), "not a JSON object"),
    "header deep": (safetensors_file(b"[" * 200_000, b""), "not valid JSON"),
    "name twice": (safetensors_file(b'{"t": 1, "t": 2}', b""), "the key 't' occurs twice"),
    "entry no object": (safetensors_file({"t": 1}, b""), "not an object"),
    "dtype unknown": (safetensors_file({"t": entry("F4")}, bytes(8)), "dtype 'F4' is not supp"),
    "dtype list": (safetensors_file({"t": entry(["F32"])}, bytes(8)), "is not supported"),
    "dtype integer": (
        safetensors_file({"t": entry("I32")}, bytes(8)),
        "'t': has the dtype I32; supported are F64, F32, F16, BF16",
    ),
    "shape negative": (safetensors_file({"t": entry(shape=[-2])}, bytes(8)), "positive sizes"),
    "shape zero": (safetensors_file({"t": entry(shape=[0])}, bytes(8)), "positive sizes"),
    "shape truth": (safetensors_file({"t": entry(shape=[True])}, bytes(8)), "positive sizes"),
    "shape float": (safetensors_file({"t": entry(shape=[2.0])}, bytes(8)), "positive sizes"),
    "shape long": (safetensors_file({"t": entry(shape=[1] * 9)}, bytes(8)), "at most 8"),
    "shape huge": (safetensors_file({"t": entry(shape=[1 << 62] * 3)}, bytes(8)), "has 39231"),
    "offsets three": (safetensors_file({"t": entry(offsets=[0, 4, 8])}, bytes(8)), "two sizes"),
    "offsets backwards": (safetensors_file({"t": entry(offsets=[8, 0])}, bytes(8)), "span -8"),
    "size wrong": (safetensors_file({"t": entry(offsets=[0, 4])}, bytes(4)), "span 4 bytes, but"),
    "beyond the end": (safetensors_file({"t": entry()}, bytes(4)), "beyond the end of the file"),
    "hole": (safetensors_file({"t": entry(offsets=[8, 16])}, bytes(16)), "follows a hole"),
    "overlap": (
        safetensors_file({"t": entry(), "u": entry(offsets=[4, 12])}, bytes(12)),
        "'u': its data at byte .* overlaps its neighbour",
    ),
    "bytes left over": (safetensors_file({"t": entry()}, bytes(9)), "the header describes"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_file(directory, case):
    raw, message = BAD_FILES[case]
    (directory / "model.safetensors").write_bytes(raw)
    text = refusal(directory)
    assert "model.safetensors" in text
    with pytest.raises(CheckpointError, match=message):
        raise CheckpointError(text)


def test_cut_anywhere(single):
    raw = (single / "model.safetensors").read_bytes()
    for length in range(0, len(raw), 4):
        (single / "model.safetensors").write_bytes(raw[:length])
        with pytest.raises(CheckpointError):
            open_checkpoint(single)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(flips=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4))
def test_damage_is_refused_or_harmless(single, flips):
    raw = bytearray(safetensors_bytes(TENSORS))
    for at, byte in flips:
        raw[at] = byte
    (single / "model.safetensors").write_bytes(raw)
    with contextlib.suppress(CheckpointError):
        for _ in open_checkpoint(single).tensors():
            pass
