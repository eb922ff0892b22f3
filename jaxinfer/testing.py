"""Stand-ins for tests, benchmarks and experiments that have no model at hand."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxinfer.text.byte_decoder import BYTE_OF_CHAR
from jaxinfer.text.tokenizer import Tokenizer

LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
"""`config.json` of Llama-3.1-8B, the layers left out: a real shape to compile and to time."""


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
