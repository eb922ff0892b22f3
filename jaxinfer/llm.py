"""The offline side: prompts in, whole outputs back, from a script or a notebook."""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, cast

from tqdm import tqdm

from jaxinfer.async_engine import AsyncEngine, EngineDeadError
from jaxinfer.config import EngineConfig
from jaxinfer.outputs import OutputDelta, RequestOutput, TokenLogprob
from jaxinfer.request import EngineRequest
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
        options.setdefault("max_queued_requests", 2**31 - 1)
        self._engine = AsyncEngine(EngineConfig(model=model, **options))
        self._engine.load()
        self._ids = itertools.count()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the model; the object cannot be used afterwards."""
        self._engine.close()

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
          InvalidParameter: a prompt or a setting does not fit the model.
          EngineDeadError: the model was closed.
        """
        batch = _as_batch(prompts)
        requests = [
            self._request(prompt, settings)
            for prompt, settings in zip(
                batch, self._settings(params, sampling, len(batch)), strict=True
            )
        ]
        outputs = {
            request.request_id: RequestOutput.empty(
                request.request_id,
                prompt if isinstance(prompt, str) else None,
                request.prompt_token_ids,
                request.params.n,
            )
            for prompt, request in zip(batch, requests, strict=True)
        }
        with _ProgressBar(sum(r.params.n for r in requests), progress) as bar:
            for delta in self._run(requests):
                outputs[delta.request_id].extend(delta)
                bar.count(delta)
        return list(outputs.values())

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
        yield from self._run([self._request(prompt, settings)])

    def score(
        self, prompts: Prompt | Iterable[Prompt], *, top: int = 0, progress: bool = True
    ) -> list[list[TokenLogprob | None]]:
        """Returns the log-probability of every prompt token but the first, which is None.

        Args:
          prompts: one prompt or several; each is text or token ids.
          top: how many alternatives to report per position, 0 to 20.
        """
        settings = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=top)
        outputs = self.generate(prompts, settings, progress=progress)
        return [output.prompt_logprobs or [None] for output in outputs]

    def _settings(
        self,
        params: SamplingParams | Sequence[SamplingParams] | None,
        sampling: Mapping[str, Any],
        count: int,
    ) -> list[SamplingParams]:
        if params is None:
            defaults = {"max_tokens": DEFAULT_MAX_TOKENS, **self._engine.loaded.default_params}
            return [SamplingParams(**{**defaults, **sampling})] * count
        given = [params] * count if isinstance(params, SamplingParams) else list(params)
        if len(given) != count:
            raise ValueError(f"{len(given)} SamplingParams were given for {count} prompts")
        return [replace(one, **sampling) for one in given]

    def _request(self, prompt: Prompt, params: SamplingParams) -> EngineRequest:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        request = EngineRequest(f"llm-{next(self._ids)}", tuple(ids), params)
        self._engine.check(request)
        return request

    def _run(self, requests: list[EngineRequest]) -> Iterator[OutputDelta]:
        """Submits requests and yields their deltas; aborts what is open when left early."""
        arrived: queue.SimpleQueue[list[OutputDelta]] = queue.SimpleQueue()
        open_: dict[str, int] = {}
        try:
            for request in requests:
                open_[request.request_id] = request.params.n
                self._engine.submit(request, arrived.put)
            while open_:
                for delta in arrived.get():
                    if delta.finish_reason == "error":
                        raise EngineDeadError(delta.error)
                    if delta.finish_reason is not None:
                        open_[delta.request_id] -= 1
                        if not open_[delta.request_id]:
                            del open_[delta.request_id]
                    yield delta
        finally:
            for request_id in open_:
                self._engine.abort(request_id)


class _ProgressBar:
    """Completions done, and tokens per second so far."""

    def __init__(self, total: int, shown: bool) -> None:
        self._bar = tqdm(total=total, desc="Generating", disable=not shown)
        self._began = time.perf_counter()
        self._num_tokens = 0

    def __enter__(self) -> _ProgressBar:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.close()

    def count(self, delta: OutputDelta) -> None:
        """Takes one delta into account."""
        self._num_tokens += len(delta.token_ids)
        rate = self._num_tokens / (time.perf_counter() - self._began)
        self._bar.set_postfix_str(f"{rate:.1f} tok/s", refresh=False)
        self._bar.update(delta.finish_reason is not None)


def _as_batch(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    batch = list(prompts)
    if batch and all(isinstance(item, int) for item in batch):
        return [cast(list[int], batch)]
    return cast(list[Prompt], batch)


_models: dict[tuple[tuple[str, Any], ...], LLM] = {}
"""Models that `generate` loaded, by their options."""


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
    engine_fields = {field.name for field in fields(EngineConfig)}
    engine = {name: options.pop(name) for name in list(options) if name in engine_fields}
    unknown = options.keys() - {field.name for field in fields(SamplingParams)} - {"progress"}
    if unknown:
        raise ValueError(
            f"{sorted(unknown)[0]!r} is neither a field of SamplingParams nor of EngineConfig"
        )
    key = (("model", model), *sorted(engine.items()))
    if key not in _models:
        _models[key] = LLM(model, **engine)
    return _models[key].generate(prompts, **options)


def unload() -> None:
    """Frees every model that `generate` kept."""
    while _models:
        _models.popitem()[1].close()
