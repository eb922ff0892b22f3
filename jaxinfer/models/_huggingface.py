"""Reads `config.json` the way Hugging Face means it, and names the tensors families share.

A key a checkpoint must supply has no default here: its absence is an error that names it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxinfer.nn.mlp import ACTIVATIONS
from jaxinfer.nn.rotary import LinearScaling, Llama3Scaling, RotaryConfig, RotaryScaling
from jaxinfer.nn.weights import Weight


class HFConfig:
    """One `config.json`, or a part of it; a null counts as absent, no default means required.

    Raises:
      ValueError: from every reader, naming the key: it is absent and has no default, or its value
        has the wrong type or sign.
    """

    def __init__(self, model_type: str, values: Mapping[str, Any]) -> None:
        self._model_type = model_type
        self._values = values

    def integer(self, key: str, default: int | None = None) -> int:
        """Returns a positive integer."""
        return self._positive(key, self._read(key, int, default))

    def count(self, key: str) -> int:
        """Returns an integer that may be zero."""
        value = self._read(key, int, None)
        if value < 0:
            raise self.error(f"{key} is {value}, expected zero or more")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a positive finite number."""
        return float(self._positive(key, self._read(key, float, default)))

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Returns a boolean."""
        return self._read(key, bool, default)

    def word(self, key: str, default: str | None = None) -> str:
        """Returns a string."""
        return self._read(key, str, default)

    def raw(self, key: str) -> Any:
        """Returns whatever is there, None if nothing is."""
        return self._values.get(key)

    def section(self, key: str, default: Mapping[str, Any] | None = None) -> HFConfig:
        """Returns a nested object."""
        return HFConfig(self._model_type, self._read(key, Mapping, default))

    def error(self, problem: str) -> ValueError:
        """Returns an error that says which configuration is wrong."""
        return ValueError(f"config.json ({self._model_type}): {problem}")

    def _read(self, key: str, kind: type, default: Any) -> Any:
        value = self._values.get(key)
        if value is None:
            if default is None:
                raise self.error(f"the key {key!r} is missing and has no default")
            return default
        accepted = (int, float) if kind is float else kind
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise self.error(f"{key} is {value!r}, expected {kind.__name__}")
        return value

    def _positive(self, key: str, value: int | float) -> Any:
        if not 0 < value < math.inf:
            raise self.error(f"{key} is {value}, expected a positive finite number")
        return value


def read_plain_decoder(hf: HFConfig, head_dim: int) -> dict[str, Any]:
    """Returns the fields of a decoder with nothing optional; a family overrides its differences."""
    num_layers = hf.integer("num_hidden_layers")
    return {
        "vocab_size": hf.integer("vocab_size"),
        "hidden_size": hf.integer("hidden_size"),
        "intermediate_size": hf.integer("intermediate_size"),
        "num_layers": num_layers,
        "num_heads": hf.integer("num_attention_heads"),
        "head_dim": head_dim,
        "max_position_embeddings": hf.integer("max_position_embeddings"),
        "rms_norm_eps": hf.number("rms_norm_eps"),
        "qkv_bias": False,
        "out_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
        "attention_scale": head_dim**-0.5,
        "attention_soft_cap": None,
        "windows": (None,) * num_layers,
    }


def read_head_dim(hf: HFConfig) -> int:
    """Returns head_dim; where it is absent or null, hidden_size / num_attention_heads."""
    if hf.raw("head_dim") is not None:
        return hf.integer("head_dim")
    hidden_size, num_heads = hf.integer("hidden_size"), hf.integer("num_attention_heads")
    if hidden_size % num_heads:
        raise hf.error(
            f"head_dim is missing, and hidden_size {hidden_size} is not a multiple of "
            f"num_attention_heads {num_heads}"
        )
    return hidden_size // num_heads


def read_activation(hf: HFConfig, key: str = "hidden_act") -> str:
    """Returns the MLP's activation, refusing those we do not have."""
    name = hf.word(key)
    if name not in ACTIVATIONS:
        raise hf.error(f"{key} {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return name


def read_layer_windows(
    hf: HFConfig, window: int | None, default: list[str]
) -> tuple[int | None, ...]:
    """Returns each layer's window from `layer_types`, or from `default` where that is absent."""
    kinds = hf.raw("layer_types") or default
    num_layers = hf.integer("num_hidden_layers")
    windows = {"sliding_attention": window, "full_attention": None}
    if len(kinds) != num_layers or not set(kinds) <= set(windows):
        raise hf.error(
            f"layer_types is {kinds}, expected {num_layers} times one of {', '.join(windows)}"
        )
    return tuple(windows[kind] for kind in kinds)


def read_upper_windows(hf: HFConfig) -> tuple[int | None, ...]:
    """Returns Qwen's windows: none unless switched on, then from layer `max_window_layers` up."""
    num_layers = hf.integer("num_hidden_layers")
    if not hf.flag("use_sliding_window", False):
        return (None,) * num_layers
    kinds: list[str] = []
    if hf.raw("layer_types") is None:
        first = hf.count("max_window_layers")
        kinds = ["full_attention"] * first + ["sliding_attention"] * (num_layers - first)
    return read_layer_windows(hf, hf.integer("sliding_window"), kinds[:num_layers])


def read_rotary(hf: HFConfig, head_dim: int, default_theta: float | None = None) -> RotaryConfig:
    """Returns the rotary embedding of `rope_parameters`, or of `rope_theta` and `rope_scaling`.

    The first is how transformers 5 writes it, the others are how files written before have it.
    """
    if hf.raw("rope_parameters") is not None:
        parameters = hf.section("rope_parameters")
        return make_rotary(parameters, head_dim, parameters.number("rope_theta", default_theta))
    theta = hf.number("rope_theta", default_theta)
    scaling = hf.section("rope_scaling", {})
    return make_rotary(scaling, head_dim, theta, hf.raw("partial_rotary_factor"))


def make_rotary(rope: HFConfig, head_dim: int, theta: float, partial: Any = None) -> RotaryConfig:
    """Returns the rotary embedding a rope dictionary describes (`type` is its old spelling)."""
    partial = partial or rope.raw("partial_rotary_factor")
    if partial not in (None, 1, 1.0):
        raise rope.error(f"partial_rotary_factor {partial} is not supported; only 1 is")
    kind = rope.word("rope_type", rope.word("type", "default"))
    scaling: RotaryScaling | None
    if kind == "default":
        scaling = None
    elif kind == "linear":
        scaling = LinearScaling(rope.number("factor"))
    elif kind == "llama3":
        scaling = Llama3Scaling(
            rope.number("factor"),
            rope.number("low_freq_factor"),
            rope.number("high_freq_factor"),
            rope.integer("original_max_position_embeddings"),
        )
    else:
        raise rope.error(f"rope_type {kind!r} is not supported; supported: default, linear, llama3")
    return RotaryConfig(theta, head_dim, scaling)


def layer_weight(*names: str, offset: float = 0.0) -> Weight:
    """Returns the source of a layer's parameter, names given below `model.layers.{i}.`."""
    return Weight(tuple(f"model.layers.{{i}}.{name}" for name in names), offset)


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")

DECODER_WEIGHTS = {
    "embedding.weight": Weight(("model.embed_tokens.weight",)),
    "layers.{i}.input_norm.weight": layer_weight("input_layernorm.weight"),
    "layers.{i}.attention.qkv.weight": layer_weight(*(f"{name}.weight" for name in _QKV)),
    "layers.{i}.attention.out.weight": layer_weight("self_attn.o_proj.weight"),
    "layers.{i}.post_attention_norm.weight": layer_weight("post_attention_layernorm.weight"),
    "layers.{i}.mlp.gate_up.weight": layer_weight("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "layers.{i}.mlp.down.weight": layer_weight("mlp.down_proj.weight"),
    "norm.weight": Weight(("model.norm.weight",)),
    "head.weight": Weight(("lm_head.weight",)),
}
QKV_BIASES = {"layers.{i}.attention.qkv.bias": layer_weight(*(f"{name}.bias" for name in _QKV))}
OUT_BIAS = {"layers.{i}.attention.out.bias": layer_weight("self_attn.o_proj.bias")}

ROTARY_BUFFERS = ("model.layers.*.self_attn.rotary_emb.inv_freq",)
"""Tables old checkpoints carry although they follow from `config.json`."""
