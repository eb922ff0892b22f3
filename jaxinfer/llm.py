"""The offline side: prompts in, whole outputs back, from a script or a notebook."""

from __future__ import annotations

import difflib
import gc
import itertools
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import fields, replace
from numbers import Integral
from typing import Any, cast

import numpy as np
from tqdm import tqdm

from jaxinfer.async_engine import AsyncEngine
from jaxinfer.config import EngineConfig
from jaxinfer.embedding import normalized
from jaxinfer.outputs import OutputDelta, RequestOutput, TokenLogprob
from jaxinfer.request import EMBEDDING, EngineRequest
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Message = Mapping[str, Any]

DEFAULT_MAX_TOKENS = 256
"""Output tokens where neither the caller nor a SamplingParams says how many."""


class LLM:
    """One loaded model.

    Works inside a running event loop; may be used from several threads.

    Args:
      model: hub id, directory or .gguf file; None for SmolLM2-135M-Instruct.
      options: any field of EngineConfig.

    Raises:
      ValueError: the checkpoint or an option cannot be used.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        _refuse_unknown(options, EngineConfig)
        options.setdefault("max_queued_requests", 2**31 - 1)
        self._engine = AsyncEngine(EngineConfig(model=model, **options))
        self._engine.load()
        self._ids = itertools.count()

    @classmethod
    def from_engine(cls, engine: AsyncEngine) -> LLM:
        """Returns one around an engine that is ready and that it owns from here."""
        llm = cls.__new__(cls)
        llm._engine = engine
        llm._ids = itertools.count()
        return llm

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives the model's memory back; the object cannot be used afterwards."""
        self._engine.close()
        self._engine.free()
        gc.unfreeze()  # what is alive now is the caller's, to be collected like anything else

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._engine.loaded.tokenizer

    @property
    def engine(self) -> AsyncEngine:
        """The engine behind it."""
        return self._engine

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        **sampling: Any,
    ) -> list[RequestOutput]:
        """Completes prompts; returns one output per prompt, in order.

        Args:
          prompts: one prompt or several; each is text or token ids.
          params: for all prompts, or one per prompt.
          progress: show a bar with tokens per second.
          sampling: fields of SamplingParams, over `params` or the checkpoint's own defaults.

        Raises:
          ValueError: a setting is unknown, or one or a prompt does not fit (InvalidParameter).
          EngineDeadError: the model was closed.
        """
        batch = _as_batch(prompts)
        settings = self._settings(params, sampling, len(batch))
        requests = [self._request(*pair) for pair in zip(batch, settings, strict=True)]
        return self._run(batch, requests, "Generating" if progress else None)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        template: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation or several, rendered by the model's chat template.

        Args:
          messages: a list of {"role", "content"}, or a list of such lists.
          template: more variables for the template.
          params, progress, sampling: as for `generate`.

        Raises:
          TemplateError: the model has no chat template, or the template refused.
        """
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        conversations = cast(list[list[Message]], [messages] if is_one else messages)
        prompts = [
            self.tokenizer.encode(
                self._engine.chat_template.render(list(conversation), **(template or {})),
                add_special_tokens=False,
            )
            for conversation in conversations
        ]
        return self.generate(prompts, params, progress=progress, **sampling)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **sampling: Any
    ) -> Iterator[OutputDelta]:
        """Yields one prompt's output as it is generated; closing the iterator aborts."""
        [settings] = self._settings(params, sampling, 1)
        yield from self._engine.stream([self._request(prompt, settings)])

    def score(
        self, prompts: Prompt | Iterable[Prompt], *, top: int = 0, progress: bool = True
    ) -> list[list[TokenLogprob | None]]:
        """Returns the log-probability of every prompt token but the first, which is None.

        Args:
          prompts: one prompt or several; each is text or token ids.
          top: how many alternatives to report per position, 0 to 20.
        """
        settings = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=top)
        batch = _as_batch(prompts)
        requests = [self._request(prompt, settings) for prompt in batch]
        outputs = self._run(batch, requests, "Scoring" if progress else None)
        return [output.prompt_logprobs or [None] for output in outputs]

    def embed(
        self,
        prompts: Prompt | Iterable[Prompt],
        *,
        normalize: bool = True,
        progress: bool = True,
    ) -> np.ndarray:
        """Returns float32 vectors [N, D] that stand for prompts, one row each, in order.

        A row is the hidden state of the prompt's last token after the final norm.

        Args:
          prompts: one prompt or several; each is text or token ids.
          normalize: scale each vector to length 1.
          progress: show a bar with tokens per second.

        Raises:
          InvalidParameter: a prompt is empty or does not fit.
          RuntimeError: a prompt failed; says which.
          EngineDeadError: the model was closed.
        """
        batch = _as_batch(prompts)
        requests = [self._request(prompt, EMBEDDING, embeds=True) for prompt in batch]
        outputs = self._run(batch, requests, "Embedding" if progress else None)
        rows = []
        for index, output in enumerate(outputs):
            if output.hidden is None:
                raise RuntimeError(f"prompt {index} failed: {output.outputs[0].error}")
            rows.append(normalized(output.hidden) if normalize else np.array(output.hidden))
        return np.stack(rows) if rows else np.zeros((0, 0), np.float32)

    def _settings(
        self,
        params: SamplingParams | Sequence[SamplingParams] | None,
        sampling: Mapping[str, Any],
        count: int,
    ) -> list[SamplingParams]:
        _refuse_unknown(sampling, SamplingParams)
        if params is None:
            defaults = {"max_tokens": DEFAULT_MAX_TOKENS, **self._engine.default_params}
            return [SamplingParams(**{**defaults, **sampling})] * count
        given = [params] * count if isinstance(params, SamplingParams) else list(params)
        if len(given) != count:
            raise ValueError(f"{len(given)} SamplingParams were given for {count} prompts")
        return [replace(one, **sampling) for one in given]

    def _request(
        self, prompt: Prompt, params: SamplingParams, *, embeds: bool = False
    ) -> EngineRequest:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        request = EngineRequest(f"llm-{next(self._ids)}", tuple(ids), params, embeds=embeds)
        self._engine.check(request)
        return request

    def _run(
        self, prompts: Sequence[Prompt], requests: Sequence[EngineRequest], title: str | None
    ) -> list[RequestOutput]:
        """Runs all prompts together, under a bar of that title; an interrupt aborts them."""
        outputs = {
            request.request_id: RequestOutput.empty(
                request.request_id,
                prompt if isinstance(prompt, str) else None,
                request.prompt_token_ids,
                request.params.n,
            )
            for prompt, request in zip(prompts, requests, strict=True)
        }
        num_completions = sum(request.params.n for request in requests)
        with (
            _ProgressBar(num_completions, title) as bar,
            closing(self._engine.stream(requests)) as deltas,
        ):
            for delta in deltas:
                outputs[delta.request_id].extend(delta)
                bar.count(delta, len(outputs[delta.request_id].prompt_token_ids))
        return list(outputs.values())


