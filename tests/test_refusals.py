"""What `serve.py` and `bench` refuse to start with: quickly, and in one sentence."""

import json
import pickle
import re
import socket
import time

import pytest
from checkpoint.builders import STRING, tiny_gguf
from checkpoint.tiny_directory import add_remote_code, pickle_that_makes, write_model
from command import run

pytestmark = pytest.mark.slow
FAST_S = 10
"""Importing jax takes one or two seconds of it; nothing of a model may be loaded first."""


def refusal(*flags, **environment):
    """Starts `serve.py`, which must refuse quickly and in one sentence; returns it."""
    began = time.monotonic()
    result = run("serve.py", "--port", "0", *flags, **environment)
    assert time.monotonic() - began < FAST_S
    assert result.returncode in (1, 2), result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    shown = ("INFO jaxinfer: listening", "lifecycle: loading model", "Loading weights: ")
    lines = [
        line for line in result.stderr.splitlines() if line and not any(map(line.count, shown))
    ]
    [sentence] = lines
    assert sentence.startswith("jaxinfer serve: ")
    return sentence


@pytest.fixture
def directory(tmp_path):
    """A directory whose index names two shards, of which one is there."""
    path = tmp_path / "sharded"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 8}))
    weight_map = {"model.a.weight": "model-1.safetensors", "model.b.weight": "model-2.safetensors"}
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (path / "model.safetensors.index.json").write_text(index)
    (path / "model-1.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return path


def test_a_file_that_was_cut(tmp_path):
    whole = tiny_gguf().build()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[: len(whole) // 2])
    assert "cut.gguf" in refusal("--model", str(path))


def test_a_shard_that_is_absent(directory):
    assert "model-2.safetensors" in refusal("--model", str(directory))


def test_an_architecture_nobody_knows(tmp_path):
    builder = tiny_gguf().put("general.architecture", STRING, "mamba")
    sentence = refusal("--model", str(builder.write(tmp_path / "m.gguf")))
    assert "mamba" in sentence
    assert "llama" in sentence


def test_a_model_that_is_nowhere():
    assert "nosuch" in refusal("--model", "nosuch")
    assert "no/such" in refusal("--model", "no/such")


def test_pickles(tmp_path):
    trace = tmp_path / "trace"
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "pytorch_model.bin").write_bytes(pickle_that_makes(trace))
    assert "pickled weights" in refusal("--model", str(tmp_path))
    assert not trace.exists()
    pickle.loads((tmp_path / "pytorch_model.bin").read_bytes()).close()
    assert trace.exists(), "this pickle would have said that it was loaded"


def test_a_family_that_is_code_of_the_checkpoint(tmp_path):
    trace = tmp_path / "trace"
    path = add_remote_code(write_model(tmp_path / "model"), trace, model_type="tiny_custom")
    sentence = refusal("--model", str(path))
    assert "'tiny_custom' is not supported" in sentence
    assert "the code that auto_map names is never run" in sentence
    assert not trace.exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--attention", "flash"], ["'flash'", "xla", "reference"]),
        (["--matmul", "cutlass"], ["'cutlass'", "xla"]),
        (["--quant", "int3"], ["'int3'", "int8", "int4"]),
        (["--max-model-len", "99999"], ["99999", "8192"]),
        (["--tensor-parallel", "3"], ["3", "1 cpu"]),
        (["--model-type", "qwen3"], ["'qwen3'", "'llama'"]),
        (["--kv-cache-memory", "1MiB", "--max-model-len", "2048"], ["2048", "kv_cache_memory"]),
        (["--num-pages", "8", "--max-model-len", "512"], ["512", "128"]),
        (["--chat-template", "nosuch"], ["nosuch"]),
        (["--tokenizer-path", "/no/such"], ["/no/such"]),
    ],
)
@pytest.mark.real_model
def test_flags_that_do_not_fit_the_model(smollm2_path, flags, words):
    sentence = refusal("--model", str(smollm2_path), *flags, XLA_FLAGS="")
    for word in words:
        assert word in sentence


@pytest.mark.real_model
def test_nine_heads_on_two_devices(smollm2_path):
    two = "--xla_force_host_platform_device_count=2"
    flags = ("--model", str(smollm2_path), "--tensor-parallel", "2")
    sentence = refusal(*flags, XLA_FLAGS=two)
    assert re.search(r"\b9\b", sentence)
    assert re.search(r"\b2\b", sentence)


def test_a_port_in_use():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        result = run("serve.py", "--port", str(port))
    assert result.returncode == 2
    assert f"{port}: the port is in use" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_bench_refuses_as_serve_does():
    result = run("-m", "jaxinfer", "bench", "--model", "nosuch", "--json")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("jaxinfer bench: ")
    assert "nosuch" in result.stderr
    assert "Traceback" not in result.stderr
