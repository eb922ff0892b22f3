"""What a model will take of each device, told before anything is loaded.

Arithmetic over a checkpoint's table of tensors and a configuration; touches no device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from jaxinfer.checkpoint.checkpoint import TensorInfo
from jaxinfer.config import ConfigError, EngineConfig
from jaxinfer.nn.config import DecoderConfig, num_cache_kv_heads
from jaxinfer.platforms import Platform
from jaxinfer.pool_size import (
    GRAIN,
    make_cache_spec,
    pool_pages,
    pool_too_small,
    token_budget,
)
from jaxinfer.program_memory import layers_kind, program_bytes
from jaxinfer.quantization import QuantScheme, make_scheme, tensor_format, weight_bytes
from jaxinfer.runner.kv_cache import cpu_pool_bytes
from jaxinfer.runner.model_runner import LOGIT_BLOCK

LOGIT_COPIES = 5
"""Float32 copies of a block of logits that sampling holds at once."""

_MIN_PAGES = 2
PROPOSED_SCHEMES = ("int8", "Q8_0", "HQQ8", "HQQ4", "nf4", "Q4_0", "int4")
"""Schemes a refusal may propose: they round weights only."""


@dataclass(frozen=True)
class MemoryPlan:
    """What each device holds, in bytes; of a CPU, what all its devices do.

    Attributes:
      platform: name of it.
      num_devices: that share the model.
      free_bytes: what there is.
      weight_bytes: the model.
      page_bytes, page_size, kv_dtype: of the KV cache.
      pool_tokens: tokens the pool will hold; a page for padding comes on top.
      max_model_len: longest sequence; less than asked for where nothing was asked for.
      max_num_seqs: sequences that run at once.
      step_bytes: temporaries of the widest step, or of loading the largest matrix.
      program_bytes: compiled programs, where they lie in the same memory.
    """

    platform: str
    num_devices: int
    free_bytes: int
    weight_bytes: int
    page_bytes: int
    page_size: int
    kv_dtype: str
    pool_tokens: int
    max_model_len: int
    max_num_seqs: int
    step_bytes: int
    program_bytes: int

    @property
    def fixed_bytes(self) -> int:
        """Everything but the KV cache."""
        return self.weight_bytes + self.step_bytes + self.program_bytes

    @property
    def sequence_bytes(self) -> int:
        """KV cache of one sequence of the longest length, the page for padding included."""
        return (1 + -(-self.max_model_len // self.page_size)) * self.page_bytes

    @property
    def pool_bytes(self) -> int:
        """KV cache of the pool."""
        return (1 + -(-self.pool_tokens // self.page_size)) * self.page_bytes

    @property
    def kv_budget(self) -> int:
        """What a pool may take that nobody gave a size."""
        left = max(0, self.free_bytes - self.fixed_bytes)
        return cpu_pool_bytes(left) if self.platform == "cpu" else left // GRAIN * GRAIN

    @property
    def total_bytes(self) -> int:
        """Everything."""
        return self.fixed_bytes + self.pool_bytes

    @property
    def fits(self) -> bool:
        """Whether the pool holds the longest sequence, and all of it fits the device."""
        return self.pool_tokens >= self.max_model_len and self.total_bytes <= self.free_bytes

    def table(self) -> str:
        """Returns the plan in aligned lines, sizes in MB."""
        each = f" on each of {self.num_devices} devices" if self.num_devices > 1 else ""
        shared = self.platform == "cpu"
        token = self.page_bytes / self.page_size
        rows = [
            ("weights", self.weight_bytes, ""),
            (
                "KV cache",
                self.pool_bytes,
                f"{self.pool_tokens} tokens in pages of {self.page_size}, {token:.0f} bytes each "
                f"({self.kv_dtype})",
            ),
            ("workspace", self.step_bytes, "temporaries of the widest step, an estimate"),
            *([("programs", self.program_bytes, "compiled, an estimate")] if shared else []),
            ("total", self.total_bytes, "" if shared else each.strip()),
            ("free", self.free_bytes, ""),
        ]
        sequences = self.pool_tokens / self.max_model_len
        lines = [
            f"  {name:<10}{size / 1e6:>12,.1f} MB{'  ' * bool(note)}{note}"
            for name, size, note in rows
        ]
        lines.append(
            f"  context {self.max_model_len} tokens, {min(sequences, self.max_num_seqs):.1f} "
            f"sequences of it at once, {self.max_num_seqs} at most"
        )
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Returns the plan as plain values."""
        return {
            "platform": self.platform,
            "devices": self.num_devices,
            "free_bytes": self.free_bytes,
            "weight_bytes": self.weight_bytes,
            "kv_bytes": self.pool_bytes,
            "kv_bytes_per_token": self.page_bytes // self.page_size,
            "kv_dtype": self.kv_dtype,
            "kv_tokens": self.pool_tokens,
            "workspace_bytes": self.step_bytes,
            "program_bytes": self.program_bytes,
            "total_bytes": self.total_bytes,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "fits": self.fits,
        }


