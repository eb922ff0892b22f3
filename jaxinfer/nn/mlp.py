"""The gated feed-forward block."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxinfer.nn.config import DecoderConfig
from jaxinfer.nn.context import ModelContext
from jaxinfer.nn.linear import Linear
from jaxinfer.nn.weights import Part, RowLayout, plain_layout, round_up
from jaxinfer.quantization import unpadded_format, width_multiple

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
}


class MLP(nnx.Module):
    """`down(activation(gate(x)) · up(x))` with gate and up in one matrix.

    Rows of that matrix are `[device, gate or up, F/devices]`, F padded with zeros, so each device
    multiplies its own halves.
    """

    def __init__(self, config: DecoderConfig, context: ModelContext) -> None:
        devices, features = context.tensor_parallel, config.intermediate_size
        fmt = context.linear_format
        multiple = max(width_multiple(fmt), context.stored_group_size)
        padded = round_up(features, devices * multiple)
        gate_up = RowLayout(devices, padded // devices, (Part(features), Part(features)))
        down = plain_layout(config.hidden_size, columns=features)
        make = partial(Linear, context=context, bias=config.mlp_bias)
        self.gate_up = make(config.hidden_size, gate_up, sharding="column", fmt=fmt)
        self.down = make(padded, down, sharding="row", fmt=unpadded_format(fmt, features))
        self.activation = config.activation
        self.devices = devices

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Returns the block's output, without the residual."""
        halves = self.gate_up(x).reshape(x.shape[0], self.devices, 2, -1)
        gated = ACTIVATIONS[self.activation](halves[:, :, 0]) * halves[:, :, 1]
        return self.down(gated.reshape(x.shape[0], -1))
