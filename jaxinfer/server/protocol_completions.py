"""The body of a completions request: its parameter table, and how it becomes options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxinfer.config import ServerConfig
from jaxinfer.server.constraints import RESPONSE_FORMAT
from jaxinfer.server.errors import invalid, missing
from jaxinfer.server.fields import Field, boolean, integer, read_object, refused
from jaxinfer.server.parameters import MAX_TOKENS, SHARED, GenerationOptions, generation_options
from jaxinfer.server.prompts import Prompt, any_prompts, read_prompts

DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True)
class CompletionRequest:
    """A validated completions request.

    Attributes:
      prompts: texts or token ids; choices are ordered by prompt, then by n.
      echo: the answer starts with the prompt.
      num_best: of the n completions of a prompt, which the options tell, as many are the answer;
        None for all.
      logprobs: alternatives shown per token; None shows nothing.
    """

    options: GenerationOptions
    prompts: tuple[Prompt, ...]
    echo: bool
    num_best: int | None = None
    logprobs: int | None = None


COMPLETIONS: Mapping[str, Field] = {
    **SHARED,
    "prompt": Field(any_prompts),
    "max_tokens": Field(integer(0)),
    "echo": Field(boolean),
    "logprobs": Field(integer(0, 20)),
    "best_of": Field(integer(0, 20)),
    "suffix": refused("", because="needs a fill-in-the-middle model, which this one is not"),
    "response_format": RESPONSE_FORMAT,
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
        raise missing("prompt")
    prompts = read_prompts(values["prompt"], "prompt", vocab_size)
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
    best_of, n = values.get("best_of"), options.params.n
    if best_of is None or best_of == n:
        return CompletionRequest(options, prompts, echo, None, logprobs)
    return CompletionRequest(_best_of(best_of, options, config), prompts, echo, n, logprobs)


def _best_of(best_of: int, options: GenerationOptions, config: ServerConfig) -> GenerationOptions:
    """Returns the options of completions of which some are chosen."""
    n = options.params.n
    if best_of < n:
        raise invalid("best_of", f"best_of must be at least n ({n}), got {best_of}")
    if best_of > config.max_n:
        message = f"best_of must be at most {config.max_n}, got {best_of}"
        raise invalid("best_of", message, "integer_above_max_value")
    if options.stream:
        raise invalid("best_of", f"best_of above n needs stream=false (got {best_of}, n is {n})")
    params = replace(options.params, n=best_of, logprobs=options.params.logprobs or 0)
    return replace(options, params=params)