def make_plan(
    config: EngineConfig,
    model: DecoderConfig,
    infos: Mapping[str, TensorInfo],
    where: Platform,
) -> MemoryPlan:
    """Returns what the model will take, whether it fits or not.

    Args:
      config: `quant` may not be "auto": whoever chooses has put the choice in its place.
      model: the checkpoint's configuration.
      infos: the checkpoint's tensors.
      where: the devices.

    Raises:
      ValueError: the quantization does not fit a matrix, or the devices the heads.
    """
    scheme = None if config.quant is None else make_scheme(config.quant, config.quant_group_size)
    cache = make_cache_spec(config, model, where.name, where.num_devices)
    # The devices of a CPU share its memory.
    sharers = 1 if where.name == "cpu" else where.num_devices
    stored = _weight_bytes(model, infos, where, scheme)
    page_bytes = -(-cache.page_bytes // sharers)
    limit = model.max_position_embeddings
    weights, programs = sum(stored.values()) // sharers, 0
    if where.name == "cpu":
        kind = layers_kind(config, infos, where, scheme)
        programs = program_bytes(config, model, weights, kind)
    plan = MemoryPlan(
        platform=where.name,
        num_devices=where.num_devices,
        free_bytes=where.free_bytes,
        weight_bytes=weights,
        page_bytes=page_bytes,
        page_size=cache.page_size,
        kv_dtype=cache.dtype_name,
        pool_tokens=0,
        max_model_len=config.max_model_len or limit,
        max_num_seqs=config.max_num_seqs,
        step_bytes=max(step_bytes(config, model, where), _loading_bytes(infos, where, scheme)),
        program_bytes=programs,
    )
    pages = pool_pages(
        config, plan.platform, page_bytes, plan.page_size, plan.kv_budget, plan.max_model_len
    )
    plan = replace(plan, pool_tokens=(pages - 1) * cache.page_size)
    if config.max_model_len is None and pages - 1 >= _MIN_PAGES:
        return replace(plan, max_model_len=min(limit, plan.pool_tokens))
    return plan


def check_plan(
    plan: MemoryPlan,
    config: EngineConfig,
    model: DecoderConfig,
    infos: Mapping[str, TensorInfo],
    where: Platform,
) -> None:
    """Does nothing if the plan fits.

    Raises:
      ConfigError: it does not; names what is needed, what there is, and the two ways out that were
        found to fit: a shorter context, a smaller quantization.
    """
    if plan.fits:
        return
    is_given = config.num_pages is not None or config.kv_cache_memory is not None
    if is_given and plan.pool_tokens < plan.max_model_len:
        pages = plan.pool_tokens // plan.page_size
        raise pool_too_small(plan.max_model_len, plan.pool_tokens, pages * plan.page_bytes)
    each = f" on each of {plan.num_devices} devices" if plan.num_devices > 1 else ""
    has_pool = plan.pool_tokens >= plan.max_model_len + plan.page_size
    kind = "the KV pool" if has_pool else "one sequence"
    tokens = plan.pool_tokens if has_pool else plan.max_model_len
    held = plan.pool_bytes if has_pool else plan.sequence_bytes
    problem = (
        f"the model does not fit: {_mb(plan.weight_bytes)} of weights, {_mb(held)} of KV cache for "
        f"{kind} ({tokens} tokens) and {_mb(plan.step_bytes + plan.program_bytes)} of workspace "
        f"are {_mb(plan.fixed_bytes + held)}, but {_mb(plan.free_bytes)} are free{each}"
    )
    ways = remedies(plan, config, model, infos, where)
    if ways:
        raise ConfigError(f"{problem}; what would fit: {' or '.join(ways)}")
    raise ConfigError(f"{problem}; {_nothing_fits(plan, config, model, infos, where)}")


def remedies(
    plan: MemoryPlan,
    config: EngineConfig,
    model: DecoderConfig,
    infos: Mapping[str, TensorInfo],
    where: Platform,
) -> list[str]:
    """Returns the flags that make it fit: the longest context, the widest quantization."""
    ways = []
    automatic = replace(config, num_pages=None, kv_cache_memory=None)
    room = plan.free_bytes - plan.fixed_bytes if plan.platform == "cpu" else plan.kv_budget
    tokens = min((room // plan.page_bytes - 1) * plan.page_size, plan.max_model_len)
    if tokens >= _MIN_PAGES * plan.page_size:
        shorter = make_plan(replace(automatic, max_model_len=tokens), model, infos, where)
        flag = f"--max-model-len {tokens}"
        if tokens == plan.max_model_len:
            flag = f"--kv-cache-memory {room - plan.page_bytes}"
        if shorter.fits:
            ways.append(f"{flag} ({_mb(shorter.sequence_bytes)} of KV cache for one sequence)")
    plans = _plans_by_scheme(automatic, model, infos, where)
    smaller = {
        name: found
        for name, found in plans.items()
        if found.fits and found.weight_bytes < plan.weight_bytes
    }
    if smaller:
        name, widest = max(smaller.items(), key=lambda item: item[1].weight_bytes)
        ways.append(f"--quant {name} ({_mb(widest.weight_bytes)} of weights)")
    return ways


def _nothing_fits(
    plan: MemoryPlan,
    config: EngineConfig,
    model: DecoderConfig,
    infos: Mapping[str, TensorInfo],
    where: Platform,
) -> str:
    """Says how far the smallest of all is from fitting."""
    short = replace(
        config, max_model_len=_MIN_PAGES * plan.page_size, num_pages=None, kv_cache_memory=None
    )
    plans = _plans_by_scheme(short, model, infos, where)
    if not plans:
        return "no shorter context fits; free memory, or use more devices (--tensor-parallel)"
    name, least = min(plans.items(), key=lambda item: item[1].weight_bytes)
    needed = least.fixed_bytes + least.sequence_bytes
    return (
        f"no shorter context fits, and even --quant {name} with {least.max_model_len} tokens needs "
        f"{_mb(needed)}; free memory, or use more devices (--tensor-parallel)"
    )


def _plans_by_scheme(
    config: EngineConfig,
    model: DecoderConfig,
    infos: Mapping[str, TensorInfo],
    where: Platform,
) -> dict[str, MemoryPlan]:
    """The plans under other quantizations, those left out that do not fit a matrix."""
    plans = {}
    for name in PROPOSED_SCHEMES:
        quantized = replace(config, quant=name, quant_group_size=None)
        with suppress(ValueError):
            plans[name] = make_plan(quantized, model, infos, where)
    return plans


def _weight_bytes(
    model: DecoderConfig,
    infos: Mapping[str, TensorInfo],
    where: Platform,
    scheme: QuantScheme | None,
) -> dict[str, int]:
    """Bytes of each tensor on all devices, vectors and repeated KV heads once for each copy."""
    copies = num_cache_kv_heads(model, where.num_devices) // model.num_kv_heads
    sizes = {}
    for name, info in infos.items():
        if name == "lm_head.weight" and model.tie_word_embeddings:
            continue
        if len(info.shape) < 2:
            sizes[name] = math.prod(info.shape) * 4 * where.num_devices
            continue
        repeats = copies if ".k_proj." in name or ".v_proj." in name else 1
        sizes[name] = _loaded_bytes(info, where, scheme) * repeats
    return sizes


def _loaded_bytes(info: TensorInfo, where: Platform, scheme: QuantScheme | None) -> int:
    """Bytes of one matrix as it will be held."""
    shapes = {info.name: info.shape}
    if scheme is not None and tensor_format(info.name, info.shape, scheme) is not None:
        return weight_bytes(shapes, scheme, where.weight_dtype.itemsize)
    if info.loaded_bytes is not None and where.keeps_quantized:
        return info.loaded_bytes
    return weight_bytes(shapes, None, where.weight_dtype.itemsize)


def _loading_bytes(
    infos: Mapping[str, TensorInfo], where: Platform, scheme: QuantScheme | None
) -> int:
    """Memory that placing the largest matrix takes beside its final form: at most it in float32."""
    largest = max(infos.values(), key=lambda info: math.prod(info.shape))
    if scheme is None and largest.loaded_bytes is not None and where.keeps_quantized:
        return largest.loaded_bytes
    if scheme is None and largest.loaded_bytes is None:
        return _loaded_bytes(largest, where, None)
    return math.prod(largest.shape) * 4 // (1 if where.name == "cpu" else where.num_devices)


def step_bytes(config: EngineConfig, model: DecoderConfig, where: Platform) -> int:
    """Estimates the temporaries of the widest program, on one device (on a CPU: on all).

    For each token of it, what one layer makes: two residual streams, queries, keys and values
    twice, what was attended, both halves of the gated block and their product. For each row that is
    sampled at once, float32 copies of its logits. Compilers reuse some buffers and keep others
    apart: what they report is within a factor of 3 (tests/test_memory_plan.py).
    """
    heads = model.num_heads + 2 * num_cache_kv_heads(model, where.num_devices)
    split = (2 * heads + model.num_heads) * model.head_dim + 3 * model.intermediate_size
    sharers = 1 if where.name == "cpu" else where.num_devices
    # Sums are float32 and may be kept beside what they are rounded to.
    width = 4 if where.name == "cpu" else 4 + where.dtype.itemsize
    per_token = (3 * model.hidden_size + split // sharers) * width
    per_logit_row = model.vocab_size * 4 * LOGIT_COPIES
    ragged = token_budget(config, where.name) * per_token + LOGIT_BLOCK[where.name] * per_logit_row
    return max(ragged, config.max_num_seqs * (per_token + per_logit_row))


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
