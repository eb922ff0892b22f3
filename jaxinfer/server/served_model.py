"""The models of a server: their names, whether they take requests, loading and unloading."""

from __future__ import annotations

import asyncio
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import fields, replace
from typing import Any, Literal

from jaxinfer.async_engine import AsyncEngine, EngineDeadError, EngineStats, QueueFullError
from jaxinfer.config import EngineConfig
from jaxinfer.pool_size import leaving_room
from jaxinfer.server.errors import ApiError, queue_full, shown, unavailable

Status = Literal["loading", "loaded", "unloading", "unloaded", "failed"]

_POLL_S = 0.05


class ServedModel:
    """One model of a server, whether it is loaded or not.

    Invariant: a request that generates is inside `running`, so that draining can wait for it and
    end it.

    Args:
      engine: not loaded yet, or ready.
      names: what clients call it; none for the engine's own name.
      loads_at_start: whether the server loads it by itself.
      make_engine: makes another engine when it is loaded again.

    Attributes:
      engine: the one that answers, will answer, or did.
      config: how it is loaded where nothing else shares the memory.
      is_loading: a thread is at it, which cannot be stopped.
      load_error: why it could not be loaded.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        names: Sequence[str] = (),
        *,
        loads_at_start: bool = True,
        make_engine: Callable[[EngineConfig], AsyncEngine] = AsyncEngine,
    ) -> None:
        self.engine = engine
        self.config = engine.config
        self._names = tuple(names)
        self.load_error: Exception | None = None
        self._make_engine = make_engine
        self._is_wanted = loads_at_start
        self.is_loading = False
        self._deadlines: set[asyncio.Timeout] = set()
        self._cut: ApiError | None = None
        self._num_preparing = 0
        self._past: EngineStats | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """What clients call it."""
        return self._names or (self.engine.model_name,)

    @property
    def name(self) -> str:
        """The first of its names: it labels its metrics."""
        return self.names[0]

    @property
    def fingerprint(self) -> str:
        """What stays the same while its answers are comparable."""
        return f"jaxinfer-{self.engine.model_name.rsplit('/', 1)[-1]}"

    @property
    def vocab_size(self) -> int:
        """Number of token ids that mean something: models pad their embeddings."""
        return min(self.engine.vocab_size, self.engine.tokenizer.vocab_size)

    # Life.

    @property
    def status(self) -> Status:
        """What becomes of its requests."""
        state = self.engine.state
        if self.is_loading and state != "ready":
            return "loading"
        if self._is_wanted:
            statuses: dict[str, Status] = {
                "loading": "loading",
                "ready": "loaded",
                "draining": "unloading",
                "dead": "failed",
            }
            return statuses[state]
        return "unloading" if state in ("ready", "draining") else "unloaded"

    @property
    def has_died(self) -> bool:
        """Whether its engine stopped although it had been loaded, or cannot be stopped."""
        is_loaded = self._is_wanted and not self.is_loading and self.load_error is None
        return self.engine.is_hung or (is_loaded and self.engine.state == "dead")

    def check_ready(self) -> None:
        """Does nothing if a request would be served.

        Raises:
          ApiError: 503, it is loading or ends; 404, it is not loaded.
        """
        status = self.status
        if status == "loading":
            raise unavailable("Loading model", retry_after_s=2)
        if self.has_died:
            raise unavailable("the engine has stopped", retry_after_s=10, closes=True)
        if status == "unloading":
            message = f"model {shown(self.name)} is being unloaded"
            raise unavailable(message, retry_after_s=10, closes=True)
        if status != "loaded":
            message = (
                f"model {shown(self.name)} is not loaded; POST /v1/models/load with "
                '{"model": "NAME"} loads it'
            )
            raise ApiError(404, message, code="model_not_loaded", param="model")

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Surrounds the work put into a request before the engine gets it; it counts as queued.

        Raises:
          ApiError: 429, the queue is full; 503, the engine has stopped.
        """
        try:
            self.engine.check_room(1 + self._num_preparing)
        except QueueFullError as error:
            raise queue_full(str(error)) from None
        except EngineDeadError:
            raise unavailable("the engine has stopped", retry_after_s=10) from None
        self._num_preparing += 1
        try:
            yield
        finally:
            self._num_preparing -= 1

    async def load(self, beside: Sequence[ServedModel] = ()) -> None:
        """Loads it, unless it is loaded.

        Args:
          beside: models that are not loaded, for which room is left.

        Raises:
          ValueError: the checkpoint or the configuration cannot be used.
          Exception: a fault of ours; `load_error` keeps either.
        """
        if self.status == "loaded":
            return
        if self.engine.state == "dead":
            self._past = self.stats()
            counts = self.engine.step_tokens
            self.engine = self._make_engine(self.config)
            self.engine.step_tokens = counts
        self.load_error = self._cut = None
        self._is_wanted = self.is_loading = True
        try:
            configs = [other.config for other in beside]
            self.engine.config = await asyncio.to_thread(leaving_room, self.config, configs)
            await self.engine.start()
        except Exception as error:
            self.load_error = error
            # What was loaded before the fault lives in the frames of its traceback.
            traceback.clear_frames(error.__traceback__)
            await asyncio.to_thread(self.engine.free)
            raise
        finally:
            self.is_loading = False

    async def unload(self, timeout_s: float) -> None:
        """Refuses new requests, ends the running ones as `drain` does, and frees the memory."""
        self._is_wanted = False
        await self.drain(timeout_s, unavailable("the model was unloaded", retry_after_s=10))
        await self.engine.shutdown(0.0)
        await asyncio.to_thread(self.engine.free)

    # Requests.

    @property
    def num_running(self) -> int:
        """Requests that are being answered."""
        return len(self._deadlines)

    @asynccontextmanager
    async def running(self, timeout_s: float | None) -> AsyncIterator[None]:
        """Bounds the work inside by the request timeout and by the end of draining.

        Raises:
          ApiError: 504 the timeout passed, 503 the server cannot wait longer.
        """
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                self._deadlines.add(deadline)
                yield
        except TimeoutError:
            if not deadline.expired():
                raise
            if self._cut is not None:
                raise self._cut from None
            raise ApiError(
                504,
                f"the request did not finish within {timeout_s:g} s",
                kind="timeout_error",
                code="request_timeout",
            ) from None
        finally:
            self._deadlines.discard(deadline)

    async def drain(self, timeout_s: float, cut: ApiError) -> None:
        """Lets running requests finish for `timeout_s`, then ends the rest with the error `cut`."""
        await self._wait_until_idle(timeout_s)
        self._cut = cut
        now = asyncio.get_running_loop().time()
        for deadline in self._deadlines:
            if not deadline.expired():
                deadline.reschedule(now)
        await self._wait_until_idle(1.0)

    async def _wait_until_idle(self, timeout_s: float) -> None:
        end = asyncio.get_running_loop().time() + timeout_s
        while self._deadlines and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(_POLL_S)

    # Counts.

    def stats(self) -> EngineStats | None:
        """Returns counts since the server started, and what the engine holds now.

        None if it was never loaded.
        """
        try:
            now = self.engine.stats()
        except EngineDeadError:
            return self._past
        return now if self._past is None else _continued(self._past, now)


