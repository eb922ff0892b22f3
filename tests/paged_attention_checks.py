"""What every implementation of paged attention must pass; the same bodies for all of them.

Each check takes (platform, implementation, spec). For Pallas kernels call them inside
`kernels.device.assume(...)` and `kernels.device.interpreted(...)`.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from kernels import device
from kernels.paged_attention import QuantizedKV, attend, kv_dims, write
from kernels.paged_attention.cache import encode_rows, held_by, holding, read_pages, values_of
from kernels.paged_attention.specs import Spec, make_inputs

# Float32 sums of up to a few hundred terms of size 1, in any order.
TOLERANCE = 5e-6
# One unit in the last place of a bfloat16 result, whose magnitude stays below 2.
TOLERANCE_BFLOAT16 = 2**-7


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
    "mixed-int8": small(MIXED, num_tokens=100, num_rows=9, kv_dtype="int8"),
    "decode": small([(1, 9), (1, 1), (1, 140)], num_tokens=4, num_rows=4),
    "decode-int8": small([(1, 9), (1, 1), (1, 140)], num_tokens=4, num_rows=4, kv_dtype="int8"),
    "soft-cap": small([(1, 9), (6, 14)], num_rows=3, soft_cap=0.5),
    "soft-cap-int8": small([(1, 9), (6, 14)], num_rows=3, soft_cap=0.5, kv_dtype="int8"),
    "only-prefill": small([(7, 7), (4, 12)], num_tokens=16, num_rows=32),
    "groups": small([(1, 9), (6, 14)], num_rows=3, num_groups=3, group=1),
    "nothing": small([], num_tokens=4, num_rows=4),
} | {
    f"window-{window}": small(
        [(1, n) for n in LENGTHS] + [(n, n) for n in LENGTHS] + [(3, n) for n in LENGTHS],
        window=window,
    )
    for window in (1, 7, 8, 300)
}


def in_float32(spec: Spec) -> Spec:
    """The spec with float32 queries and keys; int8 keys stay, of which only the scales round."""
    kv_dtype = "int8" if spec.kv_dtype == "int8" else "float32"
    return dataclasses.replace(spec, dtype="float32", kv_dtype=kv_dtype)


_STATIC = (*("group", "scale", "window", "soft_cap", "implementation", "platform"), "traced_for")


@partial(jax.jit, static_argnames=_STATIC)
def _attend(q, kv, metadata, traced_for, **static):
    return attend(q, kv, metadata, **static)


@partial(jax.jit, static_argnames=("platform", "implementation", "traced_for"))
def _write(kv, new_kv, slots, traced_for, **static):
    return write(kv, new_kv, slots, **static)


def traced_for(platform):
    """What jit's cache must tell apart: the assumed device and how kernels are interpreted."""
    return device.current(platform), device.interpret_mode()


def run(platform, implementation, spec, inputs, **changes):
    """Returns the attention of `inputs`, float32 in numpy."""
    call = {"group": spec.group, "scale": spec.scale}
    call |= {"window": spec.window, "soft_cap": spec.soft_cap}
    call |= {"platform": platform, "implementation": implementation} | changes
    out = _attend(*inputs, traced_for=traced_for(platform), **call)
    assert out.dtype == inputs[0].dtype
    return np.asarray(out, np.float32)


def tolerance(spec):
    return TOLERANCE if spec.dtype == "float32" else TOLERANCE_BFLOAT16


def bits(held):
    """The elements of an array as unsigned integers, in which NaN equals NaN."""
    held = np.asarray(held)
    return held.view(f"u{held.itemsize}")


def elements_of(kv):
    """The elements `[P, page, K, 2, H]` of a cache, as they are, and scales `[P, page, K, 2]`."""
    dims = kv_dims(kv)
    pages = jnp.arange(dims.num_pages, dtype=jnp.int32)
    elements = np.asarray(read_pages(values_of(kv), pages))
    if elements.dtype == np.uint16:
        elements = elements.view(jnp.bfloat16)
    if not isinstance(kv, QuantizedKV):
        return elements, None
    return elements, np.asarray(kv.scales)[..., : dims.page_size].transpose(0, 3, 1, 2)


