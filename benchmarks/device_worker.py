"""Runs the sections of `benchmarks/device.py` on the default device, in a process of its own.

Each case is logged as it begins and ends, and printed. A case that raises ends alone, unless it
left the device unusable: then the process ends, and its successor goes on behind that case.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from device_log import FAILED, OK, OUT_OF_MEMORY, OUT_OF_TIME, REFUSED, RESTART_CODE, Log, Result
from device_report import COPY_CASE, columns_of, line_of

from jaxinfer.testing import LLAMA_8B
from kernels.bench import PLATFORMS

SHARES = {
    "bandwidth": 0.03,
    "numerics": 0.2,
    "attention": 0.15,
    "matmul": 0.17,
    "models": 0.45,
}
"""Of the time, in the order of the sections; what one leaves over the next ones have."""

_MAX_THREADS = 8
_COMPILE = "compile "
Built = TypeVar("Built")


@dataclass(frozen=True)
class ModelSizes:
    """An 8B-shaped model, and what is timed of it.

    Attributes:
      schemes: formats of its weights, "bf16" or names that `--quant` takes.
      hf: its config.json, the layers left out.
      layers: the two counts that are timed and extrapolated from; full: the real one.
      batches: decode rows; full_batch: of the full model.
      context: prompt tokens of each row; prefill: tokens of one prompt.
      drift: tokens that rows may grow by while others join and steps are timed.
    """

    hf: Mapping[str, Any]
    schemes: tuple[str, ...]
    layers: tuple[int, int]
    full: int
    batches: tuple[int, ...]
    full_batch: int
    context: int
    prefill: int
    drift: int
    steps: int


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
      copy_bytes: of the array that is copied; flops_size: side of the square product.
      cached_bytes: beyond which no cache holds a working set; unroll: variants in a program.
      num_specs: how many specs of each operation are compared; None for all.
      heads: N, K, H of timed attention; decodes: its (rows, context), the important ones first.
      is_tiny: matrices are small as well.
    """

    copy_bytes: int
    flops_size: int
    cached_bytes: int
    unroll: int
    num_specs: int | None
    heads: tuple[int, int, int]
    decodes: tuple[tuple[int, int], ...]
    model: ModelSizes
    is_tiny: bool


