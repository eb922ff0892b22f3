"""One engine thread, and the ways into it: callbacks from any thread, async iterators on a loop."""

from __future__ import annotations

import asyncio
import gc
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from typing import Any, Literal

from jaxinfer.bucket_counts import BucketCounts
from jaxinfer.collection import collect_unused, paused_collection
from jaxinfer.config import EngineConfig
from jaxinfer.delivery import Batch, Deliver, Mailbox, call, deliver_all
from jaxinfer.engine import Engine, EngineStats
from jaxinfer.open_requests import OpenRequests
from jaxinfer.outputs import OutputDelta
from jaxinfer.request import EngineDeadError, EngineRequest, QueueFullError
from jaxinfer.runner import host_memory
from jaxinfer.startup import LoadedEngine, expected_name, load_engine
from jaxinfer.text.chat_template import ChatTemplate
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.watchdog import Watchdog

__all__ = ["AsyncEngine", "EngineDeadError", "EngineRequest", "EngineStats", "QueueFullError"]

logger = logging.getLogger(__name__)

State = Literal["loading", "ready", "draining", "dead"]


_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class AsyncEngine:
    """Runs an engine on a thread of its own.

    Invariants: only that thread touches the engine; every submitted request gets, for each of its
    completions, a delta with a finish reason, also when the engine dies, or else one exception.

    Attributes:
      config: how the model is to be loaded, and how long a step may take.
      state: loading until `load` returns; ready; draining after `shutdown`; dead at the end.
      step_tokens: how many steps made how many tokens, prompts counted when they end.
      is_hung: dead because a step never ended; its thread, and so the process, cannot be ended in
        an orderly way.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.state: State = "loading"
        self._loaded: LoadedEngine | None = None
        self._commands: queue.SimpleQueue[Callable[[Engine], None] | None] = queue.SimpleQueue()
        # Guards `state` and `_open` between submitting threads and the engine's; notified when
        # nothing is open any more.
        self._idle = threading.Condition()
        self._open = OpenRequests()
        self._stats: EngineStats | None = None
        self.step_tokens = BucketCounts(_STEP_TOKENS)
        self._counted = 0  # tokens
        self._thread: threading.Thread | None = None
        self._watchdog: Watchdog | None = None
        self.is_hung = False

    @classmethod
    def from_loaded(cls, loaded: LoadedEngine, config: EngineConfig | None = None) -> AsyncEngine:
        """Returns a ready one around an engine that exists already and that it owns from here."""
        engine = cls(config or EngineConfig())
        engine._start(loaded)
        return engine

    # Life.

    def load(self) -> None:
        """Loads the model, compiles, and starts the engine thread.

        Raises:
          ValueError: the checkpoint or the configuration cannot be used.
          EngineDeadError: `close` was called meanwhile.
        """
        try:
            with paused_collection():
                loaded = load_engine(self.config)
                # What loading made lives as long as the engine: one collection looks at it, and not
                # a second when they are on again. Each would stop the threads of a step, on two
                # cores a twentieth of all time.
                gc.collect()
                gc.freeze()
            self._start(loaded)
        except BaseException:
            self.state = "dead"
            raise

    def _start(self, loaded: LoadedEngine) -> None:
        with self._idle:
            if self.state != "loading":
                loaded.engine.runner.settle()
                raise EngineDeadError("the engine was closed while it was loading")
            self._loaded = loaded
            stats = self._stats = loaded.engine.stats()
            self._counted = stats.prompt_tokens + stats.generation_tokens
            watchdog = Watchdog(self.config.step_timeout, self._give_up)
            self._thread = threading.Thread(
                target=self._run,
                args=(loaded.engine, watchdog),
                name="jaxinfer-engine",
                daemon=True,
            )
            self._watchdog = watchdog
            self.state = "ready"
            self._thread.start()
            watchdog.start(self._thread)

    async def start(self) -> None:
        """`load` in a thread, so that the loop stays free."""
        await asyncio.to_thread(self.load)

    async def shutdown(self, timeout: float = 0.0) -> None:
        """Waits up to `timeout` seconds for running requests, aborts the rest, ends the thread."""
        await asyncio.to_thread(self.close, timeout)

    def close(self, timeout: float = 0.0) -> None:
        """As `shutdown`, from a thread; the model is freed."""
        with self._idle:
            if self._thread is None or self._watchdog is None:
                self.state = "dead"  # `load`, if it is running, will not start the thread
                return
            if self.state == "ready":
                self.state = "draining"
            self._idle.wait_for(lambda: not self._open, timeout)
            unfinished = list(self._open)
        for request_id in unfinished:
            self.abort(request_id)
        self._commands.put(None)
        self._watchdog.wait()
        if self.is_hung:
            return  # the thread still holds the model
        self._thread.join()
        loaded, self._loaded = self._loaded, None
        if loaded is not None:  # else another thread has closed it
            loaded.engine.runner.settle()
        gc.unfreeze()

    def free(self) -> None:
        """Gives back what is left of a closed engine: 400 of the 430 MB of gemma-3-270m are."""
        collect_unused()
        host_memory.trim()

    # What clients need to know of the model.

    @property
    def loaded(self) -> LoadedEngine:
        """The engine with its tokenizer and names.

        Raises:
          EngineDeadError: it is not loaded.
        """
        if self._loaded is None:
            raise EngineDeadError("the model is not loaded")
        return self._loaded

    @property
    def model_name(self) -> str:
        """What the model is called when no other name is given; known before it is loaded."""
        return expected_name(self.config.model) if self._loaded is None else self._loaded.model_name

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.loaded.tokenizer

    @property
    def chat_template(self) -> ChatTemplate:
        """The chat template; one that is missing says so when it renders."""
        return self.loaded.chat_template

    @property
    def default_params(self) -> dict[str, Any]:
        """Sampling settings the checkpoint recommends."""
        return self.loaded.default_params

    @property
    def settings(self) -> Mapping[str, str]:
        """All settings by name, as text: the values in effect."""
        return self.loaded.settings

    @property
    def max_model_len(self) -> int:
        """Context limit in tokens."""
        return self.loaded.engine.max_model_len

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.loaded.engine.vocab_size

    def check(self, request: EngineRequest) -> None:
        """Raises InvalidParameter if the engine would refuse the request; from any thread."""
        self.loaded.engine.check(request)

    def stats(self) -> EngineStats:
        """Returns the numbers of the last step."""
        if self._stats is None:
            raise EngineDeadError("the model is not loaded")
        return self._stats

    @property
    def devices(self) -> list[Any]:
        """The jax devices that hold the model; none while it is not loaded."""
        return [] if self._loaded is None else list(self._loaded.engine.runner.mesh.devices.flat)

    # Requests.

    @property
    def queue_depth(self) -> int:
        """Completions that were taken and do not run yet."""
        with self._idle:
            num_open = self._open.num_sequences
        return max(0, num_open - (0 if self._stats is None else self._stats.num_running))

    def check_room(self, num_sequences: int = 1, num_prompt_tokens: int = 0) -> None:
        """Does nothing if a request of that size would be taken now.

        Raises:
          QueueFullError: too many sequences, or prompt tokens, wait.
        """
        # Those that run are part of the limit; `load_engine` has set it accordingly.
        most = self.loaded.engine.max_queued_requests
        with self._idle:
            self._open.check_room(
                num_sequences, num_prompt_tokens, most, self.config.max_queued_tokens
            )

    def submit(self, request: EngineRequest, deliver: Deliver) -> None:
        """Hands over a request; `deliver` is called on the engine thread with lists of deltas.

        When that thread hangs, the watchdog's delivers the last ones. If the engine refuses the
        request, `deliver` gets the exception instead; callers that want an InvalidParameter at
        once use `check` first.

        Raises:
          EngineDeadError: the engine takes no requests.
          QueueFullError: too many sequences, or prompt tokens, wait.
          ValueError: a request with this id is in flight.
        """
        with self._idle:
            if self.state != "ready":
                raise EngineDeadError(f"the engine is {self.state}")
            self.check_room(request.params.n, len(request.prompt_token_ids))
            self._open.add(request, deliver)
            self._commands.put(lambda engine: self._add(engine, request))

    def abort(self, request_id: str) -> None:
        """Ends a request soon; unknown ids are ignored."""
        self._commands.put(lambda engine: self._abort(engine, request_id))

    def clear_prefix_cache(self) -> None:
        """Makes requests that are submitted from now on find nothing of those before.

        Raises:
          EngineDeadError: the engine takes no commands.
        """
        if self.state not in ("ready", "draining"):
            raise EngineDeadError(f"the engine is {self.state}")
        self._commands.put(lambda engine: engine.clear_prefix_cache())

    async def generate(self, request: EngineRequest) -> AsyncGenerator[OutputDelta, None]:
        """Yields deltas until every completion has ended; closing the iterator aborts.

        Raises:
          EngineDeadError, QueueFullError: as `submit`.
          InvalidParameter: the engine refused the request.
        """
        arrived: asyncio.Queue[Batch] = asyncio.Queue()
        self.submit(request, Mailbox(asyncio.get_running_loop(), arrived))
        num_open = request.params.n
        try:
            while num_open:
                for delta in _deltas(await arrived.get()):
                    num_open -= delta.finish_reason is not None
                    yield delta
        finally:
            if num_open:
                self.abort(request.request_id)

    def stream(self, requests: Sequence[EngineRequest]) -> Generator[OutputDelta, None, None]:
        """Yields the deltas of all requests as they come, on a thread; closing aborts.

        Raises:
          EngineDeadError: the engine takes no requests, or it died.
          QueueFullError: as `submit`.
          InvalidParameter: the engine refused a request.
        """
        arrived: queue.SimpleQueue[Batch] = queue.SimpleQueue()
        num_open: dict[str, int] = {}
        try:
            for request in requests:
                # Noted first: an interrupt may come between these two lines.
                num_open[request.request_id] = request.params.n
                self.submit(request, arrived.put)
            while num_open:
                for delta in _deltas(arrived.get()):
                    if delta.finish_reason == "error" and self.state == "dead":
                        raise EngineDeadError(delta.error)
                    num_open[delta.request_id] -= delta.finish_reason is not None
                    if not num_open[delta.request_id]:
                        del num_open[delta.request_id]
                    yield delta
        finally:
            for request_id in num_open:
                self.abort(request_id)

    # The engine thread.

    def _run(self, engine: Engine, watchdog: Watchdog) -> None:
        try:
            while self._obey(engine) and not self.is_hung:
                if engine.has_work:
                    with watchdog.step():
                        engine.start_step()
                        # Text, and waking those who wait for it, while the device works.
                        self._dispatch(engine, engine.take_deltas())
                        engine.end_step()
        except Exception:
            logger.exception("the engine stopped")
        finally:
            self._die("the engine stopped")

    def _give_up(self, why: str) -> None:
        """Called by the watchdog when nothing more is to be expected of the engine thread."""
        logger.critical("%s: the engine is given up", why)
        self.is_hung = True
        self._die(why)

    def _obey(self, engine: Engine) -> bool:
        """Carries out waiting commands, sleeping while there is nothing to do; False to stop."""
        while True:
            try:
                command = self._commands.get(block=not engine.has_work)
            except queue.Empty:
                return True
            if command is None:
                return False
            command(engine)

    def _add(self, engine: Engine, request: EngineRequest) -> None:
        try:
            engine.add(request)
        except (ValueError, QueueFullError) as error:
            with self._idle:
                refused = self._open.pop(request.request_id)
                self._idle.notify_all()
            if refused is not None:
                call(refused.deliver, error)
        self._stats = engine.stats()

    def _abort(self, engine: Engine, request_id: str) -> None:
        self._dispatch(engine, engine.take_deltas() + engine.abort(request_id))

    def _dispatch(self, engine: Engine, deltas: list[OutputDelta]) -> None:
        """Delivers deltas, those of one request in one call; who has the last sees new stats."""
        stats = self._stats = engine.stats()
        tokens, self._counted = self._counted, stats.prompt_tokens + stats.generation_tokens
        if self._counted > tokens:
            self.step_tokens.add(self._counted - tokens)
        by_request: dict[str, list[OutputDelta]] = {}
        for delta in deltas:
            by_request.setdefault(delta.request_id, []).append(delta)
        with self._idle:
            addressed = self._open.settle(by_request)
            self._idle.notify_all()
        for request_id in deliver_all(addressed):
            with self._idle:
                self._open.pop(request_id)
                self._idle.notify_all()
            engine.abort(request_id)
            self._stats = engine.stats()

    def _die(self, why: str) -> None:
        """Ends what is open; nothing can be submitted any more once the lock is free."""
        with self._idle:
            self.state = "dead"
            unfinished = self._open.take_all()
            self._idle.notify_all()
        for request_id, receiver in unfinished:
            call(receiver.deliver, receiver.failed(request_id, why))


def _deltas(batch: Batch) -> list[OutputDelta]:
    if isinstance(batch, Exception):
        raise batch
    return batch
