"""Answers of the soak's requests: folded from streams or bodies, and compared with solo runs."""

from __future__ import annotations

import bisect
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp


class Wrong(Exception):
    """An answer breaks a rule; the message says which."""


class QueueFull(Exception):
    """The server answered 429."""


def check_room(response: aiohttp.ClientResponse) -> None:
    """Raises QueueFull if the server asks to be asked later."""
    if response.status == 429 and response.headers.get("Retry-After"):
        raise QueueFull


@dataclass
class Choice:
    """One completion as a client has it so far.

    Attributes:
      logprobs: those of the answer's tokens, of the echoed prompt's too; None was not scored.
      is_scored: whether log-probabilities came at all.
    """

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    is_scored: bool = False
    finish_reason: str | None = None

    def take(self, piece: Mapping[str, Any]) -> None:
        """Adds a choice of a body or of a streamed chunk, of either endpoint."""
        message = piece.get("message") or piece.get("delta") or {}
        self.text += piece.get("text") or message.get("content") or ""
        self.ids += piece.get("token_ids") or ()
        self.finish_reason = piece.get("finish_reason") or self.finish_reason
        found = piece.get("logprobs")
        if found:
            self.is_scored = True
            values = found.get("token_logprobs")
            if values is None:
                values = [entry["logprob"] for entry in found["content"] or ()]
            self.logprobs += values


@dataclass
class Answer:
    """All choices of a request.

    Attributes:
      prompt_ids: of a whole body that was asked for ids.
      usage: as the server counts, None where it did not say.
      num_events: bodies or chunks that were taken.
    """

    choices: dict[int, Choice] = field(default_factory=dict)
    prompt_ids: list[int] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    num_events: int = 0

    def take(self, event: Mapping[str, Any]) -> None:
        """Adds a body or a streamed chunk."""
        self.num_events += 1
        self.usage = event.get("usage") or self.usage
        self.prompt_ids = event.get("prompt_token_ids") or self.prompt_ids
        for piece in event.get("choices") or ():
            self.prompt_ids = piece.get("prompt_token_ids") or self.prompt_ids
            self.choices.setdefault(piece["index"], Choice()).take(piece)

    async def fetch(
        self,
        session: aiohttp.ClientSession,
        url: str,
        body: dict[str, Any],
        num_events: int | None = None,
    ) -> bool:
        """Posts a request and takes its answer, and returns whether all of it.

        Otherwise it has taken `num_events` and closed the connection.

        Raises:
          QueueFull: the server has no room for it.
          Wrong: it is no answer.
        """
        async with session.post(url, json=body) as response:
            check_room(response)
            if response.status != 200:
                raise Wrong(f"{response.status}: {(await response.text())[:300]}: {body}")
            if not body.get("stream"):
                self.take(await response.json())
                return True
            async for line in response.content:
                data = line.strip()
                if data == b"data: [DONE]":
                    return True
                if data.startswith(b"data:"):
                    event = json.loads(data.removeprefix(b"data:"))
                    if "error" in event:
                        raise Wrong(f"{event}: {body}")
                    self.take(event)
                    if self.num_events == num_events:
                        response.close()
                        return False
        raise Wrong(f"a stream ended without [DONE]: {body}")


@dataclass(frozen=True)
class Difference:
    """Where a choice first has another token than the solo run.

    Attributes:
      before: ids that both have, the prompt's among them.
      found, expected: the ids at that place.
    """

    index: int
    before: tuple[int, ...]
    found: int
    expected: int


