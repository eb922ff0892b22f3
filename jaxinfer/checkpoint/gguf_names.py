"""GGUF tensor names and layouts, turned into Hugging Face's, architecture by architecture.

The converter of llama.cpp renames tensors, interleaves the rotary halves of `llama`'s q and k, and
adds one to gemma's norm weights; all of it is undone here, so that models never know.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxinfer.quantized_array import QuantizedArray

ROPE_FACTORS = "rope_freqs.weight"
"""Frequency divisors of Llama 3's rope scaling: configuration rather than a weight."""

_GLOBAL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SANDWICH_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYER_TENSOR = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.(\w+)\.(weight|bias)")
_GLOBAL_TENSOR = re.compile(r"(\w+)\.(weight|bias)")

Stored = np.ndarray | QuantizedArray
Restore = Callable[[str, Stored, Mapping[str, Any]], Stored]
"""(Hugging Face name, stored array, Hugging Face config) -> the array in its original layout."""


def _unpermute_qk(name: str, array: Stored, config: Mapping[str, Any]) -> Stored:
    """Takes interleaved rotary pairs (x0 y0 x1 y1 ...) back to halves (x0 x1 ... y0 y1 ...)."""
    if ".q_proj." in name:
        num_heads = config["num_attention_heads"]
    elif ".k_proj." in name:
        num_heads = config["num_key_value_heads"]
    else:
        return array
    if array.shape[0] % (2 * num_heads):
        raise ValueError(f"{array.shape[0]} rows are not {num_heads} heads of an even size")

    def to_halves(rows: np.ndarray) -> np.ndarray:
        pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
        return pairs.swapaxes(1, 2).reshape(rows.shape)

    return array.map_rows(to_halves) if isinstance(array, QuantizedArray) else to_halves(array)


def _subtract_one_from_norms(name: str, array: Stored, _: Mapping[str, Any]) -> Stored:
    if not name.endswith("norm.weight"):
        return array
    if isinstance(array, QuantizedArray):  # a norm stored as a matrix of one row
        array = array.dequantize()
    return array - array.dtype.type(1)


def _unchanged(_: str, array: Stored, __: Mapping[str, Any]) -> Stored:
    return array


@dataclass(frozen=True)
class Architecture:
    """How one `general.architecture` relates to Hugging Face.

    Attributes:
      model_type: Hugging Face's name for it.
      layer_names: the name inside a layer, from GGUF's to Hugging Face's.
      restore: undoes the converter's change of a tensor; raises ValueError on a wrong shape.
    """

    model_type: str
    layer_names: Mapping[str, str] = field(default_factory=lambda: MappingProxyType(_LAYER))
    restore: Restore = _unchanged

    def hf_name(self, gguf_name: str) -> str | None:
        """Returns a tensor's Hugging Face name, or None where the architecture has no such."""
        if match := _LAYER_TENSOR.fullmatch(gguf_name):
            layer, inner, suffix = match.groups()
            renamed = self.layer_names.get(inner)
            return renamed and f"model.layers.{layer}.{renamed}.{suffix}"
        match = _GLOBAL_TENSOR.fullmatch(gguf_name)
        renamed = match and _GLOBAL.get(match[1])
        return renamed and match and f"{renamed}.{match[2]}"


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", restore=_unpermute_qk),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3", _LAYER | _QK_NORM),
    "gemma3": Architecture(
        "gemma3_text", _LAYER | _QK_NORM | _SANDWICH_NORMS, _subtract_one_from_norms
    ),
}
"""By `general.architecture`. `llama` is also what mistral models are converted to."""
