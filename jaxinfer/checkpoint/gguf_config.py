"""GGUF metadata, turned into the dicts that `config.json` and `generation_config.json` would hold.

Defaults are llama.cpp's for keys its converter leaves out. What would change the mathematics and
is not understood is refused; other unknown keys of the architecture are named in a warning.
"""

from __future__ import annotations

import logging
import math
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.checkpoint.checkpoint import CheckpointError
from jaxinfer.checkpoint.gguf_names import ARCHITECTURES

logger = logging.getLogger(__name__)

DEFAULT_ROPE_THETA = 10000.0
GEMMA3_SLIDING_WINDOW_PATTERN = 6
GEMMA3_27B_NUM_LAYERS = 62
"""The one size whose queries are scaled by hidden_size / num_heads and not by head_dim."""
END_OF_TURN_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|endoftext|>")
"""Control tokens that end a reply whatever `eos_token_id` says, as in llama.cpp."""

_CONTROL_TOKEN = 3
_MAX_INT = (1 << 31) - 1
_NO_EFFECT = {  # keys that change the mathematics, and the value with which they do not
    "attention.causal": True,
    "expert_count": 0,
    "expert_used_count": 0,
    "rope.scaling.attn_factor": 1.0,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "embedding_scale": 1.0,
    "attention.scale": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "attention.clamp_kqv": 0.0,
}
_UNUSED_KEYS = frozenset(
    {
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "tensor_data_layout",
        "vocab_size",  # the embedding's rows count
    }
)


def architecture_of(path: Path, metadata: Mapping[str, Any]) -> str:
    """Returns `general.architecture`; raises CheckpointError where it is absent or unknown."""
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise CheckpointError(f"{path}: holds {reprlib.repr(kind)} (general.type), not a model")
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise CheckpointError(
            f"{path}: general.architecture is {reprlib.repr(name)}; supported are "
            f"{', '.join(ARCHITECTURES)}"
        )
    return name


def hf_config_from_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rope_factors: np.ndarray | None,
) -> dict[str, Any]:
    """Returns the Hugging Face config.

    Args:
      path: the file, for messages.
      metadata: raw key -> value.
      shapes: every GGUF tensor's row-major shape.
      rope_factors: the tensor `rope_freqs.weight`, `[H / 2]`, if the file has one.

    Raises:
      CheckpointError: a key is missing, out of range, or asks for what is not supported.
    """
    architecture = architecture_of(path, metadata)
    keys = _Keys(path, metadata, architecture)
    num_heads = keys.integer("attention.head_count")
    hidden_size = keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", hidden_size // num_heads)
    theta = keys.number("rope.freq_base", DEFAULT_ROPE_THETA)
    config = {
        "model_type": ARCHITECTURES[architecture].model_type,
        "hidden_size": hidden_size,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": _num_layers(keys, shapes),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.integer("context_length"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(keys, head_dim, theta, rope_factors),
        "vocab_size": _vocab_size(path, metadata, shapes),
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
    }
    keys.require_equal("attention.value_length", head_dim)
    keys.require_equal("rope.dimension_count", head_dim)
    for token in ("bos", "eos"):
        token_id = metadata.get(f"tokenizer.ggml.{token}_token_id")
        config[f"{token}_token_id"] = token_id if isinstance(token_id, int) else None
    if architecture == "gemma3":
        config |= _gemma3_config(keys, config)
    elif architecture == "llama" and keys.integer("attention.sliding_window", 0, minimum=0):
        config |= {
            "model_type": "mistral",
            "sliding_window": keys.integer("attention.sliding_window"),
        }
    keys.finish()
    return config


