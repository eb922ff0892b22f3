"""Paged attention as Pallas-Triton kernels, for NVIDIA's Ampere and Ada and for ROCm.

Decode rows: programs share a row's keys, a second kernel adds up. Other rows: tiles of queries.
The kernels' bodies are in `triton_kernels`; what is here chooses block sizes and calls them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jaxtyping import Float, Int

from kernels import device, tuning
from kernels.paged_attention import triton_kernels as kernels
from kernels.paged_attention.cache import (
    KVCache,
    KVStruct,
    QuantizedKV,
    held_by,
    kv_dims,
    values_of,
)
from kernels.paged_attention.metadata import AttentionMetadata

_FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32)
_MAX_PARTIAL_BYTES = 36 << 20  # a whole step may take 64 MiB beside weights and cache


@dataclass(frozen=True)
class Config:
    """Block sizes of a kernel.

    Attributes:
      block_keys: keys that a program folds in at a time; a power of two, at least 16.
      block_queries: queries of one row in a program, each with its G heads.
      num_splits: programs among which a decode row's keys are divided; a power of two.
      num_warps: warps of a program; a power of two.
      num_stages: as Triton's, of the loop over keys; 1 loads no block ahead.
    """

    block_keys: int
    block_queries: int
    num_splits: int
    num_warps: int
    num_stages: int

    @classmethod
    def for_decode(cls, sizes: Sizes, chip: device.Device) -> Config:
        """Returns what is legal on every chip and sensible on this one, for decode rows."""
        # Codes need more instructions per byte: with larger blocks, fewer of the others.
        block_keys = 16 if sizes.is_widened else 128 if sizes.key_itemsize == 1 else 64
        while block_keys > 16 and 2 * block_keys * sizes.key_bytes > 32 << 10:
            block_keys //= 2
        # Twice what may run at once, so that the last to end are few; and 16 at least for the
        # sake of one long row among short ones, unless the partial results take too much memory.
        programs = sizes.num_rows * sizes.num_kv_heads
        num_splits = pl.next_power_of_2(pl.cdiv(8 * chip.core_count, programs))
        num_splits = min(max(num_splits, 16), 64)
        while num_splits > 1 and num_splits * sizes.result_bytes > _MAX_PARTIAL_BYTES:
            num_splits //= 2
        is_large = kernels.num_block_rows(1, sizes.group_size) * sizes.padded_dim >= 64 * 128
        return cls(block_keys, 1, num_splits, 8 if is_large or sizes.is_widened else 4, 3)

    @classmethod
    def for_tiles(cls, sizes: Sizes, chip: device.Device) -> Config:
        """Returns what is legal on every chip and sensible on this one, for tiles of queries."""
        num_rows = 16 if sizes.is_widened else 128
        block_keys = 16 if sizes.is_widened else 64 if sizes.padded_dim <= 64 else 32
        while num_rows > 16 and num_rows * sizes.query_bytes > 32 << 10:
            num_rows //= 2
        is_tight = chip.compute_capability is None or sizes.product_itemsize == 4
        shared_bytes = (16 if is_tight else 32) << 10
        while block_keys > 16 and 2 * block_keys * sizes.key_bytes > shared_bytes:
            block_keys //= 2
        return cls(block_keys, max(1, num_rows // sizes.group_size), 1, 8, 3)


@dataclass(frozen=True)
class Sizes:
    """What decides over a `Config`: a step's decode rows, a layer's heads, bytes per element."""

    num_rows: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    key_itemsize: int
    product_itemsize: int

    @property
    def group_size(self) -> int:
        """G, query heads of a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def padded_dim(self) -> int:
        """H as the kernels' blocks have it."""
        return kernels.padded(self.head_dim)

    @property
    def is_widened(self) -> bool:
        """Whether keys become float32 in registers, which then hold few of them."""
        return self.key_itemsize < self.product_itemsize == 4

    @property
    def query_bytes(self) -> int:
        """Bytes of one query and head in a block."""
        return self.padded_dim * self.product_itemsize

    @property
    def key_bytes(self) -> int:
        """Bytes of one key, or of one value, of a head in a block."""
        return self.padded_dim * self.key_itemsize

    @property
    def result_bytes(self) -> int:
        """Bytes of one split's partial results of all rows."""
        return 4 * self.num_rows * self.num_heads * self.head_dim


