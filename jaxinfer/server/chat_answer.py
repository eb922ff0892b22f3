"""Chat completions: OpenAI's `chat.completion` and `chat.completion.chunk`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxinfer.outputs import CompletionOutput, OutputDelta, TokenLogprob
from jaxinfer.server.answers import Answer
from jaxinfer.server.logprobs import chat_logprobs


class ChatAnswer(Answer):
    """The answer to a chat request: one prompt, n messages."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def opening(self) -> list[dict[str, Any]]:
        """Returns one role delta per choice; the role is never sent again."""
        prompt_ids = self._prompt_ids(0)
        return [
            {**self._streamed(index, {"role": "assistant", "content": ""}), **prompt_ids}
            for index in range(self.n)
        ]

    def delta(self, prompt: int, delta: OutputDelta) -> list[dict[str, Any]]:
        """Returns the text as one choice and the finish reason as another."""
        index = self.index(prompt, delta.index)
        choices = []
        shows_tokens = delta.token_ids and self.options.return_token_ids
        if delta.text or delta.logprobs or shows_tokens:
            choice = self._streamed(index, {"content": delta.text})
            choice["logprobs"] = self._logprobs(delta)
            if self.options.return_token_ids:
                choice["token_ids"] = list(delta.token_ids)
            choices.append(choice)
        if delta.finish_reason is not None:
            choice = self._streamed(index, {})
            choice["finish_reason"] = delta.finish_reason
            choice["stop_reason"] = delta.stop_reason
            choices.append(choice)
        return choices

    def choice(
        self,
        prompt: int,
        output: CompletionOutput,
        prompt_logprobs: Sequence[TokenLogprob | None] | None,
    ) -> dict[str, Any]:
        """Returns a complete message."""
        choice: dict[str, Any] = {
            "index": self.index(prompt, output.index),
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": self._logprobs(output),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        if self.options.return_token_ids:
            choice["token_ids"] = output.token_ids
        return {**choice, **self._prompt_ids(prompt)}

    def _streamed(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, output: CompletionOutput | OutputDelta) -> dict[str, Any] | None:
        if output.logprobs is None:
            return None
        entries = chat_logprobs(self.tokenizer, output.logprobs, self.hidden(output))
        return {"content": entries, "refusal": None}

    def _prompt_ids(self, prompt: int) -> dict[str, Any]:
        if not self.options.return_token_ids:
            return {}
        return {"prompt_token_ids": list(self.requests[prompt].prompt_token_ids)}
