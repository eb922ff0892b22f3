"""The record of one run of `benchmarks/device.py`: a file of JSON lines, one per event.

The worker appends as it goes, so what was measured survives a crash; the supervisor reads it to
see what the worker is at, and a restarted worker to go on behind what is done. Imports no jax.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OK, FAILED, REFUSED, OUT_OF_MEMORY, OUT_OF_TIME = (
    "ok",
    "failed",
    "refused",
    "out of memory",
    "out of time",
)
"""How a case ended. Only FAILED is a fault."""

RESTART_CODE = 70
"""A worker's exit code where a case left the device unusable: another worker goes on."""


@dataclass(frozen=True)
class Result:
    """One case: its section and name, how it ended, and what was measured.

    Attributes:
      status: one of the constants above.
      values: what was measured, by name; numbers mostly.
      error: why it did not end well.
      seconds: how long it took, compilation included.
    """

    section: str
    name: str
    status: str
    values: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class OpenCase:
    """A case that has begun and not ended; it may run until `until`, in seconds of the epoch."""

    section: str
    name: str
    until: float


class Log:
    """The events of one run.

    Args:
      path: the file; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, kind: str, **fields: Any) -> None:
        """Adds one event."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, **fields}) + "\n")

    def begin(self, section: str, name: str, limit_s: float) -> None:
        """Says that a case begins, and how long it may take before it counts as hanging."""
        self.append("begin", section=section, name=name, until=time.time() + limit_s)

    def end(self, result: Result) -> None:
        """Says how a case ended."""
        self.append("result", **vars(result))

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Returns the events of one kind, oldest first."""
        return [event for event in self._read() if event["kind"] == kind]

    def first(self, kind: str) -> dict[str, Any]:
        """Returns the first event of a kind, without its kind; empty if there is none."""
        for event in self.events(kind):
            return {key: value for key, value in event.items() if key != "kind"}
        return {}

    def results(self) -> list[Result]:
        """Returns what ended so far, in order."""
        return [
            Result(**{key: value for key, value in event.items() if key != "kind"})
            for event in self.events("result")
        ]

    def open_case(self) -> OpenCase | None:
        """Returns the case that began last, unless it has ended."""
        case = None
        for event in self._read():
            if event["kind"] == "begin":
                case = OpenCase(event["section"], event["name"], event["until"])
            elif event["kind"] == "result":
                case = None
        return case

    def _read(self) -> list[dict[str, Any]]:
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        # A line without its end is still being written.
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
