"""Device time of a call, without what it costs to start it.

A program runs the call many times in a loop, over arguments that no cache holds; a few such
programs are dispatched before the host waits. So dispatch, the host and its wake-up do not count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from device_arrays import noise
from jax import Array, lax
from jax.stages import Compiled

from jaxinfer.runner.compile_watch import CompileWatch

BLOCK_S = 0.03
"""Time of the programs that are dispatched before the host waits once."""

PROGRAM_S = 0.005
"""Time a program should take: far more than it takes to dispatch it."""

_REPEATS = 5
_MAX_LOOPS = 64
_watch = CompileWatch()


@dataclass(frozen=True)
class Calls:
    """A call to time: `function(x, *variant)`.

    Attributes:
      xs: `[n, ...]`, the x of n passes over the variants.
      variants: the other arguments, several times: a pass calls with each of them in turn.
      num_bytes: that a call must move.
      flops: that a call must compute, where that matters.
    """

    function: Callable[..., Array]
    xs: Array
    variants: Sequence[tuple[Any, ...]]
    num_bytes: float
    flops: float = 0.0

    def loops(self, bytes_per_s: float) -> int:
        """Returns how often a program should loop over the variants."""
        seconds = len(self.variants) * max(self.num_bytes / bytes_per_s, 2e-6)
        return max(1, min(_MAX_LOOPS, round(PROGRAM_S / seconds)))

    def compile(self, bytes_per_s: float, platform: str) -> Compiled:
        """Returns the program `(xs, variants) -> results` for `seconds`."""
        # A jit of its own: lowered once, not per variant; a new function: traced now, as kernels
        # choose their block sizes while they are traced.
        call = jax.jit(lambda *args: self.function(*args))
        num_xs, loops = self.xs.shape[0], self.loops(bytes_per_s)

        def body(index: Array, _: tuple[Array, ...], xs: Array, variants: Any) -> Any:
            # A call that did not depend on the index would be hoisted out of the loop.
            x = lax.dynamic_index_in_dim(xs, index % num_xs, keepdims=False)
            # Nor is what depends on the variant alone, or shared what depends on x alone.
            return tuple(call(*_together(x, *variant)) for variant in variants)

        def run(xs: Array, variants: Any) -> Any:
            out = jax.eval_shape(call, xs[0], *variants[0])
            empty = tuple(jnp.zeros(out.shape, out.dtype) for _ in variants)
            return lax.fori_loop(0, loops, partial(body, xs=xs, variants=variants), empty)

        # A CUDA graph could run independent calls side by side.
        options = {"xla_gpu_graph_min_graph_size": 2**30} if platform == "gpu" else None
        lowered = jax.jit(run).lower(self.xs, tuple(self.variants))
        return lowered.compile(compiler_options=options)

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments of the first call."""
        return (self.xs[0], *self.variants[0])

    def seconds(self, program: Compiled, bytes_per_s: float) -> float:
        """Returns the median time of one call."""
        of_program = median_seconds(partial(program, self.xs, tuple(self.variants)))
        return of_program / (self.loops(bytes_per_s) * len(self.variants))


def median_seconds(run: Callable[[], Any]) -> float:
    """Returns the median time of a dispatch, waiting only behind many of them.

    Raises:
      RuntimeError: something was compiled meanwhile.
    """
    jax.block_until_ready(run())  # loads the program, and touches its memory
    first = _seconds(run, 1)
    count = max(1, min(64, round(BLOCK_S / first)))
    with compiling_nothing():
        repeats = _REPEATS if first * count < 10 * BLOCK_S else 2
        return statistics.median(_seconds(run, count) for _ in range(repeats)) / count


@contextmanager
def compiling_nothing() -> Iterator[None]:
    """Raises RuntimeError at the end if something was compiled inside, on this thread."""
    before = _watch.num_after_warmup
    with _watch.step():
        yield
    if _watch.num_after_warmup > before:
        raise RuntimeError("a program was compiled while its time was taken")


def measured_copy(num_bytes: int) -> dict[str, float]:
    """Returns GB/s of a copy (bytes read plus written) and of a plain read of `num_bytes`."""
    data = jax.jit(lambda: jnp.ones(num_bytes // 4, jnp.uint32))()
    copies = [jax.jit(jnp.copy), jax.jit(lambda x: x ^ jnp.uint32(1))]
    seconds = min(median_seconds(partial(_compiled(copy, data), data)) for copy in copies)
    read = median_seconds(partial(_compiled(jax.jit(jnp.max), data), data))
    rates = {"copy_gb_per_s": 2 * data.nbytes / seconds, "read_gb_per_s": data.nbytes / read}
    return {name: rate / 1e9 for name, rate in rates.items()}


def measured_flops(size: int) -> float:
    """Returns the rate of a square bfloat16 matrix product, in FLOP/s."""
    a = jax.jit(lambda: noise((size, size), 1).astype(jnp.bfloat16))()
    product = _compiled(jax.jit(partial(jnp.dot, preferred_element_type=jnp.bfloat16)), a, a)
    return 2 * size**3 / median_seconds(partial(product, a, a))


def _together(*values: Any) -> tuple[Any, ...]:
    """Returns values that XLA takes to depend on one another."""
    return lax.optimization_barrier(values)


def _compiled(function: Any, *args: Array) -> Compiled:
    return function.lower(*args).compile()


def _seconds(run: Callable[[], Any], count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        out = run()
    jax.block_until_ready(out)
    return time.perf_counter() - begin
