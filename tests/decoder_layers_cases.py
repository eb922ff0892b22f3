"""Small stacks of decoder layers with weights of every kind, and steps of tokens through them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from native_matmul_cases import FORMATS, random_weight, weight_by_hand

from kernels.decoder_layers import BlockMatrix, LayerShape, LayerWeights
from kernels.paged_attention import AttentionMetadata, kv_structs
from kernels.paged_attention.cache import encode_rows
from kernels.quantized_matmul import prepare
from kernels.quantized_matmul.format import CPU_BLOCKS

PAGE_SIZE, MAX_PAGES = 4, 24


@dataclass(frozen=True)
class Case:
    """A stack of layers; `qkv` and `gate_up` have a piece for each (format, slots of a block)."""

    qkv: tuple[tuple[str, int], ...] = (("int8", 4),)
    out: str = "int8"
    gate_up: tuple[tuple[str, int], ...] = (("int8", 2),)
    down: str = "int8"
    hidden: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 96
    activation: str = "silu"
    has_biases: bool = False
    has_head_norms: bool = False
    has_post_norms: bool = False
    soft_cap: float | None = None
    windows: tuple[int | None, ...] = (None, None)
    kv_dtype: str = "float32"
    in_blocks: bool = False
    product_dtype: str = "float32"

    @property
    def groups(self) -> tuple[int | None, ...]:
        """The window of each page table."""
        return tuple(dict.fromkeys(self.windows))

    @property
    def shape(self) -> LayerShape:
        return LayerShape(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            activation=self.activation,
            eps=1e-5,
            scale=self.head_dim**-0.5,
            soft_cap=self.soft_cap,
            product_dtype=self.product_dtype,
        )


@dataclass(frozen=True)
class Step:
    """Rows as (tokens, keys) pairs, decodes first; num_tokens and num_rows count padding."""

    rows: tuple[tuple[int, int], ...]
    num_tokens: int
    num_rows: int
    pages_of: tuple[int, ...] = field(default=())  # whose pages each row has; its own by default

    @property
    def num_live(self) -> int:
        return sum(q_len for q_len, _ in self.rows)

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == self.num_rows and all(q_len == 1 for q_len, _ in self.rows)


MOST_ROWS = 8
_NUM_PAGES = 1 + MOST_ROWS * MAX_PAGES


def page_tables(case: Case) -> np.ndarray:
    """The pages `[groups, MOST_ROWS, MAX_PAGES]` of every row there may be: all different."""
    rng = np.random.default_rng(1)
    pages = [1 + rng.permutation(_NUM_PAGES - 1) for _ in case.groups]
    return np.stack(pages).reshape(-1, MOST_ROWS, MAX_PAGES)


def make_metadata(case: Case, step: Step) -> AttentionMetadata:
    """Tables and slots of a step; entries of pages without a key are 0."""
    q_lens, kv_lens = np.array(step.rows, np.int32).reshape(-1, 2).T
    spare = step.num_rows - len(step.rows)
    starts = np.concatenate([[0], np.cumsum(q_lens)])
    all_pages = page_tables(case)
    table = np.zeros((len(case.groups), step.num_rows, MAX_PAGES), np.int32)
    slots = np.zeros((len(case.groups), step.num_tokens), np.int32)
    for row, (q_len, kv_len) in enumerate(step.rows):
        pages = all_pages[:, step.pages_of[row] if step.pages_of else row]
        count = -(-kv_len // PAGE_SIZE)
        table[:, row, :count] = pages[:, :count]
        position = np.arange(kv_len - q_len, kv_len)
        span = slice(starts[row], starts[row + 1])
        slots[:, span] = pages[:, position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
    int32 = lambda values: jnp.asarray(values, jnp.int32)
    return AttentionMetadata(
        num_decodes=int32(np.cumprod(q_lens == 1).sum()),
        num_seqs=int32(len(step.rows)),
        kv_lens=int32(np.pad(kv_lens, (0, spare))),
        cu_q_lens=int32(np.pad(starts, (0, spare), mode="edge")),
        slot_mapping=int32(slots),
        page_table=int32(table),
        is_decode=step.is_decode,
    )


def make_tables(case: Case, step: Step, padding: float = np.nan):
    """Two rotary tables, of different frequencies; `padding` where there is no token."""
    position = [np.arange(kv_len - q_len, kv_len) for q_len, kv_len in step.rows]
    position = np.concatenate([*position, np.full(step.num_tokens - step.num_live, padding)])
    half = np.arange(case.head_dim // 2) / (case.head_dim // 2)
    angles = [position[:, None] * theta**-half for theta in (1e4, 1e2)]
    return [tuple(jnp.asarray(f(a), jnp.float32) for f in (np.cos, np.sin)) for a in angles]


def make_x(case: Case, step: Step, padding: float = np.nan) -> jax.Array:
    """The hidden state of each row's tokens, by the row's pages and the position."""
    rows = []
    for row, (q_len, kv_len) in enumerate(step.rows):
        rng = np.random.default_rng(step.pages_of[row] if step.pages_of else row)
        of_positions = rng.standard_normal((MAX_PAGES * PAGE_SIZE, case.hidden))
        rows.append(of_positions[kv_len - q_len : kv_len])
    rows.append(np.full((step.num_tokens - step.num_live, case.hidden), padding))
    return jnp.asarray(np.concatenate(rows), jnp.float32)


def make_caches(case: Case, step: Step, unused: float = np.nan):
    """A cache per layer, with keys where the step's rows have them, `unused` everywhere else."""
    rng = np.random.default_rng(2)
    size = (_NUM_PAGES, PAGE_SIZE, case.num_kv_heads, 2, case.head_dim)
    structs = kv_structs("cpu", case.kv_dtype, *size[:3], case.head_dim)
    has_key = np.zeros((len(case.groups), _NUM_PAGES * PAGE_SIZE), bool)
    for row, (_, kv_len) in enumerate(step.rows):
        pages = page_tables(case)[:, step.pages_of[row] if step.pages_of else row]
        slots = pages[:, :, None] * PAGE_SIZE + np.arange(PAGE_SIZE)
        slots = slots.reshape(len(case.groups), -1)[:, :kv_len]
        np.put_along_axis(has_key, slots, True, axis=1)
    has_key = has_key.reshape(-1, *size[:2], 1, 1, 1)
    caches = []
    for window in case.windows:
        values = rng.standard_normal(size, np.float32)
        values = np.where(has_key[case.groups.index(window)], values, np.float32(unused))
        rows = encode_rows(jnp.asarray(values.reshape(-1, *size[2:])), structs)
        caches.append(rows.reshape(size))
    return tuple(caches)


