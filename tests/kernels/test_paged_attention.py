"""Every implementation against the reference, the reference against a loop, and invariances."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import paged_attention_checks as checks
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec
from paged_attention_checks import SMALL_SPECS, TOLERANCE, small
from sweep import IN_SWEEP

from kernels.paged_attention import attend, kv_partition
from kernels.paged_attention.cache import WordsKV, values_of
from kernels.paged_attention.specs import SPECS, make_inputs

NAMES = ["reference", "xla"]
# Specs that between them have every head size, a window, a cap, groups, and both kinds of cache.
QUICK = (
    "smollm2-decode-32-one-long",
    "gemma3-local-mixed",
    "gemma3-groups-mixed-int8",
    "mqa-soft-cap-mixed",
    "mha-head-80-page-128",
    "phi3-mixed-int8",
)
INVARIANT = ["mixed", "decode-int8", "window-7", "groups"]
run = partial(checks.run, "cpu")
pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spec", SMALL_SPECS.values(), ids=SMALL_SPECS)
def test_equals_the_formula(spec, name):
    checks.check_formula("cpu", name, spec)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else IN_SWEEP) for name in SPECS],
)
def test_equals_the_reference(name):
    checks.check_reference("cpu", "xla", SPECS[name])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["mixed-int8"])
def test_reads_and_writes_the_words_of_a_tpu(kind, name):
    spec = SMALL_SPECS[kind]
    assert isinstance(values_of(make_inputs(spec, platform="tpu")[1]), WordsKV)
    checks.check_formula("tpu", name, spec)
    checks.check_write("tpu", name, spec)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", INVARIANT)
@pytest.mark.parametrize(
    "check",
    [checks.check_unseen_slots, checks.check_page_numbers, checks.check_padding],
    ids=lambda check: check.__name__,
)
def test_does_not_depend_on(check, kind, name):
    check("cpu", name, SMALL_SPECS[kind])


@pytest.mark.parametrize("name", NAMES)
def test_groups_have_their_own_page_tables(name):
    spec = SMALL_SPECS["groups"]
    inputs = make_inputs(spec)
    ours, other = (run(name, spec, inputs, group=group) for group in (1, 0))
    assert not np.array_equal(ours, other)


@pytest.mark.parametrize("window", [None, 7])
def test_whole_chunked_and_one_by_one_agree(window):
    """A 140-token prompt at once, in chunks over page and tile borders, and token by token."""
    length = 140
    whole = small([(length, length)], window=window)
    q, kv, metadata = make_inputs(whole)
    expected = run("xla", whole, (q, kv, metadata))
    queries = np.pad(q, ((0, 70), (0, 0), (0, 0)))
    for chunks, num_tokens in ([63, 1, 70, 6], 70), ([1] * length, 2):
        spec = small([(1, 1)], num_tokens=num_tokens, num_rows=2, window=window)
        _, _, step = make_inputs(spec)
        table = jnp.pad(metadata.page_table, ((0, 0), (0, 1), (0, 0)))
        for end, size in zip(np.cumsum(chunks), chunks, strict=True):
            step = dataclasses.replace(
                step,
                num_decodes=jnp.int32(size == 1),
                kv_lens=jnp.asarray([end, 0], jnp.int32),
                cu_q_lens=jnp.asarray([0, size, size], jnp.int32),
                page_table=table,
            )
            begin = end - size
            actual = run("xla", spec, (queries[begin : begin + num_tokens], kv, step))[:size]
            np.testing.assert_allclose(actual, expected[begin:end], rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("num_rows", [2, 8, 32])
def test_a_decode_row_is_bit_equal_with_any_batchmates(num_rows, window):
    """Alone, beside short rows, beside rows far longer, in any place: the same bits."""
    rng = np.random.default_rng(0)
    mine, results = 150, []
    widest = small([(1, 1000)] * num_rows, max_pages=256, window=window)
    q, kv, metadata = make_inputs(widest)
    for others in (0, 1, 149, 1000, None):
        lens = rng.integers(0, 1000, num_rows) if others is None else [others] * num_rows
        place = rng.integers(num_rows)
        kv_lens = jnp.asarray(lens, jnp.int32).at[place].set(mine)
        table = metadata.page_table.at[0, [0, place]].set(metadata.page_table[0, [place, 0]])
        queries = q.at[place].set(q[0]) if place else q
        table = metadata.page_table.at[0, place].set(metadata.page_table[0, 0])
        step = dataclasses.replace(metadata, kv_lens=kv_lens, page_table=table)
        results.append(run("xla", widest, (queries, kv, step))[place])
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    decodes=st.lists(st.integers(1, 150), max_size=4),
    prefills=st.lists(st.tuples(st.integers(1, 90), st.integers(0, 60)), max_size=3),
    window=st.sampled_from([None, 33]),
    seed=st.integers(0, 3),
)
def test_any_ragged_batch_equals_the_reference(decodes, prefills, window, seed):
    rows = [(1, kv_len) for kv_len in decodes]
    rows += [(q_len, q_len + cached) for q_len, cached in prefills]
    spec = small(rows, num_tokens=300, num_rows=8, num_kv_heads=1, window=window)
    q, kv, metadata = make_inputs(spec, seed)
    kv = jnp.zeros((300, *kv.shape[1:])).at[: kv.shape[0]].set(kv)  # one shape: one compilation
    np.testing.assert_allclose(
        run("xla", spec, (q, kv, metadata)),
        run("reference", spec, (q, kv, metadata)),
        rtol=0,
        atol=TOLERANCE,
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["mixed", "mixed-int8", "decode"])
def test_heads_split_over_a_mesh(kind, name):
    """Inside shard_map over two devices, each holds half of the heads."""
    spec = SMALL_SPECS[kind]
    inputs = make_inputs(spec)
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",))
    call, _ = spec.prepare("cpu", name)
    heads, kv_heads = PartitionSpec(None, "tensor"), kv_partition(inputs[1], "tensor")
    split = jax.shard_map(
        call, mesh=mesh, in_specs=(heads, kv_heads, PartitionSpec()), out_specs=heads
    )
    np.testing.assert_allclose(
        jax.jit(split)(*inputs), run(name, spec, inputs), rtol=0, atol=TOLERANCE
    )


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("name", ["smollm2-decode-8", "smollm2-mixed", "llama70b-mixed-int8"])
def test_lowers_for_accelerators(name, platform):
    spec = SPECS[name]
    call, inputs = spec.prepare("tpu" if platform == "tpu" else "gpu", "xla")
    lowered = jax.jit(call).trace(*inputs).lower(lowering_platforms=(platform,))
    assert "while" in lowered.as_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group": 1}, "group 1 is not one of the metadata's 1"),
        ({"window": 0}, "window 0 must be at least 1"),
        ({"soft_cap": 0.0}, "soft_cap 0.0 must be positive"),
        ({"implementation": "fast"}, "no implementation 'fast'"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    spec = SMALL_SPECS["mixed"]
    call = {"group": 0, "scale": 1.0, "platform": "cpu"} | changes
    with pytest.raises(ValueError, match=message):
        attend(*make_inputs(spec), **call)


def test_bad_shapes_are_named():
    q, kv, metadata = make_inputs(SMALL_SPECS["mixed"])
    call = partial(attend, group=0, scale=1.0, platform="cpu")
    with pytest.raises(ValueError, match=r"q \(100, 3, 8\) does not fit a cache of KVDims"):
        call(q[:, :3], kv, metadata)
    with pytest.raises(ValueError, match=r"slot_mapping has shape \(1, 100\).*\(1, 50\)"):
        call(q[:50], kv, metadata)
    with pytest.raises(ValueError, match="100 tokens for 9 rows"):
        call(q, kv, dataclasses.replace(metadata, is_decode=True))
