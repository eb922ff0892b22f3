"""The parameters chat and completions share: their table, and how they become SamplingParams."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxinfer.config import ServerConfig
from jaxinfer.sampling_params import (
    MAX_BAD_WORDS,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    InvalidParameter,
    SamplingParams,
)
from jaxinfer.server.constraints import CONSTRAINTS, read_constraint
from jaxinfer.server.errors import ApiError, invalid, shown
from jaxinfer.server.fields import (
    Field,
    anything,
    array,
    boolean,
    ignored,
    integer,
    json_object,
    number,
    read_object,
    refused,
    string,
)
from jaxinfer.server.prompts import TRUNCATION, Truncation, read_truncation

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
MAX_TOKENS = 2**31 - 1
"""Larger values of max_tokens mean the same: up to the context limit."""
_STRICT_STOP_STRINGS = 4
_TOKEN_ID = re.compile(r"[0-9]{1,10}")


@dataclass(frozen=True)
class GenerationOptions:
    """What one request asks for, apart from its prompt.

    Attributes:
      model: the name it was sent under; None if it named none.
      params: sampling settings; `max_tokens` is None where the request leaves it open.
      include_usage: a streamed answer ends with a usage chunk.
      continuous_usage: every chunk carries the usage so far.
      return_token_ids: choices carry token ids.
      add_special_tokens: whether tokenizing adds them; None leaves it to the endpoint.
      prompt_logprobs: alternatives to report per prompt token, apart from those of an echo.
      names_ids: log-probabilities name tokens by their ids.
      truncation: how prompts are cut; None if not.
      priority: smaller is scheduled earlier.
      cache_salt: cached prefixes are shared only with requests that send the same.
    """

    model: str | None
    params: SamplingParams
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    add_special_tokens: bool | None
    priority: int
    cache_salt: str | None
    prompt_logprobs: int | None = None
    names_ids: bool = False
    truncation: Truncation | None = None


def _read_stop(value: Any, path: str) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [value]
    stops = array(string(), high=MAX_STOP_STRINGS)(value, path)
    if "" in stops:
        raise invalid(path, f"{path} takes non-empty strings")
    return tuple(stops)


def _read_logit_bias(value: Any, path: str) -> dict[int, float]:
    biases = {}
    for key, bias in json_object(value, path).items():
        if not _TOKEN_ID.fullmatch(key):
            raise invalid(path, f"{path} has key {shown(key)}; keys must be token ids such as '42'")
        if bias is None:
            raise invalid(path, f"{path}[{key}] must be a number, got null", "invalid_type")
        try:
            biases[int(key)] = number(-100.0, 100.0)(bias, f"{path}[{key}]")
        except ApiError as error:
            error.body["error"]["param"] = path
            raise
    return biases


_STREAM_OPTIONS = {
    "include_usage": Field(boolean),
    "continuous_usage_stats": Field(boolean),
    "include_obfuscation": ignored(boolean),
}

_SAMPLING = {
    "n": Field(integer(1)),
    "temperature": Field(number(0.0, 2.0)),
    "top_p": Field(number(0.0, 1.0)),
    "top_k": Field(integer(-1, 2**31 - 1)),
    "min_p": Field(number(0.0, 1.0)),
    "repetition_penalty": Field(number()),
    "repeat_penalty": Field(number(), name="repetition_penalty"),
    "presence_penalty": Field(number(-2.0, 2.0)),
    "frequency_penalty": Field(number(-2.0, 2.0)),
    "logit_bias": Field(_read_logit_bias),
    "seed": Field(integer(INT64_MIN, INT64_MAX)),
    "min_tokens": Field(integer(0, MAX_TOKENS)),
    "stop": Field(_read_stop),
    "stop_token_ids": Field(array(integer(0, 2**31 - 1))),
    "ignore_eos": Field(boolean),
    "include_stop_str_in_output": Field(boolean),
    "skip_special_tokens": Field(boolean),
    "speculation": Field(boolean),
    "bad_words": Field(array(string(), high=MAX_BAD_WORDS)),
    "allowed_token_ids": Field(array(integer(0, 2**31 - 1), low=1)),
}

# Samplers of other servers, with the values that switch each one off.
_OTHER_SAMPLERS = {
    "typical_p": refused(1),
    "tfs": refused(1),
    "tfs_z": refused(1),
    "top_a": refused(0),
    "mirostat": refused(0),
    "mirostat_mode": refused(0),
    "xtc_probability": refused(0),
    "dynatemp_range": refused(0),
    "smoothing_factor": refused(0),
    "dry_multiplier": refused(0),
    "repeat_last_n": refused(-1),
    "use_beam_search": refused(False),
    **dict.fromkeys(
        (
            "mirostat_tau",
            "mirostat_eta",
            "xtc_threshold",
            "dynatemp_exponent",
            "smoothing_curve",
            "dry_base",
            "length_penalty",
        ),
        ignored(number()),
    ),
    "dry_allowed_length": ignored(integer(0)),
    "dry_penalty_last_n": ignored(integer(-1)),
    "dry_sequence_breakers": ignored(array(string())),
    "early_stopping": ignored(anything),
}

_REFUSED = {
    "logprob_token_ids": refused([]),
    "prompt_embeds": refused(),
}

_WITHOUT_EFFECT = {
    "user": ignored(string()),
    "safety_identifier": ignored(string()),
    "metadata": ignored(json_object),
    "store": ignored(boolean),
    "service_tier": ignored(string()),
    "prediction": ignored(json_object),
    "prompt_cache_key": ignored(string()),
    "prompt_cache_retention": ignored(string()),
    "moderation": ignored(anything),
    "spaces_between_special_tokens": ignored(boolean),
    "guided_decoding_backend": ignored(string()),
    "include_reasoning": ignored(boolean),
    "thinking_token_budget": ignored(integer()),
    "vllm_xargs": ignored(json_object),
    "kv_transfer_params": ignored(json_object),
    "mm_processor_kwargs": ignored(json_object),
    "timings_per_token": ignored(boolean),
    "return_progress": ignored(boolean),
    "cache_prompt": ignored(boolean),
    "n_probs": ignored(integer(0)),
    "id_slot": ignored(integer(-1)),
    "n_predict": ignored(integer(-1)),
    "truncate_sequence": ignored(boolean),
    "session_id": ignored(string()),
    "adapter": ignored(anything),
}

SHARED: Mapping[str, Field] = {
    "model": Field(string()),
    "stream": Field(boolean),
    "stream_options": Field(json_object),
    "return_token_ids": Field(boolean),
    "add_special_tokens": Field(boolean),
    "priority": Field(integer(INT64_MIN, INT64_MAX)),
    "cache_salt": Field(string()),
    "prompt_logprobs": Field(integer(0, MAX_LOGPROBS)),
    "return_tokens_as_token_ids": Field(boolean),
    **TRUNCATION,
    **_SAMPLING,
    **CONSTRAINTS,
    **_OTHER_SAMPLERS,
    **_REFUSED,
    **_WITHOUT_EFFECT,
}


def generation_options(
    values: Mapping[str, Any],
    *,
    defaults: Mapping[str, Any],
    vocab_size: int,
    config: ServerConfig,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> GenerationOptions:
    """Returns the options of a request.

    Args:
      values: its parameters, read by a table that includes SHARED.
      defaults: the checkpoint's sampling settings, for what the request leaves out.
      vocab_size: ids from here on are refused.
      config: the server's own limits.
      max_tokens: tokens to generate; None leaves it open.
      logprobs: alternatives to report per generated token; None reports nothing.
      prompt_logprobs: the same per token of a prompt that is echoed.

    Raises:
      ApiError: 400; two parameters contradict each other, or one exceeds this server's limits.
    """
    sampling = _sampling(values, defaults, config)
    stream = values.get("stream", False)
    stream_options = _stream_options(values, stream, config.strict_params)
    of_prompt = values.get("prompt_logprobs")
    if of_prompt is not None:
        if stream:
            raise invalid("prompt_logprobs", "prompt_logprobs needs stream=false")
        # With an alternative comes a token's rank.
        prompt_logprobs = max(of_prompt, prompt_logprobs or 1)
    constraint = read_constraint(values)
    try:
        params = SamplingParams(
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=None if constraint is None else constraint[1],
            **sampling,
        )
        params.validate_for(vocab_size)
    except InvalidParameter as error:
        raise invalid(error.param, str(error), error.code) from None
    return GenerationOptions(
        model=values.get("model"),
        params=params,
        stream=stream,
        include_usage=stream_options.get("include_usage", False),
        continuous_usage=stream_options.get("continuous_usage_stats", False),
        return_token_ids=values.get("return_token_ids", False),
        add_special_tokens=values.get("add_special_tokens"),
        priority=values.get("priority", 0),
        cache_salt=values.get("cache_salt"),
        prompt_logprobs=of_prompt,
        names_ids=values.get("return_tokens_as_token_ids", False),
        truncation=read_truncation(values),
    )


def _sampling(
    values: Mapping[str, Any], defaults: Mapping[str, Any], config: ServerConfig
) -> dict[str, Any]:
    """Returns the fields of SamplingParams that the request or the checkpoint sets."""
    sampling = {name: values[name] for name in _SAMPLING if name in values}
    if config.generation_config == "auto":
        sampling = {**{name: defaults[name] for name in _DEFAULTED if name in defaults}, **sampling}
    if sampling.get("n", 1) > config.max_n:
        message = f"n must be at most {config.max_n}, got {shown(sampling['n'])}"
        raise invalid("n", message, "integer_above_max_value")
    if config.strict_params and len(sampling.get("stop", ())) > _STRICT_STOP_STRINGS:
        message = f"stop takes at most {_STRICT_STOP_STRINGS} strings"
        raise invalid("stop", message, "array_above_max_length")
    return sampling


_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def _stream_options(values: Mapping[str, Any], stream: bool, strict: bool) -> dict[str, Any]:
    given = values.get("stream_options")
    if given is None:
        return {}
    if not stream:
        raise invalid("stream_options", "stream_options needs stream=true")
    return read_object(given, _STREAM_OPTIONS, strict=strict)


def fit_to_context(
    params: SamplingParams, prompt_length: int, limit: int, *, param: str, default: int | None
) -> SamplingParams:
    """Returns `params` with `max_tokens` set to what fits behind the prompt.

    Args:
      params: as asked for.
      prompt_length: tokens of the prompt.
      limit: tokens a request may hold, prompt and output together.
      param: the prompt's parameter, for the error.
      default: `max_tokens` of a request that gives none; None means all that fits.

    Raises:
      ApiError: 400 context_length_exceeded; the prompt leaves no room for a token.
    """
    wanted = params.max_tokens if params.max_tokens is not None else default
    room = limit - prompt_length
    if room < 0 or (room == 0 and wanted != 0):
        raise ApiError(
            400,
            f"This model's maximum context length is {limit} tokens, but the prompt has "
            f"{prompt_length}; shorten it so that at least one token can be generated.",
            code="context_length_exceeded",
            param=param,
            extra={"n_prompt_tokens": prompt_length, "n_ctx": limit},
        )
    max_tokens = room if wanted is None else min(wanted, room)
    if wanted is None and params.min_tokens > room:
        raise invalid(
            "min_tokens",
            f"min_tokens must be at most {room}, what the context leaves, got {params.min_tokens}",
            "integer_above_max_value",
        )
    return replace(params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens))
