"""Paged attention as Pallas Mosaic GPU kernels, for NVIDIA's Hopper: TMA and wgmma.

Decode rows and tiles of queries have a kernel each, in `mosaic_gpu_decode` and `mosaic_gpu_tiles`,
over the same blocks of keys, `mosaic_gpu_pages`. Here is what they take and what joins them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int

from kernels import device, tuning
from kernels.paged_attention.cache import (
    KVCache,
    KVStruct,
    QuantizedKV,
    encode_rows,
    held_by,
    kv_dims,
    quantize_kv,
    values_of,
    write_scales,
)
from kernels.paged_attention.metadata import AttentionMetadata
from kernels.paged_attention.mosaic_gpu_decode import DecodeKernel
from kernels.paged_attention.mosaic_gpu_pages import Blocks
from kernels.paged_attention.mosaic_gpu_tiles import TileKernel
from kernels.paged_attention.mosaic_gpu_write import copy_rows

_HEAD_DIMS = (64, 80, 96, 128, 256)
_SHARED_BYTES = 224 * 1024  # of an SM, less what barriers and the system take
_MAX_DECODE_HEADS = 32


def supports(q: Array | jax.ShapeDtypeStruct, kv: KVCache | KVStruct) -> None:
    """Refuses other chips than Hopper, and what TMA and wgmma cannot take in 16 or 8 bits."""
    capability = device.current("gpu").compute_capability
    if capability is None or capability[0] != 9:
        raise NotImplementedError(f"wgmma needs compute capability 9.x, this chip has {capability}")
    values = held_by(values_of(kv))
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"wgmma would round queries of {q.dtype}; it takes 16 bits")
    if not isinstance(kv, QuantizedKV) and values.dtype != q.dtype:
        raise NotImplementedError(f"wgmma cannot multiply {q.dtype} queries by {values.dtype} keys")
    if values.ndim != 5:
        raise NotImplementedError(f"values {values.shape} are not [P, page, K, 2, H]")
    page_size, num_kv_heads, _, head_dim = values.shape[1:]
    if head_dim not in _HEAD_DIMS:
        raise NotImplementedError(f"head_dim {head_dim} is none of {[*_HEAD_DIMS]}")
    if page_size % 16:
        raise NotImplementedError(f"page size {page_size} is not a multiple of 16")
    if num_kv_heads > 128:
        raise NotImplementedError(f"{num_kv_heads} KV heads: a TMA box has 128 at most")


@dataclass(frozen=True)
class Config:
    """Block sizes of both kernels.

    Attributes:
      block_keys, stages: keys of a decode block, a multiple of 64, and how many blocks shared
        memory holds at a time.
      num_splits: thread blocks among which a decode row's keys are divided.
      tile_block_keys, tile_stages: likewise of a tile.
      tile_warpgroups: 1 or 2 that compute a tile, each 64 rows of queries times heads.
      tile_decoded: blocks of an int8 cache that a tile holds decoded at a time.
    """

    block_keys: int
    stages: int
    num_splits: int
    tile_block_keys: int
    tile_stages: int
    tile_warpgroups: int
    tile_decoded: int

    @classmethod
    def for_call(cls, sizes: Sizes, chip: device.Device) -> Config:
        """Returns what is legal and sensible: two decode thread blocks an SM, in few waves."""
        block = 2 * 64 * sizes.head_dim * sizes.itemsize
        # Queries, weights and result of a decode block, and values that were codes.
        others = sizes.heads * (8 * sizes.head_dim + 256) + (sizes.itemsize == 1) * block
        stages = max(2, min(6, (_SHARED_BYTES // 2 - others) // block))
        splits = _num_splits(sizes, 2 * chip.core_count)
        if sizes.head_dim > 128:  # one warpgroup's sums fill its registers
            return cls(64, stages, splits, 64, 2, 1, 1)
        return cls(64, stages, splits, 64, 3, 2, 2)


class Sizes(NamedTuple):
    """What the heuristic depends on."""

    num_rows: int
    num_blocks: int  # of query heads, each a thread block of a decode row
    heads: int  # of such a block
    head_dim: int
    itemsize: int  # of the cache
    max_keys: int


def _num_splits(sizes: Sizes, slots: int) -> int:
    """Returns how many splits of a row take least time, in the chip's slots for thread blocks.

    Of rows no longer than a table allows, and seldom longer than 4096 keys.
    """
    num_blocks = sizes.num_rows * sizes.num_blocks
    length = min(sizes.max_keys, 4096) / 64

    def time(splits: int) -> float:
        """In blocks of 64 keys: to start takes two, to write and merge half a one."""
        waves = math.ceil(num_blocks * splits / slots)
        return waves * (length / splits + 2) + splits * num_blocks / slots / 2

    return min(range(1, max(1, min(64, sizes.max_keys // 256)) + 1), key=time)


class _Call(NamedTuple):
    """How a layer looks at its cache, and the block sizes."""

    config: Config
    group: int
    scale: float
    window: int | None
    soft_cap: float | None

    def blocks(self, q: Array, kv: KVCache, *, is_tile: bool) -> Blocks:
        """Returns how a kernel cuts up the keys."""
        dims, config = kv_dims(kv), self.config
        return Blocks(
            block_keys=config.tile_block_keys if is_tile else config.block_keys,
            stages=config.tile_stages if is_tile else config.stages,
            page_size=dims.page_size,
            head_dim=dims.head_dim,
            dtype=q.dtype,
            is_int8=isinstance(kv, QuantizedKV),
            value_rows=0 if is_tile else -(-dims.head_dim // 64) * 64,
            group=self.group,
        )


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
    call = _Call(_choose_config(q, kv, metadata), group, scale, window, soft_cap)
    rows = min(metadata.kv_lens.shape[0], q.shape[0])
    num_decodes = metadata.num_seqs if metadata.is_decode else metadata.num_decodes
    is_decode = jnp.arange(rows, dtype=jnp.int32) < num_decodes
    kv_lens = jnp.where(is_decode, metadata.kv_lens[:rows], 0)
    decoded = _attend_decodes(q[:rows], kv, kv_lens, metadata.page_table, call)
    if metadata.is_decode:
        return decoded
    token = jnp.arange(q.shape[0], dtype=jnp.int32)[:, None, None]
    decoded = jnp.pad(decoded, ((0, q.shape[0] - rows), (0, 0), (0, 0)))
    tiled = _attend_tiles(q, kv, metadata, call)
    tiled = jnp.where(token < metadata.cu_q_lens[-1], tiled, 0)
    return jnp.where(token < num_decodes, decoded, tiled)


def write(kv: KVCache, new_kv: Float[Array, "T K 2 H"], slot_mapping: Int[Array, "T"]) -> KVCache:
    """Copies each token into its slot, in place; see `kernels.paged_attention.write`."""
    if not isinstance(kv, QuantizedKV):
        return copy_rows(values_of(kv), encode_rows(new_kv, kv), slot_mapping)
    codes, scales = quantize_kv(new_kv)
    values = copy_rows(kv.values, encode_rows(codes, kv.values), slot_mapping)
    # TMA writes 16 bytes at least, which four tokens' scales share: XLA scatters those.
    page_size = kv_dims(kv).page_size
    page, offset = slot_mapping // page_size, slot_mapping % page_size
    return QuantizedKV(values, write_scales(kv.scales, scales, page, offset))


def _attend_decodes(
    q: Float[Array, "B N H"],
    kv: KVCache,
    kv_lens: Int[Array, "B"],
    page_table: Int[Array, "C B M"],
    call: _Call,
) -> Float[Array, "B N H"]:
    """Attends one query per row; zeros for rows without keys."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = kv_dims(kv).num_kv_heads
    group_size = num_heads // num_kv_heads
    heads, blocks_per_kv_head = _decode_heads(group_size)
    kernel = DecodeKernel(
        blocks=call.blocks(q, kv, is_tile=False),
        heads=heads,
        blocks_per_kv_head=blocks_per_kv_head,
        num_splits=call.config.num_splits,
        scale=call.scale,
        window=call.window,
        soft_cap=call.soft_cap,
    )
    queries = q.reshape(num_rows, num_kv_heads, group_size, head_dim)
    padding = heads * blocks_per_kv_head - group_size
    queries = jnp.pad(queries, ((0, 0), (0, 0), (0, padding), (0, 0)))
    queries = queries.reshape(num_rows, -1, heads, head_dim)
    merged = _merge(*kernel(queries, kv, kv_lens, page_table))
    merged = jnp.swapaxes(merged[:, :, :head_dim], 2, 3)
    merged = merged.reshape(num_rows, num_kv_heads, -1, head_dim)[:, :, :group_size]
    return merged.reshape(q.shape).astype(q.dtype)


