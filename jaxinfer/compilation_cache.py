"""The persistent caches of compiled programs: where they are, what they may be shared between."""

from __future__ import annotations

import hashlib
import os
import sys
from importlib.metadata import version
from pathlib import Path

import jax

import kernels
from jaxinfer import cpu
from jaxinfer.checkpoint.default_model import cache_directory
from jaxinfer.runner.model_runner import ModelRunner
from jaxinfer.runner.program_store import ProgramStore
from kernels import lazy_zeros, native
from kernels.decoder_layers import cpu as decoder_layers
from kernels.logit_stats import cpu as logit_stats
from kernels.paged_attention import cpu as paged_attention
from kernels.quantized_matmul import cpu as quantized_matmul
from kernels.token_sampler import cpu as token_sampler

_NATIVE = (
    *(decoder_layers, lazy_zeros, logit_stats, paged_attention, quantized_matmul),
    token_sampler,
)

_NO_PROGRAMS = ("server", "scheduler", "text", "load_test", "checkpoint", "constraints")
"""Folders whose code is in no program."""


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


def program_store(runner: ModelRunner) -> ProgramStore | None:
    """Returns where an engine's step programs are kept, beside what jax's own cache keeps.

    None where that is off or elsewhere than on a disk, and on accelerators, where what a start
    gains by it is not measured.
    """
    directory = jax.config.values["jax_compilation_cache_dir"]
    if runner.platform != "cpu" or not jax.config.values["jax_enable_compilation_cache"]:
        return None
    if directory is None or "://" in directory:
        return None
    settings = {
        name: value
        for name, value in jax.config.values.items()
        if "compilation_cache" not in name and "persistent_cache" not in name
    }
    made_of = repr(
        (
            runner.made_of,
            [version(name) for name in ("jax", "jaxlib", "flax")],
            sys.version_info,
            _sources(),
            sorted(settings.items()),
            os.environ.get("XLA_FLAGS"),
            cpu.num_threads(),
            cpu.features(),
            # This also registers what programs call: nothing else does where none is traced.
            [module.unavailable() for module in _NATIVE],
            native.handler(""),
        )
    )
    if " at 0x" in made_of:
        return None  # something without a name that lasts
    return ProgramStore(Path(directory) / "programs", made_of, list(runner.mesh.devices.flat))


def _sources() -> str:
    """Digest of all code that programs may come from."""
    digest = hashlib.sha256()
    for package in (Path(__file__).parent, Path(kernels.__file__).parent):
        for path in sorted(package.rglob("*")):
            is_code = path.suffix in (".py", ".so") and path.is_file()
            if is_code and path.relative_to(package).parts[0] not in _NO_PROGRAMS:
                digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
