"""Named, realistic calls of paged attention: the same for tests, tuning and bench."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from kernels.paged_attention import attend
from kernels.paged_attention.cache import (
    KVCache,
    KVStruct,
    KVValues,
    QuantizedKV,
    encode_rows,
    held_by,
    holding,
    kv_structs,
    quantize_kv,
)
from kernels.paged_attention.metadata import AttentionMetadata


@dataclass(frozen=True)
class Spec:
    """One call: a model's heads, and the rows of a step as (query length, KV length) pairs.

    Attributes:
      num_heads, num_kv_heads, head_dim, window, soft_cap: of the layer.
      rows: (q_len, kv_len) of each row, decodes (q_len 1) first.
      num_tokens, num_rows, max_pages: T, B and M, padding included.
      page_size: tokens per page.
      dtype, kv_dtype: of the queries and of the cache; int8 is a cache with scales.
      num_groups, group: C, and the KV group of the layer.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rows: tuple[tuple[int, int], ...]
    num_tokens: int
    num_rows: int
    max_pages: int = 64
    page_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    dtype: str = "float32"
    kv_dtype: str = "float32"
    num_groups: int = 1
    group: int = 0

    @property
    def is_decode(self) -> bool:
        """Whether this is a decode step: one token per row."""
        return self.num_tokens == self.num_rows and all(q_len == 1 for q_len, _ in self.rows)

    @property
    def scale(self) -> float:
        """The usual factor of `q . k`."""
        return self.head_dim**-0.5

    @property
    def num_bytes(self) -> int:
        """Bytes that must move: every visible key and value once, the queries and the result."""
        seen = sum(
            kv_len if self.window is None else min(kv_len, self.window + q_len - 1)
            for q_len, kv_len in self.rows
        )
        num_queries = sum(q_len for q_len, _ in self.rows)
        row_bytes = self.head_dim * jnp.dtype(self.kv_dtype).itemsize
        if self.kv_dtype == "int8":
            row_bytes += jnp.dtype(jnp.float32).itemsize  # its scale
        q_bytes = num_queries * self.num_heads * self.head_dim * jnp.dtype(self.dtype).itemsize
        return 2 * (seen * self.num_kv_heads * row_bytes + q_bytes)

    def prepare(
        self, platform: str, implementation: str
    ) -> tuple[Callable[..., Array], tuple[Array, KVCache, AttentionMetadata]]:
        """Returns `attend` as a function of arrays, and arrays for it."""
        call = partial(
            attend,
            group=self.group,
            scale=self.scale,
            window=self.window,
            soft_cap=self.soft_cap,
            platform=platform,
            implementation=implementation,
        )
        return call, make_inputs(self, platform=platform)


_SMOLLM2 = partial(Spec, 9, 3, 64)
_LLAMA_8B = partial(Spec, 32, 8, 128)
_GEMMA3 = partial(Spec, 4, 1, 256)
# One device's share under tensor parallelism.
_LLAMA_8B_TP4 = partial(Spec, 8, 2, 128)
_LLAMA_70B_TP8 = partial(Spec, 8, 1, 128)
_QWEN2_7B_TP2 = partial(Spec, 14, 2, 128)
_GEMMA2_TP2 = partial(Spec, 4, 2, 256, soft_cap=50.0)
_PHI3_TP8 = partial(Spec, 4, 4, 96)
_PHI2_TP8 = partial(Spec, 4, 4, 80)
_MIXED_LENS = (700, 33, 512, 16, 257, 1, 64)

