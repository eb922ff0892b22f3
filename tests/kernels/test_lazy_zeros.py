"""Zeros that take memory only where they are written."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.lazy_zeros import lazy_zeros, unavailable

needs_library = pytest.mark.skipif(unavailable() is not None, reason="the library is not built")


@pytest.mark.parametrize("shape", [(), (3,), (1000, 3), (7, 1 << 18)])
@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.uint16, jnp.float32])
def test_they_are_zeros_in_memory_that_was_used(shape, dtype):
    make = jax.jit(lambda: lazy_zeros(shape, dtype, "cpu"))
    for _ in range(3):
        found = make()
        assert (found.shape, found.dtype) == (shape, dtype)
        np.testing.assert_array_equal(found, np.zeros(shape, dtype))
        # The next may get the same memory, which is no longer zeros.
        jax.jit(lambda x: x + 1, donate_argnums=0)(found).block_until_ready()


@needs_library
def test_each_has_memory_of_its_own():
    both = jax.jit(lambda: [lazy_zeros((1 << 16,), jnp.int32, "cpu") for _ in range(2)])()
    assert both[0].unsafe_buffer_pointer() != both[1].unsafe_buffer_pointer()
    changed = jax.jit(lambda x: x.at[5].set(7), donate_argnums=0)(both[0])
    assert changed[5] == 7
    np.testing.assert_array_equal(both[1], 0)


@needs_library
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_memory_is_taken_when_it_is_written():
    def resident():
        return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) >> 10

    before = resident()
    held = jax.jit(lambda: lazy_zeros((256 << 20,), jnp.uint8, "cpu"))().block_until_ready()
    assert resident() < before + 64
    held = jax.jit(lambda x: x + 1, donate_argnums=0)(held).block_until_ready()
    assert resident() > before + 192
    assert held[-1] == 1


def test_other_platforms_take_what_jax_has():
    assert "ffi_call" not in str(jax.make_jaxpr(lambda: lazy_zeros((4,), jnp.int8, "tpu"))())
