"""Patterns for names of modules that a quantization_config may hold, matched in bounded time.

Python's matcher backtracks: a pattern from a file could keep it busy for ever. Only patterns with
few repetitions and choices, none repeated as a whole, are taken: all that real files have. The
worst of them takes about 0.05 s for a name.
"""

from __future__ import annotations

import re

from jaxinfer.checkpoint.prequantized.settings import Settings

MAX_PATTERN = 256
MAX_NAME = 128
MAX_REPETITIONS = 4
MAX_CHOICES = 4

_ESCAPE_OR_CLASS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_REPETITION = re.compile(r"[*+{]")
_CHOICE = re.compile(r"\(|(?<![(*+}])\?")  # a group, or something optional
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_BACKREFERENCE = re.compile(r"\\\d|\(\?P=|\(\?\(")


class Pattern:
    """A regular expression that a name must begin with, as `re.match` has it."""

    def __init__(self, settings: Settings, key: str, text: str) -> None:
        """Compiles `text`, from the value of `key`; raises CheckpointError."""
        bare = _ESCAPE_OR_CLASS.sub("x", text)
        if (
            len(text) > MAX_PATTERN
            or len(_REPETITION.findall(bare)) > MAX_REPETITIONS
            or len(_CHOICE.findall(bare)) > MAX_CHOICES
            or _REPEATED_GROUP.search(bare)
            or _BACKREFERENCE.search(text)
        ):
            raise settings.error(
                key,
                f"the pattern {text[:80]!r} is not supported: it may have {MAX_PATTERN} "
                f"characters, {MAX_REPETITIONS} repetitions, none of a group, and {MAX_CHOICES} "
                "groups or optional parts; name the modules instead",
            )
        try:
            self._compiled = re.compile(text)
        except (re.error, OverflowError, RecursionError) as error:
            raise settings.error(
                key, f"the pattern {text[:80]!r} is not valid ({error})"
            ) from error

    def __call__(self, name: str) -> bool:
        """Whether a module's name matches; names longer than any real one do not."""
        return len(name) <= MAX_NAME and self._compiled.match(name) is not None
