"""Linear, RMSNorm, MLP and Embedding against numpy in float64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from models.conftest import make_context
from models.oracle_cases import hf_config

from jaxinfer.models import llama
from jaxinfer.nn.embedding import Embedding
from jaxinfer.nn.linear import Linear
from jaxinfer.nn.mlp import ACTIVATIONS, MLP
from jaxinfer.nn.norm import RMSNorm
from jaxinfer.nn.weights import plain_layout

RNG = np.random.default_rng(0)


def fill(module):
    """Gives every parameter of a block random values."""
    for _, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Param):
            node.set_value(jnp.asarray(RNG.standard_normal(node.shape), node.dtype))
    return module


@pytest.mark.parametrize("bias", [True, False])
def test_linear(bias):
    linear = fill(Linear(7, plain_layout(5), make_context(), bias=bias))
    x = RNG.standard_normal((3, 7), np.float32)
    expected = x @ np.asarray(linear.weight[...]).T
    if bias:
        expected += np.asarray(linear.bias[...])
    np.testing.assert_allclose(linear(jnp.asarray(x)), expected, atol=1e-5)


def test_linear_accumulates_in_float32_and_rounds_once():
    context = make_context(dtype=ml_dtypes.bfloat16)
    linear = Linear(1024, plain_layout(1), context, bias=True)
    linear.weight.set_value(jnp.ones((1, 1024), ml_dtypes.bfloat16))
    linear.bias.set_value(jnp.ones(1, ml_dtypes.bfloat16))
    x = jnp.full((2, 1024), 1 + 2**-7, ml_dtypes.bfloat16)  # bfloat16 sums would stop at 256
    assert linear(x).dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(linear(x, jnp.float32), np.full((2, 1), 1033.0, np.float32))


def test_a_shared_weight_is_one_parameter():
    context = make_context()
    embedding = Embedding(4, plain_layout(9), context)
    head = Linear(4, plain_layout(9), context, weight=embedding.weight)
    assert head.weight is embedding.weight


def test_rms_norm():
    norm = fill(RMSNorm(6, eps=0.5))
    x = RNG.standard_normal((2, 3, 6))
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 0.5) * np.asarray(norm.weight[...])
    np.testing.assert_allclose(norm(jnp.asarray(x, jnp.float32)), expected, atol=1e-6)


def test_rms_norm_of_float16_does_not_overflow():
    out = RMSNorm(4, eps=1e-6)(jnp.full((1, 4), 6e4, np.float16))
    np.testing.assert_array_equal(out, np.ones((1, 4), np.float16))


def test_activations():
    x = np.linspace(-4, 4, 33)
    silu, gelu = x / (1 + np.exp(-x)), np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    np.testing.assert_allclose(ACTIVATIONS["silu"](jnp.asarray(x, jnp.float32)), silu, atol=1e-6)
    np.testing.assert_allclose(
        ACTIVATIONS["gelu_pytorch_tanh"](jnp.asarray(x, jnp.float32)),
        0.5 * x * (1 + np.tanh(gelu)),
        atol=1e-6,
    )


def test_mlp():
    config = llama.Config.from_hf(hf_config("llama_plain") | {"intermediate_size": 10})
    mlp = fill(MLP(config, make_context()))
    x = RNG.standard_normal((3, 64), np.float32)
    gate, up = np.split(x @ np.asarray(mlp.gate_up.weight[...]).T, 2, axis=1)
    expected = gate / (1 + np.exp(-gate)) * up @ np.asarray(mlp.down.weight[...]).T
    np.testing.assert_allclose(mlp(jnp.asarray(x)), expected, rtol=1e-4, atol=1e-3)


def test_embedding_rows_in_the_activation_dtype():
    embedding = fill(Embedding(4, plain_layout(9, multiple_of=2), make_context(2)))
    rows = jax.jit(lambda e, ids: e(ids))(embedding, jnp.asarray([8, 0, 8], jnp.int32))
    assert embedding.weight.shape == (10, 4)
    np.testing.assert_array_equal(rows, np.asarray(embedding.weight[...])[[8, 0, 8]])
