"""The requests an engine has taken and not ended: who waits for each, and how much room is left."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from jaxinfer.delivery import Deliver
from jaxinfer.outputs import OutputDelta
from jaxinfer.request import EngineRequest, QueueFullError


@dataclass(slots=True)
class OpenRequest:
    """A request that was submitted and has not ended.

    Attributes:
      deliver: what its deltas go to.
      indices: of its completions that have not ended.
      num_prompt_tokens: of its prompt.
      has_begun: something was delivered.
    """

    deliver: Deliver
    indices: set[int]
    num_prompt_tokens: int
    has_begun: bool = False

    def failed(self, request_id: str, why: str) -> list[OutputDelta]:
        """Returns the last deltas of completions that can never end otherwise."""
        return [
            OutputDelta(request_id, index, finish_reason="error", error=why)
            for index in sorted(self.indices)
        ]


class OpenRequests:
    """Not thread-safe: whoever calls holds a lock."""

    def __init__(self) -> None:
        self._by_id: dict[str, OpenRequest] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._by_id))

    @property
    def num_sequences(self) -> int:
        """Completions that have not ended."""
        return sum(len(one.indices) for one in self._by_id.values())

    def check_room(
        self, num_sequences: int, num_prompt_tokens: int, most: int, most_tokens: int | None
    ) -> None:
        """Does nothing if a request of that size may come on top.

        Args:
          num_sequences, num_prompt_tokens: of the request.
          most: sequences that may be open.
          most_tokens: prompt tokens that may wait; a prompt that waits alone may have more.

        Raises:
          QueueFullError: too many are there.
        """
        num_open = self.num_sequences
        if num_open + num_sequences > most:
            raise QueueFullError(
                f"{num_open} sequences are running or waiting, and {num_sequences} more would be "
                f"too many; the limit is {most}"
            )
        if most_tokens is None:
            return
        waiting = sum(one.num_prompt_tokens for one in self._by_id.values() if not one.has_begun)
        if waiting and waiting + num_prompt_tokens > most_tokens:
            raise QueueFullError(f"{waiting} prompt tokens are waiting; the limit is {most_tokens}")

    def add(self, request: EngineRequest, deliver: Deliver) -> None:
        """Takes note of a request.

        Raises:
          ValueError: one with this id is in flight.
        """
        if request.request_id in self._by_id:
            raise ValueError(f"request id {request.request_id!r} is already in flight")
        indices = set(range(request.params.n))
        self._by_id[request.request_id] = OpenRequest(
            deliver, indices, len(request.prompt_token_ids)
        )

    def pop(self, request_id: str) -> OpenRequest | None:
        """Forgets a request, and returns it; None if it has ended."""
        return self._by_id.pop(request_id, None)

    def take_all(self) -> list[tuple[str, OpenRequest]]:
        """Forgets all requests, and returns them."""
        everything = list(self._by_id.items())
        self._by_id.clear()
        return everything

    def settle(
        self, by_request: Mapping[str, list[OutputDelta]]
    ) -> list[tuple[str, Deliver, list[OutputDelta]]]:
        """Says to whom deltas go; forgets completions that ended, and requests with the last."""
        addressed = []
        for request_id, batch in by_request.items():
            receiver = self._by_id.get(request_id)
            if receiver is None:
                continue
            receiver.has_begun = True
            addressed.append((request_id, receiver.deliver, batch))
            receiver.indices.difference_update(_ended(batch))
            if not receiver.indices:
                del self._by_id[request_id]
        return addressed


def _ended(batch: Iterable[OutputDelta]) -> Iterator[int]:
    return (delta.index for delta in batch if delta.finish_reason is not None)
