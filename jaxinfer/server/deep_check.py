"""Whether the models really generate: one token of each, at most once a second."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import aclosing

from jaxinfer.async_engine import EngineDeadError, EngineRequest, QueueFullError
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.server.errors import ApiError, queue_full, unavailable
from jaxinfer.server.served_model import Models, ServedModel

_INTERVAL_S = 1.0
_TIMEOUT_S = 20.0
_FIRST = -(2**31)  # of priorities: before whatever waits


class DeepCheck:
    """Checks the models of a server; who asks again within a second gets the same answer."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._lock = asyncio.Lock()
        self._due_at = 0.0
        self._found: ApiError | None = None

    async def run(self) -> None:
        """Does nothing if every loaded model generates a token.

        Raises:
          ApiError: 503, one does not, or not within 20 s; 429, its queue is full.
        """
        loop = asyncio.get_running_loop()
        async with self._lock:
            if loop.time() >= self._due_at:
                self._found = await self._fault()
                self._due_at = loop.time() + _INTERVAL_S
            if self._found is not None:
                raise self._found

    async def _fault(self) -> ApiError | None:
        for model in self._models:
            if model.status == "loaded":
                try:
                    async with asyncio.timeout(_TIMEOUT_S):
                        await _generate(model)
                except ApiError as error:
                    return error
                except TimeoutError:
                    return _silent(model)
        return None


async def _generate(model: ServedModel) -> None:
    request = EngineRequest(
        request_id=f"health-{secrets.token_hex(8)}",
        prompt_token_ids=(0,),
        params=SamplingParams(max_tokens=1, temperature=0.0),
        priority=_FIRST,
    )
    try:
        async with aclosing(model.engine.generate(request)) as deltas:
            reasons = [delta.finish_reason async for delta in deltas]
    except QueueFullError as error:
        raise queue_full(str(error)) from None
    except EngineDeadError:
        raise _silent(model) from None
    if reasons[-1] not in ("stop", "length"):
        raise _silent(model)


def _silent(model: ServedModel) -> ApiError:
    return unavailable(f"model {model.name!r} generates nothing", retry_after_s=10)
