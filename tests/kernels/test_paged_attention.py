"""Every implementation against the reference, the reference against a loop, and invariances."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from kernels.paged_attention import IMPLEMENTATIONS, attend, choose
from kernels.paged_attention.specs import SPECS, Spec, make_inputs

NAMES = sorted({name for names in IMPLEMENTATIONS.values() for name in names})
# Float32 sums of up to a few hundred terms of size 1, in any order.
TOLERANCE = 5e-6
# One unit in the last place of a bfloat16 result, whose magnitude stays below 2.
TOLERANCE_BFLOAT16 = 2**-7


@partial(
    jax.jit, static_argnames=("group", "scale", "window", "soft_cap", "implementation", "platform")
)
def jitted(q, kv, metadata, **static):
    return attend(q, kv, metadata, platform="cpu", **static)


def run(name, spec, inputs, **changes):
    call = {"group": 0, "scale": spec.scale, "window": spec.window, "soft_cap": spec.soft_cap}
    return np.asarray(jitted(*inputs, implementation=name, **(call | changes)), np.float32)


def naive(spec, q, kv, metadata):
    """The formula, one query and one head at a time, in float64."""
    q, kv = np.asarray(q, np.float64), np.asarray(kv, np.float64)
    table, starts = np.asarray(metadata.page_table[0]), np.asarray(metadata.cu_q_lens)
    out = np.zeros(q.shape)
    for row, (q_len, kv_len) in enumerate(spec.rows):
        for i in range(q_len):
            position = kv_len - q_len + i
            first = 0 if spec.window is None else max(0, position - spec.window + 1)
            keys = range(first, position + 1)
            cached = np.stack(
                [kv[table[row, j // spec.page_size], j % spec.page_size] for j in keys]
            )
            for head in range(spec.num_heads):
                kv_head = head * spec.num_kv_heads // spec.num_heads
                scores = spec.scale * cached[:, kv_head, 0] @ q[starts[row] + i, head]
                if spec.soft_cap is not None:
                    scores = spec.soft_cap * np.tanh(scores / spec.soft_cap)
                weights = np.exp(scores - scores.max())
                out[starts[row] + i, head] = weights @ cached[:, kv_head, 1] / weights.sum()
    return out


def small(rows, *, num_tokens=None, num_rows=None, **changes):
    """A spec of small heads and pages."""
    num_tokens = num_tokens or sum(q_len for q_len, _ in rows)
    fields = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "page_size": 4, "max_pages": 50}
    fields |= {"num_tokens": num_tokens, "num_rows": num_rows or len(rows)}
    return Spec(rows=tuple(rows), **(fields | changes))


MIXED = [(1, 9), (1, 1), (1, 30), (5, 5), (3, 17), (1, 1), (70, 140)]
LENGTHS = (7, 8, 9, 12, 64)  # around the windows below and pages of 4
SMALL_SPECS = {
    "mixed": small(MIXED, num_tokens=100, num_rows=9),
    "decode": small([(1, 9), (1, 1), (1, 140)], num_tokens=4, num_rows=4),
    "soft-cap": small([(1, 9), (6, 14)], num_rows=3, soft_cap=0.5),
    "only-prefill": small([(7, 7), (4, 12)], num_tokens=16, num_rows=32),
    "nothing": small([], num_tokens=4, num_rows=4),
} | {
    f"window-{window}": small(
        [(1, n) for n in LENGTHS] + [(n, n) for n in LENGTHS] + [(3, n) for n in LENGTHS],
        window=window,
    )
    for window in (1, 7, 8, 300)
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spec", SMALL_SPECS.values(), ids=SMALL_SPECS)
def test_equals_the_formula(spec, name):
    inputs = make_inputs(spec)
    np.testing.assert_allclose(
        run(name, spec, inputs), naive(spec, *inputs), rtol=0, atol=TOLERANCE
    )


@pytest.mark.parametrize("name", [name for name in NAMES if name != "reference"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_equals_the_reference(spec, name):
    inputs = make_inputs(spec)
    tolerance = TOLERANCE if spec.dtype == "float32" else TOLERANCE_BFLOAT16
    np.testing.assert_allclose(
        run(name, spec, inputs), run("reference", spec, inputs), rtol=0, atol=tolerance
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["mixed", "decode", "window-7"])
def test_unseen_slots_do_not_matter(kind, name):
    """NaN in page 0, in pages of no row and behind each row's end changes no bit."""
    spec = SMALL_SPECS[kind]
    q, kv, metadata = make_inputs(spec)
    kv = jnp.concatenate([kv, kv[:3]])
    table = np.asarray(metadata.page_table[0])
    seen = np.zeros(kv.shape[:2], bool)
    for row, (q_len, kv_len) in enumerate(spec.rows):
        first = 0 if spec.window is None else max(0, kv_len - q_len - spec.window + 1)
        for j in range(first, kv_len):
            seen[table[row, j // spec.page_size], j % spec.page_size] = True
    assert not seen.all()
    assert not seen[0].any()
    poisoned = jnp.where(jnp.asarray(seen)[:, :, None, None, None], kv, jnp.nan)
    clean, dirty = (run(name, spec, (q, each, metadata)) for each in (kv, poisoned))
    np.testing.assert_array_equal(clean, dirty)


@pytest.mark.parametrize("name", NAMES)
def test_page_numbers_do_not_matter(name):
    spec = SMALL_SPECS["mixed"]
    q, kv, metadata = make_inputs(spec)
    to = np.concatenate([[0], 1 + np.random.default_rng(1).permutation(kv.shape[0] - 1)])
    moved = dataclasses.replace(
        metadata, page_table=jnp.asarray(to, jnp.int32)[metadata.page_table]
    )
    moved_kv = jnp.zeros_like(kv).at[to].set(kv)
    np.testing.assert_array_equal(
        run(name, spec, (q, kv, metadata)), run(name, spec, (q, moved_kv, moved))
    )


@pytest.mark.parametrize("name", NAMES)
def test_padding_does_not_matter(name):
    """More rows, tokens and table entries: the same result for tokens, zeros for padding."""
    tight = small(MIXED)
    loose = small(MIXED, num_tokens=128, num_rows=32, max_pages=64)
    (q, kv, metadata), (_, _, padded) = make_inputs(tight), make_inputs(loose)
    padded_q = jnp.full((128, 4, 8), jnp.nan).at[: tight.num_tokens].set(q)
    expected = run(name, tight, (q, kv, metadata))
    actual = run(name, loose, (padded_q, kv, padded))
    np.testing.assert_allclose(actual[: tight.num_tokens], expected, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(actual[tight.num_tokens :], 0)


@pytest.mark.parametrize("name", NAMES)
def test_groups_have_their_own_page_tables(name):
    spec = SMALL_SPECS["mixed"]
    q, kv, metadata = make_inputs(spec)
    both = dataclasses.replace(
        metadata,
        page_table=jnp.concatenate([jnp.zeros_like(metadata.page_table), metadata.page_table]),
        slot_mapping=jnp.concatenate([metadata.slot_mapping] * 2),
    )
    expected = run(name, spec, (q, kv, metadata))
    np.testing.assert_array_equal(run(name, spec, (q, kv, both), group=1), expected)
    assert not np.array_equal(run(name, spec, (q, kv, both), group=0), expected)


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
@pytest.mark.parametrize("kind", ["mixed", "decode"])
def test_heads_split_over_a_mesh(kind, name):
    """Inside shard_map over two devices, each holds half of the heads."""
    spec = SMALL_SPECS[kind]
    inputs = make_inputs(spec)
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",))
    call, _ = spec.prepare("cpu", name)
    heads, kv_heads = PartitionSpec(None, "tensor"), PartitionSpec(None, None, "tensor")
    split = jax.shard_map(
        call, mesh=mesh, in_specs=(heads, kv_heads, PartitionSpec()), out_specs=heads
    )
    np.testing.assert_allclose(
        jax.jit(split)(*inputs), run(name, spec, inputs), rtol=0, atol=TOLERANCE
    )


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("name", ["smollm2-decode-8", "smollm2-mixed"])
def test_lowers_for_accelerators(name, platform):
    spec = SPECS[name]
    call, inputs = spec.prepare("tpu" if platform == "tpu" else "gpu", "xla")
    lowered = jax.jit(call).trace(*inputs).lower(lowering_platforms=(platform,))
    assert "while" in lowered.as_text()


def test_refuses_a_cache_that_needs_scales():
    q = jax.ShapeDtypeStruct((8, 4, 8), jnp.float32)
    kv = jax.ShapeDtypeStruct((9, 4, 2, 2, 8), jnp.int8)
    with pytest.raises(NotImplementedError, match="xla: a cache of int8 needs scales"):
        choose(q, kv, platform="cpu")


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
    with pytest.raises(ValueError, match=r"q \(100, 3, 8\) does not fit a cache of shape"):
        call(q[:, :3], kv, metadata)
    with pytest.raises(ValueError, match=r"slot_mapping has shape \(1, 100\).*\(1, 50\)"):
        call(q[:50], kv, metadata)
    with pytest.raises(ValueError, match="100 tokens for 9 rows"):
        call(q, kv, dataclasses.replace(metadata, is_decode=True))