def supports(q: Array | jax.ShapeDtypeStruct, kv: KVCache | KVStruct) -> None:
    """Refuses what Triton cannot compile, and caches that its offsets do not reach."""
    if kernels.triton is None:
        raise NotImplementedError(f"jax {jax.__version__} lowers no Pallas kernels to Triton")
    capability = device.current("gpu").compute_capability
    if capability is not None and capability < (8, 0):
        raise NotImplementedError(f"compute capability {capability} is below (8, 0)")
    is_quantized = isinstance(kv, QuantizedKV)
    values = values_of(kv)
    if held_by(values) is not values:
        raise NotImplementedError("the cache is laid out for a TPU")
    if not is_quantized and values.dtype not in _FLOATS:
        raise NotImplementedError(f"a cache of {values.dtype} needs scales: pass a QuantizedKV")
    if q.dtype not in _FLOATS:
        raise NotImplementedError(f"queries of {q.dtype} are none of bfloat16, float16, float32")
    if values.ndim != 5:
        raise NotImplementedError(f"values {values.shape} are not [P, page, K, 2, H]")
    if values.shape[-1] > 256:
        raise NotImplementedError(f"head_dim {values.shape[-1]} is more than 256")
    # The lowering takes 32 bits for offsets up to 2**32 bytes, signed and in elements: too few
    # only where an element is one byte.
    if is_quantized and 2**31 < math.prod(values.shape) <= 2**32:
        raise NotImplementedError(f"int8 values {values.shape} take between 2 and 4 GiB a layer")