SPECS: dict[str, Spec] = {
    "smollm2-decode-2": _SMOLLM2(((1, 900), (1, 77)), 2, 2),
    "smollm2-decode-8": _SMOLLM2(tuple((1, n) for n in _MIXED_LENS), 8, 8),
    "smollm2-decode-32": _SMOLLM2(tuple((1, 64 + n) for n in range(32)), 32, 32),
    "smollm2-decode-32-one-long": _SMOLLM2(((1, 4000), *[(1, 100)] * 31), 32, 32, 512),
    "smollm2-prefill-chunk": _SMOLLM2(((256, 700),), 256, 32),
    "smollm2-mixed": _SMOLLM2(
        (*[(1, n) for n in _MIXED_LENS], (100, 100), (33, 450), (90, 90)), 256, 32
    ),
    "llama8b-decode-8": _LLAMA_8B(tuple((1, n) for n in _MIXED_LENS), 8, 8, kv_dtype="bfloat16"),
    "gemma3-local-decode-8": _GEMMA3(tuple((1, 3 * n) for n in _MIXED_LENS), 8, 8, 256, window=512),
    "gemma3-local-mixed": _GEMMA3(((1, 1300), (1, 2), (60, 600), (1, 1)), 64, 8, 256, window=512),
    "mqa-soft-cap-mixed": Spec(
        8, 1, 128, ((1, 90), (40, 300)), 64, 4, soft_cap=30.0, kv_dtype="float16"
    ),
    "mha-head-80-page-128": Spec(
        8, 8, 80, ((1, 200), (1, 128), (20, 129)), 64, 8, 16, 128, dtype="bfloat16"
    ),
    "smollm2-decode-8-int8": _SMOLLM2(
        tuple((1, n) for n in _MIXED_LENS), 8, 8, 24, 32, kv_dtype="int8"
    ),
    "smollm2-mixed-bf16-page-128": _SMOLLM2(
        ((1, 300), (1, 1), (30, 158)), 64, 8, 4, 128, kv_dtype="bfloat16"
    ),
    "llama1b-decode-2-page-64": Spec(
        32, 8, 64, ((1, 450), (1, 64)), 2, 2, 8, 64, kv_dtype="bfloat16"
    ),
    "llama8b-decode-2-long-int8": _LLAMA_8B_TP4(
        ((1, 4000), (1, 3001)), 2, 2, 32, 128, kv_dtype="int8"
    ),
    "llama8b-decode-4-long-bf16": _LLAMA_8B_TP4(
        ((1, 3000), (1, 17), (1, 1025)), 4, 4, 256, kv_dtype="bfloat16"
    ),
    "llama8b-mixed-bf16-page-32": _LLAMA_8B_TP4(
        ((1, 65), (1, 200), (33, 33), (40, 168)),
        128,
        8,
        8,
        32,
        dtype="bfloat16",
        kv_dtype="bfloat16",
    ),
    "llama70b-decode-32": _LLAMA_70B_TP8(
        tuple((1, 1 + 16 * n) for n in range(30)), 32, 32, 4, 128, kv_dtype="bfloat16"
    ),
    "llama70b-mixed-int8": _LLAMA_70B_TP8(
        ((1, 129), (17, 150), (64, 64)), 128, 4, 4, 64, kv_dtype="int8"
    ),
    "qwen2-decode-4-int8": _QWEN2_7B_TP2(
        ((1, 130), (1, 31), (1, 64)), 4, 4, 16, 16, kv_dtype="int8"
    ),
    "qwen2-mixed": _QWEN2_7B_TP2(((1, 100), (50, 90), (3, 3)), 64, 8, 16, 16),
    "gemma2-decode-4-int8": _GEMMA2_TP2(
        ((1, 300), (1, 128), (1, 5)), 4, 4, 3, 128, window=128, kv_dtype="int8"
    ),
    "gemma2-mixed": _GEMMA2_TP2(
        ((1, 200), (70, 140), (5, 5)), 128, 4, 8, 32, window=64, kv_dtype="bfloat16"
    ),
    "gemma3-groups-decode-4": _GEMMA3(
        ((1, 700), (1, 40), (1, 513)),
        4,
        4,
        48,
        window=512,
        kv_dtype="bfloat16",
        num_groups=2,
        group=1,
    ),
    "gemma3-groups-mixed-int8": _GEMMA3(
        ((1, 90), (40, 100)), 64, 4, 4, 64, window=48, kv_dtype="int8", num_groups=2, group=1
    ),
    "phi3-decode-4": _PHI3_TP8(
        ((1, 260), (1, 64), (1, 100)), 4, 4, 6, 64, window=200, kv_dtype="bfloat16"
    ),
    "phi3-mixed-int8": _PHI3_TP8(((1, 70), (20, 60)), 32, 4, 4, 32, window=50, kv_dtype="int8"),
    "phi2-decode-4-int8": _PHI2_TP8(((1, 99), (1, 16), (1, 33)), 4, 4, 8, 16, kv_dtype="int8"),
}

LARGE_SPECS: dict[str, Spec] = {
    f"llama8b-decode-{batch}-context-{context}-page-{page_size}-{kv_dtype}": _LLAMA_8B(
        ((1, context),) * batch,
        batch,
        batch,
        context // page_size,
        page_size,
        dtype="bfloat16",
        kv_dtype=kv_dtype,
    )
    for batch in (1, 16, 64)
    for context in (512, 2048, 8192)
    for page_size in (16, 128)
    for kv_dtype in ("bfloat16", "int8")
}
"""Decode steps of an 8B model: what is tuned and timed on chips."""


