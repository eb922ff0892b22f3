"""OpenAI's `response`: a chat's answer told as items, and as the events of one after the other."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxinfer.outputs import OutputDelta
from jaxinfer.server.chat_answer import ChatAnswer
from jaxinfer.server.responses_items import Event, OutputItems, Status
from jaxinfer.server.sse import dumps


class ResponsesAnswer(ChatAnswer):
    """The answer to a request for a response: what the one choice of a chat would hold.

    Args:
      repeated: what of the request is part of every response object.
      common: as for a chat.
    """

    names_events: ClassVar[bool] = True

    def __init__(self, *, repeated: Mapping[str, Any], **common: Any) -> None:
        super().__init__(**common)
        self._items = OutputItems()
        self._numbers = itertools.count()
        self._ending: Status = "in_progress"
        self._constant = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": self._identity["created"],
            "model": self._identity["model"],
            **repeated,
            "temperature": self.options.params.temperature,
            "top_p": self.options.params.top_p,
            "top_logprobs": self.options.params.logprobs or 0,
        }

    def opening(self) -> list[Event]:
        """Returns the events before the first item."""
        return [self._lifecycle("created"), self._lifecycle("in_progress")]

    def delta(self, prompt: int, delta: OutputDelta) -> list[Event]:
        """Returns the events of what a delta adds to the output."""
        events: list[Event] = []
        for choice in super().delta(prompt, delta):
            logprobs = choice["logprobs"] or {"content": []}
            events += self._items.add(choice["delta"], logprobs["content"])
            if choice["finish_reason"] is not None:
                self._ending = "incomplete" if delta.finish_reason == "length" else "completed"
        return events

    def chunk(self, choice: Event) -> dict[str, Any]:
        """Returns an event with its number."""
        return {"type": choice["type"], "sequence_number": next(self._numbers), **choice}

    def closing(self) -> list[dict[str, Any]]:
        """Returns the events that end the last item and the response."""
        events = list(self._items.end(self._ending))
        return [self.chunk(event) for event in (*events, self._lifecycle(self._ending))]

    def failure(self, error: dict[str, Any]) -> dict[str, Any]:
        """Returns the event that ends a response which fails on the way."""
        if self._items.as_json():
            list(self._items.end("incomplete"))
        kind, message = error["error"]["type"], error["error"]["message"]
        code = "invalid_prompt" if kind == "invalid_request_error" else "server_error"
        about = {"code": code, "message": message}
        return self.chunk(self._lifecycle("failed", about))

    def take(self, prompt: int, delta: OutputDelta) -> None:
        """Adds a delta of the prompt."""
        self.delta(prompt, delta)

    def text(self) -> str:
        """Returns the JSON of a response that is not streamed."""
        list(self._items.end(self._ending))
        return dumps(self._response(self._ending))

    def _lifecycle(self, name: str, error: dict[str, str] | None = None) -> Event:
        status = "in_progress" if name == "created" else name
        return {"type": f"response.{name}", "response": self._response(status, error)}

    def _response(self, status: str, error: dict[str, str] | None = None) -> dict[str, Any]:
        is_over = status != "in_progress"
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._constant,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": error,
            "incomplete_details": details,
            "output": self._items.as_json(),
            "usage": self._usage() if is_over else None,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
            "total_tokens": usage.total_tokens,
            **usage.speeds(),
        }
