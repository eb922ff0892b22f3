"""The tokenizer the engine uses: the `tokenizers` package's encoder, and decoding by bytes.

Reads a Hugging Face directory here; GGUF metadata is read by `gguf_tokenizer`. Knows no model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from jaxinfer.text.byte_decoder import ByteDecoder, drop_spaces
from jaxinfer.text.surrogates import refuse_surrogates


class TokenizerError(ValueError):
    """A tokenizer that cannot be used; the message names the file or key and the rule."""


class _WholeTexts(dict[int, str | None]):
    """Texts of tokens, each made when it is first asked for; at most one entry per token."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes

    def __missing__(self, token_id: int) -> str | None:
        data = self._token_bytes(token_id)
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            text = None
        if data:  # not for ids without a token
            self[token_id] = text
        return text


class Tokenizer:
    """Text to token ids and back; may be shared by threads.

    Attributes:
      whole_texts: a token's text, or None if it is not of whole characters; "" for unknown ids.
      vocab_size: one more than the largest token id.
      bos_token_id: the id of the beginning of a sequence, if there is one.
      eos_token_ids: the ids that end generation as far as the tokenizer knows.
      special_ids: ids of control tokens, which `skip_special_tokens` leaves out of text.
      special_tokens: their texts by name (`bos_token`, `eos_token`, ...), for chat templates.
      strip: leading spaces that a decoded text loses because encoding adds them.
      chat_template: one template, or several by name, or None.
      origin: where it was read from, for messages.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        eos_token_ids: Iterable[int] | None = None,
        chat_template: str | dict[str, str] | None = None,
        origin: str = "tokenizer",
    ) -> None:
        """Wraps `backend`, which from here on must not be changed.

        Args:
          backend: the encoder.
          special_tokens: texts of the special tokens by name; those the vocabulary holds are made
            special tokens of the encoder if they are not yet.
          eos_token_ids: ids that end generation; None means the id of `eos_token`.
          chat_template: one template, or several by name.
          origin: where all this was read from, for messages.

        Raises:
          TokenizerError: the backend's decoder is missing or not supported.
        """
        # The pickled state of the decoder alone: serialising a large vocabulary takes a second.
        decoder = backend.decoder and json.loads(backend.decoder.__getstate__())
        try:
            self._decoder = ByteDecoder.from_spec(decoder)
        except ValueError as error:
            raise TokenizerError(f"{origin}: {error}") from error
        # Sequences are never cut or filled up, whatever the file asks for.
        backend.no_truncation()
        backend.no_padding()
        known = {name: backend.token_to_id(text) for name, text in special_tokens.items()}
        backend.add_special_tokens(
            [
                AddedToken(text, special=True, normalized=False)
                for name, text in special_tokens.items()
                if known[name] is not None
            ]
        )
        added = backend.get_added_tokens_decoder()
        eos = known.get("eos_token")
        if eos_token_ids is None:
            eos_token_ids = () if eos is None else (eos,)
        self._backend = backend
        self._added_ids = frozenset(added)
        self._bytes: dict[int, bytes] = {}  # filled on demand, at most one entry per token
        self.whole_texts = _WholeTexts(self.token_bytes)
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self.bos_token_id = known.get("bos_token")
        self.eos_token_ids = tuple(eos_token_ids)
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.special_tokens = dict(special_tokens)
        self.strip = self._decoder.strip
        self.chat_template = chat_template
        self.origin = origin

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of `text`; texts of special tokens in it become those tokens.

        Args:
          text: any text without lone surrogates.
          add_special_tokens: whether the model's beginning-of-sequence token and the like are
            added; a rendered chat template already holds them.

        Raises:
          ValueError: `text` holds a lone surrogate.
        """
        refuse_surrogates(text, "the text")
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(
        self, ids: Iterable[int], skip_special_tokens: bool = True, continuation: bool = False
    ) -> str:
        """Returns the text of `ids`; bytes that are not UTF-8 become U+FFFD.

        Args:
          ids: token ids; ids without a token have no text.
          skip_special_tokens: whether special tokens have no text.
          continuation: whether other text precedes it, so that a leading space is kept.
        """
        skipped = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join(self.token_bytes(token_id) for token_id in ids if token_id not in skipped)
        if not continuation:
            data, _ = drop_spaces(data, self.strip)
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of one token, which need not be whole characters; b"" if unknown."""
        data = self._bytes.get(token_id)
        if data is None:
            known = 0 <= token_id < self.vocab_size
            token = self._backend.id_to_token(token_id) if known else None
            if token is None:
                return b""
            data = self._decoder.token_bytes(token, token_id in self._added_ids)
            self._bytes[token_id] = data
        return data

    def token_text(self, token_id: int) -> str:
        """Returns one token's text for display; parts of characters become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_id(self, token: str) -> int | None:
        """Returns the id of a token as the vocabulary spells it, or None."""
        return self._backend.token_to_id(token)

    def to_json(self) -> str:
        """Returns the encoder as a `tokenizer.json`."""
        return self._backend.to_str(pretty=False)


