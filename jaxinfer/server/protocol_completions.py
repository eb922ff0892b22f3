"""The body of a completions request: its parameter table, and the forms a prompt can have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.config import ServerConfig
from jaxinfer.server.errors import invalid, shown, unsupported
from jaxinfer.server.fields import Field, anything, boolean, integer, read_object, refused
from jaxinfer.server.parameters import MAX_TOKENS, SHARED, GenerationOptions, generation_options

DEFAULT_MAX_TOKENS = 16

Prompt = str | tuple[int, ...]


@dataclass(frozen=True)
class CompletionRequest:
    """A validated completions request.

    Attributes:
      prompts: texts or token ids; choices are ordered by prompt, then by n.
      echo: the answer starts with the prompt.
    """

    options: GenerationOptions
    prompts: tuple[Prompt, ...]
    echo: bool


COMPLETIONS: Mapping[str, Field] = {
    **SHARED,
    "prompt": Field(anything),
    "max_tokens": Field(integer(0)),
    "echo": Field(boolean),
    "logprobs": Field(integer(0, 20)),
    "best_of": Field(integer(0, 20)),
    "suffix": refused("", because="needs a fill-in-the-middle model, which this one is not"),
    "response_format": refused(
        {"type": "text"}, because="needs constrained decoding, which this server does not offer yet"
    ),
}


def parse_completion(
    body: Mapping[str, Any],
    *,
    defaults: Mapping[str, Any],
    vocab_size: int,
    config: ServerConfig,
) -> CompletionRequest:
    """Returns the request in a JSON body.

    Raises:
      ApiError: 400; a parameter is missing, does not fit, or is not honoured.
    """
    values = read_object(body, COMPLETIONS, strict=config.strict_params)
    if "prompt" not in values:
        raise invalid("prompt", "prompt is required", "missing_required_parameter")
    prompts = _read_prompts(values["prompt"], vocab_size)
    if len(prompts) > config.max_prompts:
        message = f"prompt takes at most {config.max_prompts} prompts, got {len(prompts)}"
        raise invalid("prompt", message, "array_above_max_length")
    echo = values.get("echo", False)
    max_tokens = values.get("max_tokens", config.default_max_tokens or DEFAULT_MAX_TOKENS)
    if max_tokens == 0 and not echo:
        message = "max_tokens must be at least 1 without echo=true, got 0"
        raise invalid("max_tokens", message, "integer_below_min_value")
    logprobs = values.get("logprobs")
    options = generation_options(
        values,
        defaults=defaults,
        vocab_size=vocab_size,
        config=config,
        max_tokens=min(max_tokens, MAX_TOKENS),
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo else None,
    )
    _check_best_of(values.get("best_of"), options.params.n)
    return CompletionRequest(options, prompts, echo)


def _check_best_of(best_of: int | None, n: int) -> None:
    if best_of is None or best_of == n:
        return
    if best_of < n:
        raise invalid("best_of", f"best_of must be at least n ({n}), got {best_of}")
    raise unsupported("best_of", f"best_of above n is not supported (got {best_of}, n is {n})")


def _read_prompts(value: Any, vocab_size: int) -> tuple[Prompt, ...]:
    if isinstance(value, str):
        return (_read_prompt(value, "prompt", vocab_size),)
    if not isinstance(value, list):
        message = f"prompt must be a string or an array, got {shown(value)}"
        raise invalid("prompt", message, "invalid_type")
    if not value:
        raise invalid("prompt", "prompt must not be empty", "empty_array")
    if isinstance(value[0], str | list):
        kind = type(value[0])
        for index, item in enumerate(value):
            if type(item) is not kind:
                message = f"prompt[{index}] has another type than prompt[0]; do not mix them"
                raise invalid(f"prompt[{index}]", message, "invalid_type")
        return tuple(
            _read_prompt(item, f"prompt[{index}]", vocab_size) for index, item in enumerate(value)
        )
    return (_read_prompt(value, "prompt", vocab_size),)


def _read_prompt(value: str | list[Any], path: str, vocab_size: int) -> Prompt:
    if not value:
        raise invalid("prompt", f"{path} must not be empty", "empty_array")
    if isinstance(value, str):
        return value
    for index, token_id in enumerate(value):
        if type(token_id) is not int:
            message = f"{path}[{index}] must be a token id, got {shown(token_id)}"
            raise invalid("prompt", message, "invalid_type")
        if not 0 <= token_id < vocab_size:
            message = f"{path}[{index}] is {shown(token_id)}, but ids end at {vocab_size - 1}"
            raise invalid("prompt", message)
    return tuple(value)
