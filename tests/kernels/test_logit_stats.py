"""Best tokens and totals of logits: every implementation against numpy in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import logit_stats, native
from kernels.logit_stats import cpu

SETS = native.runnable_instruction_sets() if cpu.is_available() else ()
KINDS = ["xla", *(f"cpu {name}" for name in SETS)]


def stats_of(kind: str, logits) -> tuple[np.ndarray, np.ndarray]:
    implementation, _, instruction_set = kind.partition(" ")
    with pytest.MonkeyPatch.context() as patch:
        if instruction_set:
            patch.setenv("JAXINFER_CPU_ISA", instruction_set)
        found = logit_stats.logit_stats(
            jnp.asarray(logits, jnp.float32), platform="cpu", implementation=implementation
        )
    return np.asarray(found.best), np.asarray(found.log_total)


def check(kind: str, logits: np.ndarray) -> None:
    best, log_total = stats_of(kind, logits)
    np.testing.assert_array_equal(best, np.argmax(logits, axis=1))
    wide = logits.astype(np.float64)
    top = wide.max(axis=1)
    wanted = top + np.log(np.exp(wide - top[:, None]).sum(axis=1))
    np.testing.assert_allclose(log_total, wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("vocab_size", [1, 3, 16, 100, 8192, 8193, 49152 + 5])
@pytest.mark.parametrize("kind", KINDS)
def test_random_rows(kind, vocab_size):
    rng = np.random.default_rng(vocab_size)
    check(kind, (4 * rng.standard_normal((3, vocab_size))).astype(np.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_the_lowest_of_equal_ids(kind):
    rng = np.random.default_rng(0)
    check(kind, rng.integers(-2, 3, (40, 61)).astype(np.float32))
    # Equal ones in several parts of a row.
    logits = np.zeros((2, 30000), np.float32)
    logits[0, [29999, 20000, 9000]] = 7
    logits[1, [8191, 8192]] = 7
    check(kind, logits)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=70), st.sampled_from(KINDS))
def test_any_row(values, kind):
    check(kind, np.array([values], np.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_minus_infinity_counts_for_nothing(kind):
    logits = np.full((1, 20000), -np.inf, np.float32)
    logits[0, 12345] = -3
    best, log_total = stats_of(kind, logits)
    assert (best[0], log_total[0]) == (12345, -3)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_shows_in_its_row_alone(kind, bad):
    logits = np.random.default_rng(1).standard_normal((3, 9000)).astype(np.float32)
    wanted = stats_of(kind, logits)
    logits[1, 8500] = bad
    best, log_total = stats_of(kind, logits)
    assert not np.isfinite(log_total[1])
    assert 0 <= best[1] < 9000
    for found, other in zip((best, log_total), wanted, strict=True):
        np.testing.assert_array_equal(found[[0, 2]], other[[0, 2]])


@pytest.mark.parametrize("kind", KINDS)
def test_a_rows_bits_do_not_depend_on_the_batch(kind):
    logits = np.random.default_rng(2).standard_normal((5, 20000)).astype(np.float32)
    whole, alone = stats_of(kind, logits), stats_of(kind, logits[3:4])
    assert whole[0][3] == alone[0][0]
    if kind != "xla":
        assert whole[1][3] == alone[1][0]


@pytest.mark.skipif(not SETS, reason=str(cpu.unavailable()))
def test_it_is_what_cpus_choose_and_what_it_refuses():
    logits = jax.ShapeDtypeStruct((2, 10), jnp.float32)
    assert str(logit_stats.choose(logits, platform="cpu")) == "cpu"
    halves = jax.ShapeDtypeStruct((2, 10), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="logits are bfloat16"):
        cpu.supports(halves)
    call = jax.ffi.ffi_call(
        "jaxinfer_logit_stats_v1",
        (jax.ShapeDtypeStruct((3,), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.float32)),
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match="logit_stats on cpu: logits are"):
        jax.block_until_ready(call(jnp.zeros((2, 10))))