_HELD_NOW = frozenset({"num_running", "num_waiting", "num_pages", "num_free_pages"})


def _continued(past: EngineStats, now: EngineStats) -> EngineStats:
    """Adds the counts of an engine that was unloaded: counters never fall."""
    sums: dict[str, Any] = {}
    for item in fields(EngineStats):
        before, value = getattr(past, item.name), getattr(now, item.name)
        if isinstance(value, dict):
            sums[item.name] = dict(Counter(before) + Counter(value))
        elif item.name not in _HELD_NOW:
            sums[item.name] = before + value
    return replace(now, **sums)


class Models:
    """The models of one server by their names; the first one answers where no name is given."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._models = tuple(models)

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    @property
    def default(self) -> ServedModel:
        """The model of requests that name none."""
        return self._models[0]

    @property
    def names(self) -> tuple[str, ...]:
        """All names, the default model's first."""
        return tuple(name for model in self for name in model.names)

    def find(self, name: str | None) -> ServedModel:
        """Returns the model of that name; no name means the default model.

        Raises:
          ApiError: 404; no such model is served.
        """
        if name is None:
            return self.default
        for model in self:
            if name in model.names:
                return model
        message = f"model {shown(name)} is not served here; use {' or '.join(self.names)}"
        raise ApiError(404, message, code="model_not_found", param="model")
