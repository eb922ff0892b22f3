"""Section `models`: an 8B-shaped model of random weights in the real scheduler and runner.

Timed at two numbers of layers, from which `device_report` extrapolates all 32, and once whole.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from device_arrays import random_weight, weight_bytes
from device_log import OK
from device_timing import compiling_nothing
from device_worker import ModelSizes, Worker
from jax.sharding import Mesh

from jaxinfer.models import llama
from jaxinfer.nn.context import ModelContext
from jaxinfer.nn.decoder import CausalLM
from jaxinfer.quantization import SCHEMES
from jaxinfer.runner.buckets import Ladders
from jaxinfer.runner.compile_watch import CompileWatch
from jaxinfer.runner.kv_cache import CacheSpec, default_page_size
from jaxinfer.runner.loader import make_abstract_model, parameters
from jaxinfer.runner.model_runner import ModelRunner, PendingStep
from jaxinfer.runner.placement import shardings_of
from jaxinfer.runner.runner_config import RunnerConfig
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.scheduler.limits import SchedulerLimits
from jaxinfer.scheduler.page_tables import GroupSpec, PageTables
from jaxinfer.scheduler.plan import StepPlan
from jaxinfer.scheduler.scheduler import Scheduler
from jaxinfer.scheduler.sequence import Sequence, StopRule
from kernels.paged_attention import kv_dtype

PIPELINE_DEPTH = 1

_RESERVED_BYTES = 2 * 10**9  # for temporaries
_BUILD_LIMIT_S = 180.0
_STEP_LIMIT_S = 90.0
_FILL_LIMIT_S = 45.0
_REPEATS = 3


def models(worker: Worker) -> None:
    """Times decode and prefill of every scheme; bfloat16, and the whole model, come first."""
    sizes = worker.sizes.model
    for scheme in sizes.schemes:
        for layers in sizes.layers:
            _time_model(worker, scheme, layers, sizes.batches, prefill=True)
        if scheme == "bf16":
            _time_model(worker, scheme, sizes.full, (sizes.full_batch,), prefill=False)


def _time_model(
    worker: Worker, scheme: str, layers: int, batches: tuple[int, ...], prefill: bool
) -> None:
    label = f"{scheme} L={layers}"
    cases: dict[str, Callable[[Session], dict[str, Any]]] = {}
    if prefill:
        cases["prefill"] = Session.time_prefill
    cases |= {f"decode {batch}": partial(Session.time_decode, batch=batch) for batch in batches}
    todo = {f"{label} {case}": (case, time) for case, time in cases.items()}
    # The names of a killed worker's cases are there already, but its model is not.
    todo = {name: each for name, each in todo.items() if worker.wants("models", name)}
    if not todo:
        return
    session = None
    last = f"{label} build"
    before = worker.found.get(("models", last))
    if before is None or before.status == OK:  # else it ended an earlier worker
        with worker.case("models", last, _BUILD_LIMIT_S) as values:
            session = Session(worker, scheme, layers, batches)
            values |= {"layers": layers, **session.build_values}
    for name, (case, measure) in todo.items():
        ended = worker.found["models", last]
        if session is None or ended.status != OK:
            # Its device state may be gone, and more rows need no less memory and time.
            worker.end(dataclasses.replace(ended, name=name, values={}, error=f"as {last}"))
        elif worker.wants("models", name):
            with worker.case("models", name, _STEP_LIMIT_S) as values:
                values |= _labels(worker.sizes.model, scheme, layers, case)
                values |= measure(session)
                if layers == worker.sizes.model.full:
                    per_s = 1e3 / values["step_ms"]
                    values["tok_per_s"] = values["tokens"] * per_s
                    values["of_copy"] = values["num_bytes"] * per_s / worker.bytes_per_s
            last = name
    del session
    worker.free()


def _labels(sizes: ModelSizes, scheme: str, layers: int, case: str) -> dict[str, Any]:
    """What `device_report` needs to extrapolate a case."""
    labels: dict[str, Any] = {"layers": layers, "full": sizes.full, "case": f"{scheme} {case}"}
    if layers == sizes.layers[1]:
        labels["extrapolate_with"] = f"{scheme} L={sizes.layers[0]} {case}"
    return labels


class Session:
    """One model, its compiled programs, and sequences that it generates for.

    Args:
      worker: whose device and sizes.
      scheme: "bf16", or one of `SCHEMES`.
      layers: of the model.
      batches: rows of its decode programs, ascending; those that memory cannot hold are left out.

    Raises:
      MemoryError: not even the smallest batch fits.
    """

    def __init__(self, worker: Worker, scheme: str, layers: int, batches: tuple[int, ...]) -> None:
        self.sizes: ModelSizes = worker.sizes.model
        began = time.perf_counter()
        self.model = make_model(worker, scheme, layers)
        _, *weights = _weights(self.model)  # of the embedding only some rows are read
        self.weight_bytes = sum(map(weight_bytes, weights))
        self.num_weights = sum(math.prod(weight.shape) for weight in weights)
        jax.block_until_ready(weights)
        weights_s = time.perf_counter() - began

        self._watch = CompileWatch()
        self.config = self._make_config(worker, layers, batches)
        self.runner = ModelRunner(
            self.model, self.config, self.model.config.vocab_size, self._watch
        )
        rungs = tuple(batch for batch in batches if batch <= self.config.max_num_seqs)
        self.runner.ladders = Ladders(decode=rungs, tokens=(self.sizes.prefill,))
        began = time.perf_counter()
        self.runner.reset_device()
        self.runner.compile(run=True)
        self.build_values = {
            "weights_s": weights_s,
            "compile_s": time.perf_counter() - began,
            "weights_gb": self.weight_bytes / 1e9,
            "kv_gb": self.config.cache.page_bytes * self.config.num_pages / 1e9,
            "temp_mb": max(self.runner.memory_analysis().values(), default=0) / 1e6,
        }
        limits = SchedulerLimits(
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.sizes.prefill,
            max_prefill_chunk_tokens=self.sizes.prefill - self.config.max_num_seqs,
            pipeline_depth=PIPELINE_DEPTH,
        )
        tables = PageTables([GroupSpec(self.config.num_pages)], self.config.cache.page_size)
        self.scheduler = Scheduler(limits, tables)
        self._pending: deque[PendingStep] = deque()
        self._rng = np.random.default_rng(0)
        self._num_added = 0

    def _make_config(self, worker: Worker, layers: int, batches: tuple[int, ...]) -> RunnerConfig:
        sizes, config = self.sizes, self.model.config
        platform = worker.platform
        cache = CacheSpec(
            platform=platform,
            dtype=kv_dtype(platform, jnp.bfloat16),
            num_layers=layers,
            num_kv_heads=self.model.num_cache_kv_heads,
            head_dim=config.head_dim,
            page_size=default_page_size(platform),
        )
        max_model_len = max(sizes.context + sizes.drift, sizes.prefill + 1)
        pages = -(-max_model_len // cache.page_size)
        fitting = list(batches)
        if worker.memory_bytes is not None:
            used = sum(array.nbytes for array in jax.live_arrays())
            room = worker.memory_bytes - used - _RESERVED_BYTES
            fitting = [each for each in batches if each * pages * cache.page_bytes <= room]
            if not fitting:
                raise MemoryError(
                    f"{used / 1e9:.1f} GB of weights leave no room for {batches[0]} sequences "
                    f"in {worker.memory_bytes / 1e9:.1f} GB"
                )
        return RunnerConfig(
            max_num_seqs=max(fitting),
            max_num_batched_tokens=sizes.prefill,
            max_model_len=max_model_len,
            decode_steps=1,
            cache=cache,
            num_pages=1 + max(fitting) * pages,
            num_groups=1,
        )

    # What is measured.

    def time_prefill(self) -> dict[str, Any]:
        """Times the prefill of one prompt that fills a step."""
        num_tokens = self.sizes.prefill
        sequence = self._add(num_tokens, max_tokens=1)
        plan = self._plan()
        if [row.num_tokens for row in plan.rows] != [num_tokens]:
            raise RuntimeError(f"the prompt of {num_tokens} tokens is not one step: {plan.rows}")
        values = self._time_dispatches(plan)
        self._drain()
        if sequence.finish_reason is None:
            raise RuntimeError("the prompt's sequence did not end")
        config = self.model.config
        head = config.vocab_size * config.hidden_size  # for one row only
        products = 2 * num_tokens * (self.num_weights - head)
        scores = 2 * num_tokens**2 * config.num_heads * config.head_dim * config.num_layers
        tflop = (products + scores) / 1e12
        rate = tflop / values["device_ms"] * 1e3
        return {"tokens": num_tokens, "tflop": tflop, **values, "tflop_per_s": rate}

    def time_decode(self, batch: int) -> dict[str, Any]:
        """Times decode steps of `batch` rows, in the engine's pipeline and back to back.

        Raises:
          MemoryError: the pool was made for fewer rows.
        """
        if batch > self.config.max_num_seqs:
            raise MemoryError(f"the KV pool has room for {self.config.max_num_seqs} sequences only")
        self._grow_to(batch)
        for _ in range(3):
            self._step()
        steps = []
        with compiling_nothing():
            for _ in range(self.sizes.steps):
                begin = time.perf_counter()
                host_s = self._step()
                steps.append((time.perf_counter() - begin, host_s))
        self._drain()
        context = statistics.mean(each.num_tokens for each in self.scheduler.running)
        plan = self._plan()
        if not plan.is_decode_only or len(plan.rows) != batch:
            raise RuntimeError(f"expected a decode step of {batch} rows, not {plan.rows}")
        values = self._time_dispatches(plan)
        self._drain()
        step_s, host_s = (statistics.median(each) for each in zip(*steps, strict=True))
        cache = self.config.cache
        kv_bytes = batch * context * cache.page_bytes / cache.page_size
        return {
            "tokens": batch,
            "context": float(context),
            "num_bytes": self.weight_bytes + kv_bytes,
            "step_ms": step_s * 1e3,
            **values,
            "host_us": host_s * 1e6,
        }

    def _time_dispatches(self, plan: StepPlan) -> dict[str, float]:
        """Times a step on the device: dispatched again and again, read once.

        `dispatch_us` is what the host needs for each; where that is the longer of the two, the
        device waited.
        """
        self._pending.append(self.runner.dispatch(plan))
        jax.block_until_ready(self._pending[-1].output)
        totals, dispatches = [], []
        with compiling_nothing():
            for _ in range(_REPEATS):
                begin = time.perf_counter()
                for _ in range(self.sizes.steps):
                    pending = self.runner.dispatch(plan)
                dispatches.append(time.perf_counter() - begin)
                jax.block_until_ready(pending.output)
                totals.append(time.perf_counter() - begin)
        self._pending[-1] = pending
        total, dispatch = (
            statistics.median(each) / self.sizes.steps for each in (totals, dispatches)
        )
        return {"device_ms": total * 1e3, "dispatch_us": dispatch * 1e6}

    # Steps.

    def _add(self, num_tokens: int, max_tokens: int) -> Sequence:
        prompt = self._rng.integers(self.model.config.vocab_size, size=num_tokens).tolist()
        sequence = Sequence(str(self._num_added), prompt, num_tokens, StopRule(max_tokens))
        self._num_added += 1
        self.scheduler.add(sequence)
        return sequence

    def _grow_to(self, batch: int) -> None:
        """Adds sequences until `batch` of them decode.

        Raises:
          TimeoutError: their prompts take too long.
        """
        until = time.monotonic() + _FILL_LIMIT_S
        context = self.sizes.context
        for _ in range(batch - len(self.scheduler.running)):
            self._add(context, self.config.max_model_len - context)
        running = self.scheduler.running
        while len(running) < batch or not all(each.is_decoding for each in running):
            if time.monotonic() > until:
                raise TimeoutError(f"{batch} prompts of {context} tokens take too long")
            self._step()

    def _plan(self) -> StepPlan:
        plan = self.scheduler.schedule()
        if plan is None:
            raise RuntimeError("there is nothing to compute")
        for sequence in plan.admitted:
            self.runner.reset(
                sequence.row,
                SamplingParams(temperature=0.0),
                sequence.stop.stop_ids,
                sequence.token_ids,
                sequence.prompt_len,
                sequence.pages,
            )
        return plan

    def _step(self) -> float:
        """Steps as the engine does; returns the seconds in which the host did not only wait."""
        begin = time.perf_counter()
        self._pending.append(self.runner.dispatch(self._plan()))
        seconds = time.perf_counter() - begin
        return seconds + (self._finish() if len(self._pending) > PIPELINE_DEPTH else 0.0)

    def _finish(self) -> float:
        """Reads the oldest step; returns the seconds it took once the device was done."""
        pending = self._pending.popleft()
        jax.block_until_ready(pending.output)
        begin = time.perf_counter()
        results = self.runner.collect(pending)
        self.scheduler.update(pending.plan, results)
        if not all(result.finite for result in results):
            raise RuntimeError("the model's output is not finite")
        return time.perf_counter() - begin

    def _drain(self) -> None:
        while self._pending:
            self._finish()


def make_model(worker: Worker, scheme: str, layers: int) -> CausalLM:
    """Returns a model with random weights, which never were anywhere but on the device."""
    config = llama.Config.from_hf(dict(worker.sizes.model.hf) | {"num_hidden_layers": layers})
    context = ModelContext(
        mesh=Mesh(np.array([worker.device]).reshape(1, 1), ("data", "tensor")),
        platform=worker.platform,
        dtype=np.dtype(jnp.bfloat16),
        weight_dtype=np.dtype(jnp.bfloat16),
        quant=None if scheme == "bf16" else SCHEMES[scheme],
    )
    model = make_abstract_model(llama, config, context)
    programs: dict[Any, Callable[[jax.Array], Any]] = {}
    for seed, (_, param) in enumerate(parameters(model)):
        struct = param.get_value()
        fmt = param.get_metadata().get("fmt")
        key = jax.tree.structure(struct), tuple(jax.tree.leaves(struct)), fmt
        if key not in programs:
            make = (
                partial(random_weight, struct, fmt)
                if len(struct.shape) > 1
                else partial(_ones, struct)
            )
            programs[key] = jax.jit(make, out_shardings=shardings_of(param, context))
        param.set_value(programs[key](jnp.uint32(3 * seed)))
    return model


def _ones(struct: Any, _: jax.Array) -> jax.Array:
    return jnp.ones(struct.shape, struct.dtype)


def _weights(model: CausalLM) -> list[Any]:
    """The model's matrices, the embedding first."""
    embedding = model.embedding.weight
    others = [each for _, each in parameters(model) if each is not embedding]
    matrices = [each.get_value() for each in others if len(each.get_value().shape) > 1]
    return [embedding.get_value(), *matrices]
