"""The masks that a step's program takes: of the tokens that each of its rows may sample."""

from __future__ import annotations

from functools import cache

import jax
import numpy as np
from jax.sharding import Sharding

from jaxinfer.token_masks import num_words


class MaskBuffers:
    """Host arrays for the masks of a step, and zeros on the device for all steps that have none.

    The host's take turns: with pipeline depth 1 those of the previous step may still be read while
    the next are filled.

    Args:
      most_rows: of any program.
      vocab_size: ids that can be sampled.
      sharding: of what lies on the device.
    """

    def __init__(self, most_rows: int, vocab_size: int, sharding: Sharding) -> None:
        self._num_words = num_words(vocab_size)
        self._sharding = sharding
        # Memory is taken when they are first written.
        self._arrays = np.zeros((3, most_rows, self._num_words), np.uint32)
        self._turn = 0
        self.none = cache(self._none)

    def abstract(self, num_rows: int) -> jax.ShapeDtypeStruct:
        """Shape, type and sharding of what a program of `num_rows` takes."""
        shape = (num_rows, self._num_words)
        return jax.ShapeDtypeStruct(shape, np.uint32, sharding=self._sharding)

    def next(self, num_rows: int) -> np.ndarray:
        """Returns masks that allow everything."""
        self._turn = (self._turn + 1) % len(self._arrays)
        masks = self._arrays[self._turn, :num_rows]
        masks.fill(np.uint32(0xFFFFFFFF))
        return masks

    def _none(self, num_rows: int) -> jax.Array:
        """Returns what a step without masks hands over; on the device, and always the same."""
        return jax.device_put(np.zeros((num_rows, self._num_words), np.uint32), self._sharding)
