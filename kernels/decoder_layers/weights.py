"""What a stack of decoder layers is made of, for every implementation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import jax

Leaf: TypeAlias = Any  # an Array, or whatever a transformation puts in its place in the pytree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockMatrix:
    """A matrix `[O, I]` whose rows are blocks of slots; a pytree.

    Attributes:
      pieces: QTensors, each of some neighbouring slots of every block, in slot order.
      rows: of each piece, its rows in one block.
      bias: float32 `[O]`, in the order of the whole, or None.
    """

    pieces: tuple[Any, ...]
    rows: tuple[int, ...] = field(metadata={"static": True})
    bias: Leaf = None

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (O, I)."""
        return sum(piece.shape[0] for piece in self.pieces), self.pieces[0].shape[1]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerWeights:
    """One pre-norm decoder layer; a pytree.

        x += attention_norm(out(attention(rotate(qkv(input_norm(x))))))
        x += mlp_norm(down(activation(gates) * ups)), with gates, ups = gate_up(mlp_input_norm(x))

    Norms are `x / sqrt(mean(x²) + eps) * w`; those that are None do nothing.

    Attributes:
      input_norm, mlp_input_norm: float32 `[D]`.
      attention_norm, mlp_norm: float32 `[D]` or None, of what is added.
      query_norm, key_norm: float32 `[H]` or None, of each head before it is rotated.
      qkv: blocks `[K, N / K queries then key then value, H]`.
      out, down: one block each.
      gate_up: one block, the gates then the ups.
      rotary: which of the step's rotary tables.
      group: which of the step's page tables.
      window: keys that a query sees, None for all.
    """

    input_norm: Leaf
    qkv: BlockMatrix
    query_norm: Leaf
    key_norm: Leaf
    out: BlockMatrix
    attention_norm: Leaf
    mlp_input_norm: Leaf
    gate_up: BlockMatrix
    down: BlockMatrix
    mlp_norm: Leaf
    rotary: int = field(metadata={"static": True})
    group: int = field(metadata={"static": True})
    window: int | None = field(metadata={"static": True})


@dataclass(frozen=True)
class LayerShape:
    """What all layers of a stack have in common.

    Attributes:
      activation: of the gates: `silu` or `gelu_pytorch_tanh`; implementations refuse others.
      scale: factor of the attention scores.
      soft_cap: attention scores are bounded by `cap · tanh(score / cap)`; None for no bound.
      product_dtype: to which what is multiplied by a matrix may be rounded.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    activation: str
    eps: float
    scale: float
    soft_cap: float | None
    product_dtype: Literal["float32", "bfloat16"]
