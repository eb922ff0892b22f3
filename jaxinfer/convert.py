"""`jaxinfer convert`: a checkpoint as a directory of safetensors, quantized or not.

Tensor by tensor, so a model larger than memory can be converted. What is written reads back as the
very arrays that quantizing at load would have made.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxinfer.checkpoint import Checkpoint, open_checkpoint, resolve_model
from jaxinfer.checkpoint.checkpoint import TensorInfo
from jaxinfer.checkpoint.directory import CONFIG, GENERATION_CONFIG
from jaxinfer.checkpoint.prequantized import CONFIG_KEYS
from jaxinfer.checkpoint.safetensors import FLOAT_DTYPES
from jaxinfer.checkpoint.safetensors_writer import SHARD_BYTES, Entry, SafetensorsWriter
from jaxinfer.config import ConfigError
from jaxinfer.quantization import (
    SCHEMES,
    QuantScheme,
    make_scheme,
    quantize_on_host,
    scheme_name,
    tensor_format,
)
from jaxinfer.quantized_array import QuantizedArray
from jaxinfer.stored_formats import BitsandbytesNf4, Jaxinfer, StoredFormat, stored_format
from jaxinfer.text.tokenizer import load_tokenizer
from kernels.quantized_matmul import QFormat

logger = logging.getLogger(__name__)

BITSANDBYTES_NF4 = "bitsandbytes-nf4"
DTYPES = ("float32", "bfloat16", "float16")
COPIED_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("chat_template.*", "additional_chat_templates/*.jinja", "LICENSE*"),
)
"""What a directory has beside weights and configurations that a copy should have as well."""

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `jaxinfer convert`."""
    parser.add_argument(
        "--input", required=True, metavar="MODEL", help="hub id, directory or .gguf file"
    )
    parser.add_argument("--revision", help="branch, tag or commit of a hub model")
    parser.add_argument(
        "--output", required=True, metavar="DIR", help="directory to make; it must not exist"
    )
    parser.add_argument(
        "--quantize",
        metavar="NAME",
        help=f"{', '.join(SCHEMES)} or {BITSANDBYTES_NF4} (default: floats)",
    )
    parser.add_argument(
        "--quant-group-size",
        type=int,
        choices=(16, 32, 64, 128),
        help="weights per scale, where the format leaves it open",
    )
    parser.add_argument(
        "--own-format",
        action="store_true",
        help="store all that quantizing at load makes, an 8-bit embedding too, for jaxinfer alone",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="of what is not quantized (default: as it is stored; float32 where it was quantized)",
    )


def run(args: argparse.Namespace) -> int:
    """Converts as the flags say; returns the exit code.

    Raises:
      ConfigError: a flag's value cannot be used, or the output exists.
      ValueError: the checkpoint cannot be used, or a format does not fit one of its matrices.
    """
    target = parse_target(args.quantize, args.quant_group_size, args.own_format)
    output = Path(args.output).expanduser()
    _refuse_existing(output)
    checkpoint = open_checkpoint(resolve_model(args.input, args.revision))
    num_bytes = convert(checkpoint, output, target, args.dtype, progress=True)
    print(f"{output}: {num_bytes / 1e6:.1f} MB of weights")
    return 0


@dataclass(frozen=True)
class Target:
    """What matrices become: formats, and how those are stored."""

    name: str
    scheme: QuantScheme
    storage: StoredFormat


