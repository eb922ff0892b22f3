"""Log-probabilities in the shapes of OpenAI's API and of vLLM's, and tokens' offsets in a text."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from jaxinfer.outputs import TokenLogprob
from jaxinfer.text import Tokenizer

_LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def chat_logprobs(
    tokenizer: Tokenizer,
    entries: Iterable[TokenLogprob],
    invisible: frozenset[int],
    *,
    names_ids: bool = False,
) -> list[dict[str, Any]]:
    """Returns `logprobs.content`.

    The `bytes` of all entries, joined, are the message: tokens in `invisible` have none. With
    `names_ids` ids stand for the texts of tokens.
    """

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = b"" if token_id in invisible else tokenizer.token_bytes(token_id)
        token = _id_name(token_id) if names_ids else tokenizer.token_text(token_id)
        return {"token": token, "logprob": _finite(logprob), "bytes": list(data)}

    return [
        {
            **entry(item.token_id, item.logprob),
            "top_logprobs": [entry(token_id, logprob) for token_id, logprob in item.top],
        }
        for item in entries
    ]


class CompletionLogprobs:
    """Builds the `logprobs` of one completions choice piece by piece, offsets going on.

    Args:
      tokenizer: of the model.
      invisible: ids of tokens that never become text.
      names_ids: tokens are named by their ids, not by their texts.
    """

    def __init__(
        self, tokenizer: Tokenizer, invisible: frozenset[int], *, names_ids: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._names_ids = names_ids
        self._invisible = invisible
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def piece(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None]
    ) -> dict[str, Any]:
        """Returns the lists for these tokens; an entry of None has null log-probabilities."""
        tokens, offsets = [], []
        for token_id in token_ids:
            tokens.append(self._name(token_id))
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
            top.setdefault(self._name(token_id), _finite(logprob))
        return top

    def _name(self, token_id: int) -> str:
        """Returns a token's text, or its bytes spelt out if they are not whole characters."""
        if self._names_ids:
            return _id_name(token_id)
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode("utf-8") or self._tokenizer.token_text(token_id)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def prompt_logprobs(
    tokenizer: Tokenizer, entries: Iterable[TokenLogprob | None], count: int
) -> list[dict[str, Any] | None]:
    """Returns vLLM's `prompt_logprobs`: by id, of each prompt token and of `count` alternatives."""

    def entry(token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
        text = tokenizer.token_text(token_id)
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": text}

    found: list[dict[str, Any] | None] = []
    for item in entries:
        if item is None:
            found.append(None)
            continue
        by_id = {str(item.token_id): entry(item.token_id, item.logprob, item.rank)}
        for rank, (token_id, logprob) in enumerate(item.top[:count], start=1):
            by_id.setdefault(str(token_id), entry(token_id, logprob, rank))
        found.append(by_id)
    return found


def _id_name(token_id: int) -> str:
    return f"token_id:{token_id}"


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
