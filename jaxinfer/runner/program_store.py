"""Compiled programs on disk by all that they are made of, so that a warm start traces nothing."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import pickle
import stat
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.stages import Compiled, Lowered

from jaxinfer import _compat

logger = logging.getLogger(__name__)

KEPT_S = 90 * 86_400
"""What was not used for so many seconds is removed when something new is stored."""


class ProgramStore:
    """One engine's programs, compiled by this process or an earlier one.

    jax's own cache wants a program that was traced and lowered to look for it, which takes most of
    a warm start. Like that one, a folder of these holds machine code: it must be the user's own,
    and a file that anybody else could have written is left alone.

    Args:
      folder: where they are.
      made_of: everything that decides what the programs compute and how; equal text, equal
        programs.
      devices: that they run on.
    """

    def __init__(self, folder: Path, made_of: str, devices: Sequence[jax.Device]) -> None:
        self._folder = folder
        self._digest = hashlib.sha256(made_of.encode()).hexdigest()[:32]
        self._devices = devices

    def load(self, name: str) -> Compiled | None:
        """Returns a program that was compiled before, or None."""
        path = self._path(name)
        try:
            with path.open("rb") as file:
                is_own = _is_own(os.fstat(file.fileno()))
                checksum, _, data = file.read().partition(b"\n")
        except OSError:
            return None
        if not is_own:
            logger.warning("%s could be anybody's: it is compiled again", path)
            return None
        if checksum != _checksum(data):
            logger.warning("%s is damaged: it is compiled again", path)
            return None
        try:
            code, in_tree, out_tree = pickle.loads(data)
            program = deserialize_and_load(code, in_tree, out_tree, execution_devices=self._devices)
        except Exception as error:  # whatever jax makes of it, there is a way without
            logger.warning("%s cannot be loaded (%s): it is compiled again", path, error)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return program

    def compile(self, name: str, lowered: Lowered) -> Compiled:
        """Compiles a program and keeps it for the next start."""
        # What jax's cache returns cannot be written a second time: XLA:CPU leaves functions out.
        with _compat.without_compilation_cache():
            program = lowered.compile()
        try:
            self._write(name, pickle.dumps(serialize(program)))
        except Exception as error:  # a full disk, say: the engine runs all the same
            logger.warning("the program %s is not kept for the next start: %s", name, error)
        return program

    def _path(self, name: str) -> Path:
        return self._folder / f"{self._digest}-{name}.program"

    def _write(self, name: str, data: bytes) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Others may read while this writes.
        with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
            file.write(_checksum(data) + b"\n" + data)
        os.replace(file.name, self._path(name))
        for path in self._folder.iterdir():
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > KEPT_S:
                    path.unlink()


def _is_own(status: os.stat_result) -> bool:
    """Whether a file is this user's or the administrator's, and not for everybody to write."""
    if not hasattr(os, "getuid"):
        return True
    return status.st_uid in (0, os.getuid()) and not status.st_mode & stat.S_IWOTH


def _checksum(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()
