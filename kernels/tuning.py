"""Block sizes of kernels: measured ones as data, a kernel's own heuristic where none were measured.

`tuned/<device kind>.json` maps "operation/implementation" to {call: {field: value}}.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

TUNED_FOLDER = Path(__file__).parent / "tuned"
Config = TypeVar("Config")


@dataclass(frozen=True)
class Request:
    """What a kernel asked `choose` while it was traced, and the config it got."""

    kernel: str
    call: str
    device_kind: str
    config: Any


_forced: ContextVar[Any] = ContextVar("forced kernel config", default=None)
_asked: ContextVar[list[Request] | None] = ContextVar("recorded requests", default=None)


def choose(kernel: str, call: str, device_kind: str, heuristic: Config) -> Config:
    """Returns the config a kernel runs with: the one of `force`, else tuned, else its heuristic.

    Args:
      kernel: "operation/implementation".
      call: names what the config depends on, such as heads, dtypes and a bucket of lengths.
      device_kind: as `kernels.device.Device.kind`.
      heuristic: a frozen dataclass, legal for the call; a tuned entry may set some of its fields.
    """
    config, forced = heuristic, _forced.get()
    fields = _tuned(device_kind).get(kernel, {}).get(call)
    if type(forced) is type(heuristic):
        config = forced
    elif fields is not None:
        config = dataclasses.replace(cast("Any", heuristic), **fields)
    asked = _asked.get()
    if asked is not None:
        asked.append(Request(kernel, call, device_kind, config))
    return config


@contextmanager
def force(config: Any) -> Iterator[None]:
    """Makes kernels traced inside use a config, if it is of their Config class: to time it."""
    token = _forced.set(config)
    try:
        yield
    finally:
        _forced.reset(token)


@contextmanager
def record() -> Iterator[list[Request]]:
    """Collects what kernels traced inside ask for."""
    asked: list[Request] = []
    token = _asked.set(asked)
    try:
        yield asked
    finally:
        _asked.reset(token)


def neighbours(config: Config) -> list[Config]:
    """Returns the configs with one whole-number field halved or doubled, legal or not."""
    changed: list[Config] = []
    for field in dataclasses.fields(cast("Any", config)):
        value = getattr(config, field.name)
        if type(value) is int and value > 0:
            values = {value * 2, max(value // 2, 1)} - {value}
            changed += [
                dataclasses.replace(cast("Any", config), **{field.name: v}) for v in sorted(values)
            ]
    return changed


def climb(start: Config, seconds: Callable[[Config], float], max_timed: int = 40) -> Config:
    """Returns the fastest config found by walking from one to its best neighbour.

    Args:
      start: where to begin; must run.
      seconds: times a config; infinity for one that does not compile or run.
      max_timed: how many are timed at most.
    """
    timed = {start: seconds(start)}
    best = start
    while True:
        for config in neighbours(best):
            if config not in timed and len(timed) < max_timed:
                timed[config] = seconds(config)
        fastest = min(timed, key=timed.__getitem__)
        if fastest == best:
            return best
        best = fastest


def save(device_kind: str, kernel: str, configs: Mapping[str, Any], folder: Path) -> Path:
    """Adds measured configs, call -> config, to a device's file and returns the file."""
    path = folder / f"{_slug(device_kind)}.json"
    table = json.loads(path.read_text()) if path.exists() else {}
    entries = table.setdefault(kernel, {})
    entries.update({call: dataclasses.asdict(config) for call, config in configs.items()})
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    _tuned.cache_clear()
    return path


@cache
def _tuned(device_kind: str) -> dict[str, dict[str, dict[str, Any]]]:
    path = TUNED_FOLDER / f"{_slug(device_kind)}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _slug(device_kind: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", device_kind.lower()).strip("_")
