"""Incremental detokenizing: whole characters only, equal to decoding everything at once (B01)."""

import itertools

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers

from jaxinfer.testing import byte_tokenizer
from jaxinfer.text import Detokenizer, Tokenizer

BYTES = byte_tokenizer()
CONTROL_TEXT = "d\u010f 🌶️ 你好 👩‍👩‍👧 "


def sentencepiece_tokenizer(strip):
    """Returns a tokenizer of the SentencePiece kind: byte tokens, a few pieces, `<s>` last."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["\u2581", "\u2581a", "b", "你", "<s>"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", strip, 0)])
    return Tokenizer(backend, special_tokens={"bos_token": "<s>"})


TOKENIZERS = [BYTES, sentencepiece_tokenizer(strip=0), sentencepiece_tokenizer(strip=2)]


def stream(tokenizer, ids, **options):
    """Returns the pushes and, last, the flush."""
    detokenizer = Detokenizer(tokenizer, **options)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


def test_characters_over_several_tokens_come_whole():
    pieces = stream(BYTES, BYTES.encode(CONTROL_TEXT))
    assert "".join(pieces) == CONTROL_TEXT
    assert all(len(piece) <= 1 for piece in pieces)  # never early, never two at once
    assert "\ufffd" not in CONTROL_TEXT


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_an_unfinished_character_is_one_replacement_character(kept):
    ids = BYTES.encode("ab🌶")[: 2 + kept]
    assert stream(BYTES, ids) == ["a", "b", *[""] * kept, "\ufffd"]
    assert BYTES.decode(ids) == "ab\ufffd"


def test_bytes_that_cannot_be_text_are_shown_at_once():
    assert stream(BYTES, [0xE4, 0xBD, ord("x"), 0xFF]) == ["", "", "\ufffdx", "\ufffd", ""]


def test_special_tokens_inside_a_character():
    ids = [0xC3, 256, 0xA9]
    assert stream(BYTES, ids) == ["", "", "é", ""]
    assert "".join(stream(BYTES, ids, skip_special_tokens=False)) == "\ufffd<s>\ufffd"


def test_the_space_that_encoding_added_is_dropped_once():
    tokenizer = sentencepiece_tokenizer(strip=1)
    space, word = 256, 257
    assert stream(tokenizer, [260, space, word, word]) == ["", "", " a", " a", ""]
    assert stream(tokenizer, [word, word], continuation=True) == [" a", " a", ""]
    assert tokenizer.decode([word, word]) == "a a"
    assert tokenizer.decode([word, word], continuation=True) == " a a"


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["bytes", "spm", "spm-strip"])
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("continuation", [True, False])
@settings(deadline=None)  # the cores are shared
@given(data=st.data())
def test_stream_equals_decode(tokenizer, skip, continuation, data):
    text = st.text().map(lambda text: list(text.encode()))
    noise = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=8)
    ids = [*itertools.chain(*data.draw(st.lists(st.one_of(text, noise), max_size=6)))]
    options = {"skip_special_tokens": skip, "continuation": continuation}
    pieces = stream(tokenizer, ids, **options)
    assert "".join(pieces) == tokenizer.decode(ids, **options)


@settings(deadline=None)  # the cores are shared
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_text_survives_the_round_trip(text):
    assert "".join(stream(BYTES, BYTES.encode(text), skip_special_tokens=False)) == text


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["bytes", "spm", "spm-strip"])
@settings(deadline=None)  # the cores are shared
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")))
def test_valid_text_decodes_as_the_tokenizers_package_does(tokenizer, text):
    ids = tokenizer.encode(text)
    expected = tokenizer._backend.decode(ids, skip_special_tokens=True)
    assert tokenizer.decode(ids) == expected
