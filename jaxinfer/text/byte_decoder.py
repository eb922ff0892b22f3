"""What bytes a token stands for, read off the decoder section of a tokenizer.json.

Tokens are bytes, not text: a character may be split over several of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """Returns the byte that each character of byte-level BPE stands for.

    Visible Latin-1 characters stand for themselves; the other bytes are numbered from U+0100.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(256)).difference(visible))
    return {chr(byte): byte for byte in visible} | {
        chr(0x100 + index): byte for index, byte in enumerate(hidden)
    }


BYTE_OF_CHAR = _byte_level_alphabet()


@dataclass(frozen=True)
class ByteDecoder:
    """Turns token strings into bytes, each token for itself.

    Attributes:
      byte_level: tokens are spelled in byte-level BPE's alphabet.
      byte_fallback: a token `<0xE4>` is that byte.
      replacements: (old, new) pairs, such as the visible space of SentencePiece.
      strip: leading spaces that a whole text loses: encoding had added them.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    strip: int = 0

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any] | None) -> ByteDecoder:
        """Reads a decoder section.

        Raises:
          ValueError: the section is missing or has a part that does not work token by token.
        """
        byte_level = byte_fallback = fused = False
        replacements: list[tuple[str, str]] = []
        strip = 0
        for part in _parts(spec):
            match part:
                case {"type": "ByteLevel"}:
                    byte_level = True
                case {"type": "ByteFallback"}:
                    byte_fallback = True
                case {"type": "Fuse"}:
                    fused = True
                case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                    replacements.append((old, new))
                case {"type": "Metaspace", "replacement": old}:
                    replacements.append((old, " "))
                    strip += part.get("prepend_scheme", "always") != "never"
                case {"type": "Strip", "content": " ", "start": start, "stop": 0} if fused:
                    strip += start
                case _:
                    raise ValueError(f"the decoder {part} is not supported")
        if not (byte_level or byte_fallback or replacements):
            raise ValueError("it has no decoder that says what bytes a token stands for")
        return cls(byte_level, byte_fallback, tuple(replacements), strip)

    def token_bytes(self, token: str, is_added: bool) -> bytes:
        """Returns the bytes of one token; added tokens are spelled in plain text."""
        if self.byte_level:
            if is_added:
                return token.encode()
            try:
                return bytes([BYTE_OF_CHAR[char] for char in token])
            except KeyError:
                return token.encode()
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token.encode()


def drop_spaces(text: bytes, limit: int) -> tuple[bytes, int]:
    """Drops up to `limit` leading spaces; returns the rest and how many may still be dropped."""
    rest = text.lstrip(b" ")
    dropped = min(limit, len(text) - len(rest))
    return text[dropped:], limit - dropped if len(text) == dropped else 0


def _parts(spec: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Yields the elementary decoders of a section, sequences flattened."""
    if spec is None:
        return
    if spec.get("type") == "Sequence":
        for part in spec["decoders"]:
            yield from _parts(part)
    else:
        yield spec
