"""Which device a program is traced for, and whether its Pallas kernels are interpreted.

Usually the process's own device; tests and ahead-of-time compilation name another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Device:
    """What a kernel may ask about the chip it is traced for.

    Attributes:
      platform: `cpu`, `gpu` or `tpu`.
      kind: as `jax.Device.device_kind` says it, such as "TPU v6 lite" or "NVIDIA H200".
      core_count: streaming multiprocessors of a GPU, cores of a TPU chip seen as one device.
      compute_capability: (major, minor) of an NVIDIA GPU, else None.
    """

    platform: str
    kind: str
    core_count: int = 1
    compute_capability: tuple[int, int] | None = None


KNOWN_DEVICES = {
    "v5e": Device("tpu", "TPU v5 lite", 1),
    "v6e": Device("tpu", "TPU v6 lite", 1),
    "tpu7x": Device("tpu", "TPU7x", 1),
    "a100": Device("gpu", "NVIDIA A100-SXM4-80GB", 108, (8, 0)),
    "rtx4090": Device("gpu", "NVIDIA GeForce RTX 4090", 128, (8, 9)),
    "h200": Device("gpu", "NVIDIA H200", 132, (9, 0)),
}
"""The devices that kernels are compiled for in tests, by a short name."""

_assumed: ContextVar[Device | None] = ContextVar("assumed device", default=None)
_interpret: ContextVar[Any] = ContextVar("interpret mode", default=False)


def current(platform: str) -> Device:
    """Returns the device that a program for `platform` is traced for.

    That is the one of `assume`, else the process's first device of that platform, else an unknown
    one (a program for a chip that is not here), for which kernels choose what is always legal.
    """
    assumed = _assumed.get()
    if assumed is not None and assumed.platform == platform:
        return assumed
    device = jax.devices()[0]
    if {"cuda": "gpu", "rocm": "gpu"}.get(device.platform, device.platform) != platform:
        return Device(platform, "unknown")
    capability = getattr(device, "compute_capability", None) if platform == "gpu" else None
    if capability is not None:
        major, minor = capability.split(".")
        capability = (int(major), int(minor))
    cores = getattr(device, "core_count", 1) or 1
    return Device(platform, device.device_kind, cores, capability)


@contextmanager
def assume(device: Device) -> Iterator[None]:
    """Traces what is inside for another device than the process's own.

    A function that was traced before keeps its trace: jit's cache does not know the device.
    """
    token = _assumed.set(device)
    try:
        yield
    finally:
        _assumed.reset(token)


@contextmanager
def interpreted(mode: Any = True) -> Iterator[None]:
    """Interprets the Pallas kernels traced inside: `mode` is pallas_call's `interpret`."""
    token = _interpret.set(mode)
    try:
        yield
    finally:
        _interpret.reset(token)


def interpret_mode() -> Any:
    """Returns what a kernel passes as pallas_call's `interpret`."""
    return _interpret.get()
