"""Tiny checkpoints built byte by byte, so that tests can also build wrong ones."""

from __future__ import annotations

import dataclasses
import json
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer.checkpoint import CheckpointError, open_checkpoint
from jaxinfer.quantized_array import QuantizedArray

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
FORMATS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?"}
FORMATS |= {U64: "Q", I64: "q", F64: "d"}


def gguf_string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def gguf_value(value_type: int, value: Any) -> bytes:
    if value_type == STRING:
        return gguf_string(value)
    return struct.pack("<" + FORMATS[value_type], value)


class GgufBuilder:
    """Collects keys and tensors, then writes them as GGUF would; every field can be forged."""

    def __init__(self) -> None:
        self.magic = b"GGUF"
        self.version = 3
        self.alignment = 32
        self.num_keys: int | None = None
        self.num_tensors: int | None = None
        self.keys: dict[str, bytes] = {}
        self.extra_keys = b""
        self.tensors: dict[str, tuple[tuple[int, ...], int, bytes]] = {}
        self.offsets: dict[str, int] = {}

    def put(self, key: str, value_type: int, value: Any) -> GgufBuilder:
        return self.put_raw(key, value_type, gguf_value(value_type, value))

    def put_raw(self, key: str, value_type: int, payload: bytes) -> GgufBuilder:
        self.keys[key] = gguf_string(key) + struct.pack("<I", value_type) + payload
        return self

    def put_array(self, key: str, item_type: int, items: list[Any]) -> GgufBuilder:
        head = struct.pack("<IQ", item_type, len(items))
        return self.put_raw(key, ARRAY, head + b"".join(gguf_value(item_type, i) for i in items))

    def tensor(self, name: str, array: np.ndarray) -> GgufBuilder:
        """Adds a float32 tensor of row-major shape."""
        array = np.asarray(array, np.float32)
        return self.raw_tensor(name, array.shape[::-1], 0, array.tobytes())

    def raw_tensor(self, name: str, dims: tuple[int, ...], number: int, data: bytes) -> GgufBuilder:
        """Adds a tensor with dims in the file's order (fastest first) and any type number."""
        self.tensors[name] = dims, number, data
        return self

    def build(self) -> bytes:
        num_tensors = len(self.tensors) if self.num_tensors is None else self.num_tensors
        num_keys = len(self.keys) if self.num_keys is None else self.num_keys
        head = self.magic + struct.pack("<IQQ", self.version, num_tensors, num_keys)
        head += b"".join(self.keys.values()) + self.extra_keys
        data = b""
        for name, (dims, number, raw) in self.tensors.items():
            offset = self.offsets.get(name, len(data))
            head += gguf_string(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
            head += struct.pack("<IQ", number, offset)
            data += raw + bytes(-len(raw) % self.alignment)
        return head + bytes(-len(head) % self.alignment) + data

    def write(self, path: Path) -> Path:
        path.write_bytes(self.build())
        return path


def tiny_gguf(architecture: str = "llama", seed: int = 0, is_tied: bool = False) -> GgufBuilder:
    """A complete model: 2 layers, hidden 64, 4 heads of 16, 2 KV heads, 96 tokens."""
    hidden, inner, heads, kv_heads, head_dim, vocab, layers = 64, 96, 4, 2, 16, 96, 2
    builder = GgufBuilder().put("general.architecture", STRING, architecture)
    for key, value in {
        "context_length": 256,
        "embedding_length": hidden,
        "block_count": layers,
        "feed_forward_length": inner,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
    }.items():
        builder.put(f"{architecture}.{key}", U32, value)
    builder.put(f"{architecture}.attention.layer_norm_rms_epsilon", F32, 1e-6)
    builder.put(f"{architecture}.rope.freq_base", F32, 10000.0)
    builder.put_array("tokenizer.ggml.tokens", STRING, [f"<{i}>" for i in range(vocab)])
    builder.put_array("tokenizer.ggml.token_type", I32, [1] * vocab)
    builder.put("tokenizer.ggml.eos_token_id", U32, 2)
    rng = np.random.default_rng(seed)

    def add(name: str, *shape: int) -> None:
        builder.tensor(name, rng.standard_normal(shape) / 8 + (1.0 if "norm" in name else 0.0))

    add("token_embd.weight", vocab, hidden)
    add("output_norm.weight", hidden)
    if not is_tied:
        add("output.weight", vocab, hidden)
    for layer in range(layers):
        prefix = f"blk.{layer}."
        for norm in ("attn_norm", "ffn_norm"):
            add(f"{prefix}{norm}.weight", hidden)
        add(f"{prefix}attn_q.weight", heads * head_dim, hidden)
        add(f"{prefix}attn_k.weight", kv_heads * head_dim, hidden)
        add(f"{prefix}attn_v.weight", kv_heads * head_dim, hidden)
        add(f"{prefix}attn_output.weight", hidden, heads * head_dim)
        for name, shape in {"gate": (inner, hidden), "up": (inner, hidden)}.items():
            add(f"{prefix}ffn_{name}.weight", *shape)
        add(f"{prefix}ffn_down.weight", hidden, inner)
        if architecture == "qwen2":
            for name, rows in {"q": heads, "k": kv_heads, "v": kv_heads}.items():
                add(f"{prefix}attn_{name}.bias", rows * head_dim)
        if architecture in ("qwen3", "gemma3"):
            add(f"{prefix}attn_q_norm.weight", head_dim)
            add(f"{prefix}attn_k_norm.weight", head_dim)
        if architecture == "gemma3":
            add(f"{prefix}post_attention_norm.weight", hidden)
            add(f"{prefix}post_ffw_norm.weight", hidden)
    if architecture == "gemma3":
        builder.put("gemma3.attention.sliding_window", U32, 8)
    return builder


def interleave_halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What the converter does to `llama`'s q and k, row by row: x0 y0 x1 y1 ... in each head."""
    head_dim = len(weight) // num_heads
    half = head_dim // 2
    rows = []
    for head in range(num_heads):
        for i in range(half):
            rows += [weight[head * head_dim + i], weight[head * head_dim + half + i]]
    return np.stack(rows)


SAFETENSORS_NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
SAFETENSORS_NAMES |= {"int64": "I64", "uint8": "U8", "int32": "I32", "int8": "I8"}
SAFETENSORS_NAMES |= {"float8_e4m3fn": "F8_E4M3"}


def safetensors_bytes(tensors: dict[str, np.ndarray]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in tensors.items():
        raw = array.tobytes()
        header[name] = {
            "dtype": SAFETENSORS_NAMES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    return safetensors_file(header, data)


def safetensors_file(header: Any, data: bytes) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def write_quantized(path: Path, config: Any, tensors: dict[str, np.ndarray]) -> Path:
    """Writes a model directory with a quantization_config and returns it."""
    path.mkdir(exist_ok=True)
    text = json.dumps({"model_type": "llama", "quantization_config": config})
    (path / "config.json").write_text(text)
    (path / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    return path


def assert_same_format(abstract: QuantizedArray, weight: QuantizedArray) -> None:
    """Asserts that a matrix is what was said of it before it was read."""
    for field in dataclasses.fields(QuantizedArray):
        said, found = getattr(abstract, field.name), getattr(weight, field.name)
        if not isinstance(found, np.ndarray):
            assert said == found, field.name
        elif field.name == "codebook":
            np.testing.assert_array_equal(said, found, strict=True)
        else:
            assert (said.dtype, said.shape) == (found.dtype, found.shape), field.name


def read_quantized(path: Path, name: str) -> QuantizedArray:
    """Reads a quantized matrix and checks it against what is known before."""
    checkpoint = open_checkpoint(path)
    weight = dict(checkpoint.tensors())[name]
    info = checkpoint.tensor_infos[name]
    assert isinstance(weight, QuantizedArray)
    assert (info.shape, info.group_size) == (weight.shape, weight.group_size)
    assert info.loaded_bytes is not None
    assert info.codes is not None
    if info.is_certain:
        assert_same_format(info.codes, weight)
    # What only data can tell is planned for: zero points that differ, columns in another order.
    assert info.loaded_bytes >= weight.num_bytes
    return weight


def refusal(path: Path, read: bool = False) -> str:
    """Opens a checkpoint that must be refused; returns the message after bounding its cost.

    With `read`, opening may pass, and reading must not.
    """
    tracemalloc.start()
    begin = time.perf_counter()
    try:
        with pytest.raises(CheckpointError) as caught:
            _open_and_read(path) if read else open_checkpoint(path)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.perf_counter() - begin < 1.0
    assert peak_bytes < 50 << 20
    return str(caught.value)


def _open_and_read(path: Path) -> None:
    for _ in open_checkpoint(path).tensors():
        pass
