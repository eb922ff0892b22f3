"""Checkpoints: from a model's name to a stream of (Hugging Face name, numpy array).

Every file is checked before it is trusted; a bad one is refused with a CheckpointError that names
the file, the place and the rule. Knows no jax.
"""

from __future__ import annotations

from pathlib import Path

from jaxinfer.checkpoint.checkpoint import (
    Checkpoint,
    CheckpointError,
    TensorInfo,
    TokenizerSource,
)
from jaxinfer.checkpoint.directory import DirectoryCheckpoint
from jaxinfer.checkpoint.gguf_checkpoint import GgufCheckpoint
from jaxinfer.checkpoint.hub import resolve_model

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "TensorInfo",
    "TokenizerSource",
    "open_checkpoint",
    "resolve_model",
]


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a model directory or a GGUF file and checks its structure, reading no weights yet.

    Raises:
      CheckpointError: the checkpoint is missing, damaged, inconsistent, or not supported.
    """
    if path.is_dir():
        return DirectoryCheckpoint(path)
    return GgufCheckpoint(path)
