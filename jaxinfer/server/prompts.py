"""Prompts that are no chats: the forms they can have in a body, and their cutting to size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxinfer.server.errors import invalid, shown
from jaxinfer.server.fields import Field, described, integer, one_of

Prompt = str | tuple[int, ...]

_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}
PROMPTS_SCHEMA = {
    "anyOf": [
        _TEXT,
        {"type": "array", "items": _TEXT, "minItems": 1},
        _IDS,
        {"type": "array", "items": _IDS, "minItems": 1},
    ]
}


@described(PROMPTS_SCHEMA)
def any_prompts(value: Any, path: str) -> Any:
    """Accepts what `read_prompts` is to read: a vocabulary tells which ids there are."""
    return value


def read_prompts(value: Any, param: str, vocab_size: int) -> tuple[Prompt, ...]:
    """Returns the prompts in a parameter: a text or ids, or an array of either.

    Raises:
      ApiError: 400; it is none of these, a prompt is empty, or an id is not in the vocabulary.
    """
    if isinstance(value, str):
        return (_read_prompt(value, param, param, vocab_size),)
    if not isinstance(value, list):
        message = f"{param} must be a string or an array, got {shown(value)}"
        raise invalid(param, message, "invalid_type")
    if not value:
        raise invalid(param, f"{param} must not be empty", "empty_array")
    if isinstance(value[0], str | list):
        kind = type(value[0])
        for index, item in enumerate(value):
            if type(item) is not kind:
                path = f"{param}[{index}]"
                message = f"{path} has another type than {param}[0]; do not mix them"
                raise invalid(path, message, "invalid_type")
        return tuple(
            _read_prompt(item, param, f"{param}[{index}]", vocab_size)
            for index, item in enumerate(value)
        )
    return (_read_prompt(value, param, param, vocab_size),)


def _read_prompt(value: str | list[Any], param: str, path: str, vocab_size: int) -> Prompt:
    if not value:
        raise invalid(param, f"{path} must not be empty", "empty_array")
    if isinstance(value, str):
        return value
    for index, token_id in enumerate(value):
        if type(token_id) is not int:
            message = f"{path}[{index}] must be a token id, got {shown(token_id)}"
            raise invalid(param, message, "invalid_type")
        if not 0 <= token_id < vocab_size:
            message = f"{path}[{index}] is {shown(token_id)}, but ids end at {vocab_size - 1}"
            raise invalid(param, message)
    return tuple(value)


@dataclass(frozen=True)
class Truncation:
    """How a prompt is cut.

    Attributes:
      num_tokens: kept at most, 1 or more; -1 for as many as there is room for.
      side: where tokens are cut off.
    """

    num_tokens: int
    side: Literal["left", "right"] = "left"

    def cut(self, token_ids: Sequence[int], room: int) -> Sequence[int]:
        """Returns what is kept of a prompt for which the context has room for so many tokens."""
        most = self.num_tokens if self.num_tokens >= 0 else max(1, room)
        if len(token_ids) <= most:
            return token_ids
        return token_ids[-most:] if self.side == "left" else token_ids[:most]


TRUNCATION: Mapping[str, Field] = {
    "truncate_prompt_tokens": Field(integer(-1, 2**31 - 1)),
    "truncation_side": Field(one_of("left", "right")),
}
"""The parameters that `read_truncation` reads."""


def read_truncation(values: Mapping[str, Any]) -> Truncation | None:
    """Returns how prompts are to be cut, or None where they are not.

    Raises:
      ApiError: 400; nothing would be left.
    """
    most = values.get("truncate_prompt_tokens")
    if most is None:
        return None
    if most == 0:
        message = (
            "truncate_prompt_tokens must be at least 1, or -1 for what there is room for, got 0"
        )
        raise invalid("truncate_prompt_tokens", message)
    return Truncation(most, values.get("truncation_side", "left"))
