"""Quantized matmul on CPUs by C++ loops behind `jax.ffi`: weights are decoded in registers.

The sources beside this file are built by `kernels.native_build`, when the package is installed or
by `python -m kernels.native_build`. Without the library, or on columns that are not a multiple of
16, this refuses.
"""

from __future__ import annotations

import ctypes
import os
import re
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Float32

from kernels.native_build import LIBRARY
from kernels.quantized_matmul.format import LAYOUTS, QTensor, quantize_rows

__all__ = ["INSTRUCTION_SETS", "is_available", "matmul", "supports", "unavailable"]

INSTRUCTION_SETS = ("avx512", "avx2", "portable")

# The version is that of the handlers in cpu.cc.
_TARGET = "jaxinfer_quantized_matmul_v1"
_FORCED = "JAXINFER_CPU_ISA"


def is_available() -> bool:
    """Whether the library is there and this version of jax takes it."""
    return unavailable() is None


@cache
def unavailable() -> str | None:
    """Loads the library and returns why it cannot be used, or None."""
    if not LIBRARY.is_file():
        return "the C++ library is not built: run `python -m kernels.native_build`"
    try:
        library = ctypes.CDLL(str(LIBRARY))
        # Asked first: jax registers handlers later, when a mismatch would cost the whole backend.
        built, known = library.jaxinfer_ffi_version(), ffi_version()
        if built > known:
            raise RuntimeError(f"built for version 0.{built} of XLA's FFI, jaxlib has 0.{known}")
        for name in ("", *(f"_{name}" for name in runnable_instruction_sets())):
            capsule = jax.ffi.pycapsule(getattr(library, _TARGET + name))
            jax.ffi.register_ffi_target(_TARGET + name, capsule, platform="cpu")
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


def supports(x: Array | jax.ShapeDtypeStruct, w: QTensor) -> None:
    """Refuses without the library, other layouts, and columns that do not fill vectors."""
    if reason := unavailable():
        raise NotImplementedError(reason)
    if w.layout != LAYOUTS["cpu"]:
        raise NotImplementedError(f"the weight is laid out as {w.layout}: prepare(w, 'cpu') first")
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"x is {x.dtype}: needs float32, bfloat16 or float16")
    multiple = 32 if w.is_4bit else 16
    columns, group = w.shape[1], w.group_size
    if columns % multiple or (group != 16 and group % multiple):
        raise NotImplementedError(
            f"{columns} columns in groups of {group}: {w.code} codes need multiples of {multiple}"
        )


def matmul(
    x: Float[Array, "T I"], w: QTensor, out_dtype: DTypeLike = jnp.float32
) -> Float[Array, "T O"]:
    """Multiplies and sums in float32; a row's result has the same bits whatever the other rows."""
    if w.activations == "float":
        return _product(x.astype(jnp.float32), w).astype(out_dtype)
    codes, row_scale = quantize_rows(x)
    return (_product(codes.astype(jnp.float32), w) * row_scale).astype(out_dtype)


def _product(x: Float32[Array, "T I"], w: QTensor) -> Float32[Array, "T O"]:
    none = np.zeros((0,), np.float32)
    call = jax.ffi.ffi_call(
        handler(_TARGET), jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), jnp.float32)
    )
    offset = none if w.offset is None else w.offset
    codebook = none if w.codebook is None else w.codebook
    return call(x, w.qvalue, w.scale, offset, codebook, code=w.code)


def handler(target: str) -> str:
    """Returns a handler's name: for the best instruction set, or for the one that is forced.

    Raises:
      NotImplementedError: the library cannot be used.
      ValueError: this machine does not run the instruction set that is forced.
    """
    if reason := unavailable():
        raise NotImplementedError(reason)
    forced = os.environ.get(_FORCED)
    if not forced:
        return target
    if forced not in runnable_instruction_sets():
        raise ValueError(
            f"{_FORCED}={forced}: this machine runs {', '.join(runnable_instruction_sets())}"
        )
    return f"{target}_{forced}"
