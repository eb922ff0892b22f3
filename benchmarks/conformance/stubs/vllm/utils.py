"""`tests.utils` of vLLM's tests: its servers are one of ours that runs already."""

from __future__ import annotations

import os
from typing import Any, Self

import openai

ROCM_ENV_OVERRIDES: dict[str, str] = {}
ROCM_EXTRA_ARGS: list[str] = []
VLLM_PATH = "."


class RemoteOpenAIServer:
    """Where the server is; what it should be started with is ignored."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(self, *_: Any, **__: Any) -> None:
        self.url_root = os.environ["CONFORMANCE_URL"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def url_for(self, *parts: str) -> str:
        """Returns the URL of a path."""
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def get_client(self, **options: Any) -> openai.OpenAI:
        """Returns a client of the API."""
        return openai.OpenAI(**self._options(options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        """Returns an asynchronous client of the API."""
        return openai.AsyncOpenAI(**self._options(options))

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        own = {"base_url": self.url_for("v1"), "api_key": self.DUMMY_API_KEY, "max_retries": 0}
        return {"timeout": 300, **own, **options}


RemoteVLLMServer = RemoteOpenAIServer


def create_new_process_for_each_test(*_: Any, **__: Any) -> Any:
    """Returns a decorator that does nothing."""
    return lambda function: function
