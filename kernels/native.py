"""The library of C++ kernels for CPUs: loaded once, its handlers registered with jax by name.

`kernels.native_build` makes it. A handler's name carries a version, and beside it there is one for
each instruction set: `NAME`, which takes the machine's best when it runs, `NAME_avx2` ...
"""

from __future__ import annotations

import ctypes
import os
import re
from functools import cache
from pathlib import Path

import jax

from kernels.native_build import LIBRARY

INSTRUCTION_SETS = ("amx", "avx512bf16", "avx512", "avx2", "portable")

_FORCED = "JAXINFER_CPU_ISA"


@cache
def unavailable(*targets: str, has_sets: bool = True) -> str | None:
    """Registers handlers and returns why they cannot be used, or None.

    Args:
      has_sets: there is one of each for every instruction set.
    """
    if not LIBRARY.is_file():
        return "the C++ library is not built: run `python -m kernels.native_build`"
    try:
        library = ctypes.CDLL(str(LIBRARY))
        # Asked first: jax registers handlers later, when a mismatch would cost the whole backend.
        built, known = library.jaxinfer_ffi_version(), ffi_version()
        if built > known:
            raise RuntimeError(f"built for version 0.{built} of XLA's FFI, jaxlib has 0.{known}")
        sets = runnable_instruction_sets() if has_sets else ()
        for suffix in ("", *(f"_{name}" for name in sets)):
            for target in targets:
                capsule = jax.ffi.pycapsule(getattr(library, target + suffix))
                jax.ffi.register_ffi_target(target + suffix, capsule, platform="cpu")
    except (OSError, AttributeError, ValueError, RuntimeError) as error:
        return (
            f"the C++ library does not fit this machine, jax or source: {error}. "
            f"Run `python -m kernels.native_build`"
        )
    return None


def ffi_version() -> int:
    """Returns the minor version of XLA's FFI that jaxlib has; only its headers tell."""
    header = Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h"
    [minor] = re.findall(r"^#define XLA_FFI_API_MINOR (\d+)$", header.read_text(), re.MULTILINE)
    return int(minor)


@cache
def runnable_instruction_sets() -> tuple[str, ...]:
    """Returns which of `INSTRUCTION_SETS` this machine runs, best first."""
    ask = ctypes.CDLL(str(LIBRARY)).jaxinfer_instruction_sets
    ask.restype = ctypes.c_char_p
    return tuple(ask().decode().split())


def usable_instruction_sets() -> tuple[str, ...]:
    """Returns what handlers run with: all that runs here, or the one that is forced."""
    forced = os.environ.get(_FORCED)
    return (forced,) if forced else runnable_instruction_sets()


def handler(target: str) -> str:
    """Returns a handler's name: for the best instruction set, or for the one that is forced.

    Raises:
      ValueError: this machine does not run the instruction set that is forced.
    """
    forced = os.environ.get(_FORCED)
    if not forced:
        return target
    if forced not in runnable_instruction_sets():
        raise ValueError(
            f"{_FORCED}={forced}: this machine runs {', '.join(runnable_instruction_sets())}"
        )
    return f"{target}_{forced}"
