"""Named, realistic calls of paged attention: the same for tests, tuning and bench."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from kernels.paged_attention import attend
from kernels.paged_attention.cache import encode, kv_dtype, kv_shape
from kernels.paged_attention.metadata import AttentionMetadata


@dataclass(frozen=True)
class Spec:
    """One call: a model's heads, and the rows of a step as (query length, KV length) pairs.

    Attributes:
      num_heads, num_kv_heads, head_dim, window, soft_cap: of the layer.
      rows: (q_len, kv_len) of each row, decodes (q_len 1) first.
      num_tokens, num_rows, max_pages: T, B and M, padding included.
      page_size: tokens per page.
      dtype, kv_dtype: of the queries and of the cache.
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
        kv_bytes = seen * self.num_kv_heads * jnp.dtype(self.kv_dtype).itemsize
        q_bytes = num_queries * self.num_heads * jnp.dtype(self.dtype).itemsize
        return 2 * self.head_dim * (kv_bytes + q_bytes)

    def prepare(
        self, platform: str, implementation: str
    ) -> tuple[Callable[..., Array], tuple[Array, Array, AttentionMetadata]]:
        """Returns `attend` as a function of arrays, and arrays for it."""
        call = partial(
            attend,
            group=0,
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
}


def make_inputs(
    spec: Spec, seed: int = 0, platform: str = "cpu"
) -> tuple[Array, Array, AttentionMetadata]:
    """Returns random `(q, kv, metadata)` of a spec; each row's pages lie anywhere in the cache."""
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
        slot_mapping=_int32(slots[None]),
        page_table=_int32(page_table[None]),
        is_decode=spec.is_decode,
    )
    q = rng.standard_normal((spec.num_tokens, spec.num_heads, spec.head_dim), np.float32)
    shape = kv_shape(
        platform, spec.kv_dtype, num_pages, spec.page_size, spec.num_kv_heads, spec.head_dim
    )
    kv = rng.standard_normal(shape, np.float32)
    held_as = kv_dtype(platform, spec.kv_dtype)
    return jnp.asarray(q, spec.dtype), encode(jnp.asarray(kv), held_as), metadata


def _int32(values: ArrayLike) -> Array:
    return jnp.asarray(values, jnp.int32)
