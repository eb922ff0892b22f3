"""Rotation angles and their scalings against the formulas written out."""

import math

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxinfer.nn.rotary import LinearScaling, Llama3Scaling, RotaryConfig, rotate


def test_rotation_turns_each_pair_by_its_angle():
    config = RotaryConfig(theta=100.0, head_dim=6, scaling=None)
    positions = np.array([0, 3, 257], np.int32)
    x = np.random.default_rng(0).standard_normal((3, 2, 6), np.float32)
    turned = np.asarray(rotate(jnp.asarray(x), config.table(jnp.asarray(positions))))
    for t, position in enumerate(positions):
        for i in range(3):
            turn = np.exp(1j * position * 100.0 ** (-i / 3))
            expected = (x[t, :, i] + 1j * x[t, :, i + 3]) * turn
            np.testing.assert_allclose(turned[t, :, i], expected.real, atol=2e-5)
            np.testing.assert_allclose(turned[t, :, i + 3], expected.imag, atol=2e-5)


def test_scores_depend_on_distance_only():
    config = RotaryConfig(theta=10000.0, head_dim=8, scaling=None)
    q, k = np.random.default_rng(1).standard_normal((2, 1, 8), np.float32)

    def score(query_position, key_position):
        positions = jnp.asarray([query_position, key_position], jnp.int32)
        turned = rotate(jnp.asarray(np.concatenate([q, k])), config.table(positions))
        return float(turned[0] @ turned[1])

    assert score(17, 5) == pytest.approx(score(112, 100), abs=1e-4)


def test_bfloat16_inputs_keep_float32_angles():
    config = RotaryConfig(theta=10000.0, head_dim=2, scaling=None)
    x = jnp.asarray([[1.0, 0.0]] * 2, ml_dtypes.bfloat16)
    turned = rotate(x, config.table(jnp.asarray([256, 257], jnp.int32)))
    assert turned.dtype == ml_dtypes.bfloat16
    expected = [[math.cos(p), math.sin(p)] for p in (256, 257)]  # bfloat16 has no 257
    np.testing.assert_allclose(turned.astype(np.float32), expected, atol=4e-3)


def test_linear_scaling_divides_positions():
    plain = RotaryConfig(theta=50.0, head_dim=4, scaling=None)
    scaled = RotaryConfig(theta=50.0, head_dim=4, scaling=LinearScaling(4.0))
    at_12 = scaled.table(jnp.asarray([12], jnp.int32))
    np.testing.assert_allclose(at_12, plain.table(jnp.asarray([3], jnp.int32)), atol=1e-6)


def test_llama3_scaling_has_three_bands():
    scaling = Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=100
    )
    wavelengths = np.array([10.0, 24.9, 40.0, 100.1, 1e4])
    scaled = 2 * np.pi / scaling.scale(2 * np.pi / wavelengths)
    smooth = (100 / 40 - 1) / (4 - 1)
    between = 1 / (((1 - smooth) / 8 + smooth) / 40.0)
    np.testing.assert_allclose(scaled, [10.0, 24.9, between, 800.8, 8e4])
