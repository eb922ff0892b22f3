"""compressed-tensors, as llm-compressor saves it: groups of modules, each with its scheme."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from jaxinfer.checkpoint.prequantized import packing
from jaxinfer.checkpoint.prequantized.fp8 import parse_block
from jaxinfer.checkpoint.prequantized.gptq import parse_group_size
from jaxinfer.checkpoint.prequantized.method import Matrix, Module, Stored
from jaxinfer.checkpoint.prequantized.names import Pattern
from jaxinfer.checkpoint.prequantized.scales import Activations, Blocks, scaled_weight
from jaxinfer.checkpoint.prequantized.settings import Settings
from jaxinfer.quantized_array import QuantizedArray

logger = logging.getLogger(__name__)

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_EMBEDDINGS = (".embed_tokens", ".wte", ".word_embeddings")


@dataclass(frozen=True)
class Scheme:
    """How the modules of one group are quantized."""

    packed: bool
    kind: Literal["int", "float"]
    bits: int
    blocks: Blocks
    symmetric: bool
    activations: Activations


class Targets:
    """Modules by name, by pattern (`re:...`) or by class, in this order of precedence."""

    def __init__(self, settings: Settings, key: str) -> None:
        """Checks a list of targets; raises CheckpointError."""
        targets = settings.strings(key)
        self._names = {text for text in targets if not text.startswith("re:")}
        self._patterns = [
            Pattern(settings, key, text[3:]) for text in targets if text.startswith("re:")
        ]

    def rank(self, name: str) -> int | None:
        """How a module is meant: 0 by name, 1 by pattern, 2 by class; None if it is not."""
        if name in self._names:
            return 0
        if any(pattern(name) for pattern in self._patterns):
            return 1
        # Only a model knows classes; of those that checkpoints quantize, names tell them apart.
        of_class = "Embedding" if name.endswith(_EMBEDDINGS) else "Linear"
        return 2 if of_class in self._names else None


class CompressedTensors:
    """quant_method `compressed-tensors` with one of FORMATS."""

    parts = (
        *("weight", "weight_packed", "weight_scale", "weight_shape"),
        *("weight_zero_point", "weight_g_idx"),
    )
    ignored = (
        *(".input_scale", ".input_zero_point", ".output_scale", ".output_zero_point"),
        *(".k_scale", ".v_scale", ".k_zero_point", ".v_zero_point"),
    )

    def __init__(self, settings: Settings) -> None:
        """Checks a quantization_config; raises CheckpointError."""
        sparsity = settings.section("sparsity_config")
        if sparsity is not None and sparsity.values:
            sparsity.text("format", ("dense",), "dense")
        if settings.values.get("transform_config"):
            raise settings.error("transform_config", "rotated weights are not supported")
        self._settings = settings
        self._ignore = Targets(settings, "ignore")
        groups = settings.section("config_groups")
        if groups is None or not groups.values:
            raise settings.error("config_groups", "must say how modules are quantized")
        self._groups: list[tuple[Targets, Scheme]] = []
        for name in groups.values:
            group = groups.section(name)
            if group is not None:
                self._groups.append((Targets(group, "targets"), _parse_scheme(group, settings)))

    def matrix(self, module: Module) -> Matrix:
        """Returns what `module.weight` is; raises CheckpointError."""
        scheme = self._scheme_of(module)
        if scheme.packed:
            return _packed_weight(module, scheme)
        zero_part = "weight_zero_point" if scheme.kind == "int" else None
        if zero_part is not None and not scheme.symmetric:
            module.need(zero_part, ("I8",))
        elif zero_part is None:
            module.asked.add("weight_zero_point")  # old writers put zeros beside float codes
        return scaled_weight(
            module,
            scheme.blocks,
            "I8" if scheme.kind == "int" else "F8_E4M3",
            name=f"CT-{scheme.kind.upper()}8",
            zero_part=zero_part,
            activations=scheme.activations,
        )

    def _scheme_of(self, module: Module) -> Scheme:
        ranked = [(targets.rank(module.name), scheme) for targets, scheme in self._groups]
        found = [(rank, scheme) for rank, scheme in ranked if rank is not None]
        stored = next(iter(module.parts.values()))
        if self._ignore.rank(module.name) is not None:
            raise stored.error(
                f"{module.name} is quantized, but on the list {self._settings.path('ignore')} in "
                "config.json; remove it there"
            )
        if not found:
            raise stored.error(
                f"{module.name} is not among the targets of any group in "
                f"{self._settings.path('config_groups')} in config.json; add it to the right one"
            )
        return min(found, key=lambda pair: pair[0])[1]


def _parse_scheme(group: Settings, settings: Settings) -> Scheme:
    mixed = settings.values.get("format") == "mixed-precision"
    own = group.values.get("format") is not None or mixed
    storage = (group if own else settings).text("format", FORMATS)
    weights = group.section("weights")
    if weights is None:
        raise group.error("weights", "only groups with quantized weights are supported")
    kind: Literal["int", "float"] = "int"
    if weights.text("type", ("int", "float"), "int") == "float":
        kind = "float"
    bits = weights.integer("num_bits", (4, 8) if kind == "int" else (8,), 8)
    if (storage == "pack-quantized" and kind != "int") or (
        storage == f"{'float' if kind == 'int' else 'int'}-quantized"
    ):
        raise weights.error("type", f"does not go with the format {storage}")
    symmetric = weights.boolean("symmetric", True)
    if weights.values.get("dynamic"):
        raise weights.error("dynamic", "weights must have fixed scales")
    activations = _parse_activations(group, kind)
    if storage == "pack-quantized" or bits != 8:
        activations = "float"
    return Scheme(
        packed=storage == "pack-quantized",
        kind=kind,
        bits=bits,
        blocks=_parse_blocks(weights),
        symmetric=symmetric,
        activations=activations,
    )


def _parse_blocks(weights: Settings) -> Blocks:
    """Which weights share a scale."""
    size = weights.values.get("group_size")
    default = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = weights.text("strategy", ("tensor", "channel", "group", "block"), default)
    if strategy == "tensor":
        return Blocks(None, None)
    if strategy == "channel":
        return Blocks(1, None)
    if strategy == "block":
        blocks = parse_block(weights, "block_structure")
        if blocks is None:
            raise weights.error("block_structure", "the strategy block needs rows and columns")
        return blocks
    size = parse_group_size(weights, "group_size", size)
    return Blocks(1, None if size == -1 else size)


def _parse_activations(group: Settings, kind: Literal["int", "float"]) -> Activations:
    """What products are of: int8 only where a file asks for what our int8 products are."""
    inputs = group.section("input_activations")
    if inputs is None or kind == "float":
        return "float"
    if inputs.text("type", ("int", "float"), "int") == "float":
        return "float"
    inputs.integer("num_bits", (8,), 8)
    if inputs.values.get("dynamic") is not True:
        raise inputs.error(
            "dynamic",
            "activations with fixed scales are not supported; use a checkpoint with dynamic "
            "activations (W8A8 dynamic per token)",
        )
    per_token = inputs.text("strategy", ("token", "tensor", "group"), "token") == "token"
    if per_token and inputs.boolean("symmetric", True):
        return "int8"
    logger.warning("%s: activations stay floats: int8 is for rows only", inputs.where)
    return "float"


def _packed_weight(module: Module, scheme: Scheme) -> Matrix:
    """The matrix of a `weight_packed`: unsigned codes in int32 words along I."""
    packed = module.need("weight_packed", ("I32",), (None, None))
    stored_shape = module.need("weight_shape", ("I64", "I32"), (2,))
    rows, columns = (int(size) for size in stored_shape.read())
    if rows != packed.shape[0] or columns * scheme.bits != packed.shape[1] * 32:
        if rows == packed.shape[0] and 0 < columns < packed.shape[1] * (32 // scheme.bits):
            packing.check_width(packed, scheme.bits, columns)
        raise packed.error(
            f"has the shape {list(packed.shape)}, which does not hold {scheme.bits}-bit codes of "
            f"the weight_shape [{rows}, {columns}]"
        )
    shape = rows, columns
    packing.check_width(packed, scheme.bits, columns)
    block = scheme.blocks.width(shape)
    if columns % block:
        raise packed.error(f"groups of {block} do not divide its width, {columns}")
    group_size = packing.group_of(packed, block, columns)
    scale = scheme.blocks.need(module, "weight_scale", shape)
    has_zeros = not scheme.symmetric or "weight_zero_point" in module.parts
    zero = _find_zeros(module, scheme, shape) if has_zeros else None
    g_idx = module.find("weight_g_idx", ("I32",), (columns,))
    if g_idx is not None and scheme.blocks.height(shape) > 1:
        raise g_idx.error("only weights with scales by group can be in activation order")
    may_permute = g_idx is not None and block < columns
    codes = packing.abstract_affine(
        shape,
        scheme.bits,
        group_size,
        scale.dtype,
        has_offset=zero is not None,
        has_perm=may_permute,
    )
    read = partial(_read_packed, scheme, shape, group_size, packed, scale, zero, g_idx)
    return Matrix(f"CT-INT{scheme.bits}", codes, read, is_certain=zero is None and not may_permute)


def _find_zeros(module: Module, scheme: Scheme, shape: tuple[int, int]) -> Stored:
    """The zero points: int32 words along O, or int8 in old files and for whole tensors."""
    zero = module.need("weight_zero_point", ("I32", "I8"))
    if zero.dtype == "I8":
        scheme.blocks.find(module, "weight_zero_point", shape, ("I8",))
        return zero
    rows, columns = scheme.blocks.grid(shape)
    words = -(-rows * scheme.bits // 32)
    return module.need("weight_zero_point", ("I32",), (words, columns))


def _read_packed(
    scheme: Scheme,
    shape: tuple[int, int],
    group_size: int,
    packed: Stored,
    scale: Stored,
    zero: Stored | None,
    g_idx: Stored | None,
) -> QuantizedArray:
    blocks, bits, words = scheme.blocks, scheme.bits, packed.read()
    perm = None if g_idx is None else packing.act_order(g_idx, blocks.width(shape), shape[1])
    qvalue = packing.pack_rows(
        shape, bits, lambda rows: packing.unpack_words(words[rows], bits), perm
    )
    scales = blocks.spread(scale.read(), shape, group_size)
    zeros = None
    if zero is not None:
        zeros = blocks.spread(_read_zeros(zero, bits, blocks.grid(shape)[0]), shape, group_size)
    return packing.affine(qvalue, bits, scales, zeros, group_size, perm)


def _read_zeros(zero: Stored, bits: int, rows: int) -> np.ndarray:
    """The zero points of unsigned codes, int32 `[blocks along O, blocks along I]`."""
    stored = zero.read()
    if zero.dtype == "I32":
        return packing.unpack_words(stored.T, bits).T[:rows].astype(np.int32)
    middle = 1 << (bits - 1)
    zeros = stored.astype(np.int32) + middle
    if zeros.min() < 0 or zeros.max() >= 2 * middle:
        wrong = int(stored.min() if zeros.min() < 0 else stored.max())
        raise zero.error(f"holds the zero point {wrong}, outside -{middle} to {middle - 1}")
    return zeros
