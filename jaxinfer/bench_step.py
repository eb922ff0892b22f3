"""`jaxinfer bench step`: what a step of each compiled program takes, and how fast it moves bytes.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxinfer.config import ConfigError, EngineConfig
from jaxinfer.flag_values import add_counts
from jaxinfer.machine import versions
from jaxinfer.nn.decoder import CausalLM
from jaxinfer.pool_size import MAX_BULK_STEPS
from jaxinfer.runner.loader import parameters
from jaxinfer.step_driver import WARM_STEPS, StepDriver
from jaxinfer.step_profile import Traffic
from kernels.quantized_matmul import QTensor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `jaxinfer bench step` beside those of the engine."""
    flags = (
        ("--context", 512, "tokens of each sequence when decoding begins"),
        ("--steps", 16, "steps of each program, of which the median counts"),
    )
    add_counts(parser, flags)
    parser.add_argument("--json", action="store_true", help="print only the JSON line")


def engine_config(config: EngineConfig, args: argparse.Namespace) -> EngineConfig:
    """Returns how to load the model: as asked, in a context that is just long enough.

    Raises:
      ConfigError: the context that was asked for is too short for what is measured.
    """
    generated = (WARM_STEPS + args.steps + 4) * (config.decode_steps or MAX_BULK_STEPS)
    length = args.context + generated
    if config.max_model_len is not None and config.max_model_len < length:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, and what is measured needs {length}; "
            "leave it out, or lower --context or --steps"
        )
    return replace(
        config,
        max_model_len=config.max_model_len or length,
        max_queued_requests=max(config.max_queued_requests, config.max_num_seqs),
    )


@dataclass(frozen=True, slots=True)
class StepCost:
    """A median step of one program.

    Attributes:
      kind, rung: the program.
      what: what it computed.
      num_tokens: tokens that it computed.
      seconds: from one step's results to the next one's.
      host_s: of processor time that the engine's thread took: to schedule, pack, dispatch, read
        results and make text. XLA's own threads do not count, nor does waiting.
      num_bytes: weights and keys and values that it must move.
      flops: multiplications and additions of its matrix products, attention aside.
    """

    kind: str
    rung: int
    what: str
    num_tokens: int
    seconds: float
    host_s: float
    num_bytes: int
    flops: int

    def as_json(self) -> dict[str, Any]:
        """The step as the last line has it."""
        return {
            "program": f"{self.kind}[{self.rung}]",
            "what": self.what,
            "ms": round(1e3 * self.seconds, 3),
            "host_us": round(1e6 * self.host_s, 1),
            "bytes": self.num_bytes,
            "gb_per_s": round(self.num_bytes / self.seconds / 1e9, 2),
            "tokens_per_s": round(self.num_tokens / self.seconds, 1),
            "gflop_per_s": round(self.flops / self.seconds / 1e9, 1),
        }

    def row(self) -> str:
        """The step as a row under HEADER."""
        found = self.as_json()
        return (
            f"{found['program']:<14}{found['ms']:>10,.2f}{found['host_us']:>9,.0f}"
            f"{self.num_bytes / 1e6:>10,.1f}{found['gb_per_s']:>8,.1f}"
            f"{found['tokens_per_s']:>11,.0f}{found['gflop_per_s']:>10,.0f}  {self.what}"
        )


HEADER = (
    f"{'program':<14}{'ms':>10}{'host µs':>9}{'MB':>10}{'GB/s':>8}{'tokens/s':>11}{'GFLOP/s':>10}"
)


