"""From a request to the model it asks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from aiohttp import web

from jaxinfer.config import ServerConfig
from jaxinfer.server.json_body import read_body
from jaxinfer.server.served_model import ServedModel
from jaxinfer.server.state import CONFIG, EXECUTOR, LIFECYCLE, MODEL, MODELS

CallT = TypeVar("CallT")
CallT_co = TypeVar("CallT_co", covariant=True)


class GenerationParser(Protocol[CallT_co]):
    """Reads the body of a request to generate, such as `parse_chat`."""

    def __call__(
        self,
        body: Mapping[str, Any],
        *,
        defaults: Mapping[str, Any],
        vocab_size: int,
        config: ServerConfig,
    ) -> CallT_co:
        """Returns what it asks of a model with that vocabulary and those default settings."""


def model_of(request: web.Request, name: str | None) -> ServedModel:
    """Returns the model of that name, ready to answer; None means the default model.

    What follows of the request, its metrics and its log line are that model's.

    Raises:
      ApiError: 404, no such model is served, or it is not loaded; 503, it is loading, or it or the
        server ends.
    """
    request.app[LIFECYCLE].check_open()
    model = request[MODEL] = request.app[MODELS].find(name)
    model.check_ready()
    return model


async def read_call(
    request: web.Request, parse: Callable[[dict[str, Any], ServedModel], CallT]
) -> tuple[ServedModel, CallT]:
    """Returns the model that a request's body names, and the body as `parse` understands it.

    Raises:
      ApiError: as `read_body`, `model_of` and `parse`.
    """
    # Nothing is read where nothing will be answered.
    request.app[LIFECYCLE].check_open()

    def convert(values: dict[str, Any]) -> tuple[ServedModel, CallT]:
        name = values.get("model")
        # A name that is no text is for `parse` to refuse.
        model = model_of(request, name if isinstance(name, str) else None)
        return model, parse(values, model)

    return await read_body(request, request.app[EXECUTOR], convert)


async def read_generation(
    request: web.Request, parse: GenerationParser[CallT]
) -> tuple[ServedModel, CallT]:
    """Returns the model that a request to generate names, and what it asks of that model.

    Raises:
      ApiError: as `read_call`.
    """
    config = request.app[CONFIG]
    return await read_call(
        request,
        lambda body, model: parse(
            body,
            defaults=model.engine.default_params,
            vocab_size=model.vocab_size,
            config=config,
        ),
    )
