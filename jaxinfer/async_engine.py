"""One engine thread, and the ways into it: callbacks from any thread, async iterators on a loop."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Any, Literal

from jaxinfer.config import EngineConfig
from jaxinfer.engine import Engine, EngineStats
from jaxinfer.outputs import OutputDelta
from jaxinfer.request import EngineDeadError, EngineRequest, QueueFullError
from jaxinfer.startup import LoadedEngine, load_engine
from jaxinfer.text.chat_template import ChatTemplate
from jaxinfer.text.tokenizer import Tokenizer

__all__ = ["AsyncEngine", "EngineDeadError", "EngineRequest", "EngineStats", "QueueFullError"]

logger = logging.getLogger(__name__)

Deliver = Callable[[list[OutputDelta]], None]
State = Literal["loading", "ready", "draining", "dead"]


class AsyncEngine:
    """Runs an engine on a thread of its own.

    Invariants: only that thread touches the engine; every submitted request gets a delta with a
    finish reason, also when the engine dies.

    Attributes:
      config: how the model is to be loaded.
      state: loading until `load` returns; ready; draining after `shutdown`; dead at the end.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.state: State = "loading"
        self._loaded: LoadedEngine | None = None
        self._commands: queue.SimpleQueue[Callable[[Engine], None] | None] = queue.SimpleQueue()
        self._deliver: dict[str, Deliver] = {}
        self._stats: EngineStats | None = None
        self._thread: threading.Thread | None = None

    # Life.

    def load(self) -> None:
        """Loads the model, compiles, and starts the engine thread.

        Raises:
          ValueError: the checkpoint or the configuration cannot be used.
        """
        try:
            self._loaded = load_engine(self.config)
        except BaseException:
            self.state = "dead"
            raise
        self._stats = self._loaded.engine.stats()
        self._thread = threading.Thread(target=self._run, name="jaxinfer-engine", daemon=True)
        self._thread.start()
        self.state = "ready"

    async def start(self) -> None:
        """`load` in a thread, so that the loop stays free."""
        await asyncio.to_thread(self.load)

    async def shutdown(self, timeout: float = 0.0) -> None:
        """Waits up to `timeout` seconds for running requests, aborts the rest, ends the thread."""
        await asyncio.to_thread(self.close, timeout)

    def close(self, timeout: float = 0.0) -> None:
        """As `shutdown`, from a thread."""
        if self._thread is None or not self._thread.is_alive():
            self.state = "dead"
            return
        self.state = "draining"
        idle = threading.Event()
        self._commands.put(lambda engine: idle.set() if not engine.has_work else None)
        waited = 0.0
        while timeout > waited and self._deliver and self._thread.is_alive():
            idle.wait(0.02)
            waited += 0.02
        for request_id in list(self._deliver):
            self.abort(request_id)
        self._commands.put(None)
        self._thread.join()
        self.state = "dead"

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
        """What the model is called when no other name is given."""
        return self.loaded.model_name

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

    # Requests.

    def submit(self, request: EngineRequest, deliver: Deliver) -> None:
        """Hands over a request; `deliver` is called on the engine thread with lists of deltas.

        A request the engine refuses gets a delta with finish reason "error" for each completion;
        callers that want the exception use `check` first.

        Raises:
          EngineDeadError: the engine takes no requests.
          QueueFullError: too many requests wait.
        """
        if self.state != "ready":
            raise EngineDeadError(f"the engine is {self.state}")
        engine = self.loaded.engine
        if len(self._deliver) >= engine.max_queued_requests + engine.max_num_seqs:
            raise QueueFullError(f"{len(self._deliver)} requests are in flight")
        self._deliver[request.request_id] = deliver
        self._commands.put(lambda engine: self._add(engine, request))

    def abort(self, request_id: str) -> None:
        """Ends a request soon; unknown ids are ignored."""
        self._commands.put(lambda engine: self._dispatch(engine.abort(request_id)))

    async def generate(self, request: EngineRequest) -> AsyncGenerator[OutputDelta, None]:
        """Yields deltas until every completion has ended; closing the iterator aborts.

        Raises:
          EngineDeadError, QueueFullError: as `submit`.
        """
        loop = asyncio.get_running_loop()
        deltas: asyncio.Queue[list[OutputDelta]] = asyncio.Queue()

        def deliver(batch: list[OutputDelta]) -> None:
            loop.call_soon_threadsafe(deltas.put_nowait, batch)

        self.submit(request, deliver)
        num_open = request.params.n
        try:
            while num_open:
                for delta in await deltas.get():
                    if delta.finish_reason is not None:
                        num_open -= 1
                    yield delta
        finally:
            if num_open:
                self.abort(request.request_id)

    # The engine thread.

    def _run(self) -> None:
        engine = self.loaded.engine
        try:
            while self._obey(engine):
                if engine.has_work:
                    self._dispatch(engine.step())
                    self._stats = engine.stats()
        except Exception:
            logger.exception("the engine stopped")
        finally:
            self.state = "dead"
            self._fail_open_requests()

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
            self._stats = engine.stats()

    def _add(self, engine: Engine, request: EngineRequest) -> None:
        try:
            engine.add(request)
        except (ValueError, QueueFullError) as error:
            self._fail(request.request_id, request.params.n, str(error))

    def _dispatch(self, deltas: list[OutputDelta]) -> None:
        """Delivers a step's deltas, those of one request in one call."""
        by_request: dict[str, list[OutputDelta]] = {}
        for delta in deltas:
            by_request.setdefault(delta.request_id, []).append(delta)
        for request_id, batch in by_request.items():
            deliver = self._deliver.get(request_id)
            if not self.loaded.engine.is_open(request_id):
                self._deliver.pop(request_id, None)
            if deliver is not None:
                self._call(deliver, batch)

    def _call(self, deliver: Deliver, batch: list[OutputDelta]) -> None:
        try:
            deliver(batch)
        except RuntimeError:
            # The loop that waited for it is closed: nobody is there to be told.
            logger.info("request %s: its client is gone", batch[0].request_id)

    def _fail(self, request_id: str, n: int, error: str) -> None:
        deliver = self._deliver.pop(request_id, None)
        if deliver is not None:
            deltas = [
                OutputDelta(request_id, index, finish_reason="error", error=error)
                for index in range(n)
            ]
            self._call(deliver, deltas)

    def _fail_open_requests(self) -> None:
        for request_id in list(self._deliver):
            self._fail(request_id, self.loaded.engine.num_open(request_id), "the engine stopped")