def attend(
    q: Float[Array, "T N H"],
    kv: KVCache,
    metadata: AttentionMetadata,
    *,
    group: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Float[Array, "T N H"]:
    """Attends decode rows in splits, other rows in tiles; see `kernels.paged_attention`."""
    dims = kv_dims(kv)
    step = _Step(q, kv, metadata)

    def call(config: Config) -> kernels.Call:
        return kernels.Call(
            block_keys=config.block_keys,
            block_queries=config.block_queries,
            num_splits=config.num_splits,
            group=group,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            group_size=q.shape[1] // dims.num_kv_heads,
            head_dim=dims.head_dim,
            page_size=dims.page_size,
            is_decode=metadata.is_decode,
        )

    config = step.choose_config("decode")
    decodes = call(config)._replace(block_queries=1)
    if metadata.is_decode:
        return step.attend_decodes(decodes, config, None)
    tiles = step.choose_config("tiles")
    return step.attend_decodes(decodes, config, step.attend_tiles(call(tiles), tiles))


def write(kv: KVCache, new_kv: Float[Array, "T K 2 H"], slot_mapping: Int[Array, "T"]) -> KVCache:
    """Copies each token into its slot, in place; see `kernels.paged_attention.write`."""
    dims, held = kv_dims(kv), _flat(kv)
    values, *scales = pl.pallas_call(
        partial(kernels.write_kernel, page_size=dims.page_size),
        grid=slot_mapping.shape,
        out_shape=[jax.ShapeDtypeStruct(each.shape, each.dtype) for each in held],
        input_output_aliases={2 + i: i for i in range(len(held))},
        compiler_params=kernels.triton.CompilerParams(num_warps=4, num_stages=1),
        interpret=device.interpret_mode(),
        name="paged_attention_write",
    )(new_kv.reshape(-1, 2 * dims.num_kv_heads, dims.head_dim), slot_mapping, *held)
    if isinstance(kv, QuantizedKV):
        return QuantizedKV(values.reshape(values_of(kv).shape), *scales)
    return values.reshape(values_of(kv).shape)


def _flat(kv: KVCache) -> tuple[Array, ...]:
    """Returns values as `[P * page, 2 * K, H]`, which moves no bytes, and scales if there are."""
    values = values_of(kv)
    flat = values.reshape(-1, 2 * values.shape[2], values.shape[4])
    return (flat, kv.scales) if isinstance(kv, QuantizedKV) else (flat,)


@dataclass(frozen=True)
class _Step:
    """The operands of one call of `attend`."""

    q: Array  # [T, N, H]
    kv: KVCache
    metadata: AttentionMetadata

    @property
    def num_rows(self) -> int:
        """Rows that may be decodes."""
        return min(self.metadata.kv_lens.shape[0], self.q.shape[0])

    def choose_config(self, rows: str) -> Config:
        """Returns the config for a step's "decode" rows or for the "tiles" of its others."""
        dims, chip = kv_dims(self.kv), device.current("gpu")
        values = values_of(self.kv)
        sizes = Sizes(
            num_rows=self.num_rows,
            num_heads=self.q.shape[1],
            num_kv_heads=dims.num_kv_heads,
            head_dim=dims.head_dim,
            key_itemsize=values.dtype.itemsize,
            product_itemsize=kernels.product_dtype(self.q.dtype, values.dtype).itemsize,
        )
        which = f"decode,B{self.num_rows}" if rows == "decode" else rows
        heads = f"N{sizes.num_heads},K{dims.num_kv_heads},H{dims.head_dim}"
        key = f"{which},{heads},page{dims.page_size},{self.q.dtype},{values.dtype}"
        heuristic = Config.for_decode if rows == "decode" else Config.for_tiles
        kernel = "paged_attention/pallas_triton"
        return tuning.choose(kernel, key, chip.kind, heuristic(sizes, chip))

    def attend_decodes(self, call: kernels.Call, config: Config, out: Array | None) -> Array:
        """Returns the result of the decode rows, within `out` if that is given."""
        q, metadata, num_heads = self.q, self.metadata, self.q.shape[1]
        num_decodes = metadata.num_seqs if metadata.is_decode else metadata.num_decodes
        rows = (num_decodes.reshape(1), metadata.kv_lens)
        splits = jax.ShapeDtypeStruct((self.num_rows, num_heads, call.num_splits), jnp.float32)
        weighted = jax.ShapeDtypeStruct((*splits.shape, call.head_dim), jnp.float32)
        partials = pl.pallas_call(
            partial(kernels.decode_kernel, call=call),
            grid=(num_heads // call.group_size, self.num_rows, call.num_splits),
            out_shape=(splits, splits, weighted),
            compiler_params=_compiler_params(config),
            interpret=device.interpret_mode(),
            name="paged_attention_decode",
        )(q, *rows, metadata.page_table, *_flat(self.kv))
        elements = call.num_splits * kernels.padded(call.head_dim)
        num_warps = min(8, max(1, elements // 2048))
        return pl.pallas_call(
            partial(kernels.merge_kernel, call=call),
            grid=(num_heads, self.num_rows),
            out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
            input_output_aliases={} if out is None else {5: 0},
            compiler_params=kernels.triton.CompilerParams(num_warps=num_warps, num_stages=1),
            interpret=device.interpret_mode(),
            name="paged_attention_merge",
        )(*rows, *partials, *(() if out is None else (out,)))

    def attend_tiles(self, call: kernels.Call, config: Config) -> Array:
        """Returns the result of the rows that are no decodes, zeros elsewhere."""
        q, metadata = self.q, self.metadata
        counts = jnp.stack([metadata.num_decodes, metadata.num_seqs])
        rows = (counts, metadata.kv_lens, metadata.cu_q_lens)
        operands = (q, *rows, metadata.page_table, *_flat(self.kv))
        num_tiles = q.shape[0] // call.block_queries + metadata.kv_lens.shape[0]
        return pl.pallas_call(
            partial(kernels.tile_kernel, call=call),
            grid=(q.shape[1] // call.group_size, num_tiles),
            out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
            input_output_aliases={len(operands): 0},
            compiler_params=_compiler_params(config),
            interpret=device.interpret_mode(),
            name="paged_attention_tiles",
        )(*operands, jnp.zeros_like(q))


def _compiler_params(config: Config) -> Any:
    return kernels.triton.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages)
