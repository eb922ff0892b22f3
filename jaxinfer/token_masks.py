"""Masks of the tokens that may be sampled: bit i of word w is token 32·w + i."""

from __future__ import annotations


def num_words(num_ids: int) -> int:
    """Words of 32 bits that have a bit for each of so many ids."""
    return -(-num_ids // 32)
