"""AWQ as AutoAWQ saves it for its gemm kernel: words of eight outputs, their halves interleaved."""

from __future__ import annotations

from functools import partial

import numpy as np

from jaxinfer.checkpoint.prequantized import packing
from jaxinfer.checkpoint.prequantized.gptq import parse_group_size, whole_groups
from jaxinfer.checkpoint.prequantized.method import SCALE_DTYPES, Matrix, Module, Stored
from jaxinfer.checkpoint.prequantized.settings import Settings
from jaxinfer.quantized_array import QuantizedArray

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of a word's eight outputs each of its 4-bit codes belongs to, lowest bits first."""


class Awq:
    """quant_method `awq`, version `gemm`."""

    parts = ("qweight", "qzeros", "scales")
    ignored = ()

    def __init__(self, settings: Settings) -> None:
        """Checks a quantization_config; raises CheckpointError."""
        values = settings.values
        settings.integer("w_bit" if "w_bit" in values else "bits", (4,))
        key = "q_group_size" if "q_group_size" in values else "group_size"
        self._block = parse_group_size(settings, key, values.get(key))
        settings.text("backend", ("autoawq", "gptqmodel"), "autoawq")
        formats = [key for key in ("version", "format", "checkpoint_format") if key in values]
        for key in formats:
            settings.text(key, ("gemm",), "gemm")

    def matrix(self, module: Module) -> Matrix:
        """Returns what `module.weight` is; raises CheckpointError."""
        qweight = module.need("qweight", ("I32",), (None, None))
        rows, columns = qweight.shape[1] * 8, qweight.shape[0]
        packing.check_width(qweight, 4, columns)
        block = whole_groups(qweight, self._block, columns)
        group_size = packing.group_of(qweight, block, columns)
        num_blocks = columns // block
        scales = module.need("scales", SCALE_DTYPES, (num_blocks, rows))
        qzeros = module.need("qzeros", ("I32",), (num_blocks, rows // 8))
        shape = rows, columns
        codes = packing.abstract_affine(shape, 4, group_size, scales.dtype, has_offset=True)
        read = partial(_read, block, group_size, qweight, qzeros, scales)
        return Matrix("AWQ-INT4", codes, read, is_certain=False)


def _read(
    block: int, group_size: int, qweight: Stored, qzeros: Stored, scales: Stored
) -> QuantizedArray:
    words = qweight.read()
    columns, rows = len(words), words.shape[1] * 8
    qvalue = packing.pack_rows(
        (rows, columns), 4, lambda rows: _unpack(words[:, rows.start // 8 : rows.stop // 8])
    )
    spread = partial(packing.spread_groups, block=block, columns=columns, group_size=group_size)
    zero = _unpack(qzeros.read()).astype(np.int32)
    return packing.affine(qvalue, 4, spread(scales.read().T), spread(zero), group_size)


def _unpack(words: np.ndarray) -> np.ndarray:
    """Returns the codes in words `[I, O / 8]` as uint8 `[O, I]`."""
    raw = np.ascontiguousarray(words.T).view(np.uint8).reshape(words.shape[1], len(words), 4)
    codes = np.empty((words.shape[1], 8, len(words)), np.uint8)
    for place, row in enumerate(ORDER):
        byte = raw[:, :, place // 2]
        codes[:, row] = byte >> 4 if place % 2 else byte & 0xF
    return codes.reshape(-1, len(words))