class _ProgressBar:
    """Completions done, and tokens per second so far: generated, scored or embedded ones."""

    def __init__(self, total: int, title: str | None) -> None:
        self._bar = tqdm(total=total, desc=title, disable=title is None)
        self._began = time.perf_counter()
        self._num_tokens = 0

    def __enter__(self) -> _ProgressBar:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.close()

    def count(self, delta: OutputDelta, prompt_len: int) -> None:
        """Takes one delta of a prompt into account."""
        if delta.hidden is None:
            self._num_tokens += len(delta.token_ids) or len(delta.prompt_logprobs or ())
        else:
            self._num_tokens += prompt_len
        rate = self._num_tokens / (time.perf_counter() - self._began)
        self._bar.set_postfix_str(f"{rate:.1f} tok/s", refresh=False)
        self._bar.update(delta.finish_reason is not None)


def _refuse_unknown(names: Iterable[str], *classes: type) -> None:
    known = {field.name: owner for owner in classes for field in fields(owner)}
    for name in names:
        if name not in known:
            [nearest] = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            owners = " and ".join(owner.__name__ for owner in classes)
            raise ValueError(f"{name!r} is no field of {owners}; the nearest is {nearest!r}")


def _as_batch(prompts: Prompt | Iterable[Prompt]) -> list[str | list[int]]:
    """Returns the prompts as a list; ids of any integer type, numpy's too, become ints."""
    if isinstance(prompts, str):
        return [prompts]
    batch = list(prompts)
    if batch and all(isinstance(item, Integral) for item in batch):
        return [[int(item) for item in cast(list[int], batch)]]
    several = cast(list[Prompt], batch)
    return [item if isinstance(item, str) else [int(token) for token in item] for item in several]


_models: dict[tuple[tuple[str, Any], ...], LLM] = {}
"""Models that `generate` loaded, by their options."""
_loading = threading.Lock()


def generate(
    prompts: Prompt | Iterable[Prompt], model: str | None = None, **options: Any
) -> list[RequestOutput]:
    """Completes prompts with a model that is loaded once per set of engine options and kept.

    Args:
      prompts: one prompt or several; each is text or token ids.
      model: hub id, directory or .gguf file; None for SmolLM2-135M-Instruct.
      options: fields of SamplingParams, of EngineConfig, and `progress`.

    Raises:
      ValueError: an option is unknown or out of range, or the checkpoint cannot be used.
    """
    _refuse_unknown(options.keys() - {"progress"}, SamplingParams, EngineConfig)
    engine_fields = {field.name for field in fields(EngineConfig)}
    engine = {name: options.pop(name) for name in list(options) if name in engine_fields}
    key = (("model", model), *sorted(engine.items()))
    with _loading:
        if key not in _models:
            _models[key] = LLM(model, **engine)
        llm = _models[key]
    return llm.generate(prompts, **options)


def unload() -> None:
    """Frees every model that `generate` kept."""
    with _loading:
        while _models:
            _models.popitem()[1].close()
