"""Where the time of a decode and of a prefill step goes, and how fast it moves what it must.

Bytes are those of the weights a step reads and of the KV cache it reads and writes: what no
implementation can do without. Activations are not counted.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxinfer.engine import Engine
from jaxinfer.hlo_kinds import KINDS, read_instructions
from jaxinfer.nn.config import KVGroup
from jaxinfer.nn.decoder import CausalLM
from jaxinfer.op_times import Operation, sum_by_kind, trace
from jaxinfer.runner.loader import parameters
from jaxinfer.step_driver import WARM_STEPS, StepDriver
from kernels.quantized_matmul import QTensor

PREFILLS = 3
"""Prefill steps that are averaged."""


@dataclass(frozen=True, slots=True)
class KindShare:
    """What one kind of operation has of a step: time, operations, and bytes it must move."""

    us: float
    ops: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StepProfile:
    """An average step.

    Attributes:
      what: the step, in words.
      steps: how many were averaged.
      wall_us: time of one, untraced.
      traced_us: time of one while it was traced.
      busy_us: time of that in which the device computed.
      kinds: what each kind of operation has of `busy_us`; the sum is all of it.
    """

    what: str
    steps: int
    wall_us: float
    traced_us: float
    busy_us: float
    kinds: dict[str, KindShare]

    @property
    def host_share(self) -> float:
        """Share of a traced step in which the device waited for the host."""
        return max(0.0, 1.0 - self.busy_us / self.traced_us)

    @property
    def num_bytes(self) -> int:
        """Bytes the step must move."""
        return sum(share.num_bytes for share in self.kinds.values())

    def as_json(self) -> dict[str, Any]:
        """The step as `jaxinfer profile --json` prints it."""
        kinds = {
            kind: {
                "us": round(share.us, 1),
                "ops": round(share.ops, 1),
                "bytes": share.num_bytes,
                "gb_per_s": _rate(share.num_bytes, share.us),
            }
            for kind, share in self.kinds.items()
        }
        return {
            "step": self.what,
            "steps": self.steps,
            "wall_us": round(self.wall_us, 1),
            "traced_us": round(self.traced_us, 1),
            "busy_us": round(self.busy_us, 1),
            "host_share": round(self.host_share, 4),
            "bytes": self.num_bytes,
            "gb_per_s": _rate(self.num_bytes, self.wall_us),
            "kinds": kinds,
        }

    def table(self) -> str:
        """The step in lines of text."""
        rate = _rate(self.num_bytes, self.wall_us)
        lines = [
            f"{self.what}: {self.wall_us:,.0f} µs a step (of {self.steps}), "
            f"{self.num_bytes / 1e6:.1f} MB, {rate or 0:.1f} GB/s",
            f"traced: {self.traced_us:,.0f} µs, the device busy for {self.busy_us:,.0f}",
            f"  {'kind':<15}{'µs':>10}{'share':>8}{'ops':>8}{'MB':>9}{'GB/s':>8}",
        ]
        for kind, share in self.kinds.items():
            moved = f"{share.num_bytes / 1e6:.2f}" if share.num_bytes else ""
            rate = _rate(share.num_bytes, share.us)
            lines.append(
                f"  {kind:<15}{share.us:>10,.1f}{share.us / self.traced_us:>8.1%}"
                f"{share.ops:>8,.0f}{moved:>9}{'' if rate is None else f'{rate:.1f}':>8}"
            )
        waited = max(0.0, self.traced_us - self.busy_us)
        lines.append(f"  {'host':<15}{waited:>10,.1f}{self.host_share:>8.1%}")
        return "\n".join(lines)


def _rate(num_bytes: int, us: float) -> float | None:
    """GB/s, where there are bytes and time."""
    return round(num_bytes / us / 1e3, 2) if num_bytes and us else None


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that a step must move.

    Attributes:
      layers, others: of the layers' weights and of all others but the embedding's table, by the
        kind that reads them; a tied table is read whole by the head.
      embedding_row: of a token's row in the table.
      token_kv: of a token's keys and values in one layer.
      windows: the attention window of each layer; None sees everything.
    """

    layers: dict[str, int]
    others: dict[str, int]
    embedding_row: int
    token_kv: int
    windows: tuple[int | None, ...]

    @classmethod
    def of(cls, model: CausalLM, groups: Sequence[KVGroup], engine: Engine) -> Traffic:
        """Returns what steps of a loaded model move."""
        layers: Counter[str] = Counter()
        others: Counter[str] = Counter()
        table = 0
        for path, param in parameters(model):
            size = _num_bytes(param.get_value())
            kind = "norm" if "norm" in path else "matmul"
            if path.startswith("layers."):
                layers[kind] += size
            elif path.startswith("embedding."):
                table += size
                others[kind] += size if model.config.tie_word_embeddings else 0
            else:
                others[kind] += size
        cache = engine.runner.config.cache
        windows = {layer: group.window for group in groups for layer in group.layers}
        return cls(
            layers=dict(layers),
            others=dict(others),
            embedding_row=table // model.config.vocab_size,
            token_kv=cache.token_bytes // cache.num_layers,
            windows=tuple(windows[layer] for layer in range(cache.num_layers)),
        )

    def of_step(
        self, num_tokens: int, kv_lens: Sequence[int], layers_are_one: bool
    ) -> dict[str, int]:
        """Bytes by kind of a step of `num_tokens` over sequences of so many keys.

        `layers_are_one`: a single kernel runs all layers, and moves all that they do.
        """
        keys = sum(
            min(kv_len, math.inf if window is None else window)
            for kv_len in kv_lens
            for window in self.windows
        )
        inside = Counter(self.layers)
        inside["attention"] += round(keys * self.token_kv)
        inside["kv write"] += num_tokens * len(self.windows) * self.token_kv
        if layers_are_one:
            inside = Counter({"decoder layers": inside.total()})
        rows = Counter(embedding=num_tokens * self.embedding_row)
        return dict(inside + Counter(self.others) + rows)


