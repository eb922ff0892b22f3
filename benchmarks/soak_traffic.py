"""What the soak sends: requests with one right answer, with any of many, and with none."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MAX_MODEL_LEN = 512
MAX_BODY_BYTES = 65_536
MAX_TOP_K = 8
_TEXT = Path(__file__).resolve().parent.parent / "jaxinfer" / "data" / "evaluation.txt"
_PREFIX_CHARACTERS = 700
_NUM_PREFIXES = 4
_SHORT = (
    "The capital of France is",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,",
    "def add(a, b):\n    return a + b\n\ndef subtract(a, b):\n",
    "日本語: こんにちは、世界。\n日本語: こんにちは、世界。\n日本語:",
    "🌶️ 你好 👩‍👩‍👧 🌶️ 你好 👩‍👩‍👧 🌶️ 你好",
    "Привет, как дела? Привет, как дела? Привет",
    "Roses are red,",
)
_GRAMMARS: tuple[dict[str, Any], ...] = (
    {"guided_choice": ["Paris", "Parisian", "London", "none of these"]},
    {"guided_regex": r"[A-Z][a-z]{2,9}( [a-z]{1,9}){3,12}\."},
    {
        "guided_json": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 20},
                "numbers": {"type": "array", "items": {"type": "integer"}, "maxItems": 4},
            },
            "required": ["name", "numbers"],
        }
    },
)
_STOPS = (["."], ["\n"], [" the", " and"], ["never to be found"], ["e"])
_RANDOM_IDS = range(1_000, 40_000)


@dataclass(frozen=True)
class Case:
    """A request whose answer is determined: greedy, or sampled from a seed.

    Attributes:
      path: where it is posted.
      body: what decides the answer.
    """

    path: str
    body: dict[str, Any]

    @property
    def is_greedy(self) -> bool:
        """Whether the best token is always taken."""
        return bool(self.body["temperature"] == 0)

    @property
    def has_grammar(self) -> bool:
        """Whether only some tokens may come."""
        return any(name.startswith("guided_") for name in self.body)


def cases(rng: random.Random, count: int) -> list[Case]:
    """Returns deterministic requests of all kinds; several share a beginning."""
    return [_case(rng, index) for index in range(count)]


def _case(rng: random.Random, index: int) -> Case:
    body: dict[str, Any] = {"max_tokens": rng.choice((4, 12, 24, 48, 96)), "top_p": 1}
    if index % 2:
        seed = rng.choice((rng.randrange(1_000), -rng.randrange(2**62), 2**63 - 1))
        body |= {"temperature": rng.choice((0.7, 1.0, 1.3)), "seed": seed}
        body["top_k"] = rng.randint(2, MAX_TOP_K)
    else:
        body["temperature"] = 0
    if rng.random() < 0.3:
        body["n"] = rng.choice((2, 3))
    if not index % 2 and rng.random() < 0.4:
        body |= rng.choice(_GRAMMARS)
    elif rng.random() < 0.3:
        body["stop"] = rng.choice(_STOPS)
    elif rng.random() < 0.3:
        body["ignore_eos"] = True
    if index % 4 >= 2:
        system = {"role": "system", "content": _prefix(index // 4)}
        user = {"role": "user", "content": rng.choice(_SHORT)}
        messages = [user] if rng.random() < 0.3 else [system, user]
        return Case(CHAT, {"messages": messages, **body})
    kind = rng.random()
    if kind < 0.5:
        prompt: Any = _prefix(index // 4) + rng.choice(_SHORT)
    elif kind < 0.7:
        prompt = rng.choice(_SHORT)
    else:
        prompt = _random_ids(rng)
    # Not of random ids: what float32 says of their least likely, 17 nats down, moves by 1e-4 with
    # the shape of the step that reads them.
    if isinstance(prompt, str) and rng.random() < 0.2:
        body["echo"] = True
    return Case(COMPLETIONS, {"prompt": prompt, **body})


def _prefix(number: int) -> str:
    """A text that every so many requests begin with."""
    start = number % _NUM_PREFIXES * _PREFIX_CHARACTERS
    return _TEXT.read_text(encoding="utf-8")[start : start + _PREFIX_CHARACTERS]


def _random_ids(rng: random.Random) -> list[int]:
    return rng.choices(_RANDOM_IDS, k=rng.choice((1, 15, 16, 17, 100, 350)))


def solo(case: Case) -> dict[str, Any]:
    """Returns the body that asks for a case's answer with all that is known about it."""
    return _with_logprobs(case, case.body | {"return_token_ids": True})


def variant(rng: random.Random, case: Case) -> dict[str, Any]:
    """Returns a body with the same answer: what is drawn here must not change it."""
    body = case.body | {"return_token_ids": True, "stream": rng.random() < 0.6}
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    if rng.random() < 0.3:
        body = _with_logprobs(case, body)
    # A few go first. With many of them, the others would wait for ever, as they should.
    if rng.random() < 0.1:
        body["priority"] = rng.choice((-2, -1))
    if rng.random() < 0.2:
        body["speculation"] = False
    if rng.random() < 0.2:
        body["cache_salt"] = rng.choice(("a", "b"))
    return body


