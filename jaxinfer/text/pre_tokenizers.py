"""How byte-level BPE tokenizers cut text into words, by GGUF's `tokenizer.ggml.pre` names.

Data only. The patterns are those of the models' own tokenizer.json files.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PreTokenizer:
    """One way to cut text into words.

    Attributes:
      patterns: applied in turn; each one isolates its matches and leaves the gaps for the next.
      ignore_merges: whether a word that is a token is never built from merges.
      add_bos: whether the beginning-of-sequence token is added unless the file says otherwise.
      nfc: whether text is normalised to Unicode's composed form first.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


_SPACES = r"\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ASCII_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"


def _tiktoken(number: str) -> str:
    """Returns the pattern of OpenAI's second generation with its way to cut numbers."""
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{number}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"
    )


def _cased(number: str, suffix: str) -> str:
    """Returns the pattern that also cuts words where a lower-case letter meets a capital."""
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{suffix}"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{suffix}|{number}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_SPACES}"
    )


_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))
_GPT2_WORDS = PreTokenizer((_GPT2,))
_SINGLE_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3 = PreTokenizer((_tiktoken(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_DIGIT_TRIPLES = PreTokenizer((_tiktoken(r"\p{N}{1,3}"),))
_QWEN2 = PreTokenizer((_tiktoken(r"\p{N}"),), nfc=True)
_QWEN35 = PreTokenizer(
    (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}",
    ),
    nfc=True,
)
_TEKKEN = PreTokenizer((_cased(r"\p{N}", ""),), ignore_merges=True, add_bos=True)
_GPT4O = PreTokenizer((_cased(r"\p{N}{1,3}", f"{_CONTRACTIONS}?"),))
_FALCON = PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"))
# Letters with case in the scripts that DeepSeek's list names: not Armenian small letters,
# Georgian, Coptic's and Latin's later additions, nor the mathematical alphabets.
_DEEPSEEK_LETTER = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C88}\x{2D00}-\x{2D2D}"
    r"\x{A790}-\x{A7FF}\x{AB30}-\x{AB68}\x{10570}-\x{105BC}\x{16E40}-\x{16E7F}"
    r"\x{1D400}-\x{1D7CB}\x{1DF00}-\x{1DF1E}]]"
)
_DEEPSEEK_LLM = PreTokenizer(
    (
        r"[\r\n]",
        rf"\s?{_DEEPSEEK_LETTER}+",
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
        r"\s+$",
        r"[一-龥ࠀ-一가-퟿]+",
        r"\p{N}+",
    )
)
_DEEPSEEK_CODER = PreTokenizer(
    (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")
)
_DEEPSEEK3 = PreTokenizer(
    (
        r"\p{N}{1,3}",
        r"[一-龥぀-ゟ゠-ヿ]+",
        rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}",
    )
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    name: pre_tokenizer
    for pre_tokenizer, names in (
        (_DEFAULT, "default"),
        (_GPT2_WORDS, "gpt-2 phi-2 mpt olmo jais exaone4 trillion granite-docling modern-bert"),
        (_SINGLE_DIGITS, "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2"),
        (_LLAMA3, "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral lfm2"),
        (_DIGIT_TRIPLES, "dbrx smaug-bpe glm4 chatglm-bpe"),
        (_QWEN2, "qwen2 deepseek-r1-qwen stablelm2 megrez hunyuan solar-open grok-2"),
        (_QWEN35, "qwen35"),
        (_TEKKEN, "tekken"),
        (_GPT4O, "gpt-4o llama4 minimax-m2"),
        (_FALCON, "falcon"),
        (_DEEPSEEK_LLM, "deepseek-llm"),
        (_DEEPSEEK_CODER, "deepseek-coder"),
        (_DEEPSEEK3, "deepseek-v3 deepseek-r1 hunyuan-dense"),
    )
    for name in names.split()
}
