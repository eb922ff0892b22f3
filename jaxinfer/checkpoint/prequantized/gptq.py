"""GPTQ as AutoGPTQ and GPTQModel save it: codes in words along I, zero points along O."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial

import numpy as np

from jaxinfer.checkpoint.prequantized import packing
from jaxinfer.checkpoint.prequantized.method import SCALE_DTYPES, Matrix, Module, Stored
from jaxinfer.checkpoint.prequantized.names import Pattern
from jaxinfer.checkpoint.prequantized.settings import Settings
from jaxinfer.quantized_array import QuantizedArray

_ONE_PER_CODE = {4: 0x11111111, 8: 0x01010101}


@dataclass(frozen=True)
class _Scheme:
    """How some modules are quantized; `symmetric` None where the configuration does not say."""

    bits: int
    block: int
    symmetric: bool | None

    @staticmethod
    def parse(settings: Settings, default: _Scheme | None = None) -> _Scheme:
        block = settings.values.get("group_size", default.block if default else None)
        symmetric = default.symmetric if default else None
        if settings.values.get("sym") is not None:
            symmetric = settings.boolean("sym", False)
        return _Scheme(
            settings.integer("bits", (4, 8), default.bits if default else None),
            parse_group_size(settings, "group_size", block),
            symmetric,
        )


class Gptq:
    """quant_method `gptq`, checkpoint formats `gptq` (zeros stored minus one) and `gptq_v2`."""

    parts = ("qweight", "qzeros", "scales", "g_idx")
    ignored = ()

    def __init__(self, settings: Settings) -> None:
        """Checks a quantization_config; raises CheckpointError."""
        key = "checkpoint_format" if "checkpoint_format" in settings.values else "format"
        self._zero_bias = 1 - int(settings.text(key, ("gptq", "gptq_v2"), "gptq") == "gptq_v2")
        settings.text("pack_dtype", ("int32",), "int32")
        settings.boolean("desc_act", False)
        if settings.boolean("is_marlin_format", False):
            raise settings.error("is_marlin_format", "only plain GPTQ files can be read")
        self._scheme = _Scheme.parse(settings)
        self._dynamic = _parse_dynamic(settings, self._scheme)

    def matrix(self, module: Module) -> Matrix:
        """Returns what `module.weight` is; raises CheckpointError."""
        scheme = self._scheme_of(module.name)
        bits, per_word = scheme.bits, 32 // scheme.bits
        qweight = module.need("qweight", ("I32",), (None, None))
        rows, columns = qweight.shape[1], qweight.shape[0] * per_word
        packing.check_width(qweight, bits, columns)
        block = whole_groups(qweight, scheme.block, columns)
        group_size = packing.group_of(qweight, block, columns)
        if rows % per_word:
            raise qweight.error(f"{rows} rows of {bits}-bit zero points do not fill int32 words")
        num_blocks = columns // block
        scales = module.need("scales", SCALE_DTYPES, (num_blocks, rows))
        qzeros = module.need("qzeros", ("I32",), (num_blocks, rows // per_word))
        g_idx = module.find("g_idx", ("I32",), (columns,))
        may_permute = g_idx is not None and num_blocks > 1
        codes = packing.abstract_affine(
            (rows, columns),
            bits,
            group_size,
            scales.dtype,
            has_offset=scheme.symmetric is not True,
            has_perm=may_permute,
        )
        scheme = dataclasses.replace(scheme, block=block)
        read = partial(self._read, scheme, group_size, qweight, qzeros, scales, g_idx)
        is_certain = scheme.symmetric is True and not may_permute
        return Matrix(f"GPTQ-INT{bits}", codes, read, is_certain)

    def _scheme_of(self, name: str) -> _Scheme:
        return next((scheme for pattern, scheme in self._dynamic if pattern(name)), self._scheme)

    def _read(
        self,
        scheme: _Scheme,
        group_size: int,
        qweight: Stored,
        qzeros: Stored,
        scales: Stored,
        g_idx: Stored | None,
    ) -> QuantizedArray:
        words = qweight.read()
        bits, rows = scheme.bits, words.shape[1]
        columns = len(words) * (32 // bits)
        perm = None if g_idx is None else packing.act_order(g_idx, scheme.block, columns)
        qvalue = packing.pack_rows(
            (rows, columns),
            bits,
            lambda block: packing.unpack_words(words[:, block].T, bits),
            perm,
        )
        zero = self._zeros(scheme, qzeros)
        spread = partial(
            packing.spread_groups, block=scheme.block, columns=columns, group_size=group_size
        )
        return packing.affine(
            qvalue, bits, spread(scales.read().T), spread(zero.T), group_size, perm
        )

    def _zeros(self, scheme: _Scheme, qzeros: Stored) -> np.ndarray:
        """The zero points, int32 `[blocks, O]`."""
        # The first format's writers subtract one from every zero point inside the word, borrows
        # included, so that only adding to the word gives them all back.
        words = qzeros.read().view(np.uint32)
        words = words + np.uint32(_ONE_PER_CODE[scheme.bits] * self._zero_bias)
        zero = packing.unpack_words(words, scheme.bits).astype(np.int32)
        middle = 1 << (scheme.bits - 1)
        if scheme.symmetric and (zero != middle).any():
            raise qzeros.error(
                f"holds the zero point {zero[zero != middle][0]}, but quantization_config in "
                f"config.json says sym: true, which means {middle}; correct one of them"
            )
        return zero


def parse_group_size(settings: Settings, key: str, value: object) -> int:
    """Returns weights per scale, -1 for whole rows; raises CheckpointError."""
    if type(value) is not int or not (value == -1 or (value > 0 and value % 16 == 0)):
        raise settings.error(key, "must be -1 (whole rows) or a positive multiple of 16")
    return value


def whole_groups(stored: Stored, block: int, columns: int) -> int:
    """Returns columns per group, for -1 all of them; raises CheckpointError for broken groups."""
    if block == -1:
        return columns
    if columns % block:
        raise stored.error(f"groups of {block} do not divide its width, {columns}")
    return block


def _parse_dynamic(settings: Settings, default: _Scheme) -> list[tuple[Pattern, _Scheme]]:
    """Overrides by pattern. Those that start with `-:` leave modules unquantized, as files show."""
    section = settings.section("dynamic")
    found = []
    for key in section.values if section else ():
        assert section is not None
        override = section.section(key)
        if not key.startswith("-:") and override is not None:
            pattern = Pattern(section, key, key.removeprefix("+:"))
            found.append((pattern, _Scheme.parse(override, default)))
    return found
