"""What the device keeps between steps: its shapes, where it lies, and how it is made anew."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled
from jaxtyping import Array, Int32

from jaxinfer.runner.kv_cache import CacheSpec
from jaxinfer.runner.programs import DeviceState
from jaxinfer.runner.row_state import RowReset, RowState, empty_row_state, reset_row
from kernels.lazy_zeros import lazy_zeros
from kernels.paged_attention import kv_partition


@dataclass(frozen=True)
class StateSpec:
    """The device state of one model.

    Attributes:
      cache: shape of the KV cache.
      num_pages: pages in the pool, the trash page included.
      table: shape of the page table: KV groups, rows with the dummy, pages of a row.
      vocab_size: ids that can be sampled.
      mesh: the devices.
    """

    cache: CacheSpec
    num_pages: int
    table: tuple[int, int, int]
    vocab_size: int
    mesh: Mesh

    @property
    def replicated(self) -> NamedSharding:
        """Whole on each device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @cached_property
    def shardings(self) -> DeviceState:
        """Where each array lies."""
        heads = jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec),
            kv_partition(self.cache.layer(self.num_pages), "tensor"),
        )
        rows = empty_row_state(self.table[1], self.vocab_size)
        return DeviceState(
            kv=(heads,) * self.cache.num_layers,
            rows=jax.tree.map(lambda _: self.replicated, rows),
            page_table=self.replicated,
        )

    @cached_property
    def abstract(self) -> DeviceState:
        """Shape, type and sharding of each array."""
        state = DeviceState(
            kv=(self.cache.layer(self.num_pages),) * self.cache.num_layers,
            rows=empty_row_state(self.table[1], self.vocab_size),
            page_table=jax.ShapeDtypeStruct(self.table, np.int32),
        )
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            state,
            self.shardings,
        )

    def make(self) -> DeviceState:
        """Returns an empty one; compiles nothing when it is called again."""
        rows = empty_row_state(self.table[1], self.vocab_size)
        return DeviceState(
            kv=self._make_kv(),
            rows=jax.device_put(rows, self.shardings.rows),
            page_table=jax.device_put(np.zeros(self.table, np.int32), self.replicated),
        )

    @cached_property
    def _make_kv(self) -> Compiled:
        abstract = self.abstract.kv
        zeros = jax.numpy.zeros
        if self.mesh.size == 1:
            zeros = partial(lazy_zeros, platform=self.cache.platform)
        make_kv = jax.jit(
            lambda: jax.tree.map(lambda leaf: zeros(leaf.shape, leaf.dtype), abstract),
            out_shardings=self.shardings.kv,
        )
        return make_kv.lower().compile()


def reset_row_and_pages(
    rows: RowState,
    page_table: Int32[Array, "C R M"],
    reset: RowReset,
    pages: Int32[Array, "C M"],
) -> tuple[RowState, Int32[Array, "C R M"]]:
    """Rebuilds one row for a sequence that holds `pages`; traced."""
    return reset_row(rows, reset), page_table.at[:, reset.row].set(pages)
