"""The cache: its layouts, and writing to it: the right slots, the right rounding, in place."""

import dataclasses
import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import paged_attention_checks as checks
import pytest

from kernels.paged_attention import (
    KVDims,
    QuantizedKV,
    attend,
    choose,
    kv_dims,
    kv_dtype,
    kv_partition,
    kv_structs,
    quantize_kv,
)
from kernels.paged_attention import write as write_on
from kernels.paged_attention.specs import SPECS, abstract_inputs, make_inputs

DTYPES = ["float32", "bfloat16", "float16", "int8"]
write = partial(write_on, platform="cpu")


def empty_cache(dtype, num_pages=8, page_size=4, num_kv_heads=2, head_dim=8):
    structs = kv_structs("cpu", dtype, num_pages, page_size, num_kv_heads, head_dim)
    return jax.tree.map(lambda struct: jnp.zeros(struct.shape, struct.dtype), structs)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_layouts_split_over_heads_and_nothing_else(head_dim, platform, num_shards):
    dims = KVDims(9, 16, 6, head_dim)
    plain, quantized = (
        kv_structs(platform, dtype, *dims, num_shards) for dtype in ("bfloat16", "int8")
    )
    if platform != "tpu":
        shape = (9, 16, 6, 2, head_dim)
        assert plain == jax.ShapeDtypeStruct(shape, kv_dtype(platform, "bfloat16"))
        assert quantized.values == jax.ShapeDtypeStruct(shape, jnp.int8)
        assert kv_dims(plain) == kv_dims(quantized) == dims
    local = kv_structs(platform, "int8", 9, 16, 6 // num_shards, head_dim)
    for structs in plain, quantized:
        specs = jax.tree.leaves(kv_partition(structs, "tensor"))
        for spec, struct in zip(specs, jax.tree.leaves(structs), strict=True):
            [split] = [n for n, axis in zip(struct.shape, spec, strict=False) if axis]
            assert split % num_shards == 0
    shares = jax.tree.map(
        lambda struct, spec: tuple(
            n // num_shards if axis else n
            for n, axis in zip(struct.shape, (*spec, *[None] * struct.ndim), strict=False)
        ),
        quantized,
        kv_partition(quantized, "tensor"),
    )
    assert jax.tree.leaves(shares) == [n for leaf in jax.tree.leaves(local) for n in leaf.shape]


def test_a_tpu_has_no_float16_cache():
    with pytest.raises(ValueError, match="no cache of float16: pass one of"):
        kv_structs("tpu", "float16", 9, 16, 2, 64)


def test_quantizes_to_nearest_with_the_largest_at_127():
    new_kv = np.random.default_rng(0).standard_normal((5, 2, 2, 8), np.float32)
    new_kv[3] = 0
    codes, scales = map(np.asarray, quantize_kv(jnp.asarray(new_kv)))
    assert (np.abs(codes[[0, 1, 2, 4]]).max(-1) == 127).all()
    np.testing.assert_allclose(scales, np.abs(new_kv).max(-1) / 127, rtol=1e-6)
    assert (np.abs(codes * scales[..., None] - new_kv) <= 0.5001 * scales[..., None]).all()
    assert (scales[3] == 0).all()
    assert (codes[3] == 0).all()


@pytest.mark.parametrize("name", ["reference", "xla"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_writes_rounded_values_to_their_slots_only(dtype, name):
    checks.check_write(
        "cpu", name, dataclasses.replace(checks.SMALL_SPECS["mixed"], kv_dtype=dtype)
    )


def test_what_is_written_is_what_is_attended_to():
    """One token attends to itself alone, so the result is its value."""
    spec = dataclasses.replace(SPECS["smollm2-decode-2"], rows=((1, 1), (1, 1)))
    q, kv, metadata = make_inputs(spec)
    new_kv = jax.random.normal(jax.random.key(0), (2, 3, 2, 64))
    kv = write(kv, new_kv, metadata.slot_mapping[0])
    out = attend(q, kv, metadata, group=0, scale=spec.scale, platform="cpu")
    np.testing.assert_allclose(out, jnp.repeat(new_kv[:, :, 1], 3, axis=1), rtol=1e-6)


def test_shapes_that_disagree_are_named():
    unchecked_write = partial(
        inspect.unwrap(write_on), platform="cpu"
    )  # without the annotations, as outside of tests
    slots = jnp.zeros(5, jnp.int32)
    with pytest.raises(ValueError, match=r"new_kv \(5, 3, 2, 8\).*cache of KVDims\(num_pages=8, p"):
        unchecked_write(empty_cache("float32"), jnp.zeros((5, 3, 2, 8)), slots)
    with pytest.raises(ValueError, match=r"slot_mapping \(5,\)"):
        unchecked_write(empty_cache("float32"), jnp.zeros((4, 2, 2, 8)), slots)


def assert_in_place(compiled, kv):
    """No scratch memory near a cache's size, and no operation that copies or converts one."""
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(kv))
    assert compiled.memory_analysis().temp_size_in_bytes < min(num_bytes // 2, 64 << 20)
    for leaf in jax.tree.leaves(kv):
        shape = "[" + ",".join(map(str, leaf.shape)) + "]"
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
    addresses = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(kv)]
    written = jax.tree.leaves(compiled(kv, new_kv, slots))
    assert [leaf.unsafe_buffer_pointer() for leaf in written] == addresses


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", ["smollm2-decode-8", "smollm2-mixed"])
def test_layers_write_and_attend_in_place(name, dtype):
    spec = dataclasses.replace(SPECS[name], kv_dtype=dtype)
    q, kv, metadata = make_inputs(spec)
    # Larger than what attention itself needs.
    kv = jax.tree.map(lambda leaf: jnp.concatenate([leaf] * 8), kv)
    caches = tuple(jax.tree.map(jnp.copy, kv) for _ in range(4))
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


def test_refuses_codes_without_scales():
    q = jax.ShapeDtypeStruct((8, 4, 8), jnp.float32)
    kv = kv_structs("cpu", "int8", 9, 4, 2, 8)
    assert isinstance(kv, QuantizedKV)
    assert choose(q, kv, platform="cpu", implementation="xla").name == "xla"
    with pytest.raises(NotImplementedError, match="xla: a cache of int8 needs scales"):
        choose(q, kv.values, platform="cpu")


@pytest.mark.parametrize("name", ["smollm2-mixed", "phi3-mixed-int8"])
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_abstract_inputs_are_the_shapes_of_the_real_ones(name, platform):
    real, abstract = make_inputs(SPECS[name], 0, platform), abstract_inputs(SPECS[name], platform)
    assert jax.tree.structure(real) == jax.tree.structure(abstract)
    for array, struct in zip(jax.tree.leaves(real), jax.tree.leaves(abstract), strict=True):
        assert (array.shape, array.dtype) == (struct.shape, struct.dtype)