def load_tokenizer(source: Path | Mapping[str, Any]) -> Tokenizer:
    """Loads a tokenizer from a Hugging Face directory, or from the metadata of a GGUF file.

    A directory's `chat_template.jinja` and `additional_chat_templates/*.jinja` replace the
    templates of its `tokenizer_config.json`. Which tokens are put around a text is what
    `tokenizer.json` says; `add_bos_token` beside it is ignored, as in transformers 5.

    Raises:
      TokenizerError: a file or key is missing, unreadable or not supported.
    """
    if isinstance(source, Path):
        return _load_directory(source)
    # Imported here because it builds on this module.
    from jaxinfer.text.gguf_tokenizer import tokenizer_from_gguf

    return tokenizer_from_gguf(source)


def add_sequence_tokens(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Makes `backend` put `bos` before and `eos` behind a text, where they are not None."""
    single = [token for token in (bos, "$A", eos) if token is not None]
    tokens = [(token, backend.token_to_id(token)) for token in (bos, eos) if token is not None]
    backend.post_processor = processors.TemplateProcessing(
        single=single, pair=[*single, "$B"], special_tokens=tokens
    )


def _load_directory(directory: Path) -> Tokenizer:
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(
            f"{directory}: there is no tokenizer.json; only that format is read, so convert other "
            "tokenizers (tokenizer.model, vocab.json) with transformers' save_pretrained"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing more precise
        raise TokenizerError(f"{path}: not a readable tokenizer: {error}") from error
    config = _read_json(directory / "tokenizer_config.json")
    special_tokens = _special_tokens(_read_json(directory / "special_tokens_map.json") | config)
    _add_declared_tokens(backend, config, directory)
    return Tokenizer(
        backend,
        special_tokens=special_tokens,
        chat_template=_chat_template(directory, config),
        origin=str(directory),
    )


def _read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file, empty if there is no such file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: not a readable JSON file: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path}: a {type(content).__name__}, expected an object")
    return content


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the texts of `bos_token` and the like, written as a string or as an object."""
    tokens = {}
    for name, value in config.items():
        if isinstance(value, dict):
            value = value.get("content")
        if name.endswith("_token") and isinstance(value, str):
            tokens[name] = value
    return tokens


def _add_declared_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], directory: Path
) -> None:
    """Adds tokens that only tokenizer_config.json declares, checking that their ids come out."""
    declared = config.get("added_tokens_decoder") or {}
    for key, entry in sorted(declared.items(), key=lambda item: int(item[0])):
        options = {name: value for name, value in entry.items() if not name.startswith("__")}
        if backend.token_to_id(entry["content"]) is None:
            backend.add_tokens([AddedToken(**options)])
        if (found := backend.token_to_id(entry["content"])) != int(key):
            raise TokenizerError(
                f"{directory}/tokenizer_config.json: added token {entry['content']!r} has id {key} "
                f"there and id {found} in tokenizer.json"
            )


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    files = {"default": directory / "chat_template.jinja"} | {
        path.stem: path for path in sorted(directory.glob("additional_chat_templates/*.jinja"))
    }
    templates = {
        name: path.read_text(encoding="utf-8") for name, path in files.items() if path.is_file()
    }
    if templates:
        return templates
    match config.get("chat_template"):
        case None | str() as template:
            return template
        case dict() as named if all(isinstance(template, str) for template in named.values()):
            return named
        case [*entries] if all(_is_named_template(entry) for entry in entries):
            return {entry["name"]: entry["template"] for entry in entries}
    raise TokenizerError(
        f"{directory}/tokenizer_config.json: chat_template is neither a string nor a list of "
        "objects with name and template"
    )


def _is_named_template(entry: Any) -> bool:
    match entry:
        case {"name": str(), "template": str()}:
            return True
    return False