def parse_target(
    name: str | None, group_size: int | None = None, own_format: bool = False
) -> Target | None:
    """Returns what `--quantize` asks for; None for floats.

    Args:
      name: of a scheme, or `bitsandbytes-nf4`.
      group_size: weights per scale, None for the scheme's own.
      own_format: stores every scheme in our own format, instead of a standard one if there is one.

    Raises:
      ConfigError: it is unknown, its groups are not free to choose, or flags contradict each other.
    """
    if name is None:
        if group_size is not None or own_format:
            raise ConfigError("quant_group_size and own_format go with quantize; give it as well")
        return None
    is_bitsandbytes = name.lower() == BITSANDBYTES_NF4
    if is_bitsandbytes and own_format:
        raise ConfigError(f"own_format: {BITSANDBYTES_NF4} is another format; choose nf4")
    try:
        name = "nf4" if is_bitsandbytes else scheme_name(name)
        scheme = make_scheme(name, group_size)
    except ValueError as error:
        raise ConfigError(f"quantize: {error}") from error
    if is_bitsandbytes:
        # Nothing but the layers' matrices is ever quantized there.
        return Target(
            BITSANDBYTES_NF4, replace(scheme, head=None, embedding=None), BitsandbytesNf4()
        )
    storage = Jaxinfer() if own_format else stored_format(name)
    if not isinstance(storage, Jaxinfer):
        scheme = replace(scheme, embedding=None)  # transformers cannot load one that is packed
    return Target(name, scheme, storage)


