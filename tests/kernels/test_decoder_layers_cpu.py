"""All layers in one C++ call against the formula, on every instruction set that runs here."""

from __future__ import annotations

import dataclasses
from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest
from decoder_layers_cases import (
    Case,
    Step,
    make_caches,
    make_metadata,
    make_tables,
    make_x,
    run,
    slots_written,
)

from kernels import native
from kernels.decoder_layers import cpu, reference

pytestmark = [
    pytest.mark.skipif(not cpu.is_available(), reason=str(cpu.unavailable())),
    pytest.mark.usefixtures("quick_compilation"),
]

SETS = native.runnable_instruction_sets() if cpu.is_available() else ()
EXACT_SETS = [name for name in SETS if name in ("amx", "avx512bf16", "avx512")]
ROUNDING_SETS = [name for name in SETS if name in ("amx", "avx512bf16")]

# Of the largest hidden state. Float32 sums of up to 128 terms in any order are off by a few units
# in the 24th bit, and a token passes 7 such operations in each of up to 3 layers.
TOLERANCE = 5e-6
# A key on the edge between two of the cache's numbers may be rounded to the other: one part in 256
# of one of a head's 16 elements.
TOLERANCE_BFLOAT16_CACHE = 2e-3
# Rounding to 8 bits moves a factor by at most 2^-9 of itself; what a layer adds has passed two
# products. Layers' errors add like their squares.
ROUNDING = 2 * 2.0**-9
MANY_TOKENS = 32  # from here on, weights may be rounded as well
# Of more tokens than a tile sets without tiles round each factor by half a step at most, of which
# the largest of 32 has 127; of normal numbers it is 2.2 times their size.
BYTE_ROUNDING = 2 * 2.2 / 254

CASES = {
    "llama": Case(),
    "biases": Case(
        qkv=(("int8-offset", 4),),
        out="int4-row",
        gate_up=(("int4-g32", 2),),
        down="int8-g16",
        has_biases=True,
        windows=(None,),
    ),
    "head-norms": Case(
        qkv=(("int4-g16", 4),), gate_up=(("uint4-g16", 2),), has_head_norms=True, head_dim=16
    ),
    "gemma": Case(
        qkv=(("int8-g16", 6),),
        gate_up=(("int8", 1), ("int4-row", 1)),
        num_kv_heads=1,
        activation="gelu_pytorch_tanh",
        has_head_norms=True,
        has_post_norms=True,
        soft_cap=2.0,
        windows=(7, None, 7),
        head_dim=16,
    ),
    "pieces": Case(
        qkv=(("int4-g32", 3), ("int8-g16", 1)),
        out="uint4-g128",
        gate_up=(("nf4", 1), ("uint4-g16", 1)),
        down="nf4",
        intermediate=128,
        has_biases=True,
        windows=(9, None),
    ),
    "three-pieces": Case(
        qkv=(("uint4-g16", 2), ("int8-offset", 1), ("nf4", 1)), hidden=128, windows=(None,)
    ),
}
CASES["bfloat16-cache"] = dataclasses.replace(CASES["gemma"], kv_dtype="bfloat16")
STEPS = {
    "decode": Step(((1, 9), (1, 1), (1, 30), (1, 14)), 6, 6),
    "one": Step(((1, 17),), 1, 1),
    "few": Step(((1, 9), (1, 30)), 3, 3),
    "ragged": Step(((1, 9), (1, 30), (5, 5), (7, 41)), 21, 6),
    "panel": Step(((1, 9), (1, 33), (60, 60), (10, 41)), 80, 5),
}
COMBINATIONS = [("llama", step) for step in STEPS] + [
    *[("gemma", "decode"), ("gemma", "panel"), ("bfloat16-cache", "decode")],
    *((name, "few") for name in ("gemma", "pieces", "three-pieces")),
    *((name, "ragged") for name in CASES if name != "llama"),
]

combinations = pytest.mark.parametrize(("name", "step_name"), COMBINATIONS)


@cache
def expected(case, step):
    # Of one size: compiled once for each case.
    return run(reference, case, dataclasses.replace(step, num_tokens=80, num_rows=6))


def in_blocks(case, product_dtype="float32"):
    return dataclasses.replace(case, in_blocks=True, product_dtype=product_dtype)


def values(cache):
    """A cache's slots as float32 numbers, one row a slot."""
    wide = cache if cache.dtype != np.uint16 else cache.view(jnp.bfloat16).astype(np.float32)
    return wide.reshape(-1, *cache.shape[2:])


