"""The Mosaic GPU kernels: interpreted against formula and reference, lowered for Hopper."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import paged_attention_checks as checks
import pytest
from jax.sharding import Mesh, PartitionSpec

from kernels import device, tuning
from kernels.paged_attention import (
    AttentionMetadata,
    QuantizedKV,
    attend,
    choose,
    kv_structs,
    write,
)
from kernels.paged_attention.pallas_mosaic_gpu import Config, Sizes
from kernels.paged_attention.specs import SPECS, Spec, make_inputs

NAME = "pallas_mosaic_gpu"
CALL = ("gpu", NAME)
# Two splits, so that they are merged; few blocks in shared memory, so that they are reused.
CONFIG = Config(64, 2, 2, 64, 2, 2, 1)


@pytest.fixture(autouse=True)
def h200():
    with device.assume(device.KNOWN_DEVICES["h200"]):
        yield


@pytest.fixture
def interpreted(mosaic_gpu_interpreter):
    params = mosaic_gpu_interpreter(detect_races=True)
    with device.interpreted(params), tuning.force(CONFIG):
        yield


def spec_of(rows, head_dim=64, num_heads=2, num_kv_heads=1, *, padding=(1, 1), **changes):
    """A small spec in bfloat16, with `padding` of tokens and rows."""
    pages = max(math.ceil(kv_len / changes.get("page_size", 16)) for _, kv_len in rows)
    fields = {"dtype": "bfloat16", "kv_dtype": "bfloat16", "max_pages": pages + 1}
    fields |= {
        "num_tokens": sum(q_len for q_len, _ in rows) + padding[0],
        "num_rows": len(rows) + padding[1],
    }
    return Spec(num_heads, num_kv_heads, head_dim, tuple(rows), **(fields | changes))


# No query sees few keys: results stay below 2, as the tolerance of bfloat16 says.
DECODES = [(1, 19), (1, 300)]
MIXED = [(1, 29), (40, 90), (3, 33)]
SMALL = {
    "decode": spec_of(DECODES, num_heads=4, num_kv_heads=2),
    "decode-window-soft-cap": spec_of(DECODES, window=100, soft_cap=20.0, page_size=64),
    "decode-int8": spec_of(DECODES, 128, num_heads=3, kv_dtype="int8"),
    "decode-int8-page-128": spec_of(DECODES, 80, kv_dtype="int8", page_size=128),
    "decode-80": spec_of([(1, 70)], 80),
    "decode-96-float16": spec_of([(1, 70)], 96, dtype="float16", kv_dtype="float16"),
    "decode-256-page-48": spec_of([(1, 70)], 256, num_heads=9, page_size=48),
    "decode-40-heads": spec_of([(1, 70)], num_heads=40, page_size=64),
    "mixed": spec_of(MIXED, num_heads=3),
    "mixed-window-soft-cap": spec_of(
        [(1, 90), (40, 130)], num_heads=1, window=20, soft_cap=20.0, page_size=64
    ),
    "mixed-int8": spec_of([(33, 200)], 96, kv_dtype="int8", page_size=64),
    "mixed-80-page-128": spec_of([(33, 150)], 80, page_size=128),
    "mixed-256": spec_of([(3, 70)], 256, num_heads=4),
    "mixed-96-heads": spec_of([(2, 90)], num_heads=96, padding=(0, 0)),
}


def structs(spec, num_pages=100):
    """The arguments of a call of `attend`, as shapes."""

    def int32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    q = jax.ShapeDtypeStruct((spec.num_tokens, spec.num_heads, spec.head_dim), spec.dtype)
    sizes = (num_pages, spec.page_size, spec.num_kv_heads, spec.head_dim)
    metadata = AttentionMetadata(
        int32(),
        int32(),
        int32(spec.num_rows),
        int32(spec.num_rows + 1),
        int32(spec.num_groups, spec.num_tokens),
        int32(spec.num_groups, spec.num_rows, spec.max_pages),
        is_decode=spec.is_decode,
    )
    return q, kv_structs("gpu", spec.kv_dtype, *sizes), metadata


def in_16_bits(spec):
    """The spec in what the kernels take: bfloat16, or an int8 cache."""
    kv_dtype = "int8" if spec.kv_dtype == "int8" else "bfloat16"
    return dataclasses.replace(spec, dtype="bfloat16", kv_dtype=kv_dtype)


@pytest.mark.parametrize("name", SMALL)
def test_equals_the_formula_without_races(name, interpreted):
    checks.check_formula(*CALL, SMALL[name])


@pytest.mark.parametrize("name", ["decode-window-soft-cap", "decode-80", "mixed-window-soft-cap"])
def test_unseen_slots_do_not_matter(name, interpreted):
    checks.check_unseen_slots(*CALL, SMALL[name])


@pytest.mark.parametrize("name", ["decode-int8-page-128", "mixed-256"])
def test_page_numbers_do_not_matter(name, interpreted):
    checks.check_page_numbers(*CALL, SMALL[name])


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_padding_does_not_matter(kv_dtype, interpreted):
    checks.check_padding(*CALL, spec_of([(1, 70)], padding=(1, 1), kv_dtype=kv_dtype))


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_writes_tokens_into_their_slots(kv_dtype, interpreted):
    checks.check_write(*CALL, spec_of([(1, 29), (30, 40)], kv_dtype=kv_dtype, padding=(1, 1)))


def test_a_dead_row_harms_no_other(interpreted):
    """A row whose pages are all page 0, which holds NaN."""
    spec = spec_of(DECODES)
    q, kv, metadata = make_inputs(spec, platform="gpu")
    kv = checks.poison(spec, kv, metadata)
    dead = dataclasses.replace(
        metadata,
        num_seqs=metadata.num_seqs + 1,
        num_decodes=metadata.num_decodes + 1,
        kv_lens=metadata.kv_lens.at[2].set(spec.max_pages * spec.page_size),
        cu_q_lens=metadata.cu_q_lens.at[3:].set(3),
    )
    expected = checks.run(*CALL, spec, (q, kv, metadata))
    np.testing.assert_array_equal(checks.run(*CALL, spec, (q, kv, dead))[:2], expected[:2])


@pytest.mark.parametrize("name", SPECS)
def test_lowers_for_hopper(name):
    spec = in_16_bits(SPECS[name])
    call, _ = spec.prepare(*CALL)
    lowered = jax.jit(call).trace(*structs(spec)).lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("@mosaic_gpu_v2") == (1 if spec.is_decode else 2)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_write_lowers_in_place(kv_dtype):
    kv = kv_structs("gpu", kv_dtype, 100, 16, 8, 128)
    new_kv = jax.ShapeDtypeStruct((20, 8, 2, 128), jnp.bfloat16)
    slots = jax.ShapeDtypeStruct((20,), jnp.int32)

    def call(kv, new_kv, slots):
        return write(kv, new_kv, slots, platform="gpu", implementation=NAME)

    lowered = jax.jit(call, donate_argnums=0).trace(kv, new_kv, slots)
    text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 1
    assert "output_operand_alias" in text


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_lowers_with_heads_split_over_a_mesh(kv_dtype):
    """Writes and attends inside shard_map, as the models do."""
    spec = spec_of(DECODES, num_heads=4, num_kv_heads=2, padding=(0, 0), kv_dtype=kv_dtype)
    q, kv, metadata = structs(spec)
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",))
    heads, of_kv = PartitionSpec(None, "tensor"), PartitionSpec(None, None, "tensor")
    if isinstance(kv, QuantizedKV):
        of_kv = QuantizedKV(of_kv, PartitionSpec(None, "tensor"))

    def call(q, kv, new_kv, metadata):
        where = {"platform": "gpu", "implementation": NAME}
        kv = write(kv, new_kv, metadata.slot_mapping[0], **where)
        return attend(q, kv, metadata, group=0, scale=1.0, **where), kv

    split = jax.shard_map(
        call,
        mesh=mesh,
        in_specs=(heads, of_kv, heads, PartitionSpec()),
        out_specs=(heads, of_kv),
        check_vma=False,
    )
    new_kv = jax.ShapeDtypeStruct((2, 2, 2, 64), jnp.bfloat16)
    traced = jax.jit(split, donate_argnums=1).trace(q, kv, new_kv, metadata)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu_v2") == 2


def test_splits_fill_the_chip_and_no_more():
    chip = device.KNOWN_DEVICES["h200"]

    def num_splits(num_rows, max_keys):
        return Config.for_call(Sizes(num_rows, 8, 8, 128, 2, max_keys), chip).num_splits

    assert 132 <= 8 * num_splits(1, 32768) <= 2 * 132
    assert num_splits(1, 300) == 1
    assert num_splits(256, 32768) == 1
    assert num_splits(40, 32768) > 1  # 320 thread blocks are one wave and a bit


@pytest.mark.parametrize(
    ("changes", "chip", "message"),
    [
        ({}, "a100", r"wgmma needs compute capability 9.x, this chip has \(8, 0\)"),
        ({"dtype": "float32"}, "h200", "would round queries of float32"),
        ({"kv_dtype": "float16"}, "h200", "bfloat16 queries by float16 keys"),
        ({"head_dim": 72}, "h200", "head_dim 72 is none of"),
        ({"page_size": 8}, "h200", "page size 8 is not a multiple of 16"),
    ],
)
def test_refuses_with_a_reason(changes, chip, message):
    q, kv, _ = structs(dataclasses.replace(SMALL["decode"], **changes))
    with (
        device.assume(device.KNOWN_DEVICES[chip]),
        pytest.raises(NotImplementedError, match=message),
    ):
        choose(q, kv, platform="gpu", implementation=NAME)
