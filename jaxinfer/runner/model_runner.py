"""Owns one model on its devices: compiles every program ahead, runs steps, reads results."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.stages import Compiled, Lowered

from jaxinfer.runner import host_memory
from jaxinfer.runner.buckets import Ladders, make_ladders
from jaxinfer.runner.compile_watch import CompileWatch
from jaxinfer.runner.device_state import StateSpec, reset_row_and_pages
from jaxinfer.runner.inputs import StepBuffer, logit_rows
from jaxinfer.runner.masks import MaskBuffers
from jaxinfer.runner.output_reader import Entry, OutputReader
from jaxinfer.runner.program_store import ProgramStore
from jaxinfer.runner.programs import DeviceState, ModelPrograms, StepOutput
from jaxinfer.runner.row_state import RowReset, make_row_reset
from jaxinfer.runner.runner_config import RunnerConfig
from jaxinfer.runner.step_programs import StepProgram, step_programs
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.scheduler.plan import RowResult, StepPlan

logger = logging.getLogger(__name__)

COMPILE_THREADS = {"cpu": 1, "gpu": 2, "tpu": 2}
"""Programs compiled at once. On a CPU each takes up to 300 MB of the memory that the model needs,
half of which is free again afterwards, and XLA uses all cores for one.
"""

LOGIT_BLOCK = {"cpu": 8, "gpu": 16, "tpu": 16}
"""Rows the head is computed for at once in a ragged step; on CPU its time grows with the rows.

