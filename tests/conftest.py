"""Strict JAX settings for every test, two virtual CPU devices, and the two real models."""

import atexit
import logging
import os
import tempfile
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "JAXINFER_TEST_PROGRAMS" not in os.environ:  # else a worker, which shares that of its run
    _programs = tempfile.TemporaryDirectory(prefix="jaxinfer-programs-")
    os.environ["JAXINFER_TEST_PROGRAMS"] = _programs.name  # of `kept_programs`
    atexit.register(_programs.cleanup)

import jax
import pytest
from jaxtyping import install_import_hook


def _array_modules():
    """Names of modules that annotate arrays; in all others mypy is enough, and checks take time."""
    root = Path(__file__).parent.parent
    for path in sorted([*root.glob("jaxinfer/**/*.py"), *root.glob("kernels/**/*.py")]):
        if "from jaxtyping" in path.read_text(encoding="utf-8"):
            yield ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


# Every shape and dtype annotation is checked at run time while testing.
_hook = install_import_hook(list(_array_modules()), "beartype.beartype")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True)
def _log_level():
    """Commands that run in this process set a level of their own."""
    logger = logging.getLogger("jaxinfer")
    before = logger.level
    yield
    logger.setLevel(before)


@pytest.fixture(scope="session")
def smollm2_path():
    """SmolLM2-135M-Instruct Q4_1 (GGUF), fetched once into the user's cache."""
    return _fetched("smollm2")


@pytest.fixture(scope="session")
def gemma3_path():
    """gemma-3-270m Q4_K_M (GGUF), fetched once into the user's cache."""
    return _fetched("gemma3")


def _fetched(name):
    from real_models import fetch

    try:
        return fetch(name)
    except OSError as error:
        pytest.skip(f"{name} is neither cached nor reachable: {error}")
