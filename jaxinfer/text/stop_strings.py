"""Stop strings over a stream of text: across pieces, inside a piece, with the tail held back.

Knows no tokens: it is fed complete characters of the output, never of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxinfer.text.surrogates import refuse_surrogates


class StopMatcher:
    """Finds the stop string that is complete first, and never lets a part of one through.

    Text is released as soon as no stop string can begin in it. The match whose last character
    comes first wins, and of several ending together the longest; the output ends just before it.
    One Knuth-Morris-Pratt automaton per stop string makes the cost linear in the text.

    Attributes:
      matched: the stop string found, or None.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        """Prepares the automata.

        Args:
          stops: the stop strings; none at all lets every text through.
          include_stop: whether the output ends after the stop string instead of before it.

        Raises:
          ValueError: a stop string is empty or holds a lone surrogate.
        """
        for stop in stops:
            if not stop:
                raise ValueError("a stop string is empty: it would end every output at once")
            refuse_surrogates(stop, "a stop string")
        self.matched: str | None = None
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._failures = [_failure_table(stop) for stop in stops]
        self._states = [0] * len(stops)  # characters of each stop that the text now ends with
        self._held = ""  # withheld text: the longest of those prefixes

    def push(self, text: str) -> tuple[str, str | None]:
        """Takes the next text and returns (text that is safe to emit, stop string matched or None).

        Once a stop string matched, everything after it is dropped.
        """
        if self.matched is not None:
            return "", self.matched
        if not self._stops:
            return text, None
        for count, char in enumerate(text, start=1):
            ended = [stop for index, stop in enumerate(self._stops) if self._step(index, char)]
            if ended:
                self.matched = max(ended, key=len)
                cut = count if self._include_stop else count - len(self.matched)
                safe, self._held = self._upto(text, cut), ""
                return safe, self.matched
        longest = max(range(len(self._stops)), key=self._states.__getitem__)
        state = self._states[longest]
        safe = self._upto(text, len(text) - state)
        # The withheld text equals a prefix of the stop string, so it is never copied twice.
        self._held = self._stops[longest][:state]
        return safe, None

    def flush(self) -> str:
        """Returns the withheld text, which turned out to be no stop string; the text has ended."""
        tail, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return tail

    def _step(self, index: int, char: str) -> bool:
        """Advances one automaton by one character; True when its stop string is complete."""
        stop, failure, state = self._stops[index], self._failures[index], self._states[index]
        while state and stop[state] != char:
            state = failure[state - 1]
        state += stop[state] == char
        self._states[index] = state
        return state == len(stop)

    def _upto(self, text: str, end: int) -> str:
        """Returns the withheld text and `text`, up to offset `end` of `text` (may be negative)."""
        return self._held + text[:end] if end >= 0 else self._held[:end]


def _failure_table(stop: str) -> list[int]:
    """Returns for each prefix the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    length = 0
    for end in range(1, len(stop)):
        while length and stop[length] != stop[end]:
            length = table[length - 1]
        length += stop[length] == stop[end]
        table[end] = length
    return table
