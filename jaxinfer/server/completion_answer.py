"""Text completions: OpenAI's `text_completion`, with the prompt echoed and scored if asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxinfer.outputs import CompletionOutput, OutputDelta, TokenLogprob
from jaxinfer.server.answers import Answer
from jaxinfer.server.logprobs import CompletionLogprobs
from jaxinfer.server.logprobs import prompt_logprobs as vllm_prompt_logprobs


class CompletionAnswer(Answer):
    """The answer to a completions request.

    Args:
      echoes: what choices start with, by prompt; empty if with nothing.
      num_best: choices per prompt, those of the highest mean log-probability; None for all.
      logprobs: alternatives shown per token; None shows nothing.
      common: as for every answer.
    """

    id_prefix = "cmpl"
    object_name = chunk_object_name = "text_completion"

    def __init__(
        self,
        *,
        echoes: Sequence[str],
        num_best: int | None = None,
        logprobs: int | None = None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self._echoes = echoes
        self._num_best = num_best
        self._num_logprobs = logprobs
        self._streams: dict[int, CompletionLogprobs] = {}
        self._prompt_logprobs: dict[int, Sequence[TokenLogprob | None]] = {}
        self._held: list[tuple[int, OutputDelta]] = []

    def opening(self) -> list[dict[str, Any]]:
        """Returns an empty text, so that even an empty answer has a chunk; the echo if unscored."""
        if self._scores_prompt:
            return []
        num_choices = len(self.requests) * self.n
        return [self._piece(index, self._echo(index // self.n)) for index in range(num_choices)]

    def delta(self, prompt: int, delta: OutputDelta) -> list[dict[str, Any]]:
        """Returns the text as one choice and the finish reason as another.

        With a scored prompt, choices begin with it, so they wait until its scores are here.
        """
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs[prompt] = delta.prompt_logprobs
        if self._scores_prompt and prompt not in self._prompt_logprobs:
            self._held.append((prompt, delta))
            return []
        ready = [(prompt, delta)]
        if self._held:
            ready += [held for held in self._held if held[0] == prompt]
            self._held = [held for held in self._held if held[0] != prompt]
        return [choice for item in ready for choice in self._stream(*item)]

    def _stream(self, prompt: int, delta: OutputDelta) -> list[dict[str, Any]]:
        index = self.index(prompt, delta.index)
        choices = []
        logprobs = self._streams.get(index)
        if logprobs is None:
            logprobs = self._streams[index] = self._new_logprobs()
            if self._scores_prompt:
                piece = self._piece(index, self._echo(prompt))
                piece["logprobs"] = self._score_prompt(
                    logprobs, prompt, self._prompt_logprobs[prompt]
                )
                choices.append(piece)
        shows_tokens = delta.token_ids and self.options.return_token_ids
        if delta.text or delta.logprobs or shows_tokens:
            piece = self._piece(index, delta.text)
            if delta.logprobs is not None:
                piece["logprobs"] = logprobs.piece(delta.token_ids, delta.logprobs)
            if self.options.return_token_ids:
                piece["token_ids"] = list(delta.token_ids)
            choices.append(piece)
        if delta.finish_reason is not None:
            piece = self._piece(index, "")
            piece["finish_reason"] = delta.finish_reason
            piece["stop_reason"] = delta.stop_reason
            choices.append(piece)
        return choices

    def text(self) -> str:
        """Returns the JSON of an answer that is not streamed."""
        if self._num_best is not None:
            for output in self.outputs:
                best = sorted(output.outputs, key=_mean_logprob, reverse=True)[: self._num_best]
                output.outputs = [
                    replace(completion, index=index) for index, completion in enumerate(best)
                ]
            self.n = self._num_best
        return super().text()

    def choice(
        self,
        prompt: int,
        output: CompletionOutput,
        prompt_logprobs: Sequence[TokenLogprob | None] | None,
    ) -> dict[str, Any]:
        """Returns a complete choice."""
        choice: dict[str, Any] = {
            "index": self.index(prompt, output.index),
            "text": self._echo(prompt) + output.text,
            "logprobs": None,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        if self._num_logprobs is not None:
            logprobs = self._new_logprobs()
            pieces = []
            if self._scores_prompt and prompt_logprobs is not None:
                pieces.append(self._score_prompt(logprobs, prompt, prompt_logprobs))
            pieces.append(logprobs.piece(output.token_ids, output.logprobs or ()))
            choice["logprobs"] = {
                name: [item for piece in pieces for item in piece[name]] for name in pieces[0]
            }
        if self.options.return_token_ids:
            choice["token_ids"] = output.token_ids
            choice["prompt_token_ids"] = list(self.requests[prompt].prompt_token_ids)
        if self.options.prompt_logprobs is not None:
            choice["prompt_logprobs"] = vllm_prompt_logprobs(
                self.tokenizer, prompt_logprobs or (), self.options.prompt_logprobs
            )
        return choice

    @property
    def _scores_prompt(self) -> bool:
        """Whether the echo of the prompt comes with log-probabilities."""
        return bool(self._echoes) and self._num_logprobs is not None

    def _new_logprobs(self) -> CompletionLogprobs:
        return CompletionLogprobs(self.tokenizer, self.invisible, names_ids=self.options.names_ids)

    def _echo(self, prompt: int) -> str:
        return self._echoes[prompt] if self._echoes else ""

    def _score_prompt(
        self,
        logprobs: CompletionLogprobs,
        prompt: int,
        scores: Sequence[TokenLogprob | None],
    ) -> dict[str, Any]:
        cut = [
            None if item is None else replace(item, top=item.top[: self._num_logprobs])
            for item in scores
        ]
        return logprobs.piece(self.requests[prompt].prompt_token_ids, cut)

    def _piece(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}


def _mean_logprob(output: CompletionOutput) -> float:
    logprobs = [item.logprob for item in output.logprobs or ()]
    return sum(logprobs) / len(logprobs) if logprobs else float("-inf")
