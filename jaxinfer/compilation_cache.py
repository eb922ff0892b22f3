"""The persistent compilation cache: where it is, and what it may be shared between."""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from pathlib import Path

import jax

from jaxinfer import cpu
from jaxinfer.checkpoint.default_model import cache_directory


def set_compilation_cache(directory: str | None) -> None:
    """Turns the persistent compilation cache on, in a directory of this jaxlib and these CPUs.

    A program compiled for other CPU features would crash; jax's key does not cover them all.
    """
    if jax.config.values["jax_compilation_cache_dir"] is not None and directory is None:
        return  # the user's own choice
    base = Path(directory) if directory else cache_directory().parent / "xla"
    features = hashlib.sha256(cpu.features().encode()).hexdigest()[:12]
    jax.config.update(
        "jax_compilation_cache_dir", str(base / f"jaxlib-{version('jaxlib')}-{features}")
    )
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
