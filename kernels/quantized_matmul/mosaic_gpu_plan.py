"""How a call of quantized matmul is cut up for the Mosaic GPU kernel: what is static about it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels import device
from kernels.quantized_matmul.format import QTensor
from kernels.quantized_matmul.mosaic_gpu_codes import ROWS, Kind

_TOKEN_TILES = (8, 16, 32, 64, 128, 256)
_SHARED_BYTES = 216 * 1024  # of the 227 KiB a block may use; barriers and alignment take the rest


@dataclass(frozen=True)
class Config:
    """How a call is cut up.

    Attributes:
      num_warpgroups: that multiply, 64 rows of the weight each; one more copies.
      tile_tokens: rows of x at a time: wgmma's N.
      tile_in: columns per step: 64, 128 or 256.
      num_stages: steps whose operands are in shared memory or on their way there.
      steps_per_block: consecutive steps that a block does, across output tiles. Blocks that share a
        tile write partial sums, which are added up afterwards.
      scale_codes: scales multiply codes in registers, rounding them to bfloat16, rather than the
        float32 sums of each group, which costs more the more tokens there are per group.
    """

    num_warpgroups: int
    tile_tokens: int
    tile_in: int
    num_stages: int
    steps_per_block: int
    scale_codes: bool

    @classmethod
    def for_call(cls, num_rows: int, w: QTensor, num_cores: int, is_exact: bool) -> Config:
        """Returns a config that is legal for every supported call.

        Args:
          num_rows: of x as it is multiplied.
          num_cores: multiprocessors to fill.
          is_exact: codes must not be rounded.
        """
        num_out, num_in = w.shape
        is_grouped = w.group_size < num_in
        widest = 128 if is_exact and is_grouped else 256  # two tiles of sums fit in registers
        tile_tokens = min(
            (tile for tile in _TOKEN_TILES if tile <= widest),
            key=lambda tile: (-(-num_rows // tile) * tile, -tile),
        )
        is_decode = tile_tokens <= 64
        # A thread's operations per weight, to scale sums.
        operations = tile_tokens / w.group_size * (1 if w.offset is None else 2)
        most = 2 if tile_tokens < 64 else 1  # with more, two tiles of sums do not fit in registers
        scale_codes = is_grouped and not is_exact and (operations > most or not is_decode)
        counts = (4, 3, 2, 1) if is_decode else (2, 1)
        num_warpgroups = next(n for n in counts if num_out % (n * ROWS) == 0)
        # As wide as rows of 128 bytes, if what is unpacked at once fits in registers.
        is_large = not w.is_4bit or (w.codebook is not None and w.group_size < 64)
        widths = (128, 64) if is_large or tile_tokens >= 64 else (256, 128, 64)
        tile_in = next(n for n in (widths if is_decode else (64,)) if num_in % n == 0)

        groups = max(tile_in // w.group_size, 1) if is_grouped else 0
        row_bytes = tile_in // (2 if w.is_4bit else 1)
        stage_bytes = num_warpgroups * ROWS * (row_bytes + 8 * groups)
        stage_bytes += tile_tokens * tile_in * 2 + max(tile_tokens, 32) * 4 * groups
        num_stages = max(2, min(8, _SHARED_BYTES // stage_bytes))

        steps = num_in // tile_in
        num_tiles = num_out // (num_warpgroups * ROWS) * -(-num_rows // tile_tokens)
        rounds = -(-num_tiles // num_cores)
        # Partial sums cost more the more tokens there are.
        if num_tiles >= (0.95 if is_decode else 0.7) * rounds * num_cores:
            steps_per_block = steps * rounds
        else:
            steps_per_block = max(-(-num_tiles * steps // num_cores), min(steps, 2))
        return cls(num_warpgroups, tile_tokens, tile_in, num_stages, steps_per_block, scale_codes)


@dataclass(frozen=True)
class Plan:
    """What is static about a call.

    Attributes:
      tiles: output tiles, (of the weight's rows, of tokens).
      group_size: columns per scale within a step; 0 if the whole row has one.
      integers: int8 codes meet int8 x, straight from shared memory.
      width: columns per wgmma call, all of one group.
    """

    config: Config
    kind: Kind
    num_out: int
    num_in: int
    tiles: tuple[int, int]
    group_size: int
    has_offset: bool
    integers: bool
    width: int
    interpret: Any

    @classmethod
    def of(cls, config: Config, w: QTensor, num_rows: int) -> Plan:
        """Returns the plan for `num_rows` rows of x; whether it is interpreted is as of now."""
        is_grouped = w.group_size < w.shape[1]
        span = min(w.group_size, config.tile_in)
        # wgmma takes at least 32 columns of integers.
        integers = w.code == "int8" and w.activations == "int8" and span >= 32
        return cls(
            config,
            "codebook" if w.codebook is not None else w.code,
            *w.shape,
            tiles=(
                w.shape[0] // (config.num_warpgroups * ROWS),
                -(-num_rows // config.tile_tokens),
            ),
            group_size=span if is_grouped else 0,
            has_offset=is_grouped and w.offset is not None,
            integers=integers,
            width=min(span, 128 if integers else 64),
            interpret=device.interpret_mode(),
        )

    @property
    def tile_out(self) -> int:
        """Rows of the weight in an output tile."""
        return self.config.num_warpgroups * ROWS

    @property
    def steps(self) -> int:
        """Steps that an output tile takes."""
        return self.num_in // self.config.tile_in

    @property
    def scale_codes(self) -> bool:
        """Whether scales multiply codes."""
        return self.config.scale_codes and self.group_size > 0 and not self.integers

    @property
    def parts(self) -> np.ndarray:
        """How many blocks add to each output tile."""
        first_steps = np.arange(math.prod(self.tiles)) * self.steps
        block = self.config.steps_per_block
        return (first_steps + self.steps - 1) // block - first_steps // block + 1

    @property
    def num_parts(self) -> int:
        """The most blocks that add to an output tile."""
        return int(self.parts.max())
