"""What a measurement was made with: versions, and the most memory the process has held."""

from __future__ import annotations

import platform
import resource
import sys
from importlib import metadata
from pathlib import Path


def versions() -> dict[str, str]:
    """Returns the versions that numbers and numerics depend on."""
    names = ("jaxinfer", "jax", "jaxlib", "flax")
    return {"python": platform.python_version(), **{name: version_of(name) for name in names}}


def version_of(distribution: str) -> str:
    """Returns the version of an installed distribution, or that it is not."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def peak_rss_bytes() -> int:
    """Returns the most memory this process has held so far."""
    status = Path("/proc/self/status")
    if status.exists():
        # Unlike getrusage, this does not count what the parent held when it forked.
        [line] = (line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
