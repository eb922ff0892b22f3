"""Sends requests to a server over HTTP, streaming, and records what comes back and when."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from jaxinfer.load_test.record import RequestRecord
from jaxinfer.load_test.workload import LoadRequest

_LONGEST_LINE = 2**20
_MESSAGE_LENGTH = 200


class _StreamError(Exception):
    """What a server sent is no complete answer; the first argument says in a word why."""


@dataclass(frozen=True, slots=True)
class Target:
    """The server that is measured.

    Attributes:
      url: without the trailing /v1.
      model: name that requests carry.
      timeout_s: after which a request counts as failed.
    """

    url: str
    model: str
    timeout_s: float


class LoadClient:
    """A session with a server; its clock starts at 0.

    Args:
      on_done: called after each request.
    """

    def __init__(
        self, session: aiohttp.ClientSession, target: Target, on_done: Callable[[], object]
    ) -> None:
        self._session = session
        self._target = target
        self._on_done = on_done
        self._began = time.perf_counter()

    async def open_loop(
        self, requests: Iterable[LoadRequest], arrivals: Iterable[float]
    ) -> list[RequestRecord]:
        """Sends each request when its time has come, whatever became of those before."""
        async with asyncio.TaskGroup() as group:
            tasks = []
            for request, moment in sorted(
                zip(requests, arrivals, strict=True), key=lambda pair: pair[1]
            ):
                # Also where it is late: those sent must get their turn.
                await asyncio.sleep(max(0.0, moment - self._now()))
                tasks.append(group.create_task(self.send(request, moment)))
        return [task.result() for task in tasks]

    async def closed_loop(
        self, requests: Iterable[LoadRequest], concurrency: int
    ) -> list[RequestRecord]:
        """Keeps so many requests in flight: one that is answered makes room for the next."""
        queue = iter(requests)

        async def work() -> list[RequestRecord]:
            return [await self.send(request, self._now()) for request in queue]

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work()) for _ in range(concurrency)]
        return [record for task in tasks for record in task.result()]

    async def send(self, request: LoadRequest, planned_s: float) -> RequestRecord:
        """Sends one request and reads its answer; what goes wrong is in the record."""
        record = RequestRecord(planned_s, self._now(), prompt_tokens=len(request.prompt))
        try:
            async with asyncio.timeout(self._target.timeout_s):
                await self._exchange(request, record)
        except TimeoutError:
            record.error = "timeout"
            record.message = f"no complete answer after {self._target.timeout_s:g} s"
        except _StreamError as error:
            record.error, record.message = error.args
        except (aiohttp.ClientError, OSError, ValueError) as error:
            record.error, record.message = type(error).__name__, str(error)
        record.message = record.message[:_MESSAGE_LENGTH]
        record.end_s = self._now()
        self._on_done()
        return record

    def _now(self) -> float:
        return time.perf_counter() - self._began

    async def _exchange(self, request: LoadRequest, record: RequestRecord) -> None:
        body = {
            "model": self._target.model,
            "prompt": request.prompt,
            "max_tokens": request.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with self._answer(body) as response:
            if response.status != 200:
                raise _StreamError(str(response.status), _said(await response.text()))
            is_complete = False
            async for line in response.content:
                data = line.strip()
                if data == b"data: [DONE]":
                    is_complete = True
                elif data.startswith(b"data:"):
                    self._take(json.loads(data[len(b"data:") :]), record)
        if not is_complete:
            raise _StreamError("incomplete", "the stream ended without [DONE]")
        # Without usage, events are all there is to count.
        record.output_tokens = record.output_tokens or len(record.token_s)

    @contextlib.asynccontextmanager
    async def _answer(self, body: dict[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
        """Sends a request, once more where nothing came back: its connection may have been old.

        Servers close those that were kept since the last answer when they like.
        """
        url = f"{self._target.url}/v1/completions"
        async with contextlib.AsyncExitStack() as stack:
            try:
                response = await self._session.post(url, json=body)
            except aiohttp.ClientConnectorError:
                raise  # there was none
            except aiohttp.ClientConnectionError:
                # Of a session of its own: others that were kept may be closed as well.
                session = await stack.enter_async_context(_session(self._session.headers))
                response = await session.post(url, json=body)
            yield await stack.enter_async_context(response)

    def _take(self, event: Any, record: RequestRecord) -> None:
        if not isinstance(event, dict):
            raise _StreamError("malformed", f"an event is no object: {event!r}")
        if event.get("error"):
            raise _StreamError("error event", _said(json.dumps(event)))
        if any(choice.get("text") for choice in event.get("choices") or ()):
            record.token_s.append(self._now())
        usage = event.get("usage")
        if usage:
            record.prompt_tokens = usage.get("prompt_tokens", record.prompt_tokens)
            record.output_tokens = usage.get("completion_tokens", 0)
            details = usage.get("prompt_tokens_details") or {}
            record.cached_tokens = details.get("cached_tokens") or 0


def make_session(api_key: str | None) -> aiohttp.ClientSession:
    """Returns a session with as many connections as requests are open, and no timeouts."""
    return _session({} if api_key is None else {"Authorization": f"Bearer {api_key}"})


def _session(headers: Mapping[str, str]) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
        headers=headers,
        read_bufsize=_LONGEST_LINE,
    )


async def first_model(session: aiohttp.ClientSession, url: str) -> str:
    """Returns the first model that a server offers.

    Raises:
      ValueError: it offers none, or answers otherwise.
      OSError: it cannot be reached.
    """
    address = f"{url}/v1/models"
    async with session.get(address) as response:
        text = await response.text()
        if response.status != 200:
            raise ValueError(f"{address} answered {response.status}: {_said(text)}")
    try:
        return str(json.loads(text)["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{address} lists no model ({text[:60]!r}); give --model") from error


def _said(text: str) -> str:
    """The message in an error's body, else the body."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return text.strip()
