"""The one rule about lone surrogates: text that UTF-8 cannot hold is refused, never replaced."""

from __future__ import annotations


def refuse_surrogates(text: str, what: str) -> None:
    """Raises ValueError if `text` holds a lone surrogate, naming it, its place and `what` it is."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} holds the lone surrogate U+{ord(text[error.start]):04X} at character "
            f"{error.start}, which is not valid Unicode text: send the whole character"
        ) from None
