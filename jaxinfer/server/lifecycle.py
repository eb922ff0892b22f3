"""Whether the server takes requests: its models at start, and its end."""

from __future__ import annotations

import asyncio
import logging

from jaxinfer.server.errors import unavailable
from jaxinfer.server.served_model import Models, ServedModel

_log = logging.getLogger(__name__)


class Lifecycle:
    """The state of the process between its first second and its last.

    Attributes:
      is_draining: new requests are refused.
      load_error: why a model could not be loaded at start, which ends the process.
      load_ended: set when nothing is left to load at start.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        # One at a time: each takes its part of the memory that those before it left.
        self._changing = asyncio.Lock()
        self.is_draining = False
        self.load_error: BaseException | None = None
        self.load_ended = asyncio.Event()

    async def load(self) -> None:
        """Loads the models one after the other; a failure is kept in `load_error`."""
        try:
            for model in self._models:
                if model.status == "loading":
                    await self.load_model(model)
        except Exception as error:
            self.load_error = error
        finally:
            self.load_ended.set()

    async def load_model(self, model: ServedModel) -> None:
        """Loads one model; raises as `ServedModel.load`."""
        async with self._changing:
            _log.info("loading model %s", model.name)
            others = [other for other in self._models if other is not model]
            await model.load([other for other in others if other.status != "loaded"])

    async def unload_model(self, model: ServedModel, timeout_s: float) -> None:
        """Unloads one model, whose requests get `timeout_s` to finish."""
        async with self._changing:
            _log.info("unloading model %s: %d requests are running", model.name, model.num_running)
            await model.unload(timeout_s)

    @property
    def num_running(self) -> int:
        """Requests that are being answered."""
        return sum(model.num_running for model in self._models)

    @property
    def is_starting(self) -> bool:
        """Whether models are still to be loaded before the server is ready."""
        is_loading = any(model.status == "loading" for model in self._models)
        return is_loading and not self.load_ended.is_set()

    @property
    def is_ready(self) -> bool:
        """Whether all models that were to be loaded at start are, and one takes requests."""
        is_up = not (self.is_dead or self.is_draining or self.is_starting)
        return is_up and any(model.status == "loaded" for model in self._models)

    @property
    def is_dead(self) -> bool:
        """Whether the process is to end because an engine stopped."""
        return self.load_error is not None or any(model.has_died for model in self._models)

    def check_alive(self) -> None:
        """Does nothing if the server goes on.

        Raises:
          ApiError: 503; it drains or is dead.
        """
        if self.is_dead:
            raise unavailable("the engine has stopped", retry_after_s=10, closes=True)
        if self.is_draining:
            raise unavailable("the server is shutting down", retry_after_s=10, closes=True)

    def check_open(self) -> None:
        """Does nothing if a request to some model may be served.

        Raises:
          ApiError: 503; no model is loaded yet, or the server drains or is dead.
        """
        self.check_alive()
        if self.is_starting and not any(model.status == "loaded" for model in self._models):
            raise unavailable("Loading model", retry_after_s=2)

    def check_ready(self) -> None:
        """Does nothing if the server is ready.

        Raises:
          ApiError: 503; a model is still loading, none is loaded, or the server drains or is dead.
        """
        self.check_open()
        if not self.is_ready:
            message = "Loading model" if self.is_starting else "no model is loaded"
            raise unavailable(message, retry_after_s=2)

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests, lets running ones finish for `timeout_s`, then ends the rest."""
        self.is_draining = True
        cut = unavailable("the server is shutting down", retry_after_s=10, closes=True)
        await asyncio.gather(*(model.drain(timeout_s, cut) for model in self._models))
