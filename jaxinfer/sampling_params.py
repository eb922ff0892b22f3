"""How one request wants its tokens chosen and when it stops.

A leaf: imports no jax, and of ours only another. Limits that need a model (context length,
vocabulary) are checked by `validate_for`, which the server calls before a request is admitted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxinfer.grammar import Grammar

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 12
MAX_BAD_WORDS = 256
MAX_N = 128
GREEDY_TEMPERATURE = 1e-5
"""Temperatures up to this are greedy: dividing float32 logits by less can overflow."""


class InvalidParameter(ValueError):
    """A value outside its range; `param` names it and `code` is OpenAI's error code."""

    def __init__(self, param: str, message: str, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


@dataclass(frozen=True)
class SamplingParams:
    """One request's sampling settings, checked on construction.

    Attributes:
      n: independent completions of the prompt, 1..128.
      temperature: logits are divided by it; 0 is greedy. 0..2.
      top_p: keep the smallest set of tokens whose probability reaches it; 0 keeps only the best.
      top_k: keep the k best tokens; 0 or -1 keeps all.
      min_p: keep tokens with at least min_p times the best token's probability.
      repetition_penalty: divides positive and multiplies negative logits of tokens seen in the
        prompt or the output (Keskar et al. 2019, CTRL).
      presence_penalty, frequency_penalty: subtracted once, or once per occurrence, for tokens of
        the output. -2..2.
      logit_bias: token id -> value in -100..100 added to its logit.
      seed: int64; the same seed, parameters and prompt give the same tokens. None draws one.
      max_tokens: tokens to generate; None means up to the context limit.
      min_tokens: end-of-sequence and stop ids end nothing before this many tokens.
      stop: strings that end the output just before their earliest match.
      stop_token_ids: ids that end the output; their text is not part of it.
      ignore_eos: do not stop at the model's end-of-sequence ids.
      include_stop_str_in_output: keep the matched stop string.
      skip_special_tokens: leave special tokens out of the text.
      logprobs: report the chosen token's log-probability and this many alternatives, 0..20.
      prompt_logprobs: the same for every prompt token but the first.
      speculation: guess tokens ahead where the engine can; None leaves it to the engine. Penalties
        and a grammar exclude it: each token changes what may follow.
      grammar: what the text must match. Until it does, an end-of-sequence id can only be sampled
        where the grammar may end; `min_tokens` and `ignore_eos` yield where it must.
      allowed_token_ids: the only ids that are sampled; end-of-sequence ids only if among them.
      bad_words: words whose tokens are not sampled one after the other, with a space before the
        first or without; other tokens may spell them.

    Raises:
      InvalidParameter: a value is outside its range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    speculation: bool | None = None
    grammar: Grammar | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        for name in ("stop", "stop_token_ids", "bad_words"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        self._check_ranges()
        self._check_lists()

    def _check_ranges(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        _number("temperature", self.temperature, 0.0, 2.0)
        _number("top_p", self.top_p, 0.0, 1.0)
        _integer("top_k", self.top_k, 0, 2**31 - 1)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 1e-3, 1e3)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 0, 2**63 - 1)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.speculation is not None and not isinstance(self.speculation, bool):
            message = f"speculation must be true or false, got {self.speculation!r}"
            raise InvalidParameter("speculation", message, "invalid_type")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            message = f"grammar must be a Grammar, got a {type(self.grammar).__name__}"
            raise InvalidParameter("grammar", message, "invalid_type")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter(
                "min_tokens",
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}",
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _integer(name, value, 0, MAX_LOGPROBS)

    def _check_lists(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidParameter(
                "stop",
                f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}",
                "array_above_max_length",
            )
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidParameter("stop", f"stop takes non-empty strings, got {text!r}")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidParameter(
                "stop_token_ids",
                f"stop_token_ids takes at most {MAX_STOP_TOKEN_IDS} ids, "
                f"got {len(self.stop_token_ids)}",
                "array_above_max_length",
            )
        for token_id in self.stop_token_ids:
            _integer("stop_token_ids", token_id, 0, 2**31 - 1)
        if self.allowed_token_ids == ():
            message = "allowed_token_ids must name at least one id; leave it out to allow all"
            raise InvalidParameter("allowed_token_ids", message, "empty_array")
        for token_id in self.allowed_token_ids or ():
            _integer("allowed_token_ids", token_id, 0, 2**31 - 1)
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InvalidParameter(
                "bad_words",
                f"bad_words takes at most {MAX_BAD_WORDS} words, got {len(self.bad_words)}",
                "array_above_max_length",
            )
        for word in self.bad_words:
            if not isinstance(word, str) or not word:
                raise InvalidParameter("bad_words", f"bad_words takes words, got {word!r}")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidParameter(
                "logit_bias",
                f"logit_bias takes at most {MAX_LOGIT_BIAS} entries, got {len(self.logit_bias)}",
                "array_above_max_length",
            )
        for token_id, bias in self.logit_bias.items():
            _integer("logit_bias", token_id, 0, 2**31 - 1)
            _number("logit_bias", bias, -100.0, 100.0)

    @property
    def is_greedy(self) -> bool:
        """Whether the best token is always taken."""
        return self.temperature <= GREEDY_TEMPERATURE or self.top_k == 1 or self.top_p == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether token counts influence the logits."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def validate_for(self, vocab_size: int) -> None:
        """Checks the ids against the model's vocabulary.

        Raises:
          InvalidParameter: a token id is not below `vocab_size`.
        """
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            for token_id in getattr(self, name) or ():
                if token_id >= vocab_size:
                    raise InvalidParameter(
                        name,
                        f"{name} holds token id {token_id}, but the vocabulary ends at "
                        f"{vocab_size - 1}",
                    )

    def for_choice(self, index: int, seed: int) -> SamplingParams:
        """Returns the settings of one of the n siblings: its own seed, n = 1."""
        wrapped = (seed + index + 2**63) % 2**64 - 2**63
        return replace(self, n=1, seed=wrapped)


def _integer(param: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidParameter(param, f"{param} must be an integer, got {value!r}", "invalid_type")
    if value < low:
        raise InvalidParameter(
            param, f"{param} must be at least {low}, got {_cut(value)}", "integer_below_min_value"
        )
    if value > high:
        raise InvalidParameter(
            param, f"{param} must be at most {high}, got {_cut(value)}", "integer_above_max_value"
        )


def _number(param: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidParameter(param, f"{param} must be a number, got {value!r}", "invalid_type")
    if math.isnan(value) or value < low:
        raise InvalidParameter(
            param, f"{param} must be at least {low:g}, got {value}", "decimal_below_min_value"
        )
    if value > high:
        raise InvalidParameter(
            param, f"{param} must be at most {high:g}, got {_cut(value)}", "decimal_above_max_value"
        )


def _cut(value: int | float) -> str:
    if isinstance(value, int) and value.bit_length() > 300:
        return f"an integer of {value.bit_length()} bits"
    return str(value)