def make_inputs(
    spec: Spec, seed: int = 0, platform: str = "cpu"
) -> tuple[Array, KVCache, AttentionMetadata]:
    """Returns random `(q, kv, metadata)` of a spec; each row's pages lie anywhere in the cache.

    Groups other than the layer's have tables and slots that would be wrong for it.
    """
    rng = np.random.default_rng(seed)
    q_lens, kv_lens = np.array(spec.rows, np.int32).reshape(-1, 2).T
    counts = -(-kv_lens // spec.page_size)
    num_pages = 1 + int(counts.sum())
    pages = np.split(rng.permutation(np.arange(1, num_pages)), np.cumsum(counts))
    page_table = np.zeros((spec.num_rows, spec.max_pages), np.int32)
    for table_row, row_pages in zip(page_table, pages[: len(spec.rows)], strict=False):
        table_row[: row_pages.size] = row_pages
    cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)])
    unused = spec.num_rows - len(spec.rows)

    token, row = np.arange(cu_q_lens[-1]), np.repeat(np.arange(q_lens.size), q_lens)
    position = kv_lens[row] - (cu_q_lens[row + 1] - token)
    page, offset = page_table[row, position // spec.page_size], position % spec.page_size
    slots = np.pad(page * spec.page_size + offset, (0, spec.num_tokens - token.size))

    metadata = AttentionMetadata(
        num_decodes=_int32(np.cumprod(q_lens == 1).sum()),
        num_seqs=_int32(len(spec.rows)),
        kv_lens=_int32(np.pad(kv_lens, (0, unused))),
        cu_q_lens=_int32(np.pad(cu_q_lens, (0, unused), mode="edge")),
        slot_mapping=_of_groups(spec, slots),
        page_table=_of_groups(spec, page_table),
        is_decode=spec.is_decode,
    )
    q = rng.standard_normal((spec.num_tokens, spec.num_heads, spec.head_dim), np.float32)
    rows = (num_pages * spec.page_size, spec.num_kv_heads, 2, spec.head_dim)
    kv = _cache(spec, platform, jnp.asarray(rng.standard_normal(rows, np.float32)))
    return jnp.asarray(q, spec.dtype), kv, metadata


def abstract_inputs(
    spec: Spec, platform: str
) -> tuple[jax.ShapeDtypeStruct, KVStruct, AttentionMetadata]:
    """Returns the shapes and dtypes of `make_inputs`: enough to compile, made in no time."""
    num_pages = 1 + sum(-(-kv_len // spec.page_size) for _, kv_len in spec.rows)
    int32 = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    metadata = AttentionMetadata(
        num_decodes=int32(()),
        num_seqs=int32(()),
        kv_lens=int32((spec.num_rows,)),
        cu_q_lens=int32((spec.num_rows + 1,)),
        slot_mapping=int32((spec.num_groups, spec.num_tokens)),
        page_table=int32((spec.num_groups, spec.num_rows, spec.max_pages)),
        is_decode=spec.is_decode,
    )
    q = jax.ShapeDtypeStruct(
        (spec.num_tokens, spec.num_heads, spec.head_dim), jnp.dtype(spec.dtype)
    )
    kv = kv_structs(
        platform, spec.kv_dtype, num_pages, spec.page_size, spec.num_kv_heads, spec.head_dim
    )
    return q, kv, metadata


def _cache(spec: Spec, platform: str, rows: Array) -> KVCache:
    """Returns a cache of the keys and values `[P * page, K, 2, H]`."""
    num_pages = rows.shape[0] // spec.page_size
    structs = kv_structs(
        platform, spec.kv_dtype, num_pages, spec.page_size, spec.num_kv_heads, spec.head_dim
    )
    if isinstance(structs, QuantizedKV):
        codes, scales = quantize_kv(rows)
        scales = scales.reshape(num_pages, spec.page_size, spec.num_kv_heads, 2)
        lanes = structs.scales.shape[-1] - spec.page_size
        scales = jnp.pad(jnp.moveaxis(scales, 1, 3), ((0, 0), (0, 0), (0, 0), (0, lanes)))
        return QuantizedKV(_held(codes, structs.values), scales)
    return _held(rows, structs)


def _held(rows: Array, structs: Any) -> KVValues:
    return holding(encode_rows(rows, structs).reshape(held_by(structs).shape), structs)


def _of_groups(spec: Spec, ours: np.ndarray) -> Array:
    """Returns an array per group: ours, and for every other group what is wrong for us."""
    wrong = np.roll(ours, 1)
    return _int32(np.stack([ours if i == spec.group else wrong for i in range(spec.num_groups)]))


def _int32(values: ArrayLike) -> Array:
    return jnp.asarray(values, jnp.int32)
