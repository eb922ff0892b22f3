"""The process that `benchmarks/device.py` measures in: what it runs on, and its sections."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from shutil import which
from typing import Any

import jax
from device_kernels import attention, bandwidth, matmul
from device_log import Log
from device_models import models
from device_numerics import numerics
from device_worker import Worker

ROOT = Path(__file__).resolve().parent.parent


def header(worker: Worker) -> dict[str, Any]:
    """Returns what the numbers were measured with."""
    device, client = worker.device, worker.device.client
    return {
        "device": device.device_kind,
        "num_devices": jax.device_count(),
        "memory_gb": None if worker.memory_bytes is None else worker.memory_bytes / 1e9,
        "platform": worker.platform,
        "platform_version": " ".join(client.platform_version.split()),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "jax": jax.__version__,
        "jaxlib": jax.lib.__version__,
        "python": sys.version.split()[0],
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "commit": _output("git", "-c", "safe.directory=*", "describe", "--always", "--dirty"),
    }


def _output(program: str, *arguments: str) -> str | None:
    """The first line a program prints, None without the program or where it fails."""
    if which(program) is None:
        return None
    result = subprocess.run(
        [program, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return result.stdout.partition("\n")[0].strip() or None if result.returncode == 0 else None


def main() -> int:
    """Runs what the log named on the command line asks for."""
    worker = Worker(Log(Path(sys.argv[1])))
    if worker.platform == "cpu" and not worker.sizes.is_tiny:
        print("this is a CPU: pass --tiny, which only shows that the script works")
        return 1
    if not worker.log.first("header"):
        worker.log.append("header", **header(worker))
        for name, value in worker.log.first("header").items():
            print(f"{name:18}{value}", flush=True)
    worker.run(
        {
            "bandwidth": bandwidth,
            "numerics": numerics,
            "attention": attention,
            "matmul": matmul,
            "models": models,
        }
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
