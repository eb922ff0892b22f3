"""Mixing a head's elements: lengths and dot products stay, outliers are spread."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.nn.hadamard import mix


@pytest.mark.parametrize("size", [16, 64, 80, 96])
def test_dot_products_stay(size):
    rng = np.random.default_rng(size)
    q, k = (jnp.asarray(rng.standard_normal((3, 2, size)), jnp.float32) for _ in range(2))
    expected = np.einsum("tnh,tnh->tn", q, k)
    assert np.einsum("tnh,tnh->tn", mix(q), mix(k)) == pytest.approx(expected, abs=1e-5)
    assert np.asarray(mix(mix(q))) == pytest.approx(np.asarray(q), abs=1e-6), "its own inverse"


def test_an_outlier_is_spread():
    x = jnp.zeros((1, 64)).at[0, 5].set(8.0)
    assert np.abs(mix(x)) == pytest.approx(np.ones((1, 64)))


def test_the_dtype_stays():
    assert mix(jnp.ones((2, 32), jnp.bfloat16)).dtype == jnp.bfloat16
