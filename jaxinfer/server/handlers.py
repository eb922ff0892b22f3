"""The two generating endpoints: read the body, prepare the prompts, admit, reply."""

from __future__ import annotations

import functools
import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace

from aiohttp import web

from jaxinfer.async_engine import AsyncEngine, EngineRequest
from jaxinfer.sampling_params import InvalidParameter
from jaxinfer.server.chat_answer import ChatAnswer
from jaxinfer.server.completion_answer import CompletionAnswer
from jaxinfer.server.errors import invalid
from jaxinfer.server.json_body import read_body
from jaxinfer.server.parameters import GenerationOptions, fit_to_context
from jaxinfer.server.protocol_chat import ChatRequest, parse_chat
from jaxinfer.server.protocol_completions import CompletionRequest, parse_completion
from jaxinfer.server.replies import reply
from jaxinfer.server.served_model import fingerprint, served_name
from jaxinfer.server.state import CONFIG, ENGINE, EXECUTOR, LIFECYCLE, REQUEST_ID
from jaxinfer.server.threads import in_thread
from jaxinfer.text import TemplateError

_log = logging.getLogger(__name__)

_LOGGED_PROMPTS = 8
_LOGGED_CHARACTERS = 200


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    app = request.app
    app[LIFECYCLE].check_ready()
    engine, config = app[ENGINE], app[CONFIG]
    parse = functools.partial(
        parse_chat, defaults=engine.default_params, vocab_size=_vocab_size(engine), config=config
    )
    call = await read_body(request, app[EXECUTOR], parse)
    model = served_name(app, call.options.model)
    prompt_ids = await in_thread(request, lambda: _chat_ids(engine, call))
    _log_prompts(request, [message.get("content") for message in call.messages])
    answer = ChatAnswer(
        model=model,
        fingerprint=fingerprint(engine),
        tokenizer=engine.tokenizer,
        options=call.options,
        requests=_admit(request, call.options, [prompt_ids], "messages", config.default_max_tokens),
    )
    return await reply(request, answer)


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    app = request.app
    app[LIFECYCLE].check_ready()
    engine, config = app[ENGINE], app[CONFIG]
    parse = functools.partial(
        parse_completion,
        defaults=engine.default_params,
        vocab_size=_vocab_size(engine),
        config=config,
    )
    call = await read_body(request, app[EXECUTOR], parse)
    model = served_name(app, call.options.model)
    prompts, echoes = await in_thread(request, lambda: _prompt_ids(engine, call))
    _log_prompts(request, call.prompts)
    answer = CompletionAnswer(
        model=model,
        fingerprint=fingerprint(engine),
        tokenizer=engine.tokenizer,
        options=call.options,
        requests=_admit(request, call.options, prompts, "prompt", None),
        echoes=echoes,
    )
    return await reply(request, answer)


def _log_prompts(request: web.Request, prompts: Sequence[object]) -> None:
    if request.app[CONFIG].log_requests:
        cut = [str(prompt)[:_LOGGED_CHARACTERS] for prompt in prompts[:_LOGGED_PROMPTS]]
        _log.info("request %s: %r", request[REQUEST_ID], cut)


def _vocab_size(engine: AsyncEngine) -> int:
    """Returns the number of ids that mean something: models pad their embeddings."""
    return min(engine.vocab_size, engine.tokenizer.vocab_size)


def _chat_ids(engine: AsyncEngine, call: ChatRequest) -> list[int]:
    try:
        text = engine.chat_template.render(call.messages, **call.template_options)
    except TemplateError as error:
        raise invalid(error.param, str(error)) from None
    # Templates write the special tokens themselves.
    adds_special_tokens = call.options.add_special_tokens or False
    return engine.tokenizer.encode(text, add_special_tokens=adds_special_tokens)


def _prompt_ids(
    engine: AsyncEngine, call: CompletionRequest
) -> tuple[list[Sequence[int]], list[str]]:
    adds_special_tokens = call.options.add_special_tokens is not False
    skips = call.options.params.skip_special_tokens
    prompts: list[Sequence[int]] = []
    echoes = []
    for prompt in call.prompts:
        if isinstance(prompt, str):
            prompts.append(engine.tokenizer.encode(prompt, add_special_tokens=adds_special_tokens))
            text = prompt
        else:
            prompts.append(prompt)
            text = engine.tokenizer.decode(prompt, skip_special_tokens=skips) if call.echo else ""
        if call.echo:
            echoes.append(text)
    return prompts, echoes


def _admit(
    request: web.Request,
    options: GenerationOptions,
    prompts: Sequence[Sequence[int]],
    param: str,
    default_max_tokens: int | None,
) -> list[EngineRequest]:
    """Returns the engine requests; from here on nothing is wrong with what the client sent."""
    engine = request.app[ENGINE]
    seed = options.params.seed
    if seed is None:
        seed = secrets.randbits(63)
    requests = []
    for number, prompt_ids in enumerate(prompts):
        if not prompt_ids:
            raise invalid(param, f"{param} has no tokens; send some text", "empty_array")
        params = fit_to_context(
            options.params,
            len(prompt_ids),
            engine.max_model_len,
            param=param,
            default=default_max_tokens,
        )
        admitted = EngineRequest(
            request_id=f"{request[REQUEST_ID]}-{secrets.token_hex(4)}-{number}",
            prompt_token_ids=tuple(prompt_ids),
            params=replace(params, seed=seed),
            priority=options.priority,
            cache_salt=options.cache_salt,
            arrival_time=time.monotonic(),
        )
        try:
            engine.check(admitted)
        except InvalidParameter as error:
            raise invalid(error.param, str(error), error.code) from None
        requests.append(admitted)
    return requests