Elsewhere each block reads the head again, and sampling holds five copies of a block's logits: 41 MB
for 16 rows of 128k ids.
"""


@dataclass(slots=True)
class PendingStep:
    """A dispatched step whose results have not been read."""

    plan: StepPlan
    output: StepOutput


class ModelRunner:
    """Runs planned steps of one model.

    Args:
      model: filled, or abstract with the shardings of its weights until `take_weights` is called;
        its logits may have more columns than `vocab_size`, which are never sampled.
      config: the shapes.
      vocab_size: ids that can be sampled, scored and biased.
      watch: counts compilations.

    Raises:
      ValueError: a limit makes no sense for the model.
    """

    def __init__(
        self, model: nnx.Module, config: RunnerConfig, vocab_size: int, watch: CompileWatch
    ) -> None:
        self.config = config
        self.vocab_size = vocab_size
        self.watch = watch
        self.platform = config.cache.platform
        self.ladders: Ladders = make_ladders(
            self.platform,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.num_bulk_rows,
            config.verifies,
            config.one_rung,
        )
        self.mesh = model.context.mesh
        table = (config.num_groups, config.max_num_seqs + 1, config.pages_per_row)
        self._spec = StateSpec(config.cache, config.num_pages, table, vocab_size, self.mesh)
        graphdef, weights = nnx.split(model)
        leaves, treedef = jax.tree.flatten(weights)
        self._params: tuple[jax.Array, ...] = tuple(leaves)
        self._expected = jax.tree.map(_abstract, weights)
        self._model_parts = (type(model).__qualname__, model.config, model.context)

        def merge(params: tuple[jax.Array, ...]) -> Any:
            return nnx.merge(graphdef, jax.tree.unflatten(treedef, params))

        self._bodies = ModelPrograms(
            merge, config.cache.page_size, LOGIT_BLOCK[self.platform], vocab_size
        )
        self._executables: dict[tuple[str, int], Compiled] = {}
        self._buffers: dict[tuple[str, int], StepBuffer] = {}
        # A step may be wider than what runs.
        most_rows = max(config.max_num_seqs, *self.ladders.decode)
        self._masks = MaskBuffers(most_rows, vocab_size, self._spec.replicated)
        self._state: DeviceState
        self._state_lock = threading.Lock()  # programs are first run by several threads
        self._mover: threading.Thread | None = None

    # Start-up.

    @cached_property
    def _programs(self) -> dict[tuple[str, int], StepProgram]:
        return step_programs(self.config, self.ladders, self._bodies)

    def compile(
        self,
        progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
        *,
        run: bool = False,
        store: ProgramStore | None = None,
    ) -> None:
        """Compiles every program; nothing is compiled after this.

        Args:
          progress: wraps the programs that are awaited.
          run: also runs each once on no rows, so that the first request finds it loaded: the
            device state must exist.
          store: where programs may be found, and are left for the next start.
        """
        state = self._spec.abstract
        reset = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=self._spec.replicated
            ),
            self._row_reset(0, SamplingParams(), frozenset(), [], 0),
        )
        pages = jax.ShapeDtypeStruct(
            (self.config.num_groups, self.config.pages_per_row),
            np.int32,
            sharding=self._spec.replicated,
        )
        shardings = (self._spec.shardings.rows, self._spec.shardings.page_table)
        self._reset_row = (
            jax.jit(reset_row_and_pages, donate_argnums=(0, 1), out_shardings=shardings)
            .lower(state.rows, state.page_table, reset, pages)
            .compile()
        )
        # Tracing holds the interpreter, compiling and running do not: they overlap.
        with ThreadPoolExecutor(COMPILE_THREADS[self.platform]) as pool:
            built = []
            # The longest first, so that nothing long is left for the end.
            for (kind, rung), program in reversed(self._programs.items()):
                self._buffers[kind, rung] = StepBuffer(
                    program.layout, self.config.max_num_seqs, state.page_table.shape
                )
                found = None if store is None else store.load(f"{kind}-{rung}")
                made = self.lower(kind, rung) if found is None else found
                built.append(pool.submit(self._build, (kind, rung), made, run, store))
            for one in progress(built):
                one.result()
        host_memory.forget_compiler()
        if run:
            self.reset(0, SamplingParams(), frozenset(), [], 0)
            jax.block_until_ready(self._state)

    @property
    def made_of(self) -> str:
        """What programs are made of, the code and the machine left out; equal text, equal ones."""
        weights, structure = jax.tree.flatten(self._expected)
        model = (*self._model_parts, str(structure), weights)
        return repr((*model, self.config, self.vocab_size, self.ladders))

    def lower(self, kind: str, rung: int) -> Lowered:
        """Traces and lowers one program; the model's weights and devices may be abstract.

        Raises:
          KeyError: there is no such program.
        """
        program = self._programs[kind, rung]
        size = (program.layout.size,)
        inputs = [jax.ShapeDtypeStruct(size, np.int32, sharding=self._spec.replicated)]
        if program.num_masks is not None:
            inputs.append(self._masks.abstract(program.num_masks))
        params = tuple(jax.tree.leaves(self._expected))
        traced = jax.jit(program.body, donate_argnums=1, out_shardings=(None, self._spec.shardings))
        return traced.lower(params, self._spec.abstract, *inputs)

    def _build(
        self,
        key: tuple[str, int],
        program: Lowered | Compiled,
        run: bool,
        store: ProgramStore | None,
    ) -> None:
        if isinstance(program, Lowered):
            kind, rung = key
            compiled = store.compile(f"{kind}-{rung}", program) if store else program.compile()
        else:
            compiled = program
        self._executables[key] = compiled
        del program
        host_memory.trim()
        if run:
            self.run_empty(*key)

    def take_weights(self, model: nnx.Module) -> None:
        """Uses the weights of the model that the runner was made from, which is filled now.

        Raises:
          RuntimeError: a weight is not what programs were compiled for; names both.
        """
        weights = nnx.split(model)[1]
        expected = dict(jax.tree.leaves_with_path(self._expected))
        found = dict(jax.tree.leaves_with_path(jax.tree.map(_abstract, weights)))
        for path in expected | found:
            if expected.get(path) != found.get(path):
                raise RuntimeError(
                    f"the weight {jax.tree_util.keystr(path)} was loaded as {found.get(path)}, but "
                    f"programs were compiled for {expected.get(path)}; report this"
                )
        # What is not in the arrays, as the codes' meaning, is in the structure.
        structures = [str(jax.tree.structure(tree)) for tree in (weights, self._expected)]
        if structures[0] != structures[1]:
            raise RuntimeError(
                f"weights were loaded as {structures[0]}, but programs were compiled for "
                f"{structures[1]}; report this"
            )
        self._params = tuple(jax.tree.leaves(weights))

    def use_huge_pages(self) -> None:
        """Starts to move the weights to huge pages where a CPU reads them."""
        if self.platform == "cpu":
            self._mover = host_memory.start_moving(self._params)

    def settle(self) -> None:
        """Waits for what runs beside steps: while it does, the weights cannot be freed."""
        if self._mover is not None:
            self._mover.join()

    def run_empty(self, kind: str, rung: int) -> None:
        """Runs a program on no rows, which changes nothing."""
        packed = self._buffers[kind, rung].fill_empty()
        with self._state_lock:
            self._run(self._programs[kind, rung], packed)

    def reset_device(self) -> None:
        """Gives the device a fresh KV pool and row state; every row must be reset afterwards.

        Compiles nothing when it is called again.
        """
        if hasattr(self, "_state"):
            # The old pool goes before the new one comes, whoever still holds its arrays.
            for leaf in jax.tree.leaves(self._state):
                leaf.delete()
            del self._state
        self._state = self._spec.make()

    def rebuild(self) -> None:
        """Makes the device state anew after a step that failed, and tries a step on no rows.

        Raises:
          Exception: there is no room for it any more, or no step runs whatever it computes.
        """
        self.reset_device()
        self.run_empty("decode", self.ladders.decode[0])
        jax.block_until_ready(self._state)

    @property
    def has_state(self) -> bool:
        """Whether the device state is there; a call that fails may have taken it along."""
        state = getattr(self, "_state", None)
        return state is not None and not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))

    @property
    def num_programs(self) -> int:
        """Programs compiled, the row reset included."""
        return len(self._executables) + 1

    def memory_analysis(self) -> dict[str, int]:
        """Temporary bytes of each program, by name and rung."""
        analyses = {key: one.memory_analysis() for key, one in self._executables.items()}
        return {
            f"{kind}[{rung}]": analysis.temp_size_in_bytes
            for (kind, rung), analysis in analyses.items()
            if analysis is not None
        }

    def hlo(self, kind: str, rung: int) -> str:
        """Optimized HLO of one program."""
        return self._executables[kind, rung].as_text() or ""

    # Steps.

    def reset(
        self,
        row: int,
        params: SamplingParams,
        stop_ids: frozenset[int],
        token_ids: list[int],
        prompt_len: int,
        pages: Sequence[Sequence[int]] = (),
    ) -> None:
        """Rebuilds a row for a sequence that has `token_ids`, and `pages` in each KV group."""
        reset = self._row_reset(row, params, stop_ids, token_ids, prompt_len)
        table = np.zeros((self.config.num_groups, self.config.pages_per_row), np.int32)
        for group, held in enumerate(pages):
            table[group, : len(held)] = held
        rows, page_table = self._reset_row(
            self._state.rows,
            self._state.page_table,
            *jax.device_put((reset, table), self._spec.replicated),
        )
        self._state = replace(self._state, rows=rows, page_table=page_table)

    def _row_reset(
        self,
        row: int,
        params: SamplingParams,
        stop_ids: frozenset[int],
        token_ids: list[int],
        prompt_len: int,
    ) -> RowReset:
        max_model_len, vocab_size = self.config.max_model_len, self.vocab_size
        return make_row_reset(
            row, params, stop_ids, token_ids, prompt_len, max_model_len, vocab_size
        )

    def masks(self, plan: StepPlan) -> np.ndarray:
        """Returns masks for `dispatch`, which allow everything.

        Those of the plan's rows come first.
        """
        num_masks = self._program_of(plan).num_masks
        assert num_masks is not None
        return self._masks.next(num_masks)

    def dispatch(self, plan: StepPlan, masks: np.ndarray | None = None) -> PendingStep:
        """Starts a step; returns before the device has finished it.

        Args:
          plan: of one decode step, where there are masks.
          masks: as `masks` returned them, filled; None where nothing is banned.
        """
        program = self._program_of(plan)
        buffer = self._buffers[program.kind, program.rung]
        fill = buffer.fill_ragged if program.kind == "ragged" else buffer.fill_decode
        output = self._run(program, fill(plan, masks is not None), masks)
        if output.hidden is not None and not plan.embeds:
            output = replace(output, hidden=None)
        if self.platform != "cpu":
            jax.tree.map(lambda leaf: leaf.copy_to_host_async(), output)
        return PendingStep(plan, output)

    def _program_of(self, plan: StepPlan) -> StepProgram:
        if not plan.is_decode_only:
            return self._programs["ragged", self.ladders.token_rung(plan.num_queries)]
        kind = "decode_k" if plan.num_steps > 1 else "decode"
        return self._programs[kind, self.ladders.decode_rung(len(plan.rows))]

    def _run(
        self, program: StepProgram, packed: np.ndarray, masks: np.ndarray | None = None
    ) -> StepOutput:
        inputs: list[Any] = [packed]
        if program.num_masks is not None:
            inputs.append(self._masks.none(program.num_masks) if masks is None else masks)
        # Uploaded by the call itself, which takes a third of the time of a `device_put`.
        compiled = self._executables[program.kind, program.rung]
        output, self._state = compiled(self._params, self._state, *inputs)
        return output

    def collect(self, pending: PendingStep) -> list[RowResult]:
        """Waits for a step and returns one result per planned row, in order."""
        reader, slot, is_decode_only = OutputReader(pending.output), 0, pending.plan.is_decode_only
        results = []
        for index, row in enumerate(pending.plan.rows):
            if is_decode_only and row.sequence.logprobs is None:
                results.append(reader.sampled(index, row.num_tokens))
                continue
            if is_decode_only:
                entries: list[Entry] = [((index, step), -1) for step in range(row.num_tokens)]
            else:
                entries = [((i,), target) for i, (_, target) in enumerate(logit_rows(row), slot)]
                slot += len(entries)
            result = reader.row(entries, row.sequence.logprobs, row.sequence.prompt_logprobs)
            if row.embeds:
                result.hidden = reader.hidden(index)
                result.finite &= all(map(math.isfinite, result.hidden))
            results.append(result)
        return results


def _abstract(array: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