def convert(
    checkpoint: Checkpoint,
    output: Path,
    target: Target | None,
    dtype: str | None = None,
    *,
    progress: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Writes a checkpoint as a directory; it appears under its name once it is complete.

    Args:
      checkpoint: to read.
      output: must not exist, unless as an empty directory.
      target: None keeps every tensor a float.
      dtype: of what is not quantized; None keeps what is stored.
      progress: shows a bar.
      shard_bytes: of a file's data, at most.

    Returns:
      the bytes of weights written.

    Raises:
      ConfigError: the output exists, or its disk is too small.
      ValueError: the format does not fit a matrix.
    """
    _refuse_existing(output)
    infos = _used_tensors(checkpoint)
    plan = {name: _Planned.of(info, target, dtype) for name, info in infos.items()}
    stored = {info.dtype for info in infos.values() if info.loaded_bytes is not None}
    if target is not None and stored:
        logger.warning(
            "quantize %s: the checkpoint is already quantized (%s), so its weights are rounded "
            "twice; convert the unquantized model where there is one",
            target.name,
            ", ".join(sorted(stored)),
        )
    with _directory_in_the_making(output) as directory:
        _write_configs(checkpoint, directory, plan, target, dtype)
        _write_tokenizer(checkpoint, directory)
        entries = [planned.entries for planned in plan.values()]
        _refuse_full_disk(directory, sum(entry.num_bytes for group in entries for entry in group))
        writer = SafetensorsWriter(directory, entries, shard_bytes)
        total = sum(info.num_bytes for info in infos.values())
        with tqdm(
            total=total, unit="B", unit_scale=True, desc="Converting", disable=not progress
        ) as bar:
            for name, tensor in checkpoint.tensors():
                if name in plan:
                    for part, array in plan[name].arrays(tensor).items():
                        writer.write(part, array)
                    bar.update(infos[name].num_bytes)
        writer.finish()
    return writer.num_bytes


@dataclass(frozen=True)
class _Planned:
    """What becomes of one tensor."""

    name: str
    entries: list[Entry]
    fmt: QFormat | None
    storage: StoredFormat | None

    @staticmethod
    def of(info: TensorInfo, target: Target | None, dtype: str | None) -> _Planned:
        fmt = None if target is None else tensor_format(info.name, info.shape, target.scheme)
        if fmt is not None and target is not None:
            rows, columns = info.shape
            entries = target.storage.entries(info.name, (rows, columns), fmt)
            return _Planned(info.name, entries, fmt, target.storage)
        kept = info.dtype if info.dtype in FLOAT_DTYPES and info.loaded_bytes is None else "F32"
        if dtype is not None:
            kept = next(name for name, known in FLOAT_DTYPES.items() if known.name == dtype)
        return _Planned(info.name, [Entry(info.name, kept, info.shape)], None, None)

    def arrays(self, tensor: np.ndarray | QuantizedArray) -> dict[str, np.ndarray]:
        """Returns the arrays of `entries`."""
        floats = tensor.dequantize() if isinstance(tensor, QuantizedArray) else tensor
        if self.fmt is None or self.storage is None:
            return {self.name: floats.astype(FLOAT_DTYPES[self.entries[0].dtype], copy=False)}
        return self.storage.arrays(self.name, quantized_array(floats, self.fmt))


def quantized_array(weight: np.ndarray, fmt: QFormat) -> QuantizedArray:
    """Returns a matrix rounded to a format, as a checkpoint would hold it."""
    codes = quantize_on_host(weight, fmt)
    return QuantizedArray(
        codes.qvalue,
        codes.scale,
        codes.offset,
        codes.codebook,
        code=codes.code,
        group_size=codes.group_size,
        activations=codes.activations,
    )


def _used_tensors(checkpoint: Checkpoint) -> dict[str, TensorInfo]:
    """The tensors to write: all but a copy of the embedding that the model would not use."""
    infos = dict(checkpoint.tensor_infos)
    if checkpoint.hf_config.get("tie_word_embeddings") and "model.embed_tokens.weight" in infos:
        infos.pop("lm_head.weight", None)
    return infos


def _refuse_existing(output: Path) -> None:
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ConfigError(f"output {str(output)!r} exists and is not an empty directory")
    if not output.absolute().parent.is_dir():
        raise ConfigError(f"output {str(output)!r}: its parent directory does not exist")


def _refuse_full_disk(directory: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(directory).free
    if num_bytes > free:
        raise ConfigError(
            f"output: {num_bytes / 1e9:.1f} GB of weights do not fit on its disk, which has "
            f"{free / 1e9:.1f} GB free"
        )


@contextmanager
def _directory_in_the_making(output: Path) -> Iterator[Path]:
    """Gives a directory beside the output that is renamed to it at the end, or removed."""
    partial = output.absolute().with_name(f".{output.absolute().name}.{os.getpid()}.partial")
    partial.mkdir()
    try:
        yield partial
        if output.exists():
            output.rmdir()
        partial.rename(output.absolute())
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_configs(
    checkpoint: Checkpoint,
    directory: Path,
    plan: dict[str, _Planned],
    target: Target | None,
    dtype: str | None,
) -> None:
    config = {key: value for key, value in checkpoint.hf_config.items() if key not in CONFIG_KEYS}
    if checkpoint.model_type in _ARCHITECTURES:
        config.setdefault("architectures", [_ARCHITECTURES[checkpoint.model_type]])
    if dtype is not None or not {"dtype", "torch_dtype"} & config.keys():
        config.pop("dtype", None)
        config["torch_dtype"] = dtype or "float32"  # the name that every version understands
    if target is not None:
        matrices = {n: p for n, p in plan.items() if len(checkpoint.tensor_infos[n].shape) == 2}
        config["quantization_config"] = target.storage.config(
            {name: planned.fmt for name, planned in matrices.items() if planned.fmt is not None},
            [name for name, planned in matrices.items() if planned.fmt is None],
        )
    _write_json(directory / CONFIG, config)
    if checkpoint.generation_config:
        _write_json(directory / GENERATION_CONFIG, checkpoint.generation_config)


def _write_tokenizer(checkpoint: Checkpoint, directory: Path) -> None:
    """Copies the tokenizer's files, or makes them of what a GGUF file says."""
    source = checkpoint.tokenizer_source
    if isinstance(source, Path):
        for pattern in COPIED_FILES:
            for path in sorted(source.glob(pattern)):
                if path.is_file():
                    copy = directory / path.relative_to(source)
                    copy.parent.mkdir(exist_ok=True)
                    shutil.copyfile(path, copy)
        return
    tokenizer = load_tokenizer(source)
    (directory / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    config |= tokenizer.special_tokens
    template = tokenizer.chat_template
    if isinstance(template, dict):
        config["chat_template"] = [
            {"name": name, "template": text} for name, text in template.items()
        ]
    elif template is not None:
        config["chat_template"] = template
    _write_json(directory / "tokenizer_config.json", config)


def _write_json(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
