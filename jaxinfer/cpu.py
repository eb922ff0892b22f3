"""What of the CPU matters to XLA: its vector extensions, and how many threads to use.

Imports no jax, and must not: the number of threads is read when jax first touches the CPU.
"""

from __future__ import annotations

import os
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


def features() -> str:
    """Returns the CPU's extensions as one line of words; where Linux is not, its architecture."""
    try:
        lines = _CPUINFO.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return os.uname().machine
    found = (line for line in lines if line.startswith(("flags", "Features")))
    return next(found, os.uname().machine)


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for products of bfloat16 numbers."""
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(features().split()))


def set_num_threads(num_threads: int | None) -> None:
    """Sizes the thread pool of XLA:CPU; None leaves it at one thread per core."""
    if num_threads is not None:
        os.environ["PJRT_NPROC"] = str(num_threads)


def num_threads() -> int:
    """Returns the threads of XLA:CPU's pool."""
    given = os.environ.get("PJRT_NPROC")
    if given is not None:
        return int(given)
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
