"""Values of command-line flags, read and checked by argparse."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any


def number(kind: Callable[[str], Any], is_fine: Callable[[Any], bool], rule: str) -> Any:
    """Returns a reader of numbers that are within a range; argparse says the rule otherwise."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"must be a number (got {text!r})") from error
        if not is_fine(value):
            raise argparse.ArgumentTypeError(f"must be {rule} (got {text})")
        return value

    return read


positive = number(int, lambda value: value >= 1, "at least 1")


def add_counts(parser: argparse.ArgumentParser, flags: Iterable[tuple[str, int, str]]) -> None:
    """Declares flags that take a whole number from 1 on: (flag, default, what it is)."""
    for flag, default, about in flags:
        help_text = f"{about} (default: {default})"
        parser.add_argument(flag, type=positive, default=default, metavar="N", help=help_text)