def _with_logprobs(case: Case, body: dict[str, Any]) -> dict[str, Any]:
    return body | ({"logprobs": True} if case.path == CHAT else {"logprobs": 0})


def noise(rng: random.Random) -> Case:
    """Returns a request that may be answered in many ways, with the settings that cases lack."""
    body: dict[str, Any] = {
        "prompt": _random_ids(rng),
        "max_tokens": rng.randint(1, 64),
        "temperature": rng.choice((0.5, 1.0, 1.8)),
        "stream": rng.random() < 0.5,
        "n": rng.choice((1, 1, 1, 4)),
    }
    extras: dict[str, Any] = {
        "top_p": 0.9,
        "min_p": 0.05,
        "top_k": 40,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.7,
        "frequency_penalty": -0.3,
        "logit_bias": {"1234": 5.0, "198": -100},
        "min_tokens": 1,
        "stop_token_ids": [198],
        "logprobs": 20,
    }
    for name in rng.sample(sorted(extras), 3):
        body[name] = extras[name]
    if rng.random() < 0.3:
        body |= rng.choice(_GRAMMARS)
    return Case(COMPLETIONS, body)


@dataclass(frozen=True)
class BadRequest:
    """A request that must be refused.

    Attributes:
      data: its body, as it goes over the wire.
      status, code: what it must be answered with; None stands for an error without a code.
    """

    name: str
    path: str
    data: bytes
    status: int
    code: str | None


def bad_requests() -> list[BadRequest]:
    """Returns one of each kind."""
    fine: dict[str, Any] = {"prompt": "Hello", "max_tokens": 4}
    found = [
        BadRequest(f"{name} {str(value)[:30]}", COMPLETIONS, _dumps(fine | {name: value}), *answer)
        for name, value, *answer in (
            ("temperature", 3, 400, "decimal_above_max_value"),
            ("temperature", "hot", 400, "invalid_type"),
            ("top_p", -0.1, 400, "decimal_below_min_value"),
            ("n", 0, 400, "integer_below_min_value"),
            ("n", 1000, 400, "integer_above_max_value"),
            ("max_tokens", -1, 400, "integer_below_min_value"),
            ("logprobs", 21, 400, "integer_above_max_value"),
            ("seed", 2**63, 400, "integer_above_max_value"),
            ("stop", ["a"] * 17, 400, "array_above_max_length"),
            ("stop", [""], 400, "invalid_value"),
            ("min_tokens", 5, 400, "invalid_value"),
            ("logit_bias", {"x": 1}, 400, "invalid_value"),
            ("logit_bias", {"99999999": 1}, 400, "invalid_value"),
            ("prompt", [], 400, "empty_array"),
            ("prompt", [-1], 400, "invalid_value"),
            ("prompt", [10**6], 400, "invalid_value"),
            ("prompt", [5] * MAX_MODEL_LEN, 400, "context_length_exceeded"),
            ("prompt", "too long " * MAX_MODEL_LEN, 400, "context_length_exceeded"),
            ("stream_options", {"include_usage": True}, 400, "invalid_value"),
            ("suffix", "the end", 400, "unsupported_parameter"),
            ("guided_regex", "[a", 400, "invalid_value"),
            ("guided_json", {"type": "nothing"}, 400, "invalid_value"),
            ("model", "gpt-4", 404, "model_not_found"),
        )
    ]  # fmt: skip
    user = [{"role": "user", "content": "Hello"}]
    found += [
        BadRequest(name, CHAT, _dumps(body), *answer)
        for name, body, *answer in (
            ("no messages", {}, 400, "missing_required_parameter"),
            ("empty messages", {"messages": []}, 400, "empty_array"),
            ("a role", {"messages": [{"role": "x", "content": "y"}]}, 400, "invalid_value"),
            ("top_logprobs alone", {"messages": user, "top_logprobs": 2}, 400, "invalid_value"),
            ("a stream", {"messages": user, "stream": True, "n": 0}, 400,
             "integer_below_min_value"),
        )
    ]  # fmt: skip
    found += [
        BadRequest(name, COMPLETIONS, data, status, code)
        for name, data, status, code in (
            ("no JSON", b"{", 400, None),
            ("no UTF-8", b'{"prompt": "\xff"}', 400, None),
            ("deep JSON", b"[" * 5_000, 400, None),
            ("nothing", b"", 400, None),
            ("no object", b"[1]", 400, None),
            ("a large body", b" " * (MAX_BODY_BYTES + 1), 413, "request_too_large"),
        )
    ]
    return [*found, BadRequest("a path", "/v1/nothing", b"{}", 404, None)]


def _dumps(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()
