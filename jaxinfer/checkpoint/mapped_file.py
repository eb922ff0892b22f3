"""A file's bytes mapped into memory, read-only: views instead of copies."""

from __future__ import annotations

import math
import mmap
import stat
from pathlib import Path

import numpy as np

from jaxinfer.checkpoint.checkpoint import CheckpointError


class MappedFile:
    """A regular, non-empty file mapped read-only. Views keep the mapping alive."""

    def __init__(self, path: Path) -> None:
        """Maps `path`; raises CheckpointError where it is missing, unreadable, empty or no file."""
        self.path = path
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode) or status.st_size == 0:
                raise CheckpointError(f"{path}: empty, or not a regular file")
            with path.open("rb") as file:
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
        self.size = len(self.data)

    def view(self, dtype: np.dtype, shape: tuple[int, ...], offset: int) -> np.ndarray:
        """Returns a read-only view of `shape` at byte `offset`."""
        return np.frombuffer(self.data, dtype, math.prod(shape), offset).reshape(shape)

    def release(self, offset: int, num_bytes: int) -> None:
        """Lets the kernel drop the pages wholly inside a range; views still read correctly."""
        begin = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (offset + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - begin
        if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self.data.madvise(mmap.MADV_DONTNEED, begin, length)
