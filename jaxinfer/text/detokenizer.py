"""Text from token ids as they come, whole characters only."""

from __future__ import annotations

import codecs

from jaxinfer.text.byte_decoder import drop_spaces
from jaxinfer.text.tokenizer import Tokenizer


class Detokenizer:
    """Decodes one sequence incrementally.

    The pushes and the flush, concatenated, equal `tokenizer.decode` of all ids with the same
    options. Bytes of an unfinished character wait for the next token; bytes that cannot become
    valid UTF-8 are U+FFFD. A push costs no more than its own token.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, continuation: bool = False
    ) -> None:
        """Starts a sequence.

        Args:
          tokenizer: decodes the tokens.
          skip_special_tokens: whether special tokens have no text.
          continuation: whether text precedes this sequence, so that a leading space is kept.
        """
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._strip = 0 if continuation else tokenizer.strip
        self._texts = tokenizer.whole_texts
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_within = self._strip > 0  # a character, or the spaces to be dropped

    def push(self, token_id: int) -> str:
        """Takes one token and returns the new text: the characters that are complete now."""
        if token_id in self._skipped:
            return ""
        if not self._is_within:
            text = self._texts[token_id]
            if text is not None:
                return text
        data = self._tokenizer.token_bytes(token_id)
        if self._strip:
            data, self._strip = drop_spaces(data, self._strip)
        text = self._utf8.decode(data)
        self._is_within = self._strip > 0 or self._utf8.getstate()[0] != b""
        return text

    def flush(self) -> str:
        """Returns the tail, one U+FFFD if a character is unfinished, and ends the sequence."""
        return self._utf8.decode(b"", final=True)
