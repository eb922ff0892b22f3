"""Log-probabilities in the two shapes of OpenAI's API, and the offsets of tokens in a text."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from jaxinfer.outputs import TokenLogprob
from jaxinfer.text import Tokenizer

_LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def chat_logprobs(
    tokenizer: Tokenizer, entries: Iterable[TokenLogprob], invisible: frozenset[int]
) -> list[dict[str, Any]]:
    """Returns `logprobs.content`.

    The `bytes` of all entries, joined, are the message: tokens in `invisible` have none.
    """

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = b"" if token_id in invisible else tokenizer.token_bytes(token_id)
        token = tokenizer.token_text(token_id)
        return {"token": token, "logprob": _finite(logprob), "bytes": list(data)}

    return [
        {
            **entry(item.token_id, item.logprob),
            "top_logprobs": [entry(token_id, logprob) for token_id, logprob in item.top],
        }
        for item in entries
    ]


class CompletionLogprobs:
    """Builds the `logprobs` of one completions choice piece by piece, offsets going on."""

    def __init__(self, tokenizer: Tokenizer, invisible: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._invisible = invisible
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def piece(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None]
    ) -> dict[str, Any]:
        """Returns the lists for these tokens; an entry of None has null log-probabilities."""
        tokens, offsets = [], []
        for token_id in token_ids:
            tokens.append(_name(self._tokenizer, token_id))
            offsets.append(self._offset)
            if token_id not in self._invisible:
                data = self._tokenizer.token_bytes(token_id)
                self._offset += len(self._decoder.decode(data))
        return {
            "tokens": tokens,
            "token_logprobs": [None if item is None else _finite(item.logprob) for item in entries],
            "top_logprobs": [None if item is None else self._top(item) for item in entries],
            "text_offset": offsets,
        }

    def _top(self, item: TokenLogprob) -> dict[str, float]:
        """Returns name -> log-probability: best first, so that of equal names the best stays."""
        top: dict[str, float] = {}
        for token_id, logprob in (*item.top, (item.token_id, item.logprob)):
            top.setdefault(_name(self._tokenizer, token_id), _finite(logprob))
        return top


def _name(tokenizer: Tokenizer, token_id: int) -> str:
    """Returns a token's text, or its bytes spelt out if they are not whole characters."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode("utf-8") or tokenizer.token_text(token_id)
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