class StepBench:
    """Measures every program of an engine that nothing else uses.

    Args:
      context: tokens of each sequence when decoding begins.
      steps: of which the median is taken.
    """

    def __init__(self, driver: StepDriver, context: int, steps: int) -> None:
        self._driver = driver
        self._context = context
        self._steps = steps
        self._traffic = Traffic.of(driver.model, driver.groups, driver.engine)
        self._layer_weights, self._head_weights = _matmul_weights(driver.model)

    def costs(self) -> Iterator[StepCost]:
        """Yields one program after the other, as soon as it is measured.

        Raises:
          ConfigError: the pool does not hold the sequences of a full step.
        """
        self._check_pool()
        runner = self._driver.engine.runner
        for rung in runner.ladders.decode:
            rows = min(rung, runner.config.max_num_seqs)
            yield self._decode("decode", rung, rows, 1)
        for rung in runner.ladders.bulk:
            rows = min(rung, runner.config.num_bulk_rows)
            passes = self._driver.engine.scheduler.limits.bulk_steps(rows)
            if passes > 1:  # else the scheduler never asks for it
                yield self._decode("decode_k", rung, rows, passes)
        for rung in runner.ladders.tokens:
            yield self._ragged(rung)

    def _check_pool(self) -> None:
        config = self._driver.engine.runner.config
        held = (config.num_pages - 1) * config.cache.page_size
        needed = config.max_num_seqs * config.max_model_len
        if held < needed:
            raise ConfigError(
                f"the KV pool holds {held} tokens, and {config.max_num_seqs} sequences of "
                f"{config.max_model_len} need {needed}; lower --context, --max-model-len or "
                "--max-num-seqs, or raise --kv-cache-memory"
            )

    def _decode(self, kind: str, rung: int, rows: int, passes: int) -> StepCost:
        engine, tokens = self._driver.engine, []

        def step() -> None:
            tokens.append(sum(len(delta.token_ids) for delta in engine.step()))

        with self._driver.decoding(rows, self._context, in_bulk=passes > 1):
            seconds, host_s = _medians(step, self._steps)
        if set(tokens) != {rows * passes}:
            raise RuntimeError(f"{kind}[{rung}] gave {tokens} tokens; expected {rows * passes}")
        # The context in the middle of what was measured.
        kv_len = self._context + passes * (WARM_STEPS + self._steps // 2)
        moved = sum(self._traffic.of_step(rows, [kv_len] * rows, layers_are_one=False).values())
        return StepCost(
            kind=kind,
            rung=rung,
            what=f"{rows} × {passes} at {kv_len} of context",
            num_tokens=rows * passes,
            seconds=seconds,
            host_s=host_s,
            num_bytes=passes * moved,
            flops=2 * rows * passes * (self._layer_weights + self._head_weights),
        )

    def _ragged(self, rung: int) -> StepCost:
        """A step of prompts only, from nothing in the pipeline to the results."""
        engine = self._driver.engine
        # As few prompts as the context allows.
        count = -(-rung // (engine.max_model_len - 1))
        lengths = [rung // count + (index < rung % count) for index in range(count)]

        def prepare() -> None:
            for length in lengths:
                self._driver.add(length, 1)

        prepare()
        self._driver.drain()
        before = engine.stats().steps
        seconds, host_s = _medians(self._driver.drain, self._steps, prepare)
        if engine.stats().steps - before != self._steps:
            raise RuntimeError(f"ragged[{rung}] did not take {lengths} in one step")
        moved = self._traffic.of_step(rung, lengths, layers_are_one=False)
        return StepCost(
            kind="ragged",
            rung=rung,
            what=f"prompts of {' + '.join(map(str, lengths))}",
            num_tokens=rung,
            seconds=seconds,
            host_s=host_s,
            num_bytes=sum(moved.values()),
            flops=2 * (rung * self._layer_weights + count * self._head_weights),
        )


def run(config: EngineConfig, args: argparse.Namespace) -> int:
    """Prints what each program takes and returns the exit code.

    Raises:
      ValueError: the model cannot be used, or not in this configuration.
    """
    driver = StepDriver.load(config, not args.json)
    if not args.json:
        print(HEADER)
    costs = []
    for cost in StepBench(driver, args.context, args.steps).costs():
        costs.append(cost.as_json())
        if not args.json:
            print(cost.row(), flush=True)
    found = {"programs": costs, "device": driver.device_kind, "versions": versions()}
    print(json.dumps(found))
    return 0


def _medians(
    step: Callable[[], None], count: int, prepare: Callable[[], None] | None = None
) -> tuple[float, float]:
    """Median seconds, and median processor seconds of this thread, of `count` steps."""
    seconds, host_s = [], []
    for _ in range(count):
        if prepare is not None:
            prepare()
        began, host_began = time.perf_counter(), time.thread_time()
        step()
        host_s.append(time.thread_time() - host_began)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds), statistics.median(host_s)


def _matmul_weights(model: CausalLM) -> tuple[int, int]:
    """Numbers in the matrices of all layers, and in the head's."""
    layers = head = 0
    for path, param in parameters(model):
        is_head = path.startswith("embedding.") == model.config.tie_word_embeddings
        for leaf in jax.tree.leaves(param.get_value(), is_leaf=lambda x: isinstance(x, QTensor)):
            if len(leaf.shape) < 2:
                continue
            if path.startswith("layers."):
                layers += leaf.shape[0] * leaf.shape[1]
            elif is_head:
                head += leaf.shape[0] * leaf.shape[1]
    return layers, head