def generation_config_from_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `{"eos_token_id": [...]}` with every token that ends a reply, or `{}`."""
    ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens = metadata.get("tokenizer.ggml.tokens")
    types = metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(types, list) and len(tokens) == len(types):
        found = [tokens.index(text) for text in END_OF_TURN_TOKENS if text in tokens]
        ids += [index for index in found if types[index] == _CONTROL_TOKEN]
    eos_ids = list(dict.fromkeys(i for i in ids if isinstance(i, int)))
    return {"eos_token_id": eos_ids} if eos_ids else {}


class _Keys:
    """The architecture's own keys (`llama.context_length` ...), checked and ticked off."""

    def __init__(self, path: Path, metadata: Mapping[str, Any], architecture: str) -> None:
        prefix = f"{architecture}."
        self._path = path
        self._prefix = prefix
        self._values = {
            key.removeprefix(prefix): value
            for key, value in metadata.items()
            if key.startswith(prefix)
        }
        self._used: set[str] = set()

    def error(self, key: str, rule: str) -> CheckpointError:
        value = self._values.get(key)
        shown = f"a list of {len(value)}" if isinstance(value, list) else reprlib.repr(value)
        return CheckpointError(f"{self._path}: {self._prefix}{key} is {shown}: {rule}")

    def get(self, key: str, default: Any = None) -> Any:
        """The value; one that every layer repeats counts as one."""
        self._used.add(key)
        value = self._values.get(key, default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        return value

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(key, "an integer is needed")
        if not minimum <= value <= _MAX_INT:
            raise self.error(key, f"must lie between {minimum} and {_MAX_INT}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number, as the shortest decimal its float32 stands for (1e-05)."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(key, "a number is needed")
        with np.errstate(over="ignore", under="ignore"):
            rounded = float(str(np.float32(value)))
        if not (math.isfinite(rounded) and rounded > 0):
            raise self.error(key, "must be positive and finite in float32")
        return rounded

    def require_equal(self, key: str, expected: int) -> None:
        if self.get(key, expected) != expected:
            raise self.error(key, f"only {expected}, the size of a head, is supported")

    def finish(self) -> None:
        """Refuses values that change the mathematics; warns of keys that nothing has read."""
        for key, neutral in _NO_EFFECT.items():
            if key not in self._used and self.get(key, neutral) != neutral:
                raise self.error(key, "not supported")
        unknown = sorted(self._values.keys() - self._used - _UNUSED_KEYS)
        if unknown:
            logger.warning(
                "%s: ignoring the metadata keys %s", self._path, [self._prefix + k for k in unknown]
            )


def _num_layers(keys: _Keys, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """The layer count, bounded by the tensors that exist before anything is sized by it."""
    num_layers = keys.integer("block_count")
    if num_layers > len(shapes):
        raise keys.error("block_count", f"the file has only {len(shapes)} tensors")
    return num_layers


def _vocab_size(
    path: Path, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> int:
    if "token_embd.weight" not in shapes:
        raise CheckpointError(f"{path}: the tensor 'token_embd.weight' is missing")
    rows = shapes["token_embd.weight"][0]
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > rows:
        raise CheckpointError(
            f"{path}: tensor 'token_embd.weight' has {rows} rows, but tokenizer.ggml.tokens has "
            f"{len(tokens)} entries"
        )
    return rows


def _rope_scaling(
    keys: _Keys, head_dim: int, theta: float, rope_factors: np.ndarray | None
) -> dict[str, Any] | None:
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    kind = keys.get("rope.scaling.type", "linear" if factor != 1.0 else "none")
    if kind not in ("none", "linear"):
        raise keys.error("rope.scaling.type", "only 'none' and 'linear' are supported")
    is_linear = kind == "linear" and factor != 1.0
    if rope_factors is None:
        return {"rope_type": "linear", "factor": factor} if is_linear else None
    if is_linear:
        raise keys.error("rope.scaling.type", "not supported together with rope_freqs.weight")
    scaling = _llama3_scaling(rope_factors.astype(np.float64), head_dim, theta)
    if scaling is None:
        raise keys.error("rope.freq_base", "rope_freqs.weight holds no Llama 3 factors for it")
    return scaling or None


def _llama3_scaling(factors: np.ndarray, head_dim: int, theta: float) -> dict[str, Any] | None:
    """Recovers the parameters that give these divisors.

    Returns `{}` where the divisors are all one, and None where nothing reproduces them.
    """
    if factors.shape != (head_dim // 2,) or not (np.isfinite(factors) & (factors > 0)).all():
        return None
    factor = round(float(factors.max()), 4)  # some writers divide in float32 and leave an ulp
    if np.allclose(factors, 1.0, rtol=1e-5, atol=0):
        return {}
    for exponent in range(10, 21):
        scaling = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1 << exponent,
        }
        expected = _llama3_factors(scaling, head_dim, theta)
        if np.allclose(factors, expected, rtol=1e-5, atol=0):
            return scaling
    return None


def _llama3_factors(scaling: Mapping[str, Any], head_dim: int, theta: float) -> np.ndarray:
    """What each rotary frequency is divided by under `llama3` scaling, `[H / 2]`.

    1 for wavelengths up to original / high, `factor` from original / low on, and in between the
    inverse of a linear blend.
    """
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] / wavelengths
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1 / ((1 - smooth) / scaling["factor"] + smooth)


def _gemma3_config(keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    num_layers = config["num_hidden_layers"]
    window = keys.integer("attention.sliding_window", 0, minimum=0)
    pattern = keys.integer("attention.sliding_window_pattern", GEMMA3_SLIDING_WINDOW_PATTERN)
    is_27b = num_layers == GEMMA3_27B_NUM_LAYERS
    share = config["hidden_size"] // config["num_attention_heads"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": share if is_27b else config["head_dim"],
        "rope_local_base_freq": keys.number("rope.freq_base_swa", DEFAULT_ROPE_THETA),
        "sliding_window": window or None,
        "layer_types": [
            "sliding_attention" if window and layer % pattern else "full_attention"
            for layer in range(1, num_layers + 1)
        ],
        "attn_logit_softcapping": _optional(keys, "attn_logit_softcapping"),
        "final_logit_softcapping": _optional(keys, "final_logit_softcapping"),
    }


def _optional(keys: _Keys, key: str) -> float | None:
    return None if keys.get(key) is None else keys.number(key)
