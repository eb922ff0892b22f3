"""How large the KV cache is: bytes per page and per token; memory that is free for it on a CPU."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from kernels.paged_attention import KVStruct, kv_structs

CPU_POOL_BYTES = 2**30
"""Default bound of the CPU pool: XLA commits it whole at start, used or not."""

CPU_MEMORY_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """Shape of the cache of one model.

    Attributes:
      platform: owner of the layout.
      dtype: keys and values are held in, `kernels.paged_attention.kv_dtype`; int8 has scales.
      num_layers, num_kv_heads, head_dim: of the model, KV heads after replication.
      page_size: tokens per page.
      num_shards: devices that the KV heads are split over.
    """

    platform: str
    dtype: np.dtype
    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    num_shards: int = 1

    def layer(self, num_pages: int) -> KVStruct:
        """What holds one layer: a struct, or a pytree of them."""
        return kv_structs(
            self.platform,
            self.dtype,
            num_pages,
            self.page_size,
            self.num_kv_heads,
            self.head_dim,
            self.num_shards,
        )

    @property
    def dtype_name(self) -> str:
        """Name of what the values are: a CPU holds bfloat16 as its bits."""
        return "bfloat16" if self.dtype.name == "uint16" else self.dtype.name

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers."""
        structs = jax.tree.leaves(self.layer(1))
        sizes = (math.prod(struct.shape) * struct.dtype.itemsize for struct in structs)
        return sum(sizes) * self.num_layers

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers, its share of a page's padding included."""
        return self.page_bytes // self.page_size


def default_page_size(platform: str) -> int:
    """Tokens per page where none is configured."""
    return 128 if platform == "tpu" else 16


def cpu_pool_bytes(available: int | None = None) -> int:
    """Default KV budget on CPU, in bytes: a power of two, for that much free memory or for what is.

    Free memory varies from run to run, and the pool's size is part of every program's shape.
    """
    free = available_memory() if available is None else available
    share = int(CPU_MEMORY_SHARE * free)
    return min(1 << max(share.bit_length() - 1, 0), CPU_POOL_BYTES)


def available_memory() -> int:
    """Bytes this process may still take: the machine's, or what its control group leaves."""
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        num_pages = os.sysconf("SC_AVPHYS_PAGES")
    else:
        num_pages = os.sysconf("SC_PHYS_PAGES") // 2  # macOS tells only what is built in
    available = num_pages * os.sysconf("SC_PAGE_SIZE")
    for line in Path("/proc/meminfo").read_text().splitlines() if _has_proc() else ():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit = _number(Path("/sys/fs/cgroup/memory.max"))
    used = _number(Path("/sys/fs/cgroup/memory.current"))
    if limit is not None and used is not None:
        available = min(available, limit - used)
    return max(available, 0)


def _has_proc() -> bool:
    return Path("/proc/meminfo").exists()


def _number(path: Path) -> int | None:
    """The integer in a control-group file; None without one or for "max"."""
    if not path.exists():
        return None
    text = path.read_text().strip()
    return int(text) if text.isdigit() else None
