"""Fills a model's parameters from a stream of checkpoint tensors, one tensor at a time.

Every tensor and every parameter is accounted for. Knows no file format.
"""

from __future__ import annotations

import fnmatch
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer.nn.config import DecoderConfig
from jaxinfer.nn.context import ModelContext
from jaxinfer.nn.decoder import CausalLM
from jaxinfer.nn.weights import Weight
from jaxinfer.quantized_array import QuantizedArray
from jaxinfer.runner.placement import (
    HostTensor,
    PendingParameter,
    expected_value,
    format_of,
    shape_of,
)
from kernels.quantized_matmul import QTensor, dequantize

_logger = logging.getLogger(__name__)
_MAX_NAMES_SHOWN = 5


class WeightError(ValueError):
    """The checkpoint's tensors are not the ones the model needs; the message names them."""


def make_abstract_model(
    module: ModuleType, config: DecoderConfig, context: ModelContext
) -> CausalLM:
    """Returns the family's model with shapes in place of parameters: no memory, milliseconds.

    Raises:
      ValueError: the mesh's tensor axis does not divide the query heads.
    """
    return nnx.eval_shape(lambda: module.Model(config, context))


def load_weights(
    model: CausalLM, module: ModuleType, tensors: Iterable[tuple[str, HostTensor]]
) -> None:
    """Replaces every parameter of the model by the checkpoint's, sharded over the model's mesh.

    A fused parameter is assembled in host buffers that live until its last tensor has come, so
    memory beyond the model stays at a few tensors. Quantized matrices stay as they are.

    Args:
      model: abstract or filled; changed in place.
      module: the family's file: its `WEIGHT_MAP` and `IGNORED_WEIGHTS`.
      tensors: (Hugging Face name, host tensor) in any order.

    Raises:
      WeightError: a tensor is missing, surplus, there twice, or has another shape; or a quantized
        one cannot be split over the mesh.
    """
    inventory = _Inventory(model, module)
    tied_head = _TiedHead(model, module.WEIGHT_MAP)
    pending: dict[str, PendingParameter] = {}
    for name, tensor in tensors:
        if tied_head.takes(name, tensor):
            continue
        target = inventory.claim(name, tensor.shape)
        if target is None:
            inventory.dismiss(name, tensor)
            continue
        if target.offset:
            tensor = _as_floats(tensor).astype(np.float32) + np.float32(target.offset)
        pending.setdefault(target.path, PendingParameter(target.param, model.context))
        pending[target.path].place(target.part_idx, tensor)
        if pending[target.path].is_complete:
            try:
                pending.pop(target.path).finish()
            except ValueError as error:
                raise WeightError(f"tensor {name}: {error}") from error
    inventory.finish()
    tied_head.compare()


