"""Tokens as llguidance sees them are what our detokenizer writes."""

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxinfer.constraints import GrammarCompiler, GrammarMatcher
from jaxinfer.constraints.vocabulary import _MOST_CHARACTERS, Vocabulary
from jaxinfer.grammar import Grammar
from jaxinfer.testing import byte_tokenizer
from jaxinfer.text.tokenizer import Tokenizer


def spaced_tokenizer():
    """SentencePiece's manner: a space before every text, and bytes for what has no token."""
    words = ["<s>", "</s>", "\u2581", "\u2581ab", "ab", "a", "b", "c", "\u2581c", "abc"]
    vocab = {word: number for number, word in enumerate(words)}
    vocab |= {f"<0x{byte:02X}>": len(words) + byte for byte in range(256)}
    merges = [("a", "b"), ("ab", "c"), ("\u2581", "ab"), ("\u2581", "c")]
    model = models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=False)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(backend, special_tokens=special)


@pytest.mark.parametrize("text", ["ab", "abc", "cab", " ab", "  c", "é😀", "c\nab", "", "</s>ab"])
@pytest.mark.parametrize("make", [spaced_tokenizer, byte_tokenizer])
def test_a_text_that_must_come_is_spelled_exactly(make, text):
    tokenizer = make()
    found = Vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids).tokenizer
    ids = found.tokenize_str(text)
    assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids) == text.encode()
    assert not tokenizer.special_ids.intersection(ids)


def test_it_is_spelled_as_the_model_would():
    tokenizer = spaced_tokenizer()
    found = Vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids).tokenizer
    assert [tokenizer.token_bytes(i) for i in found.tokenize_str("abc")] == [b"abc"]
    assert [tokenizer.token_bytes(i) for i in found.tokenize_str(" ab")] == [b" ab"]


@pytest.mark.parametrize("text", ["abc", " ab", "cabab", "éab"])
def test_a_completion_writes_the_text_itself(text):
    tokenizer = spaced_tokenizer()
    size = tokenizer.vocab_size
    grammars = GrammarCompiler(tokenizer, size, tokenizer.eos_token_ids)
    matcher = GrammarMatcher(grammars.compile(Grammar("choice", (text, "zz"))))
    mask, written = np.zeros((-(-size // 32),), np.uint32), b""
    while not matcher.is_complete:
        matcher.fill(mask)
        bits = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        # Never `z`: the longest token that is left of the text.
        spelled = {tokenizer.token_bytes(token_id): token_id for token_id in bits.tolist()}
        left = text.encode()[len(written) :]
        token = max(filter(left.startswith, spelled), key=len)
        matcher.advance(spelled[token])
        written += token
    assert written.decode() == text


def test_of_a_long_text_only_the_start_is_spelled():
    tokenizer = byte_tokenizer()
    found = Vocabulary(tokenizer, 258, (257,)).tokenizer
    assert len(found.tokenize_str("x" * 10_000)) == _MOST_CHARACTERS
    grammars = GrammarCompiler(tokenizer, 258, (257,))
    matcher = GrammarMatcher(grammars.compile(Grammar("choice", ("xy" * 1000,))))
    for byte in b"xy" * 1000:
        assert not matcher.is_complete
        matcher.advance(byte)
    assert matcher.is_complete


def test_ids_that_the_model_has_and_the_tokenizer_lacks_are_never_allowed():
    tokenizer = byte_tokenizer()
    grammars = GrammarCompiler(tokenizer, 300, (257, 299))
    matcher = GrammarMatcher(grammars.compile(Grammar("regex", "(.|\\n)*")))
    mask = np.zeros((10,), np.uint32)
    matcher.fill(mask)
    bits = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    assert {ord("a"), 257, 299} <= set(bits)
    assert not set(range(258, 299)).intersection(bits)
    assert 256 not in bits