@cache
def make_layers(case: Case) -> tuple[LayerWeights, ...]:
    """Random weights whose products are about as large as what is multiplied."""
    rng = np.random.default_rng(3)
    heads, block = case.num_heads * case.head_dim, case.num_heads // case.num_kv_heads + 2

    def vector(size, exists=True):
        return jnp.asarray(rng.standard_normal(size) / 4 + 1, jnp.float32) if exists else None

    def matrix(pieces, num_blocks, slot_rows, columns):
        rows = tuple(slots * slot_rows for _, slots in pieces)
        made = tuple(
            _weight(rng, name, (num_blocks * count, columns), case.in_blocks)
            for (name, _), count in zip(pieces, rows, strict=True)
        )
        bias = rng.standard_normal(num_blocks * sum(rows)) / 2
        return BlockMatrix(made, rows, jnp.asarray(bias, jnp.float32) if case.has_biases else None)

    assert sum(slots for _, slots in case.qkv) == block
    return tuple(
        LayerWeights(
            input_norm=vector(case.hidden),
            qkv=matrix(case.qkv, case.num_kv_heads, case.head_dim, case.hidden),
            query_norm=vector(case.head_dim, case.has_head_norms),
            key_norm=vector(case.head_dim, case.has_head_norms),
            out=matrix([(case.out, 1)], 1, case.hidden, heads),
            attention_norm=vector(case.hidden, case.has_post_norms),
            mlp_input_norm=vector(case.hidden),
            gate_up=matrix(case.gate_up, 1, case.intermediate, case.hidden),
            down=matrix([(case.down, 1)], 1, case.hidden, case.intermediate),
            mlp_norm=vector(case.hidden, case.has_post_norms),
            rotary=0 if window is None else 1,
            group=case.groups.index(window),
            window=window,
        )
        for window in case.windows
    )


def _weight(rng, name, shape, in_blocks):
    w = random_weight(FORMATS[name], *shape)  # always the same: its rows are shuffled
    # A power of two: scales of any type stay what they are.
    factor = 2.0 ** float(np.round(-np.log2(np.std(weight_by_hand(w)) * shape[1] ** 0.5)))
    order = rng.permutation(shape[0])

    def scaled(a):
        return None if a is None else (a * factor).astype(a.dtype)[order]

    codes = w.qvalue[order]
    w = dataclasses.replace(w, qvalue=codes, scale=scaled(w.scale), offset=scaled(w.offset))
    return prepare(w, CPU_BLOCKS) if in_blocks else w


@partial(jax.jit, static_argnames=("module", "shape", "traced_for"))
def _run(x, tables, kv, layers, metadata, *, module, shape, traced_for):
    return module.run(x, tables, kv, layers, metadata, shape)


def run(module, case, step, *, x=None, kv=None, tables=None, metadata=None, instruction_set=None):
    """Hidden states and caches after a step, as numpy arrays; what is not given is made."""
    with pytest.MonkeyPatch.context() as patch:
        if instruction_set:
            patch.setenv("JAXINFER_CPU_ISA", instruction_set)
        hidden, written = _run(
            make_x(case, step) if x is None else x,
            make_tables(case, step) if tables is None else tables,
            make_caches(case, step) if kv is None else kv,
            make_layers(case),
            make_metadata(case, step) if metadata is None else metadata,
            module=module,
            shape=case.shape,
            traced_for=instruction_set,  # jit does not see what is forced
        )
    return np.asarray(hidden), [np.asarray(cache) for cache in written]


def slots_written(case: Case, step: Step) -> np.ndarray:
    """Of each group which slots the step's tokens are written to: bool `[groups, slots]`."""
    is_written = np.zeros((len(case.groups), _NUM_PAGES * PAGE_SIZE), bool)
    slots = np.asarray(make_metadata(case, step).slot_mapping)[:, : step.num_live]
    np.put_along_axis(is_written, slots, True, axis=1)
    return is_written
