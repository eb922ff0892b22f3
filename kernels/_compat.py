"""What differs between the versions of jax that kernels run on; nothing else knows versions."""

from __future__ import annotations

import inspect
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def import_pallas_triton() -> ModuleType | None:
    """Returns `jax.experimental.pallas.triton`, or None from the version of jax that drops it."""
    name = "jax.experimental.pallas.triton"
    return import_module(name) if find_spec(name) else None


def transpose_ref(ref: Any) -> Any:
    """Views a matrix in memory, of a Mosaic GPU kernel, the other way round."""
    mosaic_gpu = import_module("jax.experimental.pallas.mosaic_gpu")
    if hasattr(mosaic_gpu, "transform_ref"):  # until jax 0.11 wgmma does not know ref.transpose
        return mosaic_gpu.transpose_ref(ref, (1, 0))
    return ref.transpose((1, 0))


def load_as(ref: Any, layout: Any, **options: Any) -> Any:
    """Loads all of a reference in a Mosaic GPU kernel, laid out over the threads as asked."""
    load = import_module("jax.experimental.pallas.mosaic_gpu").load
    index = ((),) if "idx" in inspect.signature(load).parameters else ()
    return load(ref, *index, layout=layout, **options)


def store_as_is(ref: Any, value: Any) -> None:
    """Stores to a reference in a Mosaic GPU kernel even where threads' stores conflict."""
    mosaic_gpu = import_module("jax.experimental.pallas.mosaic_gpu")
    if hasattr(mosaic_gpu, "store"):
        mosaic_gpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