_TINY_LLAMA = LLAMA_8B | {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
_DECODES = (
    *((batch, context) for context in (2048, 8192) for batch in (16, 64)),
    *((1, 8192), (1, 2048), (64, 512), (16, 512), (1, 512)),
)


def sizes_for(tiny: bool, platform: str) -> Sizes:
    """Returns what to measure: an 8B model's shapes, or tiny ones."""
    if tiny:
        model = ModelSizes(_TINY_LLAMA, ("bf16", "int4"), (1, 2), 3, (2,), 2, 24, 32, 24, 3)
        return Sizes(2**20, 64, 2**16, 2, 2, (4, 2, 32), ((4, 40),), model, True)
    model = ModelSizes(
        LLAMA_8B, ("bf16", "int8", "int4"), (4, 8), 32, (1, 16, 64, 256), 64, 1024, 2048, 512, 32
    )
    unroll = 32 if platform == "gpu" else 8  # a TPU compiles each call of a kernel again
    return Sizes(2**30, 8192, 2**28, unroll, None, (32, 8, 128), _DECODES, model, False)


class Worker:
    """Runs cases, keeps to the time, and remembers what was done before a restart.

    Args:
      log: of this run, with its options.
    """

    def __init__(self, log: Log) -> None:
        self.log = log
        options = log.first("options")
        self.sections: list[str] = options["sections"]
        self.platform = PLATFORMS.get(jax.default_backend(), jax.default_backend())
        self.sizes = sizes_for(options["tiny"], self.platform)
        self.device = jax.devices()[0]
        self.num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
        self.found = {(each.section, each.name): each for each in log.results()}
        # Which of several compilations at once ended the process is unknown: now one by one.
        self.in_parallel = not any(
            each.status == FAILED and each.name.startswith(_COMPILE) for each in self.found.values()
        )
        self.headings: dict[str, list[str]] = {}
        self._until = self._ends(options["began"], options["deadline_s"])

    def _ends(self, began: float, deadline_s: float) -> dict[str, float]:
        ends, used = {}, 0.0
        total = sum(SHARES[section] for section in self.sections)
        for section in self.sections:
            used += SHARES[section] / total
            ends[section] = began + deadline_s * used
        return ends

    @property
    def bytes_per_s(self) -> float:
        """Rate of a copy on this device, the 100 % of all shares."""
        measured = self.found.get(("bandwidth", COPY_CASE))
        if measured is None or measured.status != OK:
            raise RuntimeError("no copy was measured, against which everything is: see bandwidth")
        return 1e9 * measured.values["copy_gb_per_s"]

    @property
    def memory_bytes(self) -> int | None:
        """Memory a program may take on the device, where it tells."""
        return (self.device.memory_stats() or {}).get("bytes_limit")

    def wants(self, section: str, name: str) -> bool:
        """Whether a case is still to be run; says so if there is no time for it."""
        if (section, name) in self.found:
            return False
        if time.time() < self._until[section]:
            return True
        self.end(Result(section, name, OUT_OF_TIME))
        return False

    def end(self, result: Result) -> None:
        """Records how a case ended, and prints it."""
        self.log.end(result)
        self.found[result.section, result.name] = result
        columns = columns_of([result])
        if result.status == OK and columns and self.headings.get(result.section) != columns:
            self.headings[result.section] = columns
            print(line_of(None, columns), flush=True)
        print(line_of(result, self.headings.get(result.section, [])), flush=True)

    @contextmanager
    def case(self, section: str, name: str, limit_s: float = 60.0) -> Iterator[dict[str, Any]]:
        """Runs what is inside as a case, which fills the values; errors end there.

        Args:
          limit_s: time after which it is taken for hanging and the process is killed.
        """
        values: dict[str, Any] = {}
        began = time.time()
        self.log.begin(section, name, limit_s)
        status, error = OK, ""
        try:
            yield values
        except NotImplementedError as refusal:
            status, error = REFUSED, str(refusal)
        except TimeoutError as failure:
            status, error = OUT_OF_TIME, str(failure)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
            status = OUT_OF_MEMORY if is_out_of_memory(failure) else FAILED
            if status == FAILED:
                traceback.print_exc(file=sys.stdout)
            traceback.clear_frames(failure.__traceback__)  # which hold arrays
        self.end(Result(section, name, status, values, error[:2000], time.time() - began))
        if status == FAILED and not self._device_works():
            print("the device is unusable now: going on in another process", flush=True)
            os._exit(RESTART_CODE)

    def built(
        self, section: str, group: str, builders: Mapping[str, Callable[[], Built]]
    ) -> dict[str, Lazy[Built]]:
        """Returns what some builders (compilations) make, at once as far as possible.

        What one raises is raised where its result is asked for.
        """
        lazies = {name: Lazy(build) for name, build in builders.items()}
        name = f"{_COMPILE}{group}"
        if lazies and self.in_parallel and self.wants(section, name):
            with self.case(section, name, 150.0), ThreadPoolExecutor(self.num_threads) as pool:
                list(pool.map(Lazy.build, lazies.values()))
        return lazies

    def run(self, sections: Mapping[str, Callable[[Worker], None]]) -> None:
        """Runs the wanted sections in order; one that raises outside of its cases ends alone."""
        for section in self.sections:
            print(f"\n=== {section}", flush=True)
            try:
                sections[section](self)
            except Exception as failure:
                traceback.print_exc(file=sys.stdout)
                traceback.clear_frames(failure.__traceback__)
                error = f"{type(failure).__name__}: {failure}"
                self.end(Result(section, "the section itself", FAILED, error=error))
            self.free()
            live_bytes = sum(array.nbytes for array in jax.live_arrays())
            self.log.append("section end", section=section, live_bytes=live_bytes)

    def free(self) -> None:
        """Frees what nothing refers to, and compiled programs that jit keeps."""
        jax.clear_caches()
        gc.collect()

    def _device_works(self) -> bool:
        try:
            return bool((jnp.arange(8) + 1).sum() == 36)
        except Exception:
            return False


class WrongResultError(Exception):
    """A kernel's result is not the one it should be."""


class Lazy(Generic[Built]):
    """Something that is built when first asked for, or before.

    Args:
      builder: is called once.
    """

    def __init__(self, builder: Callable[[], Built]) -> None:
        self._lock = threading.Lock()
        self._builder: Callable[[], Built] | None = builder
        self._value: Built | None = None
        self.error: Exception | None = None

    def build(self) -> None:
        """Builds it now, on whatever thread; raises nothing."""
        with self._lock:
            if self._builder is None:
                return
            try:
                self._value = self._builder()
            except Exception as error:
                self.error = error
            self._builder = None

    def get(self) -> Built:
        """Returns it, or raises what building it raised."""
        self.build()
        if self.error is not None:
            raise self.error
        return self._value  # type: ignore[return-value]


def is_out_of_memory(failure: Exception) -> bool:
    """Whether this says that memory did not suffice."""
    return isinstance(failure, MemoryError) or "RESOURCE_EXHAUSTED" in str(failure)
