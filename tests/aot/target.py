"""Chips that programs are compiled for without having one.

TPUs come from libtpu's topologies, GPUs from the CUDA plugin and a description of the chip.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
ARCHITECTURES = {"a100": "sm_80", "rtx4090": "sm_89", "h200": "sm_90a"}
TARGETS = (*TOPOLOGIES, *ARCHITECTURES)

_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "-1",  # else the plugin insists on cuDNN
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


def prepare(**variables: str) -> None:
    """Sets up a process that only compiles; call it before jax starts a backend."""
    import jax

    os.environ |= _ENVIRONMENT | variables
    jax.config.update("jax_platforms", "cpu")


def missing(target: str) -> str | None:
    """Returns why nothing can be compiled for a target here, or None."""
    names = ("libtpu",) if target in TOPOLOGIES else ("jax_cuda13_plugin", "nvidia.cu13")
    for name in names:
        if _spec(name) is None:
            return f"{name} is not installed: pip install -r tests/requirements-aot.txt"
    return None


def _spec(name: str):
    try:
        return find_spec(name)
    except ModuleNotFoundError:
        return None


@functools.cache
def devices(target: str) -> tuple:
    """Returns the compile-only devices of a target."""
    from jax.experimental import topologies

    if target in TOPOLOGIES:
        return tuple(topologies.get_topology_desc(TOPOLOGIES[target], "tpu").devices)
    text = (Path(__file__).parent / "targets" / f"{target}.txtpb").read_text()
    description = topologies.get_topology_desc(
        platform="cuda", topology="1x1x1", target_config=text
    )
    return tuple(description.devices)


def copies(hlo: str, arrays: Iterable) -> list[str]:
    """Returns a program's instructions that copy an array of one of these shapes."""
    shapes = {"[" + ",".join(map(str, array.shape)) + "]" for array in arrays}
    return [
        line.strip()[:160]
        for line in hlo.splitlines()
        if re.search(r" copy(-start)?\(", line) and any(shape in line for shape in shapes)
    ]


@dataclass(frozen=True)
class PtxReport:
    """What ptxas says about one kernel's PTX.

    Attributes:
      registers: per thread.
      spill_bytes: stores and loads together.
      threads: per block.
    """

    name: str
    registers: int
    spill_bytes: int
    threads: int


def ptxas(path: Path, architecture: str) -> list[PtxReport]:
    """Assembles a PTX file and returns a report for each of its kernels."""
    text = path.read_text()
    if ".entry" not in text:
        return []
    [folder] = _spec("nvidia.cu13").submodule_search_locations
    tool, output = Path(folder) / "bin" / "ptxas", path.with_suffix(".cubin")
    command = [tool, f"-arch={architecture}", "-v", path, "-o", output]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"ptxas refuses {path.name}: {run.stderr}")
    threads = {
        name: int(count)
        for name, count in re.findall(
            r"\.entry (\w+)[^{]*?\.(?:reqntid|maxntid) (\d+)", text, flags=re.DOTALL
        )
    }
    reports = []
    for entry in (run.stdout + run.stderr).split("Compiling entry function '")[1:]:
        spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", entry)
        registers = int(re.search(r"Used (\d+) registers", entry)[1])
        name = entry.split("'", 1)[0]
        reports.append(PtxReport(name, registers, sum(map(int, spills)), threads.get(name, 0)))
    return reports
