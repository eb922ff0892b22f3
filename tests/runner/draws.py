"""The sampler's stages, compiled once, and one draw as numpy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.runner.sampling import report, sample
from kernels.token_sampler.xla import uniform

run_uniform = jax.jit(uniform)
run_sample = jax.jit(partial(sample, platform="cpu"))
run_report = jax.jit(report)


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
