"""Tokenizers: the goldens, directories, GGUF metadata, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from jaxinfer.checkpoint import open_checkpoint
from jaxinfer.testing import byte_tokenizer
from jaxinfer.text import ChatTemplate, Tokenizer, TokenizerError, load_tokenizer
from jaxinfer.text.byte_decoder import BYTE_OF_CHAR
from jaxinfer.text.pre_tokenizers import PRE_TOKENIZERS

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "greedy.json").read_text("utf-8"))


def byte_level_metadata(**changes):
    """Returns GGUF metadata of a byte-level tokenizer with the merges `ab`, `Ġa` and `Ġab`."""
    tokens = [
        *sorted(BYTE_OF_CHAR, key=BYTE_OF_CHAR.get),
        "ab",
        "Ġa",
        "Ġab",
        "<bos>",
        "<eos>",
        "<user>",
        "<|im_end|>",
    ]
    types = [1] * 259 + [3, 3, 4, 3]
    keys = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": np.array(types, np.int32),
        "merges": ["a b", "Ġ a", "Ġ ab"],
        "bos_token_id": np.uint32(259),
        "eos_token_id": np.uint32(260),
    } | changes
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return {key: value for key, value in metadata.items() if value is not None}


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    return load_tokenizer(open_checkpoint(smollm2_path).tokenizer_source)


@pytest.fixture(scope="module")
def gemma3(gemma3_path):
    return load_tokenizer(open_checkpoint(gemma3_path).tokenizer_source)


@pytest.mark.real_model
@pytest.mark.parametrize(
    ("fixture", "key"),
    [("smollm2", "smollm2-135m-instruct-q4_1"), ("gemma3", "gemma-3-270m-q4_k_m")],
)
def test_goldens(fixture, key, request):
    tokenizer = request.getfixturevalue(fixture)
    for case in GOLDEN[key]["prompts"]:
        assert tokenizer.encode(case["prompt"]) == case["ids"]
        assert tokenizer.decode(case["ids"]) == case["prompt"]
        assert tokenizer.decode(case["greedy"], skip_special_tokens=False) == case["text"]
    for case in GOLDEN[key].get("chat", []):
        assert ChatTemplate.from_tokenizer(tokenizer).render(case["messages"]) == case["rendered"]
        assert tokenizer.encode(case["rendered"], add_special_tokens=False) == case["ids"]


@pytest.mark.real_model
def test_real_special_tokens(smollm2, gemma3):
    assert (smollm2.vocab_size, smollm2.bos_token_id) == (49152, 1)
    assert 2 in smollm2.eos_token_ids
    assert (gemma3.vocab_size, gemma3.bos_token_id) == (262144, 2)
    assert gemma3.eos_token_ids == (1, 106)
    assert gemma3.encode("  x<b>\n\n") == [
        2,
        138,
        gemma3.token_id("x"),
        gemma3.token_id("<b>"),
        108,
    ]


def test_byte_tokenizer_reaches_every_byte():
    tokenizer = byte_tokenizer()
    assert tokenizer.vocab_size == 258
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (256, (257,))
    assert tokenizer.special_ids == {256, 257}
    for text in ("plain", "ü \x00\n", "🌶️<s></s>"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert [tokenizer.token_bytes(byte) for byte in range(256)] == [
        bytes([byte]) for byte in range(256)
    ]
    assert tokenizer.decode([256, 104, 105, 257]) == "hi"
    assert tokenizer.token_text(0xE4) == "\ufffd"


def test_ids_without_a_token_have_no_text():
    tokenizer = byte_tokenizer()
    assert [tokenizer.token_bytes(i) for i in (258, 2**40, -1)] == [b"", b"", b""]
    assert tokenizer.decode([104, 999, 105]) == "hi"


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff", "😀\ud83d"])
def test_lone_surrogates_are_refused(text):
    with pytest.raises(ValueError, match=r"lone surrogate U\+D[8F]"):
        byte_tokenizer().encode(text)
    assert byte_tokenizer().encode(
        "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16")
    )


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path):
    backend = tokenizers.Tokenizer.from_str(byte_tokenizer()._backend.to_str())
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("hello") == list(b"hello")


def save(directory, **files):
    byte_tokenizer()._backend.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return directory


def test_special_tokens_of_both_files(tmp_path):
    save(
        tmp_path,
        special_tokens_map={"eos_token": {"content": "</s>"}, "bos_token": "x"},
        tokenizer_config={"bos_token": "<s>", "add_bos_token": True, "pad_token": None},
    )
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (256, (257,))


def test_a_named_token_outside_the_vocabulary_has_no_id(tmp_path):
    tokenizer = load_tokenizer(save(tmp_path, tokenizer_config={"eos_token": "<end>"}))
    assert tokenizer.eos_token_ids == ()
    assert tokenizer.vocab_size == 258
    assert tokenizer.special_tokens == {"eos_token": "<end>"}


def test_a_missing_tokenizer_json_is_named(tmp_path):
    with pytest.raises(TokenizerError, match=r"there is no tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", r"tokenizer\.json: not a readable tokenizer"),
        ("tokenizer_config.json", "{", "not a readable JSON file"),
        ("tokenizer_config.json", "[]", "a list, expected an object"),
        ("tokenizer_config.json", '{"chat_template": 5}', "chat_template is neither"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "a"}]}', "chat_template is neither"),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"700": {"content": "<new>"}}}',
            "'<new>' has id 700 there and id 258",
        ),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, message):
    save(tmp_path)
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("decoder", [None, tokenizers.decoders.WordPiece()])
def test_decoders_without_bytes_are_refused(decoder):
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0}, merges=[]))
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(TokenizerError, match="decoder"):
        Tokenizer(backend, special_tokens={})


def test_gguf_byte_level():
    tokenizer = load_tokenizer(byte_level_metadata())
    ids = {token: i for i, token in enumerate(byte_level_metadata()["tokenizer.ggml.tokens"])}
    assert tokenizer.encode("ab ab") == [ids["ab"], ids["Ġab"]]
    assert tokenizer.encode("<user>ab<eos>") == [ids["<user>"], ids["ab"], ids["<eos>"]]
    assert tokenizer.decode([ids["<user>"], ids["ab"], ids["<eos>"]]) == "<user>ab"
    assert tokenizer.special_tokens == {"bos_token": "<bos>", "eos_token": "<eos>"}
    assert tokenizer.eos_token_ids == (ids["<eos>"], ids["<|im_end|>"])


@pytest.mark.parametrize(
    ("changes", "bos", "eos"),
    [
        ({}, 0, 0),
        ({"add_bos_token": True}, 1, 0),
        ({"add_bos_token": True, "add_eos_token": True}, 1, 1),
        ({"pre": "llama-bpe"}, 1, 0),
        ({"pre": "llama-bpe", "add_bos_token": False}, 0, 0),
    ],
)
def test_gguf_sequence_tokens(changes, bos, eos):
    tokenizer = load_tokenizer(byte_level_metadata(**changes))
    assert tokenizer.encode("b") == [259] * bos + [ord("b")] + [260] * eos
    assert tokenizer.encode("b", add_special_tokens=False) == [ord("b")]


def test_gguf_ignore_merges_prefers_whole_words():
    changes = {"merges": ["a b"]}  # no merge leads to "Ġab"
    by_merges = load_tokenizer(byte_level_metadata(**changes))
    whole = load_tokenizer(byte_level_metadata(**changes, pre="tekken", add_bos_token=False))
    assert len(by_merges.encode(" ab")) == 2
    assert len(whole.encode(" ab")) == 1


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_pre_tokenizer_keeps_the_text(name):
    tokenizer = load_tokenizer(byte_level_metadata(pre=name, add_bos_token=False))
    text = "It's 12345 ÜBER-cool_99% of 你好 नमस्ते\r\n\n  don't\tstop 🌶️ "
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_gguf_chat_templates():
    default = {"tokenizer.chat_template": "D"}
    named = {"tokenizer.chat_template.tool_use": "T"}
    assert load_tokenizer(byte_level_metadata() | default).chat_template == "D"
    both = load_tokenizer(byte_level_metadata() | default | named)
    assert both.chat_template == {"default": "D", "tool_use": "T"}
    assert load_tokenizer(byte_level_metadata()).chat_template is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "model is missing"),
        ({"model": "t5"}, "model is 't5'"),
        ({"tokens": None}, "tokens is missing"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["a b c"]}, r"merges\[0\] is not two tokens"),
        ({"merges": ["a zz"]}, "merges do not fit the tokens"),
        ({"pre": "mine"}, "pre is 'mine'.*known are .*llama-bpe"),
        ({"token_type": [1]}, "token_type has 1 entries for 263 tokens"),
        ({"bos_token_id": 263}, "bos_token_id is 263, but there are 263 tokens"),
        ({"model": "llama"}, "scores is missing"),
        ({"model": "llama", "scores": [0.0]}, "scores has 1 entries"),
        ({"tokens": [*BYTE_OF_CHAR, *"aaaaaaa"]}, "are both 'a'"),
    ],
)
def test_bad_metadata_is_named(changes, message):
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(byte_level_metadata(**changes))
