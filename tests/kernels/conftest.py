"""What tests of kernels share."""

import jax
import pytest


@pytest.fixture(scope="module")
def quick_compilation():
    """Most of the time would be XLA optimizing kernels that run once."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