def _decode_heads(group_size: int) -> tuple[int, int]:
    """Returns the heads of a decode thread block, and how many blocks cover a KV head's."""
    heads = min(-(-group_size // 8) * 8, _MAX_DECODE_HEADS)
    return heads, -(-group_size // heads)


def _merge(
    weighted: Float32[Array, "B R S H G"],
    peak: Float32[Array, "B R S G"],
    total: Float32[Array, "B R S G"],
) -> Float32[Array, "B R H G"]:
    """Joins the splits of each row; zeros where none has keys."""
    share = jnp.exp2(peak - peak.max(2, keepdims=True))
    total = (share * total).sum(2)
    weighted = (share[..., None, :] * weighted).sum(2)
    return weighted / jnp.where(total > 0, total, 1.0)[:, :, None]


def _attend_tiles(
    q: Float[Array, "T N H"], kv: KVCache, metadata: AttentionMetadata, call: _Call
) -> Float[Array, "T N H"]:
    """Attends the rows past `num_decodes`; other tokens hold anything."""
    group_size = q.shape[1] // kv_dims(kv).num_kv_heads
    heads = max(n for n in range(1, min(group_size, 64) + 1) if group_size % n == 0)
    kernel = TileKernel(
        blocks=call.blocks(q, kv, is_tile=True),
        heads=heads,
        blocks_per_kv_head=group_size // heads,
        warpgroups=call.config.tile_warpgroups,
        decoded=call.config.tile_decoded,
        scale=call.scale,
        window=call.window,
        soft_cap=call.soft_cap,
    )
    rows, tokens, num_tiles = metadata.query_tiles(q.shape[0], kernel.tile_queries)
    # Tiles too many begin past the last token.
    is_tile = jnp.arange(rows.size, dtype=jnp.int32) < num_tiles
    tokens = jnp.where(is_tile, tokens, q.shape[0])
    rows = rows.astype(jnp.int32)
    return kernel(q, kv, rows, tokens, metadata.kv_lens, metadata.cu_q_lens, metadata.page_table)


def _choose_config(q: Array, kv: KVCache, metadata: AttentionMetadata) -> Config:
    dims, chip = kv_dims(kv), device.current("gpu")
    held = held_by(values_of(kv)).dtype
    num_heads, head_dim = q.shape[1:]
    num_rows = min(metadata.kv_lens.shape[0], q.shape[0])
    heads, blocks_per_kv_head = _decode_heads(num_heads // dims.num_kv_heads)
    num_blocks = dims.num_kv_heads * blocks_per_kv_head
    max_keys = metadata.page_table.shape[2] * dims.page_size
    sizes = Sizes(num_rows, num_blocks, heads, head_dim, held.itemsize, max_keys)
    step = f"decode,B{num_rows}" if metadata.is_decode else "mixed"
    shape = f"N{num_heads},K{dims.num_kv_heads},H{head_dim}"
    key = f"{step},{shape},page{dims.page_size},{q.dtype},{held}"
    heuristic = Config.for_call(sizes, chip)
    return tuning.choose("paged_attention/pallas_mosaic_gpu", key, chip.kind, heuristic)
