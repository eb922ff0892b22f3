"""Section `numerics`: every implementation on the device against the reference."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from device_worker import Lazy, Worker, WrongResultError
from jax import Array

from kernels import paged_attention, quantized_matmul
from kernels.paged_attention import specs as attention_specs
from kernels.quantized_matmul import specs as matmul_specs

OPS = {
    "paged_attention": (paged_attention.IMPLEMENTATIONS, attention_specs),
    "quantized_matmul": (quantized_matmul.IMPLEMENTATIONS, matmul_specs),
}
_GROUP = 16  # specs whose programs are compiled together


def numerics(worker: Worker) -> None:
    """Compares every implementation with the reference over the operations' specs.

    In float32 where an implementation takes it, else in bfloat16; then those that took it, but
    for XLA, in bfloat16 as well while there is time.
    """
    for dtypes in (("float32", "bfloat16"), ("bfloat16",)):
        for op, (table, module) in OPS.items():
            names = list(module.SPECS)[: worker.sizes.num_specs]
            for start in range(0, len(names), _GROUP):
                group = [_Comparison(op, name, worker.platform) for name in names[start:][:_GROUP]]
                todo = {
                    case: partial(comparison.compiled, worker, implementation, dtypes)
                    for comparison in group
                    for implementation in table[worker.platform]
                    if (case := _case(worker, comparison.label, implementation, dtypes))
                }
                _run(worker, f"{op} {start} {dtypes[0]}", todo)


def _case(worker: Worker, label: str, implementation: str, dtypes: tuple[str, ...]) -> str | None:
    """What a comparison is called; None if there is none."""
    name = f"{label} {implementation}"
    if len(dtypes) == 1:
        first = worker.found.get(("numerics", name))
        in_float32 = first is not None and first.values.get("dtype") == "float32"
        if implementation == "xla" or not in_float32:
            return None
        name += " bfloat16"
    is_wanted = implementation != "reference" and worker.wants("numerics", name)
    return name if is_wanted else None


def _run(worker: Worker, label: str, todo: dict[str, Callable[[], Any]]) -> None:
    """Compiles the comparisons together, then runs one after the other."""
    for case, compiled in worker.built("numerics", label, todo).items():
        if not worker.wants("numerics", case):
            continue
        with worker.case("numerics", case) as values:
            compare = compiled.get()
            values.update(compare())
            if not values["of_bound"] <= 1:
                raise WrongResultError(f"off by {values['error']:.2e}, which is not in the bound")
    worker.free()


@dataclass(frozen=True)
class _Answer:
    """Inputs on the host, the reference's float32 result for them, and how far one may be off."""

    inputs: tuple[Any, ...]
    wanted: np.ndarray
    bound: np.ndarray


class _Comparison:
    """One spec in any dtype; the reference is computed once for each."""

    def __init__(self, op: str, name: str, platform: str) -> None:
        self.op, self.platform = op, platform
        self.label = f"{op} {name}"
        spec = OPS[op][1].SPECS[name]
        self._specs = {dtype: _in_dtype(spec, dtype) for dtype in ("float32", "bfloat16")}
        self._answers = {
            dtype: Lazy(partial(self._answer, each)) for dtype, each in self._specs.items()
        }

    def compiled(
        self, worker: Worker, implementation: str, dtypes: tuple[str, ...]
    ) -> Callable[[], dict[str, Any]]:
        """Compiles an implementation for the first of some dtypes that it takes.

        Returns:
          What runs it and compares.

        Raises:
          NotImplementedError: it refuses them all; says why.
        """
        refusals = []
        for dtype in dtypes:
            answer = self._answers[dtype].get()
            inputs = jax.device_put(answer.inputs, worker.device)
            run = jax.jit(self._function(self._specs[dtype], implementation))
            try:
                program = run.lower(*inputs).compile()
            except NotImplementedError as refusal:
                refusals.append(f"{dtype}: {refusal}")
                continue
            return partial(_compare, program, inputs, answer, dtype)
        raise NotImplementedError("; ".join(refusals))

    def _answer(self, spec: Any) -> _Answer:
        with _on_host():
            inputs = OPS[self.op][1].make_inputs(spec, platform=self.platform)
            exact = jax.jit(self._function(spec, "reference"))
            x, *rest = inputs
            wanted = np.asarray(exact(x.astype(jnp.float32), *rest))
            return _Answer(inputs, wanted, _bound(spec, x, rest[0], wanted))

    def _function(self, spec: Any, implementation: str) -> Callable[..., Array]:
        call: dict[str, Any] = {"platform": self.platform, "implementation": implementation}
        if self.op == "quantized_matmul":
            return partial(quantized_matmul.matmul, **call, out_dtype=jnp.float32)
        call |= {"group": spec.group, "scale": spec.scale}
        return partial(paged_attention.attend, **call, window=spec.window, soft_cap=spec.soft_cap)


def _compare(program: Any, inputs: tuple[Any, ...], answer: _Answer, dtype: str) -> dict[str, Any]:
    result = np.asarray(program(*inputs), np.float32)
    error = np.abs(result - answer.wanted)
    share = float(np.max(error / answer.bound)) if np.isfinite(result).all() else math.inf
    return {"dtype": dtype, "error": float(np.nanmax(error)), "of_bound": share}


def _bound(spec: Any, x: Array, weight: Any, wanted: np.ndarray) -> np.ndarray:
    """How far each element may be from the reference's.

    Float32: sums of up to some thousand terms in any order. Bfloat16 rounds the probabilities and
    the result of attention; and the weights of a product, whose errors of 2**-8 each add up like a
    random walk.
    """
    if spec.dtype == "float32":
        return 2e-5 + 1e-5 * np.abs(wanted)
    if isinstance(spec, attention_specs.Spec):
        return 2.0**-7 + 2.0**-8 * np.abs(wanted)
    rows = np.asarray(quantized_matmul.dequantize(weight))
    size = np.linalg.norm(np.asarray(x, np.float32), axis=1)[:, None] * np.linalg.norm(rows, axis=1)
    return 1e-6 + 4 * 2.0**-8 / math.sqrt(spec.in_features) * size


def _in_dtype(spec: Any, dtype: str) -> Any:
    """The spec with x, and a cache without scales, in a dtype."""
    if isinstance(spec, matmul_specs.Spec):
        return dataclasses.replace(spec, dtype=dtype)
    kv_dtype = "int8" if spec.kv_dtype == "int8" else dtype
    return dataclasses.replace(spec, dtype=dtype, kv_dtype=kv_dtype)


@contextmanager
def _on_host() -> Iterator[None]:
    """Runs what is inside on the CPU if jax has it: quick to compile, and another oracle."""
    try:
        device = jax.devices("cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves it out
        device = jax.devices()[0]
    with jax.default_device(device):
        yield
