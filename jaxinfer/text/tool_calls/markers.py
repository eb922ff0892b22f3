"""Fixed strings in a text that comes in pieces."""

from __future__ import annotations

import re
from collections.abc import Iterable


class Markers:
    """Finds the first of several strings, and knows where one may have begun.

    What it finds depends on the text alone, however it was cut: of two that overlap the one that
    begins first, of two that begin together the longer.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        ordered = sorted(set(texts), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, ordered)) if ordered else r"(?!)")
        self._prefixes = frozenset(text[:end] for text in ordered for end in range(1, len(text)))
        self._longest = len(ordered[0]) if ordered else 0

    def search(self, text: str, start: int, is_all: bool) -> tuple[int, str]:
        """Returns where the first marker begins, and which.

        No marker ("") means: none begins before that place, and what follows it, if anything, is
        the beginning of one.

        Args:
          text: what there is so far.
          start: where to look from.
          is_all: whether no more text comes.
        """
        open_from = len(text) if is_all else self._open_from(text, start)
        found = self._pattern.search(text, start)
        if found is None or open_from <= found.start():
            return open_from, ""
        return found.start(), found.group()

    def _open_from(self, text: str, start: int) -> int:
        """Returns where the longest end of the text begins that a marker can begin with."""
        for begin in range(max(start, len(text) - self._longest + 1), len(text)):
            if text[begin:] in self._prefixes:
                return begin
        return len(text)


class Remover:
    """Takes fixed strings out of a text that comes in pieces."""

    def __init__(self, markers: Markers) -> None:
        self._markers = markers
        self._held = ""

    def push(self, text: str, is_all: bool = False) -> str:
        """Returns what of the text is certain now; the rest waits for the next piece."""
        text = self._held + text
        kept, start = [], 0
        while True:
            end, marker = self._markers.search(text, start, is_all)
            kept.append(text[start:end])
            start = end + len(marker)
            if not marker:
                break
        self._held = text[start:]
        return "".join(kept)
