"""What XLA:CPU's programs take of the host's memory, told before any is compiled."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jaxinfer.checkpoint.checkpoint import TensorInfo
from jaxinfer.config import EngineConfig
from jaxinfer.nn.config import DecoderConfig
from jaxinfer.platforms import Platform
from jaxinfer.pool_size import decode_steps, token_budget
from jaxinfer.quantization import QuantScheme, tensor_format
from jaxinfer.runner.buckets import make_ladders
from kernels.decoder_layers import cpu as fused_layers

CPU_COMPILER_BYTES = 36_000_000
CPU_PROGRAM_BYTES = 12_500_000
CPU_LAYER_PROGRAM_BYTES = {"fused": 0, "native": 500_000, "xla": 2_300_000}
"""Host memory that compiling leaves, and of each XLA:CPU program, besides and for each layer.

XLA tells nothing of it. Growth of the process while 4, 5 or 6 programs were compiled, or loaded
from the cache, whichever is more, with jaxlib 0.10.2: SmolLM2-135M 82, 94, 106 MB and gemma-3-270m
75, 83, 94 MB where one call runs all layers and one chooses tokens, and 4 programs of SmolLM2's 30
layers 131 MB where each is calls of C++ kernels, 282 MB where XLA attends, 344 MB where it
multiplies too.
"""


def program_bytes(
    config: EngineConfig, model: DecoderConfig, weight_bytes: int, layers: str
) -> int:
    """Host memory of all programs of XLA:CPU, whose layers are of a kind of `layers_kind`."""
    steps, bulk_rows = decode_steps(config, "cpu", weight_bytes)
    ladders = make_ladders(
        "cpu",
        config.max_num_seqs,
        token_budget(config, "cpu"),
        bulk_rows if steps > 1 else 0,
        config.speculation != "off",
        config.deterministic,
    )
    num_programs = len(ladders.decode) + len(ladders.bulk) + len(ladders.tokens)
    each = CPU_PROGRAM_BYTES + CPU_LAYER_PROGRAM_BYTES[layers] * model.num_layers
    return CPU_COMPILER_BYTES + num_programs * each


def layers_kind(
    config: EngineConfig,
    infos: Mapping[str, TensorInfo],
    where: Platform,
    scheme: QuantScheme | None,
) -> str:
    """Returns what a CPU's layers become, of CPU_LAYER_PROGRAM_BYTES: see `nn.fused_layers`."""
    is_native = fused_layers.unavailable() is None
    if not is_native or not {config.attention, config.matmul} <= {None, "cpu"}:
        return "xla"
    splits = where.num_devices > 1 or where.dtype != np.float32 or config.kv_cache_dtype == "int8"
    matrices = [info for info in infos.values() if "_proj." in info.name and len(info.shape) == 2]
    if splits or not all(_is_plain_codes(info, where, scheme) for info in matrices):
        return "native"
    return "fused"


def _is_plain_codes(info: TensorInfo, where: Platform, scheme: QuantScheme | None) -> bool:
    """Whether a matrix is multiplied as codes, by activations as they are, columns in order."""
    if scheme is not None and (fmt := tensor_format(info.name, info.shape, scheme)) is not None:
        return fmt.activations == "float"
    if info.codes is None or not where.keeps_quantized or not info.is_certain:
        return False
    return info.codes.perm is None and info.codes.activations == "float"
