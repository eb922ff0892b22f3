"""Which requests are sent, and when: all of it follows from a seed."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxinfer.config import ConfigError


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A request to send.

    Attributes:
      prompt: its token ids.
      output_tokens: exactly how many tokens it shall generate.
      arrival_s: when it was sent in what is replayed; None where that is not known.
    """

    prompt: tuple[int, ...]
    output_tokens: int
    arrival_s: float | None = None


@dataclass(frozen=True, slots=True)
class RandomLengths:
    """Prompts of random ids, uniform in length around a mean, perhaps behind shared prefixes.

    Attributes:
      input_len, output_len: mean lengths.
      range_ratio: lengths are within this share of their mean, 0 to 1.
      shared_prefix_len: tokens in front of each prompt that all of its group have.
      num_prefixes: groups; requests belong to them in turn.
    """

    input_len: int
    output_len: int
    range_ratio: float = 0.0
    shared_prefix_len: int = 0
    num_prefixes: int = 1

    def requests(self, count: int, vocab_size: int, seed: int) -> list[LoadRequest]:
        """Returns the first `count` requests that a seed stands for."""
        lengths, tokens = _stream(seed, "lengths"), _stream(seed, "tokens")
        prefixes = [
            _ids(_stream(seed, f"prefix {group}"), vocab_size, self.shared_prefix_len)
            for group in range(self.num_prefixes)
        ]
        requests = []
        for index in range(count):
            input_len = lengths.randint(*_bounds(self.input_len, self.range_ratio))
            output_len = lengths.randint(*_bounds(self.output_len, self.range_ratio))
            own = _ids(tokens, vocab_size, input_len)
            requests.append(LoadRequest(prefixes[index % self.num_prefixes] + own, output_len))
        return requests


@dataclass(frozen=True, slots=True)
class Replay:
    """Requests as a file has them; prompts of which only lengths are known get random ids.

    Attributes:
      lines: objects with `prompt_tokens` (a length, or the ids), `output_tokens` and maybe
        `arrival_s`.
    """

    lines: tuple[dict[str, Any], ...]

    @classmethod
    def read(cls, path: Path) -> Replay:
        """Reads a file of JSON lines.

        Raises:
          ConfigError: a line is not such an object; names it.
          OSError: the file cannot be read.
        """
        lines = []
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if text.strip():
                lines.append(_checked(text, f"{path}, line {number}"))
        if not lines:
            raise ConfigError(f"{path} has no requests; write one JSON object a line")
        with_arrival = sum("arrival_s" in line for line in lines)
        if with_arrival not in (0, len(lines)):
            raise ConfigError(
                f"{path}: {with_arrival} of {len(lines)} lines have arrival_s; give it in all or "
                "in none"
            )
        return cls(tuple(lines))

    @property
    def has_arrivals(self) -> bool:
        """Whether the file says when each request came."""
        return "arrival_s" in self.lines[0]

    def requests(self, count: int, vocab_size: int, seed: int) -> list[LoadRequest]:
        """Returns the first `count` requests; lengths begin anew after the last line.

        Raises:
          ConfigError: the file has arrivals, and fewer than `count`.
        """
        if self.has_arrivals and count > len(self.lines):
            raise ConfigError(
                f"--num-requests is {count}, but the file has the arrivals of {len(self.lines)}; "
                "ask for fewer, or leave arrival_s out and give --rate or --concurrency"
            )
        tokens = _stream(seed, "tokens")
        requests = []
        for line in itertools.islice(itertools.cycle(self.lines), count):
            prompt = line["prompt_tokens"]
            ids = _ids(tokens, vocab_size, prompt) if isinstance(prompt, int) else tuple(prompt)
            arrival = float(line["arrival_s"]) if self.has_arrivals else None
            requests.append(LoadRequest(ids, line["output_tokens"], arrival))
        return requests


def arrival_times(
    requests: Sequence[LoadRequest], rate: float | None, burstiness: float, seed: int
) -> list[float]:
    """Returns when each request is sent, in seconds after the first: recorded times, or random.

    Gaps are gamma-distributed with mean 1/rate: with `burstiness` 1 arrivals are a Poisson process,
    below they cluster, above they are more regular.
    """
    if rate is None:
        recorded = [request.arrival_s or 0.0 for request in requests]
        return [moment - min(recorded) for moment in recorded]
    if rate == math.inf:
        return [0.0] * len(requests)
    gaps = _stream(seed, "arrivals")
    moments: Iterator[float] = itertools.accumulate(
        (gaps.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in requests[1:]), initial=0.0
    )
    return list(moments)


def _stream(seed: int, what: str) -> random.Random:
    """A generator of its own for each choice: prompts stay the same when the rate changes."""
    return random.Random(f"{seed}: {what}")


def _ids(source: random.Random, vocab_size: int, count: int) -> tuple[int, ...]:
    return tuple(source.choices(range(vocab_size), k=count))


def _bounds(mean: int, ratio: float) -> tuple[int, int]:
    # Rounded first: 100 · (1 - 0.1) is a little more than 90 in binary.
    low, high = round(mean * (1 - ratio), 6), round(mean * (1 + ratio), 6)
    return max(1, math.ceil(low)), math.floor(high)


def _checked(text: str, where: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    if not isinstance(line, dict):
        raise ConfigError(f"{where} must be a JSON object, got {text[:60]}")
    prompt, output = line.get("prompt_tokens"), line.get("output_tokens")
    is_ids = isinstance(prompt, list) and bool(prompt) and all(map(_is_count, prompt))
    if not (is_ids or (_is_count(prompt) and prompt)):
        raise ConfigError(f"{where}: prompt_tokens must be a length of at least 1, or token ids")
    if not (_is_count(output) and output):
        raise ConfigError(f"{where}: output_tokens must be at least 1 (got {output!r})")
    arrival = line.get("arrival_s", 0)
    if type(arrival) not in (int, float) or not 0 <= arrival < math.inf:
        raise ConfigError(f"{where}: arrival_s must be seconds from 0 on (got {arrival!r})")
    return line


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
