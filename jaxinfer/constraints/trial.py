"""Compiles grammars for another process, which ends this one when it takes too long.

`isolation` starts this file by its path, so that nothing else of jaxinfer is imported: each line of
its input is a JSON object with a grammar, and each line of its output says what became of that.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from typing import Any

LIMITS: dict[str, Any] = {
    "max_items_in_row": 20_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
"""llguidance's own. The step's are up to 0.1 s of one core, of which sensible grammars need a
hundredth; 20,000 items are an object of 500 optional properties and more, 50,000 states 100 MB."""

STACK_BYTES = 64 << 20
"""llguidance recurses along chains of references, 8 to 16 KB each."""

MEMORY_BYTES = 1 << 30
"""Address space of the process that tries grammars, its stacks included."""


def compiled(tokenizer: Any, text: str) -> Any:
    """Returns a matcher in its first state, whose first mask has been computed.

    Args:
      tokenizer: a llguidance.LLTokenizer.
      text: what llguidance reads: Lark, or a JSON object of grammars.

    Raises:
      ValueError: it is no grammar, nothing matches it, or a limit was exceeded.
    """
    import llguidance

    limits = llguidance.LLParserLimits(**LIMITS)
    matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher


def as_lark(text: str) -> str:
    """Returns a grammar in llguidance's own language, where it is in llama.cpp's GBNF.

    Raises:
      ValueError: it is in neither.
    """
    from llguidance.gbnf_to_lark import any_to_lark

    if text.lstrip().startswith("{"):
        return text  # a list of grammars
    try:
        return str(any_to_lark(text))
    except RecursionError:
        raise ValueError("it nests too deeply") from None
    except Exception as error:
        raise ValueError(
            f"it is not Lark, which has a rule named start, and as GBNF it fails: {error}"
        ) from None


def on_a_large_stack(work: Any, stack_bytes: int) -> Any:
    """Returns what `work` returns or raises, called on a thread with a stack of its own size."""
    outcome: list[tuple[bool, Any]] = []

    def run() -> None:
        try:
            outcome.append((True, work()))
        except BaseException as error:
            outcome.append((False, error))

    before = threading.stack_size(stack_bytes)
    try:
        thread = threading.Thread(target=run, name="jaxinfer-grammar", daemon=True)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    [(is_good, value)] = outcome
    if not is_good:
        raise value
    return value


def _tokenizer(vocabulary: dict[str, Any]) -> Any:
    """A tokenizer of single bytes and the special tokens: compiling needs no more."""
    import llguidance

    special = {int(token_id): text.encode() for token_id, text in vocabulary["special"].items()}
    free = [token_id for token_id in range(vocabulary["size"] + 256) if token_id not in special]
    ids = dict(zip(range(256), free, strict=False))
    tokens = [b""] * max(vocabulary["size"], ids[255] + 1)
    for token_id, data in (*special.items(), *((ids[byte], bytes([byte])) for byte in ids)):
        tokens[token_id] = data

    class Encoder:
        def __init__(self) -> None:
            self.eos_token_id = vocabulary["eos"]
            self.bos_token_id = None
            self.special_token_ids = list(special)
            self.tokens = tokens

        def __call__(self, text: str) -> list[int]:
            return [ids[byte] for byte in text.encode()]

    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Encoder()))


def _answers() -> None:
    tokenizer = None
    for line in sys.stdin:
        message = json.loads(line)
        if message["vocabulary"] is not None:
            tokenizer = _tokenizer(message["vocabulary"])
        text, error = message["text"], None
        try:
            if message["is_lark"]:
                text = as_lark(text)
            compiled(tokenizer, text)
        except Exception as problem:
            error = str(problem) or type(problem).__name__
        answer = {"text": text if error is None else None, "error": error}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


if __name__ == "__main__":
    sys.path.append(sys.argv[1])
    _limit_memory()
    on_a_large_stack(_answers, STACK_BYTES)
