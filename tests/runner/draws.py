"""The sampler's stages, compiled once, and one draw as numpy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.runner.sampling import (
    Rows,
    _filtered_weights,
    inverse_cdf,
    report,
    sample,
    shape_logits,
    uniform,
)
from kernels.logit_stats.xla import best

run_uniform = jax.jit(uniform)


@jax.jit
def run_greedy(logits):
    """The best ids, as `choose` and a step of greedy rows find them."""
    return best(logits, jnp.max(logits, axis=1, keepdims=True))


run_inverse_cdf = jax.jit(inverse_cdf)
run_sample = jax.jit(partial(sample, platform="cpu"))
run_report = jax.jit(report)
run_shape = jax.jit(shape_logits)


@jax.jit
def run_weights(logits, state):
    """Weights `choose` draws from, for every row of the state but the dummy."""
    rows = Rows.gather(state, jnp.arange(logits.shape[0], dtype=jnp.int32))
    temperature = jnp.where(rows.reals[:, 0] == 0, 1.0, rows.reals[:, 0])
    top = jnp.max(logits, axis=1, keepdims=True)
    return _filtered_weights((logits - top) / temperature[:, None], rows)


def ints(values):
    return jnp.asarray(np.asarray(values, np.int64).astype(np.int32))


def draw(raw, state, length=None, rows=None, target=None, wants_top=False, masks=None):
    """One `sample` over the rows of `state`, as numpy."""
    raw = np.asarray(raw, np.float32)
    rows = np.arange(len(raw)) if rows is None else rows
    length = np.zeros(len(raw)) if length is None else length
    target = np.full(len(raw), -1) if target is None else target
    arguments = (ints(rows), ints(length), ints(target), jnp.bool_(wants_top))
    sampled = run_sample(jnp.asarray(raw), state, *arguments, masks=masks)
    return jax.tree.map(np.asarray, sampled)


def normal(shape, seed, scale=3.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)