def _num_bytes(value: Any) -> int:
    leaves = jax.tree.leaves(value, is_leaf=lambda leaf: isinstance(leaf, QTensor))
    return sum(leaf.num_bytes if isinstance(leaf, QTensor) else leaf.nbytes for leaf in leaves)


@dataclass(frozen=True, slots=True)
class _Measured:
    """A loop over steps of one program, timed, then traced."""

    program: tuple[str, int]
    steps: int
    wall_us: float
    traced_us: float
    operations: list[Operation]

    @classmethod
    def of(cls, program: tuple[str, int], steps: int, run: Callable[[], None]) -> _Measured:
        """Runs the loop twice."""
        wall_us, traced_us = _microseconds(run), 0.0

        def timed() -> None:
            nonlocal traced_us
            traced_us = _microseconds(run)

        operations = trace(timed)
        return cls(program, steps, wall_us, traced_us, operations)


def _microseconds(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    return (time.perf_counter() - began) * 1e6


class Profiler:
    """Measures steps of an engine that nothing else uses."""

    def __init__(self, driver: StepDriver) -> None:
        self._driver = driver
        self._engine = driver.engine
        self._traffic = Traffic.of(driver.model, driver.groups, driver.engine)

    def decode(self, concurrency: int, prompt_tokens: int, steps: int) -> StepProfile:
        """An average step that adds a token, or `decode_steps` of them, to each sequence."""
        bulk = self._engine.scheduler.limits.bulk_steps(concurrency)
        rung = self._engine.runner.ladders.decode_rung(concurrency)

        def run() -> None:
            for _ in range(steps):
                self._engine.step()

        with self._driver.decoding(concurrency, prompt_tokens):
            measured = _Measured.of(("decode_k" if bulk > 1 else "decode", rung), steps, run)
        # The traced steps follow the warm and the untraced ones: the context in their middle.
        kv_len = round(prompt_tokens + bulk * (WARM_STEPS + 1.5 * steps))
        what = f"decode, {concurrency} × {bulk} tokens at {kv_len} of context"
        return self._average(what, measured, concurrency, [kv_len] * concurrency, passes=bulk)

    def prefill(self, num_tokens: int) -> StepProfile:
        """An average step over one prompt, which must fit a step."""

        def run() -> None:
            for _ in range(PREFILLS):
                self._driver.add(num_tokens, 1)
                self._driver.drain()

        run()
        rung = self._engine.runner.ladders.token_rung(num_tokens)
        measured = _Measured.of(("ragged", rung), PREFILLS, run)
        return self._average(f"prefill, {num_tokens} tokens", measured, num_tokens, [num_tokens])

    def _average(
        self,
        what: str,
        measured: _Measured,
        num_tokens: int,
        kv_lens: Sequence[int],
        passes: int = 1,
    ) -> StepProfile:
        """A step that goes over the model `passes` times, with `num_tokens` each time."""
        instructions = read_instructions(self._engine.runner.hlo(*measured.program))
        times = sum_by_kind(measured.operations, instructions)
        layers_are_one = times.counts["decoder layers"] > 0
        moved = self._traffic.of_step(num_tokens, kv_lens, layers_are_one)
        each = 1e3 * measured.steps
        return StepProfile(
            what=what,
            steps=measured.steps,
            wall_us=measured.wall_us / measured.steps,
            traced_us=measured.traced_us / measured.steps,
            busy_us=times.busy_ns / each,
            kinds={
                kind: KindShare(
                    times.kind_ns[kind] / each,
                    times.counts[kind] / measured.steps,
                    passes * moved.get(kind, 0),
                )
                for kind in KINDS
                if times.kind_ns[kind] or moved.get(kind)
            },
        )
