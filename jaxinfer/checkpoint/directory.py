"""A directory in Hugging Face's layout as a Checkpoint: config files and safetensors.

The index decides what is read. Nothing outside the directory is opened, and nothing but JSON and
safetensors is: no pickle, no remote code.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.checkpoint.checkpoint import (
    CheckpointError,
    TensorInfo,
    name_some,
    stream_tensors,
)
from jaxinfer.checkpoint.prequantized import find_method, group_modules, quantized_weight
from jaxinfer.checkpoint.prequantized.method import Method, Stored, Weight
from jaxinfer.checkpoint.safetensors import FLOAT_DTYPES, SafetensorsFile, parse_json_object
from jaxinfer.quantized_array import QuantizedArray

logger = logging.getLogger(__name__)

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_JSON_BYTES = 1 << 25
BUFFER_SUFFIXES = (".position_ids", ".attn.bias", ".attn.masked_bias")
"""Integer buffers that old exports saved beside the weights; no model reads them."""

_Tensors = dict[str, Stored]


class DirectoryCheckpoint:
    """A directory with `config.json` and its weights in safetensors, in one file or in shards."""

    def __init__(self, path: Path) -> None:
        """Opens and checks every file the weights need; raises CheckpointError."""
        self.path = path
        self.hf_config = self._read_json(CONFIG)
        model_type = self.hf_config.get("model_type")
        if not isinstance(model_type, str) or not model_type:
            raise CheckpointError(f"{path / CONFIG}: model_type is {model_type!r}, not a name")
        self.model_type = model_type
        method = find_method(self.hf_config, path / CONFIG)
        has_generation_config = (path / GENERATION_CONFIG).exists()
        self.generation_config = self._read_json(GENERATION_CONFIG) if has_generation_config else {}
        self.tokenizer_source = path
        stored = self._find_tensors()
        self._weights = _plain_weights(stored) if method is None else _weights(stored, method)
        self.tensor_infos = {name: weight.info for name, weight in self._weights.items()}

    def tensors(self, progress: bool = False) -> Iterator[tuple[str, np.ndarray | QuantizedArray]]:
        """Yields (name, read-only view of the file or QuantizedArray), one weight at a time."""
        return stream_tensors(self.tensor_infos, self._read, self._release, progress)

    def _read(self, name: str) -> np.ndarray | QuantizedArray:
        return self._weights[name].read()

    def _release(self, name: str) -> None:
        for source in self._weights[name].sources:
            source.release()

    def _find_tensors(self) -> _Tensors:
        """Every tensor of the checkpoint with the file that holds it."""
        present = sorted(entry.name for entry in self.path.glob("*.safetensors"))
        if (self.path / INDEX).exists():
            return self._indexed_tensors(present)
        if SINGLE_FILE not in present:
            raise CheckpointError(self._no_weights(present))
        self._warn_ignored([name for name in present if name != SINGLE_FILE])
        file = SafetensorsFile(self._contained(SINGLE_FILE))
        return {name: Stored(file, tensor) for name, tensor in file.tensors.items()}

    def _no_weights(self, present: list[str]) -> str:
        if present:
            return (
                f"{self.path}: holds {name_some(present)} but neither {SINGLE_FILE} nor {INDEX}, "
                "which says what belongs together"
            )
        if any(self.path.glob("*.gguf")):
            return f"{self.path}: holds GGUF files: give the path of the one to load"
        if any(self.path.glob("*.bin")) or any(self.path.glob("*.pt*")):
            return (
                f"{self.path}: holds only pickled weights (.bin, .pt), which can run code and are "
                "never read; convert them with transformers: AutoModelForCausalLM"
                ".from_pretrained(DIR).save_pretrained(NEW_DIR)"
            )
        return f"{self.path}: holds no weights: neither {SINGLE_FILE} nor {INDEX}"

    def _indexed_tensors(self, present: list[str]) -> _Tensors:
        where = self.path / INDEX
        weight_map = self._read_json(INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{where}: weight_map is missing, empty or not an object")
        if not all(isinstance(shard, str) for shard in weight_map.values()):
            raise CheckpointError(f"{where}: weight_map names a file that is not a string")
        shards = list(dict.fromkeys(weight_map.values()))
        paths = {shard: self._contained(shard) for shard in shards}
        absent = [shard for shard in shards if not paths[shard].exists()]
        if absent:
            raise CheckpointError(
                f"{where}: {len(absent)} of {len(shards)} files are missing: {name_some(absent)}"
            )
        self._warn_ignored([name for name in present if name not in paths])
        files = {shard: SafetensorsFile(paths[shard]) for shard in shards}
        _check_index(where, weight_map, files)
        return {
            name: Stored(files[shard], files[shard].tensors[name])
            for name, shard in weight_map.items()
        }

    def _warn_ignored(self, names: list[str]) -> None:
        if names:
            logger.warning("%s: ignoring files outside the index: %s", self.path, names)

    def _read_json(self, name: str) -> dict[str, Any]:
        path = self._contained(name)
        try:
            if path.stat().st_size > MAX_JSON_BYTES:
                raise CheckpointError(f"{path}: larger than {MAX_JSON_BYTES} bytes")
            raw = path.read_bytes()
        except FileNotFoundError as error:
            raise CheckpointError(f"{path}: missing; is {self.path} a model directory?") from error
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
        return parse_json_object(raw, str(path))

    def _contained(self, name: str) -> Path:
        """Returns the path of a file of this directory; raises CheckpointError for any other.

        The hub's cache links snapshots to files of the same repository: its root is the bound.
        """
        root = self.path.resolve()
        if root.parent.name == "snapshots" and (root.parent.parent / "blobs").is_dir():
            root = root.parent.parent
        if name in ("", ".", "..") or "\0" in name or Path(name).name != name:
            raise CheckpointError(f"{self.path}: {name!r} is not the plain name of a file in it")
        try:
            target = (self.path / name).resolve()
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"{self.path / name}: cannot be resolved") from error
        if not target.is_relative_to(root):
            raise CheckpointError(
                f"{self.path / name}: is a link to a file outside the directory; copy the file"
            )
        return self.path / name


def _plain_weights(stored: _Tensors) -> dict[str, Weight]:
    """Drops known integer buffers and refuses every other tensor that is not a float."""
    weights: dict[str, Weight] = {}
    for name, tensor in stored.items():
        if tensor.dtype in FLOAT_DTYPES:
            info = TensorInfo(name, tensor.shape, tensor.dtype, tensor.tensor.num_bytes)
            weights[name] = Weight(info, tensor.read, (tensor,))
        elif not name.endswith(BUFFER_SUFFIXES):
            raise tensor.error(
                f"has the dtype {tensor.dtype}; supported are {', '.join(FLOAT_DTYPES)}, and "
                "others in weights that quantization_config in config.json describes"
            )
    return weights


def _weights(stored: _Tensors, method: Method) -> dict[str, Weight]:
    """The weights of a quantized checkpoint, in file order: a matrix where its first tensor is."""
    ignored = dict.fromkeys(name for name in stored if name.endswith(method.ignored))
    if ignored:
        logger.warning(
            "scales of activations and caches are not used: %s", name_some(list(ignored))
        )
    stored = {name: tensor for name, tensor in stored.items() if name not in ignored}
    modules = group_modules(stored, method)
    plain = _plain_weights({n: tensor for n, tensor in stored.items() if n not in modules})
    weights: dict[str, Weight] = {}
    for name in stored:
        if name in plain:
            weights[name] = plain[name]
        elif name in modules and (target := f"{modules[name].name}.weight") not in weights:
            weights[target] = quantized_weight(modules[name], method)
    return weights


def _check_index(
    where: Path, weight_map: dict[str, str], files: dict[str, SafetensorsFile]
) -> None:
    """Compares an index with its shards: each tensor in exactly the file the index says."""
    lost = [name for name, shard in weight_map.items() if name not in files[shard].tensors]
    if lost:
        first = weight_map[lost[0]]
        raise CheckpointError(
            f"{where}: {len(lost)} tensors are not in the file it names for them, such as {first}: "
            f"{name_some(lost)}"
        )
    surplus = []
    for shard, file in files.items():
        for name in file.tensors:
            if name not in weight_map:
                surplus.append(name)
            elif weight_map[name] != shard:
                raise CheckpointError(
                    f"{where}: tensor {name!r} is in two files: {weight_map[name]} and {shard}"
                )
    if surplus:
        logger.warning("%s: ignoring tensors outside the index: %s", where, name_some(surplus))
