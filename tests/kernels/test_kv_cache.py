"""Writing to the cache: the right slots, the right rounding, in place."""

import dataclasses
import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.paged_attention import attend, kv_dtype, kv_shape, write
from kernels.paged_attention.cache import decode
from kernels.paged_attention.specs import SPECS, make_inputs

DTYPES = ["float32", "bfloat16", "float16"]


def empty_cache(dtype, num_pages=8, page_size=4, num_kv_heads=2, head_dim=8):
    shape = kv_shape("cpu", dtype, num_pages, page_size, num_kv_heads, head_dim)
    return jnp.zeros(shape, kv_dtype("cpu", dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_writes_rounded_values_to_their_slots_only(dtype):
    new_kv = jax.random.normal(jax.random.key(0), (5, 2, 2, 8))
    slots = np.array([30, 5, 4, 0, 0])
    kv = decode(write(empty_cache(dtype), new_kv, jnp.asarray(slots, jnp.int32)))
    flat = np.asarray(kv).reshape(32, 2, 2, 8)
    rounded = np.asarray(new_kv.astype(dtype).astype(jnp.float32))
    np.testing.assert_array_equal(flat[slots[:3]], rounded[:3])
    untouched = np.setdiff1d(np.arange(4, 32), slots)  # page 0 is trash
    np.testing.assert_array_equal(flat[untouched], 0)


def test_what_is_written_is_what_is_attended_to():
    """One token attends to itself alone, so the result is its value."""
    spec = dataclasses.replace(SPECS["smollm2-decode-2"], rows=((1, 1), (1, 1)))
    q, kv, metadata = make_inputs(spec)
    new_kv = jax.random.normal(jax.random.key(0), (2, 3, 2, 64))
    kv = write(kv, new_kv, metadata.slot_mapping[0])
    out = attend(q, kv, metadata, group=0, scale=spec.scale, platform="cpu")
    np.testing.assert_allclose(out, jnp.repeat(new_kv[:, :, 1], 3, axis=1), rtol=1e-6)


def test_shapes_that_disagree_are_named():
    unchecked_write = inspect.unwrap(write)  # without the annotations, as outside of tests
    slots = jnp.zeros(5, jnp.int32)
    with pytest.raises(ValueError, match=r"new_kv \(5, 3, 2, 8\).*cache of shape \(8, 4, 2, 2, 8"):
        unchecked_write(empty_cache("float32"), jnp.zeros((5, 3, 2, 8)), slots)
    with pytest.raises(ValueError, match=r"slot_mapping \(5,\)"):
        unchecked_write(empty_cache("float32"), jnp.zeros((4, 2, 2, 8)), slots)


def assert_in_place(compiled, kv):
    """No scratch memory near a cache's size, and no operation that copies or converts one."""
    assert compiled.memory_analysis().temp_size_in_bytes < min(kv.nbytes // 2, 64 << 20)
    shape = "[" + ",".join(map(str, kv.shape)) + "]"
    lines = [line for line in compiled.as_text().splitlines() if shape in line.split("(")[0]]
    assert lines, "the cache's shape was not found: the check below would pass by mistake"
    assert not [line for line in lines if " copy(" in line or " convert(" in line]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [2, 256])
def test_writes_in_place_when_donated(num_tokens, dtype):
    kv = empty_cache(dtype, num_pages=1000, page_size=16)
    new_kv, slots = jnp.ones((num_tokens, 2, 2, 8)), jnp.arange(num_tokens, dtype=jnp.int32)
    compiled = jax.jit(write, donate_argnums=0).lower(kv, new_kv, slots).compile()
    assert_in_place(compiled, kv)
    address = kv.unsafe_buffer_pointer()
    assert compiled(kv, new_kv, slots).unsafe_buffer_pointer() == address


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["smollm2-decode-8", "smollm2-mixed"])
def test_layers_write_and_attend_in_place(name, dtype):
    spec = dataclasses.replace(SPECS[name], kv_dtype=dtype)
    q, kv, metadata = make_inputs(spec)
    kv = jnp.concatenate([kv] * 8)  # larger than what attention itself needs
    caches = tuple(kv + jnp.zeros((), kv.dtype) for _ in range(4))
    new_kv = jnp.ones((spec.num_tokens, 3, 2, 64))

    @partial(jax.jit, donate_argnums=1)
    def step(q, caches, new_kv, metadata):
        written = []
        for kv in caches:
            kv = write(kv, new_kv, metadata.slot_mapping[0])
            q = attend(q, kv, metadata, group=0, scale=spec.scale, platform="cpu")
            written.append(kv)
        return q, tuple(written)

    assert_in_place(step.lower(q, caches, new_kv, metadata).compile(), kv)
