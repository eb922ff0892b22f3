"""Builds a tokenizer from the metadata of a GGUF file.

Two kinds: `gpt2`, byte-level BPE with merges, and `llama`, SentencePiece BPE by scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from jaxinfer.text.pre_tokenizers import PRE_TOKENIZERS
from jaxinfer.text.tokenizer import Tokenizer, TokenizerError, add_sequence_tokens

_VISIBLE_SPACE = "\u2581"
_PREFIX = "tokenizer.ggml."
# GGUF has no generation_config.json: these control tokens end generation too.
_END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
)


class TokenType(IntEnum):
    """The numbers of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Builds the tokenizer that a GGUF file describes.

    Args:
      metadata: the file's keys and values; arrays as lists or numpy arrays.

    Raises:
      TokenizerError: a key is missing, inconsistent or asks for a kind that is not supported.
    """
    kind = _require(metadata, "model", str)
    tokens = list(_require(metadata, "tokens"))
    types = [int(value) for value in metadata.get(_PREFIX + "token_type", [1] * len(tokens))]
    if len(types) != len(tokens):
        raise TokenizerError(
            f"GGUF: {_PREFIX}token_type has {len(types)} entries for {len(tokens)} tokens"
        )
    if kind == "gpt2":
        backend, add_bos = _byte_level_bpe(metadata, tokens)
    elif kind == "llama":
        backend, add_bos = _sentencepiece_bpe(metadata, tokens, types), True
    else:
        raise TokenizerError(
            f"GGUF: {_PREFIX}model is {kind!r}; only 'gpt2' (byte-level BPE) and 'llama' "
            "(SentencePiece BPE) are supported"
        )
    special = {TokenType.CONTROL, TokenType.UNKNOWN}
    backend.add_tokens(
        [
            AddedToken(token, special=type_ in special, normalized=False)
            for token, type_ in zip(tokens, types, strict=True)
            if type_ in special or type_ == TokenType.USER_DEFINED
        ]
    )
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    named = {name: _token(metadata, tokens, f"{key}_token_id") for name, key in names.items()}
    wanted = {
        name: named[name] if metadata.get(f"{_PREFIX}add_{name}_token", default) else None
        for name, default in (("bos", add_bos), ("eos", False))
    }
    if any(wanted.values()):
        add_sequence_tokens(backend, wanted["bos"], wanted["eos"])
    return Tokenizer(
        backend,
        special_tokens={f"{name}_token": text for name, text in named.items() if text is not None},
        eos_token_ids=_end_ids(metadata, tokens, types),
        chat_template=_chat_template(metadata),
        origin="GGUF metadata",
    )


def word_splitter(patterns: Sequence[str]) -> pre_tokenizers.PreTokenizer:
    """Returns what cuts text into words by `patterns` and spells them in byte-level BPE's way."""
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, byte_level])


def _byte_level_bpe(
    metadata: Mapping[str, Any], tokens: list[str]
) -> tuple[tokenizers.Tokenizer, bool]:
    """Returns byte-level BPE, and whether it puts a beginning-of-sequence token by default."""
    name = metadata.get(_PREFIX + "pre", "default")
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        raise TokenizerError(
            f"GGUF: {_PREFIX}pre is {name!r}, which is not supported; known are "
            + ", ".join(sorted(PRE_TOKENIZERS))
        )
    merges = [tuple(merge.split(" ")) for merge in _require(metadata, "merges")]
    for index, merge in enumerate(merges):
        if len(merge) != 2:
            raise TokenizerError(f"GGUF: {_PREFIX}merges[{index}] is not two tokens: {merge}")
    backend = tokenizers.Tokenizer(_bpe(tokens, merges, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = word_splitter(pre.patterns)
    backend.decoder = decoders.ByteLevel()
    return backend, pre.add_bos


def _sentencepiece_bpe(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int]
) -> tokenizers.Tokenizer:
    scores = [float(score) for score in _require(metadata, "scores")]
    if len(scores) != len(tokens):
        raise TokenizerError(
            f"GGUF: {_PREFIX}scores has {len(scores)} entries for {len(tokens)} tokens"
        )
    unknown = _token(metadata, tokens, "unknown_token_id", default=0)
    model = _bpe(
        tokens,
        _merges_from_scores(tokens, scores, types),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=TokenType.BYTE in types,
    )
    backend = tokenizers.Tokenizer(model)
    normalizer: list[normalizers.Normalizer] = [normalizers.Replace(" ", _VISIBLE_SPACE)]
    decoder = [decoders.Replace(_VISIBLE_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get(_PREFIX + "add_space_prefix", True):
        normalizer.insert(0, normalizers.Prepend(_VISIBLE_SPACE))
        decoder.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(normalizer)
    backend.decoder = decoders.Sequence(decoder)
    return backend


def _merges_from_scores(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """Returns every way to join two tokens into a third, the best third token first.

    SentencePiece joins whichever neighbours give the token with the highest score. Of several
    ways to make one token, the longest left half goes first, as in Hugging Face's conversion.
    """
    vocab = set(tokens)
    normal = [index for index, type_ in enumerate(types) if type_ == TokenType.NORMAL]
    return [
        (token[:cut], token[cut:])
        for token in (tokens[i] for i in sorted(normal, key=lambda i: -scores[i]))
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in vocab and token[cut:] in vocab
    ]


def _bpe(tokens: list[str], merges: list[Any], **options: Any) -> models.BPE:
    """Returns the BPE model; the package checks that merges only name tokens."""
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if vocab[token] != index)
        raise TokenizerError(
            f"GGUF: {_PREFIX}tokens[{tokens.index(twice)}] and [{vocab[twice]}] are both {twice!r}"
        )
    try:
        return models.BPE(vocab=vocab, merges=merges, **options)
    except Exception as error:  # the package raises nothing more precise
        raise TokenizerError(f"GGUF: {_PREFIX}merges do not fit the tokens: {error}") from error


def _require(metadata: Mapping[str, Any], name: str, type_: type | None = None) -> Any:
    """Returns a value that must be there."""
    value = metadata.get(_PREFIX + name)
    if value is None or (type_ is not None and not isinstance(value, type_)):
        raise TokenizerError(f"GGUF: {_PREFIX}{name} is missing or of the wrong type")
    return value


def _token(
    metadata: Mapping[str, Any], tokens: Sequence[str], name: str, default: int | None = None
) -> str | None:
    """Returns the token whose id is stored under `name`, None if there is no such key."""
    token_id = metadata.get(_PREFIX + name, default)
    if token_id is None:
        return None
    if not 0 <= token_id < len(tokens):
        raise TokenizerError(
            f"GGUF: {_PREFIX}{name} is {token_id}, but there are {len(tokens)} tokens"
        )
    return tokens[int(token_id)]


def _end_ids(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]
) -> tuple[int, ...]:
    """Returns the ids that end generation: those the file names, and known end-of-turn tokens."""
    keys = (f"{_PREFIX}{name}_token_id" for name in ("eos", "eot", "eom"))
    named = [int(metadata[key]) for key in keys if key in metadata]
    known = [
        index
        for index, (token, type_) in enumerate(zip(tokens, types, strict=True))
        if type_ == TokenType.CONTROL and token in _END_OF_TURN
    ]
    return tuple(dict.fromkeys(named + known))


def _chat_template(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Returns the default template, with those that the file keeps under other names."""
    prefix = "tokenizer.chat_template"
    default = metadata.get(prefix)
    named = {
        key.removeprefix(prefix + "."): value
        for key, value in metadata.items()
        if key.startswith(prefix + ".")
    }
    if not named:
        return default
    return named if default is None else named | {"default": default}