def tolerance_of(case, instruction_set):
    """Attention over a bfloat16 cache rounds queries and the weights of values in some sets."""
    if case.kv_dtype == "float32":
        return TOLERANCE
    rounding = ROUNDING if instruction_set in ROUNDING_SETS else 0
    return TOLERANCE_BFLOAT16_CACHE + rounding


def check(case, step, given, wanted, tolerance):
    """Compares hidden states and what is in written slots; all others have their old bits."""
    hidden, caches = given
    live, size = step.num_live, np.abs(wanted[0][: step.num_live]).max()
    np.testing.assert_allclose(hidden[:live], wanted[0][:live], rtol=0, atol=tolerance * size)
    is_written = slots_written(case, step)
    before = [np.asarray(each) for each in make_caches(case, step)]
    for window, mine, theirs, old in zip(case.windows, caches, wanted[1], before, strict=True):
        new = is_written[case.groups.index(window)]
        mine_new, theirs_new = values(mine)[new], values(theirs)[new]
        size = np.abs(theirs_new).max()
        # What differs already may be rounded to the next number, one part in 128 away.
        rtol = 2**-7 if tolerance > ROUNDING else 0
        np.testing.assert_allclose(mine_new, theirs_new, rtol=rtol, atol=tolerance * size)
        bits = (each.reshape(len(new), -1).view(np.uint8)[~new] for each in (mine, old))
        np.testing.assert_array_equal(*bits)


@combinations
@pytest.mark.parametrize("instruction_set", SETS)
def test_equals_the_formula(instruction_set, name, step_name):
    case, step = CASES[name], STEPS[step_name]
    given = run(cpu, case, step, instruction_set=instruction_set)
    check(case, step, given, expected(case, step), tolerance_of(case, instruction_set))


@combinations
@pytest.mark.parametrize("instruction_set", EXACT_SETS)
def test_weights_in_blocks_equal_the_formula(instruction_set, name, step_name):
    case, step = CASES[name], STEPS[step_name]
    given = run(cpu, in_blocks(case), step, instruction_set=instruction_set)
    check(case, step, given, expected(case, step), tolerance_of(case, instruction_set))


@combinations
@pytest.mark.parametrize("instruction_set", ROUNDING_SETS)
def test_bfloat16_products_stay_near_the_formula(instruction_set, name, step_name):
    case, step = CASES[name], STEPS[step_name]
    rounding = in_blocks(case, "bfloat16")
    hidden, _ = run(cpu, rounding, step, instruction_set=instruction_set)
    wanted = expected(case, step)[0][: step.num_live]
    error = np.sqrt(np.mean((hidden[: step.num_live] - wanted) ** 2))
    size = np.sqrt(np.mean(wanted**2))
    bound = ROUNDING * (2 if step.num_tokens >= MANY_TOKENS else 1)
    if instruction_set == "avx512bf16" and step.num_tokens > 16:
        bound = BYTE_ROUNDING
    assert TOLERANCE * size < error < bound * len(case.windows) ** 0.5 * size  # it does round


@pytest.mark.parametrize("product_dtype", ["float32", "bfloat16"])
def test_the_default_instruction_set_is_the_best(product_dtype):
    case, step = in_blocks(CASES["pieces"], product_dtype), STEPS["ragged"]
    if not EXACT_SETS:
        case = dataclasses.replace(case, in_blocks=False)
    forced, free = (run(cpu, case, step, instruction_set=each)[0] for each in (SETS[0], None))
    np.testing.assert_array_equal(free[: step.num_live], forced[: step.num_live])


# What follows holds bit for bit, with the best instruction set: with weights in rows, in blocks,
# and in blocks with bfloat16 tokens.
def kinds(name):
    yield CASES[name]
    if EXACT_SETS:
        yield in_blocks(CASES[name])
        yield in_blocks(CASES[name], "bfloat16")


def equal_bits(step, *results):
    (hidden, caches), (other_hidden, other_caches) = results
    np.testing.assert_array_equal(hidden[: step.num_live], other_hidden[: step.num_live])
    for mine, theirs in zip(caches, other_caches, strict=True):
        np.testing.assert_array_equal(mine.view(np.uint8), theirs.view(np.uint8))


