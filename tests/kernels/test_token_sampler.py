"""The sampler: every implementation against numpy in float64, by the tokens that it chooses."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import token_sampler_reference as reference
from hypothesis import given, settings
from hypothesis import strategies as st
from token_sampler_reference import BANNED, make_masks, make_rows

from kernels import native, token_sampler
from kernels.logit_stats.xla import best
from kernels.token_sampler import cpu
from kernels.token_sampler.rows import TokenMasks

SETS = native.runnable_instruction_sets() if cpu.is_available() else ()
KINDS = ["xla", *(f"cpu {name}" for name in SETS)]

every_kind = pytest.mark.parametrize("kind", KINDS)


@cache
def compiled(kind: str):
    implementation = kind.partition(" ")[0]

    def choose(logits, rows, row_ids, length, masks):
        ids = best(logits, jnp.max(logits, axis=1, keepdims=True))
        run = partial(token_sampler.choose_tokens, platform="cpu", implementation=implementation)
        return run(logits, ids, rows, row_ids, length, masks)

    return jax.jit(choose)


def choose(kind, logits, rows, row_ids, lengths, masks=None) -> np.ndarray:
    with pytest.MonkeyPatch.context() as patch:
        if instruction_set := kind.partition(" ")[2]:
            patch.setenv("JAXINFER_CPU_ISA", instruction_set)
        row_ids, lengths = (jnp.asarray(x, jnp.int32) for x in (row_ids, lengths))
        logits = jnp.asarray(logits, jnp.float32)
        rows, masks = jax.tree.map(jnp.asarray, (rows, masks))
        return np.asarray(compiled(kind)(logits, rows, row_ids, lengths, masks))


def check(kind, logits, asked, lengths, allowed=None, tolerance=1e-5) -> None:
    """Draws from each row of logits at each length, all in one call."""
    vocab_size, count = logits.shape[1], len(asked)
    row_ids = np.repeat(np.arange(count), len(lengths))
    masks = None if allowed is None else make_masks(allowed, row_ids, vocab_size)
    rows = make_rows(asked, vocab_size)
    found = choose(kind, logits[row_ids], rows, row_ids, np.tile(lengths, count), masks)
    wanted = []
    for row, asks in enumerate(asked):
        of_row = None if allowed is None else allowed[row]
        wanted += reference.tokens(logits[row], asks, lengths, of_row)
    decided = 0
    for at, (token, (expected, margin)) in enumerate(zip(found.tolist(), wanted, strict=True)):
        decided += margin > tolerance
        assert token == expected or margin <= tolerance, (asked[row_ids[at]], lengths[0] + at)
    assert decided or len(wanted) < 40


def normal(shape, seed, scale=3.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


# Filters and draws.

FILTERS = st.fixed_dictionaries(
    {"seed": st.integers(-(2**63), 2**63 - 1)},
    optional={
        "temperature": st.sampled_from([0.0, 0.3, 0.7, 2.0]),
        "top_k": st.sampled_from([1, 2, 3, 10, 36, 37, 38, 10_000, 2**31 - 1]),
        "top_p": st.sampled_from([1e-9, 1e-3, 0.1, 0.5, 0.9, 0.999, 1.0]),
        "min_p": st.sampled_from([0.0, 1e-4, 0.05, 0.5, 1.0]),
    },
)


@settings(max_examples=300, deadline=None)
@given(
    asked=st.lists(FILTERS, min_size=4, max_size=4),
    seed=st.integers(0, 2**32),
    ties=st.booleans(),
    kind=st.sampled_from(KINDS),
)
def test_filters_keep_what_sorting_keeps(asked, seed, ties, kind):
    logits = normal((4, 37), seed)
    check(kind, np.round(logits) if ties else logits, asked, np.arange(30))


EVERY_FILTER = [
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
    {"temperature": 1.5, "top_p": 0.9},
    {"temperature": 1.5, "top_p": 0.99999},
    {"min_p": 0.02},
    {"top_k": 2000, "min_p": 1e-4},
    {"top_k": 5, "top_p": 0.99, "min_p": 1e-3},
    {"temperature": 100.0},
    {"temperature": 100.0, "top_p": 0.7},
    {"temperature": 0.0},
    {},
]


@pytest.mark.parametrize("vocab_size", [1, 2, 63, 64, 65, 257, 1000, 49_152, 151_936 + 3])
@every_kind
def test_vocabularies(kind, vocab_size):
    asked = [{"seed": seed, **asks} for seed, asks in enumerate(EVERY_FILTER)]
    check(kind, normal((len(asked), vocab_size), vocab_size), asked, np.arange(8))


@every_kind
def test_one_token_has_nearly_everything_or_all_have_the_same(kind):
    asked = [{"seed": seed, **asks} for seed, asks in enumerate(EVERY_FILTER)]
    logits = np.zeros((len(asked), 9000), np.float32)
    check(kind, logits, asked, np.arange(8))
    logits[:, 8500] = 60
    check(kind, logits, asked, np.arange(8))


@pytest.mark.parametrize(
    ("asks", "first"),
    [
        ({"top_k": 2}, [1, 2, 3, 4]),
        ({"top_p": 0.6}, [1, 2, 3, 4]),
        ({"min_p": 1.0}, [1]),
        ({"top_k": 1, "temperature": 2.0}, [1]),
        ({"top_k": 6}, range(6)),
        ({"top_p": 0.0}, [1]),
        ({"temperature": 1.5, "top_p": 1.0 - 2.0**-24}, range(6)),
    ],
    ids=str,
)
@every_kind
def test_ties_with_the_last_kept_token_are_kept(kind, asks, first):
    logits = np.array([[1, 3, 2, 2, 2, 0], [0, 0, 0, 0, 0, 0]], np.float32)
    rows, count = make_rows([{**asks, "seed": 5}] * 2, 6), 1000
    row_ids = np.repeat([0, 1], count)
    found = choose(kind, logits[row_ids], rows, row_ids, np.tile(np.arange(count), 2))
    assert np.unique(found[:count]).tolist() == list(first)
    assert np.unique(found[count:]).tolist() == list(range(6))


@pytest.mark.parametrize(
    "asks",
    [
        {"top_k": 1, "temperature": 2.0},
        {"top_p": 0.0},
        {"top_p": 1e-9},
        {"top_p": 1e-45},
        {"min_p": 1.0},
        {"temperature": 0.0},
        *({"temperature": value} for value in (1e-5, 1.01e-5, 1e-4, 1e-3)),
    ],
    ids=str,
)
@every_kind
def test_degenerate_settings_are_greedy(kind, asks):
    logits = normal((64, 300), 1)
    wanted = np.argmax(logits, axis=1)
    logits[np.arange(64), wanted] += 0.5
    asked = [{**asks, "seed": row} for row in range(62)] + [{"top_k": 5}, {"top_p": 0.3}]
    found = choose(kind, logits, make_rows(asked, 300), np.arange(64), np.zeros(64))
    assert np.array_equal(found[:62], wanted[:62])


@every_kind
def test_at_the_ends_of_a_distribution_no_id_without_weight_is_drawn(kind):
    vocab_size = 4099
    logits = np.full((3, vocab_size), -np.inf, np.float32)
    logits[0, 0] = logits[1, vocab_size - 1] = 3
    logits[2, [63, 64, 2048]] = -70, 0, -70
    rows = make_rows([{"seed": 1}], vocab_size)
    lengths = np.arange(200)
    for row, wanted in enumerate((0, vocab_size - 1, 64)):
        many = np.tile(logits[row], (200, 1))
        assert np.all(choose(kind, many, rows, np.zeros(200), lengths) == wanted)


# Shaped.


@settings(max_examples=150, deadline=None)
@given(
    asked=st.lists(
        st.fixed_dictionaries(
            {"seed": st.integers(0, 2**64 - 1)},
            optional={
                "temperature": st.sampled_from([0.0, 2.0, 30.0]),
                "repetition": st.sampled_from([1e-3, 0.5, 1.2, 1e3]),
                "presence": st.sampled_from([-2.0, 0.5, 2.0]),
                "frequency": st.sampled_from([-2.0, 0.25, 2.0]),
                "prompt": st.sets(st.integers(0, 36), max_size=9),
                "output": st.lists(st.integers(0, 36), max_size=15),
                "min_length": st.integers(0, 24),
                "stop_ids": st.sets(st.sampled_from([0, 7, 36, 37, 500]), max_size=4),
                "bias": st.dictionaries(
                    st.integers(0, 36), st.floats(-100, 100, width=32), max_size=20
                ),
            },
        ),
        min_size=3,
        max_size=3,
    ),
    allowed=st.none() | st.lists(st.none() | st.sets(st.integers(0, 36)), min_size=3, max_size=3),
    seed=st.integers(0, 2**32),
    kind=st.sampled_from(KINDS),
)
def test_bias_penalties_bans_and_masks_in_their_order(asked, allowed, seed, kind):
    check(kind, normal((3, 37), seed), asked, np.arange(20), allowed, tolerance=2e-4)


@pytest.mark.parametrize("vocab_size", [19, 64, 70, 5000])
@every_kind
def test_only_what_a_mask_allows_is_chosen(kind, vocab_size):
    """Rows go by the masks they name; also where every row wants its best, which is banned."""
    allowed = [{5}, {9, 10, vocab_size - 1}, {0, 1}, None]
    logits = normal((4, vocab_size), 2, scale=1.0)
    logits[:, 12] = 90.0
    names, count = [2, 0, 3, 1], 40
    row_ids = np.repeat(range(4), count)
    masks = make_masks(allowed, np.repeat(names, count), vocab_size)
    lengths = np.tile(np.arange(count), 4)
    for temperature in (0.0, 1.0, 3.0):
        rows = make_rows(
            [{"temperature": temperature, "seed": row} for row in range(4)], vocab_size
        )
        found = choose(kind, logits[row_ids], rows, row_ids, lengths, masks)
        for row, name in enumerate(names):
            drawn = set(found[row_ids == row].tolist())
            assert drawn == {12} if allowed[name] is None else drawn <= allowed[name]
    not_given = TokenMasks(np.zeros_like(masks.words), masks.rows, np.bool_(False))
    plain = choose(kind, logits[row_ids], rows, row_ids, lengths)
    found = choose(kind, logits[row_ids], rows, row_ids, lengths, not_given)
    assert np.array_equal(found, plain)


# Extremes.


@pytest.mark.parametrize("temperature", [0.0, 1.01e-5, 1e-3, 1.0, 2.0, 1e6])
@pytest.mark.parametrize("extra", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
@every_kind
def test_extreme_logits(kind, temperature, extra):
    logits = normal((5, 40), 5)
    logits[1, 1:] = BANNED  # all but one
    logits[2, :] = BANNED  # all
    logits[3, ::2] = -1e30
    logits[4, 7] = 3e38
    asks = {
        "temperature": temperature,
        "bias": dict.fromkeys(range(0, 40, 3), -100.0),
        "repetition": 1e3,
        "frequency": 2.0,
        "prompt": range(9),
        "output": range(9, 30),
        **extra,
    }
    rows = make_rows([{**asks, "seed": row} for row in range(5)], 40)
    found = choose(kind, logits, rows, range(5), [30] * 5)
    assert np.all((found >= 0) & (found < 40))
    assert found[1] == 0 or temperature == 1e6
    assert found[4] == 7


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "asks",
    [
        {"temperature": 0.0},
        {"top_k": 5, "top_p": 0.9, "min_p": 0.1},
        {"top_p": 0.5},
        {},
        {"bias": {4: 2.0}},
    ],
    ids=str,
)
@every_kind
def test_a_row_that_is_not_finite_gets_some_id_and_stays_alone(kind, bad, asks):
    logits = normal((3, 300), 3)
    rows = make_rows([{**asks, "seed": row} for row in range(3)], 300)
    clean = choose(kind, logits, rows, range(3), [0] * 3)
    for where in ([17], range(300)):
        broken = logits.copy()
        broken[1, list(where)] = bad
        found = choose(kind, broken, rows, range(3), [0] * 3)
        assert 0 <= found[1] < 300
        assert np.array_equal(found[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_row_depends_on_no_other_and_on_no_thread(kind):
    """One row has one thread, many have all there are."""
    vocab_size, count = 3001, 40
    logits = normal((count, vocab_size), 7)
    asked = [
        {"seed": row, "bias": {5: 9.0}} if row % 7 == 3 else {"seed": row, **EVERY_FILTER[row % 10]}
        for row in range(count)
    ]
    rows = make_rows(asked, vocab_size)
    together = choose(kind, logits, rows, range(count), np.arange(count))
    for row in range(count):
        assert choose(kind, logits[[row]], rows, [row], [row])[0] == together[row]


@pytest.mark.skipif(not SETS, reason=str(cpu.unavailable()))
def test_it_is_what_cpus_choose_and_what_it_refuses():
    logits = jax.ShapeDtypeStruct((2, 10), jnp.float32)
    assert str(token_sampler.choose(logits, platform="cpu")) == "cpu"
    with pytest.raises(NotImplementedError, match="logits are bfloat16"):
        cpu.supports(jax.ShapeDtypeStruct((2, 10), jnp.bfloat16))
    rows, ids = make_rows([{}, {}], 10), [0, 1]
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"token_sampler on cpu: .*columns"):
        choose("cpu", np.zeros((2, 11)), rows, ids, ids)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"\[1, 10\] .* is not of each row"):
        choose("cpu", np.zeros((2, 10)), replace(rows, counts=rows.counts[:1]), ids, ids)
    masks = make_masks([None], [0, 0], 10)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"masks are \[1, 1\] .*a bit for each"):
        choose("cpu", np.zeros((2, 40)), make_rows([{}, {}], 40), ids, ids, masks)