def compare(
    answer: Answer, solo: Answer, tolerance: float, is_complete: bool = True
) -> tuple[list[Difference], float]:
    """Returns where choices leave the solo run, and the largest error of a log-probability.

    Args:
      answer: of the server under load.
      solo: of the same request, alone.
      tolerance: how far log-probabilities may be from the solo run's.
      is_complete: otherwise the client went away, and has the beginning of an answer.

    Raises:
      Wrong: it differs in what no rounding explains.
    """
    if is_complete and answer.choices.keys() != solo.choices.keys():
        raise Wrong(f"choices {sorted(answer.choices)}, expected {sorted(solo.choices)}")
    differences, worst = [], 0.0
    for index, choice in answer.choices.items():
        expected = solo.choices[index]
        pairs = enumerate(zip(choice.ids, expected.ids, strict=False))
        at = next((at for at, (a, b) in pairs if a != b), None)
        if at is not None:
            before = (*solo.prompt_ids, *choice.ids[:at])
            differences.append(Difference(index, before, choice.ids[at], expected.ids[at]))
        elif is_complete:
            _check_equal(choice, expected)
        elif choice.ids != expected.ids[: len(choice.ids)] or not expected.text.startswith(
            choice.text
        ):
            raise Wrong(f"{choice} is no beginning of {expected}")
        # Behind a difference they score other texts.
        extra = 0 if at is None else len(expected.ids) - at
        error = _largest_error(choice, expected, len(expected.logprobs) - extra)
        if error > tolerance:
            raise Wrong(f"log-probabilities of choice {index} are {error:.2g} off")
        worst = max(worst, error)
    return differences, worst


def _check_equal(choice: Choice, expected: Choice) -> None:
    for name in ("ids", "text", "finish_reason"):
        found, wanted = getattr(choice, name), getattr(expected, name)
        if found != wanted:
            raise Wrong(f"{name} {found!r}, alone {wanted!r}")
    if choice.is_scored and len(choice.logprobs) != len(expected.logprobs):
        raise Wrong(f"{len(choice.logprobs)} log-probabilities, alone {len(expected.logprobs)}")


def _largest_error(choice: Choice, expected: Choice, count: int) -> float:
    pairs = zip(choice.logprobs[:count], expected.logprobs, strict=False)
    return max(
        (abs(a - b) for a, b in pairs if a is not None and b is not None and a != b), default=0.0
    )


def greedy_gap(top: Sequence[float]) -> float:
    """How far the best token is from the second one, in log-probability."""
    best, second = sorted(top, reverse=True)[:2]
    return best - second


def gap_between(top: Mapping[int, float], difference: Difference) -> float:
    """How far two tokens that a grammar allows are apart, in log-probability."""
    found, expected = top.get(difference.found), top.get(difference.expected)
    return math.inf if found is None or expected is None else abs(found - expected)


def draw_gap(top: Mapping[int, float], temperature: float, top_k: int, u: float) -> float:
    """How far a draw is from where it would pick another token, in probability.

    Args:
      top: log-probability by id, of more than `top_k` tokens.
      temperature, top_k: of the request.
      u: the uniform number that is drawn with, in [0, 1).
    """
    ordered = sorted(top.values(), reverse=True)
    kept = sorted(token for token, value in top.items() if value >= ordered[top_k - 1])
    weights = [math.exp((top[token] - ordered[0]) / temperature) for token in kept]
    edges = [edge / sum(weights) for edge in itertools.accumulate(weights)][:-1]
    at = bisect.bisect(edges, u)
    near = min((abs(u - edge) for edge in edges[max(0, at - 1) : at + 1]), default=1.0)
    # One that is all but kept makes edges of its own.
    return min(near, ordered[top_k - 1] - ordered[top_k])


def ids_by_name(model: str | None) -> dict[str, int]:
    """Token ids by what log-probabilities call them."""
    from jaxinfer.config import EngineConfig
    from jaxinfer.server.logprobs import CompletionLogprobs
    from jaxinfer.startup import open_model

    _, _, tokenizer = open_model(EngineConfig(model=model))
    ids = range(tokenizer.vocab_size)
    names = CompletionLogprobs(tokenizer, frozenset()).piece(ids, [None] * len(ids))["tokens"]
    return dict(zip(names, ids, strict=True))


def drawn(seed: int, length: int) -> float:
    """The uniform number that decides about the token behind `length` others."""
    import jax.numpy as jnp
    import numpy as np

    from kernels.token_sampler.xla import uniform

    words = np.array([(seed + 2**63) % 2**64 - 2**63], np.int64).view(np.int32)
    low, high = jnp.asarray(words[:1]), jnp.asarray(words[1:])
    return float(uniform(low, high, jnp.asarray([length], jnp.int32))[0])
