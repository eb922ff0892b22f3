"""Compiles grammars for one model, once each, within limits."""

from __future__ import annotations

import functools
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable

from jaxinfer.constraints import trial
from jaxinfer.constraints.grammar_text import llguidance_text
from jaxinfer.constraints.isolation import Trials
from jaxinfer.constraints.matcher import CompiledGrammar
from jaxinfer.constraints.vocabulary import Vocabulary
from jaxinfer.grammar import Grammar
from jaxinfer.sampling_params import InvalidParameter
from jaxinfer.text.tokenizer import Tokenizer

MAX_KEPT = 128
"""Compiled grammars kept for the next request with the same."""

MAX_KEPT_S = 2.0
"""Seconds that those took to compile, together: 40 to 120 MB for each second were measured."""

_STACK_BYTES = 2 * trial.STACK_BYTES  # what has passed the trial does so here
_MOST_SHOWN, _MOST_OF_A_WORD = 500, 50
_UNSUPPORTED = ("Unimplemented keys", "Unknown format", "oneOf constraints")

_trials = functools.cache(Trials)  # one process for all models


class GrammarCompiler:
    """The compiled grammars of one model; any thread may use it.

    Args:
      tokenizer: of the model.
      vocab_size: ids that can be sampled.
      eos_token_ids: ids that end a completion.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._vocab_size = vocab_size
        self._vocabulary = Vocabulary(tokenizer, vocab_size, eos_token_ids)
        self._compiling = threading.Lock()
        self._lock = threading.Lock()  # guards what is kept, with the seconds that it took
        self._kept: OrderedDict[tuple[str, str], tuple[CompiledGrammar, float]] = OrderedDict()

    def prepare(self) -> None:
        """Does what the first grammar would otherwise stop all threads for."""
        with self._compiling:
            _ = self._vocabulary.tokenizer

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Returns a grammar ready to be followed.

        Raises:
          InvalidParameter: it is none, nothing matches it, or compiling it exceeds a limit.
          QueueFullError: others are being compiled, which take long.
        """
        try:
            text = llguidance_text(grammar)
            key = (grammar.kind, text)
            found = self._find(key)
            if found is None:
                tried = _trials().run(text, grammar.kind == "lark", self._vocabulary.outline)
                with self._compiling:
                    found = self._find(key) or self._make(key, tried)
            return found
        except ValueError as error:
            raise InvalidParameter(grammar.param, _message(grammar, str(error))) from None

    def _find(self, key: tuple[str, str]) -> CompiledGrammar | None:
        with self._lock:
            if key not in self._kept:
                return None
            grammar, _ = self._kept[key]
            if grammar.is_spoiled:
                del self._kept[key]
                return None
            self._kept.move_to_end(key)
            return grammar

    def _make(self, key: tuple[str, str], text: str) -> CompiledGrammar:
        tokenizer = self._vocabulary.tokenizer
        began = time.monotonic()
        first = trial.on_a_large_stack(lambda: trial.compiled(tokenizer, text), _STACK_BYTES)
        seconds = time.monotonic() - began
        made = CompiledGrammar(first, self._vocab_size, self._vocabulary.eos_token_ids)
        with self._lock:
            self._kept[key] = (made, seconds)
            while len(self._kept) > 1 and (
                len(self._kept) > MAX_KEPT
                or sum(seconds for _, seconds in self._kept.values()) > MAX_KEPT_S
            ):
                self._kept.popitem(last=False)
        return made


def _message(grammar: Grammar, why: str) -> str:
    """What is wrong, in one line; an error may repeat all of a long pattern."""
    words = (
        word if len(word) <= _MOST_OF_A_WORD else f"{word[:_MOST_OF_A_WORD]}..."
        for word in why.split()
    )
    line = " ".join(words)
    line = line if len(line) <= _MOST_SHOWN else f"{line[:_MOST_SHOWN]}..."
    message = f"{grammar.param} cannot be used: {line}"
    if why.startswith(_UNSUPPORTED):
        message += '; "x-guidance": {"lenient": true} in the schema ignores such parts of it'
    return message
