"""What tests of kernels share."""

import os

import jax
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu


@pytest.fixture(scope="module")
def quick_compilation():
    """Most of the time would be XLA optimizing kernels that run once."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="session")
def mosaic_gpu_interpreter():
    """Makes what `interpret` is for Mosaic GPU kernels, where they can be interpreted."""
    if not hasattr(plgpu, "InterpretGPUParams"):
        pytest.skip(f"jax {jax.__version__} has no public interpreter of Mosaic GPU (0.12 has)")
    if _num_xla_threads() < 4:
        pytest.skip("interpreted warpgroups wait for each other in threads of XLA's: set NPROC=8")
    return plgpu.InterpretGPUParams


def _num_xla_threads() -> int:
    """Threads of XLA's CPU client: the variable NPROC, or the cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return int(os.environ.get("NPROC") or len(os.sched_getaffinity(0)))
    return int(os.environ.get("NPROC") or os.cpu_count() or 1)