def numbers_of(kv):
    """The keys and values that a cache stands for, float64 `[P, page, K, 2, H]`."""
    elements, scales = elements_of(kv)
    numbers = elements.astype(np.float64)
    return numbers if scales is None else numbers * scales.astype(np.float64)[..., None]


def formula(spec, q, kv, metadata):
    """Attention, one query and one head at a time, in float64."""
    q, cache = np.asarray(q, np.float64), numbers_of(kv)
    table, starts = np.asarray(metadata.page_table[spec.group]), np.asarray(metadata.cu_q_lens)
    out = np.zeros(q.shape)
    for row, (q_len, kv_len) in enumerate(spec.rows):
        of_row = np.stack(
            [cache[table[row, j // spec.page_size], j % spec.page_size] for j in range(kv_len)]
        )
        for i in range(q_len):
            position = kv_len - q_len + i
            first = 0 if spec.window is None else max(0, position - spec.window + 1)
            cached = of_row[first : position + 1]
            for head in range(spec.num_heads):
                kv_head = head * spec.num_kv_heads // spec.num_heads
                scores = spec.scale * cached[:, kv_head, 0] @ q[starts[row] + i, head]
                if spec.soft_cap is not None:
                    scores = spec.soft_cap * np.tanh(scores / spec.soft_cap)
                weights = np.exp(scores - scores.max())
                out[starts[row] + i, head] = weights @ cached[:, kv_head, 1] / weights.sum()
    return out


def poison(spec, kv, metadata):
    """Puts NaN (int8: NaN scales, largest codes) into every slot that no query of a spec sees."""
    dims, table = kv_dims(kv), np.asarray(metadata.page_table[spec.group])
    seen = np.zeros((dims.num_pages, dims.page_size), bool)
    for row, (q_len, kv_len) in enumerate(spec.rows):
        first = 0 if spec.window is None else max(0, kv_len - q_len - spec.window + 1)
        key = np.arange(first, kv_len)
        seen[table[row, key // spec.page_size], key % spec.page_size] = True
    assert not seen.all()
    assert not seen[0].any()

    values = values_of(kv)
    shape = (1, dims.num_kv_heads, 2, dims.head_dim)
    garbage = jnp.full(shape, 127, jnp.int8)
    if not isinstance(kv, QuantizedKV):
        garbage = jnp.full(shape, jnp.nan, jnp.float32)
    held = held_by(values)
    mask = jnp.asarray(seen).reshape(*seen.shape, *[1] * (held.ndim - 2))
    values = holding(jnp.where(mask, held, encode_rows(garbage, values)[None]), values)
    if not isinstance(kv, QuantizedKV):
        return values
    seen = np.pad(seen, ((0, 0), (0, kv.scales.shape[-1] - dims.page_size)))
    return QuantizedKV(values, jnp.where(jnp.asarray(seen)[:, None, None], kv.scales, jnp.nan))


def with_unused_pages(kv):
    """The cache with three pages more, which no row owns."""
    return jax.tree.map(lambda held: jnp.concatenate([held, held[:3]]), kv)


def check_formula(platform, implementation, spec):
    """Equals the formula in float64."""
    inputs = make_inputs(spec, platform=platform)
    np.testing.assert_allclose(
        run(platform, implementation, spec, inputs),
        formula(spec, *inputs),
        rtol=0,
        atol=tolerance(spec),
    )


def check_reference(platform, implementation, spec, atol=None):
    """Equals the reference, to a tolerance of its own if `atol` is given."""
    inputs = make_inputs(spec, platform=platform)
    np.testing.assert_allclose(
        run(platform, implementation, spec, inputs),
        run(platform, "reference", spec, inputs),
        rtol=0,
        atol=tolerance(spec) if atol is None else atol,
    )


def check_unseen_slots(platform, implementation, spec):
    """NaN in page 0, in pages of no row and behind each row's end changes no bit."""
    q, kv, metadata = make_inputs(spec, platform=platform)
    kv = with_unused_pages(kv)
    clean, dirty = (
        run(platform, implementation, spec, (q, each, metadata))
        for each in (kv, poison(spec, kv, metadata))
    )
    assert np.isfinite(clean).all()
    np.testing.assert_array_equal(clean, dirty)


def check_page_numbers(platform, implementation, spec):
    """Pages that lie elsewhere, with a table that says so, change no bit."""
    q, kv, metadata = make_inputs(spec, platform=platform)
    num_pages = kv_dims(kv).num_pages
    to = np.concatenate([[0], 1 + np.random.default_rng(1).permutation(num_pages - 1)])
    table = jnp.asarray(to, jnp.int32)[metadata.page_table]
    moved = dataclasses.replace(metadata, page_table=table)
    moved_kv = jax.tree.map(lambda held: jnp.zeros_like(held).at[to].set(held), kv)
    np.testing.assert_array_equal(
        run(platform, implementation, spec, (q, kv, metadata)),
        run(platform, implementation, spec, (q, moved_kv, moved)),
    )


def check_padding(platform, implementation, spec):
    """More rows, tokens and table entries: the same result for tokens, zeros for padding."""
    more_tokens, more_rows = (5, 5) if spec.is_decode else (37, 23)
    padded_spec = dataclasses.replace(
        spec,
        num_tokens=spec.num_tokens + more_tokens,
        num_rows=spec.num_rows + more_rows,
        max_pages=spec.max_pages + 14,
    )
    q, kv, metadata = make_inputs(spec, platform=platform)
    _, _, padded = make_inputs(padded_spec, platform=platform)
    live = sum(q_len for q_len, _ in spec.rows)
    padded_q = jnp.full((padded_spec.num_tokens, *q.shape[1:]), jnp.nan, q.dtype)
    padded_q = padded_q.at[:live].set(q[:live])
    expected = run(platform, implementation, spec, (q, kv, metadata))
    actual = run(platform, implementation, padded_spec, (padded_q, kv, padded))
    atol = 1e-6 if spec.dtype == "float32" else TOLERANCE_BFLOAT16
    np.testing.assert_allclose(actual[:live], expected[:live], rtol=0, atol=atol)
    np.testing.assert_array_equal(expected[live:], 0)
    np.testing.assert_array_equal(actual[live:], 0)


def check_write(platform, implementation, spec):
    """Tokens are rounded into their slots; every other slot keeps its bits, NaN included."""
    q, kv, metadata = make_inputs(spec, platform=platform)
    kv = poison(spec, with_unused_pages(kv), metadata)
    dims, slots = kv_dims(kv), metadata.slot_mapping[spec.group]
    shape = (spec.num_tokens, dims.num_kv_heads, 2, dims.head_dim)
    new_kv = jax.random.normal(jax.random.key(1), shape, q.dtype)
    call = {"platform": platform, "implementation": implementation}
    written = _write(kv, new_kv, slots, traced_for=traced_for(platform), **call)

    live = np.asarray(slots) >= dims.page_size  # page 0 is trash
    assert live.sum() == sum(q_len for q_len, _ in spec.rows)
    place, new = np.asarray(slots)[live], np.asarray(new_kv)[live]
    others = np.setdiff1d(np.arange(dims.page_size, dims.num_pages * dims.page_size), place)
    for after, before in zip(_by_slot(written), _by_slot(kv), strict=True):
        np.testing.assert_array_equal(bits(after)[others], bits(before)[others])
    values, *scales = _by_slot(written)
    values = values[place].reshape(new.shape)
    if isinstance(kv, QuantizedKV):
        new, scale = new.astype(np.float64), scales[0][place].astype(np.float64)
        np.testing.assert_allclose(scale, np.abs(new).max(-1) / 127, rtol=1e-6)
        error = np.abs(values * scale[..., None] - new)
        assert (error <= 0.5001 * scale[..., None]).all()
        np.testing.assert_array_equal(np.abs(values).max(-1), 127)
    else:
        rounded = new.astype(spec.kv_dtype if spec.kv_dtype != "bfloat16" else jnp.bfloat16)
        np.testing.assert_array_equal(bits(values), bits(rounded))


def _by_slot(kv):
    """The elements of a cache, and its scales if it has any, with one row per slot."""
    return [part.reshape(-1, *part.shape[2:]) for part in elements_of(kv) if part is not None]