def check_tensors(
    model: CausalLM, module: ModuleType, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Checks names and shapes as `load_weights` will, before any tensor is read.

    Raises:
      WeightError: as `load_weights`.
    """
    inventory, tied_head = _Inventory(model, module), _TiedHead(model, module.WEIGHT_MAP)
    for name, shape in shapes.items():
        if name != tied_head.name:
            inventory.claim(name, shape)
    inventory.finish()


def expected_shapes(model: CausalLM, module: ModuleType) -> dict[str, tuple[int, ...]]:
    """Returns the checkpoint tensors the model needs, by name."""
    return {name: target.shape for name, target in _targets(model, module.WEIGHT_MAP).items()}


def abstract_weights(
    model: CausalLM, module: ModuleType, codes: Mapping[str, QuantizedArray | None]
) -> None:
    """Gives an abstract model the dtypes, shapes and shardings that `load_weights` will.

    That is enough to compile its programs.

    Args:
      model: abstract; changed in place.
      module: the family's file.
      codes: what the checkpoint's quantized tensors will be, abstract; None for floats.

    Raises:
      WeightError: a quantized tensor cannot be split over the mesh.
    """
    parts: dict[str, list[QuantizedArray | None]] = {}
    for name, target in _targets(model, module.WEIGHT_MAP).items():
        of_param = parts.setdefault(target.path, [None] * len(target.param.layout.parts))
        of_param[target.part_idx] = None if target.offset else codes.get(name)
    # Layers are alike: what one parameter becomes is found once, by tracing, for all like it.
    found: dict[object, Any] = {}
    for path, param in parameters(model):
        kind = _kind_of(param, parts[path])
        if kind not in found:
            try:
                found[kind] = expected_value(param, parts[path], model.context)
            except ValueError as error:
                raise WeightError(f"parameter {path}: {error}") from error
        param.set_value(jax.tree.map(lambda leaf: leaf, found[kind]))


def _kind_of(param: nnx.Param, parts: Sequence[QuantizedArray | None]) -> object:
    """Returns all of a parameter that `expected_value` looks at."""
    leaves, structure = jax.tree.flatten(param.get_value())
    return (
        param.layout,
        param.split,
        param.get_metadata().get("fmt"),
        structure,
        tuple((leaf.shape, leaf.dtype) for leaf in leaves),
        tuple(part and (format_of(part), part.qvalue.shape, part.qvalue.dtype) for part in parts),
    )


def bytes_to_load(model: CausalLM) -> int:
    """Returns the bytes of parameters that are abstract yet, on all devices together."""
    leaves = jax.tree.leaves([param.get_value() for _, param in parameters(model)])
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape))
        * leaf.sharding.num_devices
        * leaf.dtype.itemsize
        for leaf in leaves
        if isinstance(leaf, jax.ShapeDtypeStruct)
    )


def parameter_bytes(model: CausalLM) -> int:
    """Bytes of a model's weights on all devices together, repeated ones counted once."""
    leaves = jax.tree.leaves(nnx.state(model))
    bits = sum(math.prod(leaf.shape) * _bits(leaf.dtype) for leaf in leaves)
    return bits // 8


def _bits(dtype: np.dtype) -> int:
    """Bits of an element; numpy says 8 of the types that a device packs two to a byte."""
    return jnp.iinfo(dtype).bits if jnp.issubdtype(dtype, jnp.integer) else dtype.itemsize * 8


def init_random(model: CausalLM, seed: int) -> None:
    """Fills the model with random weights that do not depend on its mesh.

    Norm weights are near 1, biases near 0, matrices keep the size of what they multiply.
    """
    for path, param in parameters(model):
        pending = PendingParameter(param, model.context)
        for part_idx in range(len(param.layout.parts)):
            shape = param.layout.part_shape(part_idx, shape_of(param))
            rng = np.random.default_rng([seed, part_idx, *path.encode()])
            values = rng.standard_normal(shape, np.float32)
            scale = 0.1 if len(shape) == 1 else shape[1] ** -0.5
            pending.place(part_idx, values * scale + float(path.endswith("norm.weight")))
        pending.finish()


@dataclass(frozen=True)
class _Target:
    """Where one checkpoint tensor belongs."""

    path: str
    param: nnx.Param
    part_idx: int
    offset: float

    @property
    def shape(self) -> tuple[int, ...]:
        return self.param.layout.part_shape(self.part_idx, shape_of(self.param))


class _Inventory:
    """Which tensors are still to come; collects what is wrong so that one error tells it all."""

    def __init__(self, model: CausalLM, module: ModuleType) -> None:
        self._missing = _targets(model, module.WEIGHT_MAP)
        self._expected = frozenset(self._missing)
        self._ignored = module.IGNORED_WEIGHTS
        self._surplus: list[str] = []

    def claim(self, name: str, shape: tuple[int, ...]) -> _Target | None:
        """Returns where the tensor belongs, or None for one the model does not use."""
        target = self._missing.pop(name, None)
        if target is None:
            if name in self._expected:
                raise WeightError(f"tensor {name} is in the checkpoint twice")
            if not (self._is_ignored(name) or self._may_be_zero_bias(name)):
                self._surplus.append(name)
            return None
        if tuple(shape) != target.shape:
            raise WeightError(
                f"tensor {name} has shape {tuple(shape)}; config.json asks for {target.shape}"
            )
        return target

    def dismiss(self, name: str, tensor: HostTensor) -> None:
        """Looks at a tensor that nothing claims: a bias the model does not have must be zero."""
        is_bias = self._may_be_zero_bias(name) and not self._is_ignored(name)
        if is_bias and np.any(_as_floats(tensor)):
            self._surplus.append(name)

    def _is_ignored(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self._ignored)

    def _may_be_zero_bias(self, name: str) -> bool:
        """Whether it is the bias of a matrix of ours: GPTQ's tools store zeros where none is."""
        stem, _, kind = name.rpartition(".")
        return kind == "bias" and f"{stem}.weight" in self._expected

    def finish(self) -> None:
        """Raises unless every tensor the model needs has come and no other."""
        problems = []
        if self._missing:
            problems.append(f"the checkpoint lacks {_listed(self._missing)}")
        if self._surplus:
            problems.append(f"the model described by config.json has no {_listed(self._surplus)}")
        if problems:
            raise WeightError("; ".join(problems))


class _TiedHead:
    """A head tensor in the checkpoint of a model whose head is its embedding.

    As in transformers the embedding wins; a head that differs from it is worth a warning.
    """

    def __init__(self, model: CausalLM, weight_map: Mapping[str, Weight]) -> None:
        self._embedding = model.embedding.weight
        [name] = weight_map["head.weight"].names
        self.name = name if model.config.tie_word_embeddings else None
        self._head: HostTensor | None = None

    def takes(self, name: str, tensor: HostTensor) -> bool:
        """Returns whether this is the tied head, and keeps it."""
        if name != self.name:
            return False
        self._head = tensor
        return True

    def compare(self) -> None:
        """Warns if there was a head and it is not the embedding."""
        if self._head is None or self._embedding.get_metadata().get("fmt") is not None:
            return
        value, head = self._embedding.get_value(), _as_floats(self._head)
        table = dequantize(value) if isinstance(value, QTensor) else value
        embedding = np.asarray(table)[: len(head)]
        if not np.array_equal(embedding, head.astype(embedding.dtype)):
            _logger.warning(
                "config.json ties the head to the embedding but the checkpoint's %s differs from "
                "it; the embedding is used, as transformers does",
                self.name,
            )


def _as_floats(tensor: HostTensor) -> np.ndarray:
    return tensor.dequantize() if isinstance(tensor, QuantizedArray) else tensor


def parameters(model: CausalLM) -> Iterator[tuple[str, nnx.Param]]:
    """Yields (dotted path, parameter), a shared parameter once."""
    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Param):
            yield ".".join(map(str, path)), node


def _targets(model: CausalLM, weight_map: Mapping[str, Weight]) -> dict[str, _Target]:
    """Returns where each tensor the model needs belongs, by its checkpoint name."""
    targets = {}
    for path, param in parameters(model):
        pattern, layer = path, ""
        if path.startswith("layers."):
            _, layer, rest = path.split(".", 2)
            pattern = f"layers.{{i}}.{rest}"
        weight = weight_map[pattern]
        for part_idx, name in enumerate(weight.names):
            targets[name.format(i=layer)] = _Target(path, param, part_idx, weight.offset)
    return targets


def _listed(names: Iterable[str]) -> str:
    """Returns the first names and the count of the others."""
    ordered = sorted(names)
    shown = ", ".join(ordered[:_MAX_NAMES_SHOWN])
    more = len(ordered) - _MAX_NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
