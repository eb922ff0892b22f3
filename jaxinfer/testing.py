"""Small stand-ins for tests and experiments that have no model at hand."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxinfer.text.byte_decoder import BYTE_OF_CHAR
from jaxinfer.text.tokenizer import Tokenizer


def byte_tokenizer(chat_template: str | dict[str, str] | None = None) -> Tokenizer:
    """Returns a tokenizer whose ids 0 to 255 are the bytes, with `<s>` = 256 and `</s>` = 257.

    Any text can be produced token by token; nothing is added around an encoded text.
    """
    vocab = BYTE_OF_CHAR | {"<s>": 256, "</s>": 257}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(
        backend,
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
        chat_template=chat_template,
        origin="byte_tokenizer",
    )
