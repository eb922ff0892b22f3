"""How `jaxinfer convert` stores quantized matrices: in which tensors, and what config.json says.

Each format is known by what it reads back as: the same QuantizedArray.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxinfer.checkpoint.prequantized.stored import QUANT_METHOD, VERSION, stored_arrays
from jaxinfer.checkpoint.safetensors_writer import Entry
from jaxinfer.quantized_array import QuantizedArray, unpack_codes
from kernels.quantized_matmul import QFormat

_SCALES = {"float32": "F32", "float16": "F16"}
_NF4_STATE = "quant_state.bitsandbytes__nf4"
_NF4_BLOCKS = (64, 128)
_COMPRESSED_FORMATS = {"int8": "pack-quantized", "int4": "pack-quantized"}
_COMPRESSED_FORMATS |= {"w8a8": "int-quantized", "fp8": "float-quantized"}


@runtime_checkable
class StoredFormat(Protocol):
    """One way to store the quantized matrices of a model."""

    def entries(self, name: str, shape: tuple[int, int], fmt: QFormat) -> list[Entry]:
        """Returns the tensors that will stand for the matrix `name`; raises ValueError."""

    def arrays(self, name: str, weight: QuantizedArray) -> dict[str, np.ndarray]:
        """Returns those tensors."""

    def config(self, formats: Mapping[str, QFormat], floats: Sequence[str]) -> dict[str, Any]:
        """Returns the quantization_config.

        Args:
          formats: of the quantized matrices, by name.
          floats: names of the matrices that are not quantized.
        """


class CompressedTensors:
    """compressed-tensors with symmetric codes, as llm-compressor writes it and vLLM reads it."""

    def __init__(self, storage: str) -> None:
        """Takes one of compressed-tensors' formats: `pack-`, `int-` or `float-quantized`."""
        self._storage = storage

    def entries(self, name: str, shape: tuple[int, int], fmt: QFormat) -> list[Entry]:
        """Returns codes, in words of 32 bits where they are packed, scales, and then the shape."""
        rows, columns = shape
        module = name.removesuffix(".weight")
        scale = Entry(
            f"{module}.weight_scale", "F32", (rows, columns // (fmt.group_size or columns))
        )
        if self._storage != "pack-quantized":
            return [Entry(name, "F8_E4M3" if fmt.code == "fp8" else "I8", shape), scale]
        per_word = 8 if fmt.code == "int4" else 4
        if columns % per_word:
            raise ValueError(
                f"tensor {name}: {columns} columns of {fmt.code} codes do not fill 32-bit words, "
                "as the format has it; choose another --quantize"
            )
        return [
            Entry(f"{module}.weight_packed", "I32", (rows, columns // per_word)),
            scale,
            Entry(f"{module}.weight_shape", "I64", (2,)),
        ]

    def arrays(self, name: str, weight: QuantizedArray) -> dict[str, np.ndarray]:
        """Returns the tensors of `entries`."""
        module = name.removesuffix(".weight")
        scale = {f"{module}.weight_scale": weight.scale}
        if self._storage != "pack-quantized":
            return {name: weight.qvalue} | scale
        if weight.is_4bit:
            codes = unpack_codes(weight.qvalue)
            raw = codes[:, ::2] | (codes[:, 1::2] << 4)
        else:
            raw = weight.qvalue.view(np.uint8) ^ np.uint8(0x80)
        packed = np.ascontiguousarray(raw).view("<i4")
        shape = np.array(weight.shape, "<i8")
        return {f"{module}.weight_packed": packed, f"{module}.weight_shape": shape} | scale

    def config(self, formats: Mapping[str, QFormat], floats: Sequence[str]) -> dict[str, Any]:
        """Returns one group of modules for each format there is."""
        modules: dict[QFormat, list[str]] = {}
        for name, fmt in formats.items():
            modules.setdefault(fmt, []).append(name.removesuffix(".weight"))
        targets = _targets(list(modules.values()))
        groups = {
            f"group_{number}": {"targets": targets[number], **_compressed_scheme(fmt)}
            for number, fmt in enumerate(modules)
        }
        return {
            "quant_method": "compressed-tensors",
            "format": self._storage,
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": [name.removesuffix(".weight") for name in floats if "embed" not in name],
            "kv_cache_scheme": None,
        }


def _targets(groups: Sequence[list[str]]) -> list[list[str]]:
    """Returns patterns by the last part of names, or full names where those do not tell apart."""
    endings = [{name.rsplit(".", 1)[-1] for name in names} for names in groups]
    if sum(map(len, endings)) > len(set().union(*endings)):
        return [list(names) for names in groups]
    return [[f"re:.*{ending}$" for ending in sorted(of_group)] for of_group in endings]


def _compressed_scheme(fmt: QFormat) -> dict[str, Any]:
    weights = {
        "num_bits": 4 if fmt.code == "int4" else 8,
        "type": "float" if fmt.code == "fp8" else "int",
        "symmetric": True,
        "strategy": "channel" if fmt.group_size is None else "group",
        "group_size": fmt.group_size,
        "dynamic": False,
    }
    activations = None
    if fmt.activations == "int8":
        activations = {
            "num_bits": 8,
            "type": "int",
            "symmetric": True,
            "strategy": "token",
            "dynamic": True,
        }
    return {"weights": weights, "input_activations": activations, "output_activations": None}


class BitsandbytesNf4:
    """What bitsandbytes saves for load_in_4bit with nf4 and without a second quantization."""

    def entries(self, name: str, shape: tuple[int, int], fmt: QFormat) -> list[Entry]:
        """Returns codes in one column, a scale for each block, the table, and a state in JSON."""
        if fmt.group_size not in _NF4_BLOCKS:
            raise ValueError(
                f"tensor {name}: rows of {shape[1]} would need blocks of {fmt.group_size}, and "
                f"bitsandbytes has {_NF4_BLOCKS[0]} or more; choose nf4"
            )
        size = prod(shape)
        return [
            Entry(name, "U8", (size // 2, 1)),
            Entry(f"{name}.absmax", "F32", (size // fmt.group_size,)),
            Entry(f"{name}.quant_map", "F32", (16,)),
            Entry(f"{name}.{_NF4_STATE}", "U8", (len(_nf4_state(shape, fmt.group_size)),)),
        ]

    def arrays(self, name: str, weight: QuantizedArray) -> dict[str, np.ndarray]:
        """Returns the tensors of `entries`; of two codes in a byte the first is the high one."""
        assert weight.codebook is not None
        codes = unpack_codes(weight.qvalue)
        state = _nf4_state(weight.shape, weight.group_size)
        return {
            name: ((codes[:, ::2] << 4) | codes[:, 1::2]).reshape(-1, 1),
            f"{name}.absmax": weight.scale.reshape(-1),
            f"{name}.quant_map": weight.codebook,
            f"{name}.{_NF4_STATE}": np.frombuffer(state, np.uint8),
        }

    def config(self, formats: Mapping[str, QFormat], floats: Sequence[str]) -> dict[str, Any]:
        """Returns what transformers' BitsAndBytesConfig reads."""
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": False,
            "bnb_4bit_compute_dtype": "float32",
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": ["lm_head"],
        }


def _nf4_state(shape: tuple[int, ...], block: int) -> bytes:
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "float32", "shape": list(shape)}
    return json.dumps(state).encode()


class Jaxinfer:
    """The arrays of a QuantizedArray as they are; nobody else reads it."""

    def entries(self, name: str, shape: tuple[int, int], fmt: QFormat) -> list[Entry]:
        """Returns codes, scales, and what else the format has."""
        rows, columns = shape
        groups = (rows, columns // (fmt.group_size or columns))
        codes = Entry(f"{name}.qvalue", "I8", shape)
        if fmt.code.endswith("int4"):
            codes = Entry(f"{name}.qvalue", "U8", (rows, columns // 2))
        entries = [codes, Entry(f"{name}.scale", _SCALES[fmt.scale_dtype], groups)]
        if fmt.has_offset:
            entries.append(Entry(f"{name}.offset", _SCALES[fmt.scale_dtype], groups))
        if fmt.codebook is not None:
            entries.append(Entry(f"{name}.codebook", "F32", (len(fmt.codebook),)))
        return entries

    def arrays(self, name: str, weight: QuantizedArray) -> dict[str, np.ndarray]:
        """Returns the tensors of `entries`."""
        return stored_arrays(name, weight)

    def config(self, formats: Mapping[str, QFormat], floats: Sequence[str]) -> dict[str, Any]:
        """Returns what activations become: the tensors say the rest."""
        activations = {fmt.activations for fmt in formats.values()}
        return {
            "quant_method": QUANT_METHOD,
            "version": VERSION,
            "activations": "int8" if "int8" in activations else "float",
        }


def stored_format(scheme: str) -> StoredFormat:
    """Returns how the matrices of a scheme are stored: in a standard format where there is one."""
    if scheme in _COMPRESSED_FORMATS:
        return CompressedTensors(_COMPRESSED_FORMATS[scheme])
    return Jaxinfer()
