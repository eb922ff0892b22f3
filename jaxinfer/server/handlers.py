"""The two generating endpoints: read the body, prepare the prompts, admit, reply."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from aiohttp import web

from jaxinfer.async_engine import AsyncEngine, EngineRequest, QueueFullError
from jaxinfer.sampling_params import InvalidParameter, SamplingParams
from jaxinfer.server.chat_answer import ChatAnswer
from jaxinfer.server.chat_prompt import prepare_chat
from jaxinfer.server.completion_answer import CompletionAnswer
from jaxinfer.server.errors import invalid, queue_full
from jaxinfer.server.parameters import GenerationOptions, fit_to_context
from jaxinfer.server.protocol_chat import ChatRequest, parse_chat
from jaxinfer.server.protocol_completions import CompletionRequest, parse_completion
from jaxinfer.server.replies import reply
from jaxinfer.server.routing import read_generation
from jaxinfer.server.served_model import ServedModel
from jaxinfer.server.state import CONFIG, MODEL, REQUEST_ID
from jaxinfer.server.threads import in_thread

_log = logging.getLogger(__name__)

_LOGGED_PROMPTS = 8
_LOGGED_CHARACTERS = 200

ChatAnswerT = TypeVar("ChatAnswerT", bound=ChatAnswer)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    model, call = await read_generation(request, parse_chat)
    return await reply(request, await chat_answer(request, model, call, ChatAnswer))


async def chat_answer(
    request: web.Request,
    model: ServedModel,
    call: ChatRequest,
    make: Callable[..., ChatAnswerT],
) -> ChatAnswerT:
    """Returns the answer to a chat, made by `make`, which takes what a ChatAnswer takes.

    Raises:
      ApiError: 400, the chat does not fit the model or its context; 429, too many are waiting.
    """
    engine = model.engine
    with model.preparing():
        prompt = await in_thread(
            request, lambda: prepare_chat(engine.chat_template, engine.tokenizer, call)
        )
        _log_prompts(request, [message.get("content") for message in call.messages])
        options = replace(call.options, params=prompt.params)
        prompts = [_cut(engine, call.options, prompt.ids)]
        default = request.app[CONFIG].default_max_tokens
        requests = await _admit(request, options, prompts, "messages", default)
    return make(
        model=call.options.model or model.name,
        fingerprint=model.fingerprint,
        tokenizer=engine.tokenizer,
        options=call.options,
        requests=requests,
        syntax=prompt.syntax,
        is_legacy=call.tools is not None and call.tools.is_legacy,
        includes_reasoning=call.includes_reasoning,
        echo=call.echo,
    )


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    model, call = await read_generation(request, parse_completion)
    _check_ids(model.engine, call)
    engine = model.engine
    with model.preparing():
        prompts, echoes = await in_thread(request, lambda: _prompt_ids(engine, call))
        _log_prompts(request, call.prompts)
        requests = await _admit(request, call.options, prompts, "prompt", None)
    answer = CompletionAnswer(
        model=call.options.model or model.name,
        fingerprint=model.fingerprint,
        tokenizer=engine.tokenizer,
        options=call.options,
        requests=requests,
        echoes=echoes,
        num_best=call.num_best,
        logprobs=call.logprobs,
    )
    return await reply(request, answer)


def _check_ids(engine: AsyncEngine, call: CompletionRequest) -> None:
    """Refuses ids that the context can never hold, even while the queue is full.

    How long a text is shows only when it is tokenized, which an overloaded server must not do: one
    that is too long may be told to come again, and is refused then.
    """
    if call.options.truncation is not None:
        return
    for prompt in call.prompts:
        if not isinstance(prompt, str):
            _fitted(engine, call.options, len(prompt), "prompt", None)


def _log_prompts(request: web.Request, prompts: Sequence[object]) -> None:
    if request.app[CONFIG].log_requests:
        cut = [str(prompt)[:_LOGGED_CHARACTERS] for prompt in prompts[:_LOGGED_PROMPTS]]
        _log.info("request %s: %r", request[REQUEST_ID], cut)


def _prompt_ids(
    engine: AsyncEngine, call: CompletionRequest
) -> tuple[list[Sequence[int]], list[str]]:
    adds_special_tokens = call.options.add_special_tokens is not False
    skips = call.options.params.skip_special_tokens
    prompts: list[Sequence[int]] = []
    echoes = []
    ids: Sequence[int]
    for prompt in call.prompts:
        if isinstance(prompt, str):
            ids = engine.tokenizer.encode(prompt, add_special_tokens=adds_special_tokens)
        else:
            ids = prompt
        kept = _cut(engine, call.options, ids)
        prompts.append(kept)
        if call.echo and kept is ids and isinstance(prompt, str):
            echoes.append(prompt)
        elif call.echo:
            echoes.append(engine.tokenizer.decode(kept, skip_special_tokens=skips))
    return prompts, echoes


def _cut(
    engine: AsyncEngine, options: GenerationOptions, prompt_ids: Sequence[int]
) -> Sequence[int]:
    """Returns the prompt, or what is to be left of it."""
    if options.truncation is None:
        return prompt_ids
    generates = options.params.max_tokens != 0
    return options.truncation.cut(prompt_ids, engine.max_model_len - generates)


async def _admit(
    request: web.Request,
    options: GenerationOptions,
    prompts: Sequence[Sequence[int]],
    param: str,
    default_max_tokens: int | None,
) -> list[EngineRequest]:
    """Returns the engine requests; from here on nothing is wrong with what the client sent."""
    engine = request[MODEL].engine
    seed = options.params.seed
    if seed is None:
        seed = request.app[CONFIG].seed
    if seed is None:
        seed = secrets.randbits(63)
    requests = []
    for number, prompt_ids in enumerate(prompts):
        if not prompt_ids:
            raise invalid(param, f"{param} has no tokens; send some text", "empty_array")
        params = _fitted(engine, options, len(prompt_ids), param, default_max_tokens)
        admitted = EngineRequest(
            request_id=f"{request[REQUEST_ID]}-{secrets.token_hex(4)}-{number}",
            prompt_token_ids=tuple(prompt_ids),
            params=replace(params, seed=seed),
            priority=options.priority,
            cache_salt=options.cache_salt,
            arrival_time=time.monotonic(),
        )
        requests.append(admitted)
    # Off the event loop: a grammar may take seconds to compile, or to be refused.
    await in_thread(request, lambda: _check(engine, requests))
    return requests


def _fitted(
    engine: AsyncEngine, options: GenerationOptions, length: int, param: str, default: int | None
) -> SamplingParams:
    return fit_to_context(
        options.params, length, engine.max_model_len, param=param, default=default
    )


def _check(engine: AsyncEngine, requests: Sequence[EngineRequest]) -> None:
    try:
        for request in requests:
            engine.check(request)
    except InvalidParameter as error:
        raise invalid(error.param, str(error), error.code) from None
    except QueueFullError as error:  # too many other grammars are being compiled
        raise queue_full(str(error)) from None