@pytest.mark.parametrize(("num_tokens", "num_rows"), [(21, 6), (60, 8), (80, 5)])
@pytest.mark.parametrize("name", ["gemma", "pieces"])
def test_a_tokens_bits_do_not_depend_on_its_neighbours(name, num_tokens, num_rows):
    whole = Step(((1, 9), (1, 30), (5, 5), (7, 41)), num_tokens, num_rows)
    begins = np.cumsum([0, *(q_len for q_len, _ in whole.rows)])
    for case in kinds(name):
        kv = make_caches(case, whole)
        hidden, caches = run(cpu, case, whole, kv=kv)
        for chosen in ((1,), (3,), (2, 3), (0, 1)):
            rows = tuple(whole.rows[row] for row in chosen)
            part = Step(rows, num_tokens, num_rows, pages_of=chosen)
            alone, alone_caches = run(cpu, case, part, kv=kv)
            mine = np.concatenate([hidden[begins[row] : begins[row + 1]] for row in chosen])
            np.testing.assert_array_equal(alone[: part.num_live], mine, err_msg=f"{chosen}")
            for window, all_of, ours in zip(case.windows, caches, alone_caches, strict=True):
                new = slots_written(case, part)[case.groups.index(window)]
                np.testing.assert_array_equal(values(ours)[new], values(all_of)[new])


@pytest.mark.parametrize("step_name", STEPS)
def test_what_no_token_owns_is_not_read(step_name):
    step = STEPS[step_name]
    for case in kinds("bfloat16-cache"):
        clean = run(
            cpu,
            case,
            step,
            kv=make_caches(case, step, unused=0),
            x=make_x(case, step, padding=0),
            tables=make_tables(case, step, padding=0),
        )
        dirty_hidden, dirty = run(cpu, case, step)
        assert np.isfinite(dirty_hidden[: step.num_live]).all()
        np.testing.assert_array_equal(dirty_hidden[: step.num_live], clean[0][: step.num_live])
        for mine, theirs, window in zip(dirty, clean[1], case.windows, strict=True):
            new = slots_written(case, step)[case.groups.index(window)]
            np.testing.assert_array_equal(values(mine)[new], values(theirs)[new])


# Steps of up to 4, 16 and 31 tokens may round them differently; of more, weights too.
@pytest.mark.parametrize(
    ("step_name", "tokens", "more"), [("few", 2, 4), ("decode", 5, 13), ("ragged", 17, 30)]
)
def test_padding_tokens_and_rows_change_nothing(step_name, tokens, more):
    step = STEPS[step_name]
    rows = lambda count: count if step.is_decode else len(step.rows) + count // 10
    tight = dataclasses.replace(step, num_tokens=tokens, num_rows=rows(tokens))
    loose = dataclasses.replace(step, num_tokens=more, num_rows=rows(more))
    for case in kinds("gemma"):
        equal_bits(step, *(run(cpu, case, each) for each in (tight, loose)))


@pytest.mark.parametrize("num_tokens", [1, 5, 70])
def test_a_step_without_rows_changes_nothing(num_tokens):
    step = Step((), num_tokens, 5)
    for case in kinds("bfloat16-cache"):
        x, kv = make_x(case, step, padding=3), make_caches(case, step)
        hidden, caches = run(cpu, case, step, x=x, kv=kv)
        np.testing.assert_array_equal(hidden, x)
        for mine, old in zip(caches, kv, strict=True):
            np.testing.assert_array_equal(mine.view(np.uint8), np.asarray(old).view(np.uint8))


def test_what_is_not_finite_stays_in_its_row():
    step = STEPS["ragged"]
    for case in kinds("gemma"):
        good, _ = run(cpu, case, step)
        bad, _ = run(cpu, case, step, x=make_x(case, step).at[0, 3].set(np.nan))
        assert np.isnan(bad[0]).all()
        np.testing.assert_array_equal(bad[1 : step.num_live], good[1 : step.num_live])


def test_numbers_that_are_out_of_range_touch_nothing_outside():
    case, step = CASES["gemma"], STEPS["ragged"]
    m = make_metadata(case, step)
    wild = dataclasses.replace(
        m,
        num_seqs=jnp.int32(1000),
        kv_lens=m.kv_lens * 1_000_000 - 5,
        cu_q_lens=m.cu_q_lens.at[2:].set(jnp.asarray([-9, 10**9, 7, 2, 10**9])),
        slot_mapping=m.slot_mapping.at[:, 0].set(-1).at[:, 1].set(10**9),
        page_table=m.page_table.at[0, 1].set(-(10**9)).at[0, 2].set(10**9),
    )
    hidden, _ = run(cpu, case, step, metadata=wild)
    assert hidden.shape == (step.num_tokens, case.hidden)
