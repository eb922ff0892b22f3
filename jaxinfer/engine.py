"""add, step, abort: the only place where scheduler, runner and text meet."""

from __future__ import annotations

import logging
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from jaxinfer.admission import Admission
from jaxinfer.constraints import GrammarFailure, StepMasks
from jaxinfer.outputs import FinishReason, OutputDelta
from jaxinfer.pipeline import FailedStep, FinishedStep, Pipeline
from jaxinfer.request import Completion, EngineRequest, QueueFullError
from jaxinfer.runner.model_runner import ModelRunner
from jaxinfer.sampling_params import InvalidParameter
from jaxinfer.scheduler.plan import PlannedRow, RowResult, StepPlan
from jaxinfer.scheduler.scheduler import Scheduler
from jaxinfer.scheduler.sequence import Sequence
from jaxinfer.stats import EngineStats
from jaxinfer.text.tokenizer import Tokenizer

__all__ = ["Engine", "EngineStats"]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Totals:
    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    failed_steps: int = 0
    finished: Counter[str] = field(default_factory=Counter)


class Engine:
    """Generates for many requests at once. Not thread-safe: one thread owns it.

    What goes wrong with one completion ends that one, with `finish_reason == "error"`. When a
    step fails, all it touched start over from their tokens, and only a completion that makes steps
    fail again and again is ended. Errors that methods raise are of the caller or of the engine as
    a whole.

    Args:
      runner: compiled, its device state made.
      scheduler: with limits and page pools that match the runner's.
      tokenizer: of the model.
      eos_token_ids: ids that end a completion.
      max_queued_requests: waiting sequences beyond which `add` refuses.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        eos_token_ids: frozenset[int],
        max_queued_requests: int,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.max_model_len = runner.config.max_model_len
        self.vocab_size = runner.vocab_size
        self._admission = Admission(
            scheduler,
            tokenizer,
            eos_token_ids,
            self.max_model_len,
            self.vocab_size,
            max_queued_requests,
        )
        self.max_queued_requests = max_queued_requests
        self.max_num_seqs = runner.config.max_num_seqs
        self._completions: dict[str, Completion] = {}
        self._sequences: dict[str, list[Sequence]] = {}
        self._masks = StepMasks()
        self._pipeline = Pipeline(runner)
        self._is_filling = False  # whether the last step was dispatched
        # Results not yet text, with how each ended its completion and when it came; and text not
        # yet taken.
        self._unread: list[tuple[PlannedRow, RowResult, FinishReason | None, float]] = []
        self._deltas: list[OutputDelta] = []
        self._totals = _Totals()

    def add(self, request: EngineRequest) -> None:
        """Queues the n completions of a request.

        Raises:
          InvalidParameter: the request does not fit the model; nothing was queued.
          QueueFullError: too many are waiting.
        """
        if request.request_id in self._sequences:
            raise ValueError(f"request id {request.request_id!r} is already in flight")
        try:
            made = self._admission.make(request)
        except (InvalidParameter, QueueFullError):
            raise
        except Exception as error:
            message = _fault(error, f"request {request.request_id} could not be started")
            for index in range(request.params.n):
                self._totals.finished["error"] += 1
                self._deltas.append(
                    OutputDelta(request.request_id, index, finish_reason="error", error=message)
                )
            return
        self._sequences[request.request_id] = [sequence for sequence, _ in made]
        for sequence, completion in made:
            self._completions[sequence.seq_id] = completion
            if completion.matcher is not None:
                self._masks.add(sequence.seq_id, completion.matcher)
            self.scheduler.add(sequence)

    def prepare_grammars(self) -> None:
        """Does now what the first grammar would otherwise stop all threads for."""
        self._admission.prepare_grammars()

    def check(self, request: EngineRequest) -> None:
        """Checks a request against the model and the pool; changes nothing, from any thread.

        Raises:
          InvalidParameter: `add` would refuse it.
        """
        self._admission.check(request)

    def abort(self, request_id: str) -> list[OutputDelta]:
        """Ends a request; returns the last delta of each completion that was still open.

        What `take_deltas` has not returned of it is lost.
        """
        self._deltas = [delta for delta in self._deltas if delta.request_id != request_id]
        deltas = []
        for sequence in self._sequences.pop(request_id, []):
            completion = self._completions.pop(sequence.seq_id, None)
            if completion is not None:
                self._masks.drop(sequence.seq_id)
                self.scheduler.finish(sequence, "abort")
                self._totals.finished["abort"] += 1
                deltas.append(completion.ended("abort"))
        return deltas

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_work or bool(self._pipeline or self._unread or self._deltas)

    def is_open(self, request_id: str) -> bool:
        """Whether any completion of the request has not ended."""
        return request_id in self._sequences

    def num_open(self, request_id: str) -> int:
        """Completions of the request that have not ended."""
        sequences = self._sequences.get(request_id, [])
        return sum(sequence.seq_id in self._completions for sequence in sequences)

    def step(self) -> list[OutputDelta]:
        """Dispatches the next step and returns what an earlier one, or this one, produced.

        With pipeline depth 1 a step's results are read after the next one is dispatched.
        """
        self.start_step()
        self.end_step()
        return self.take_deltas()

    def start_step(self) -> None:
        """Dispatches the next step, if there is anything to compute."""
        self._is_filling = False
        if self._pipeline.is_broken:
            return
        with self.runner.watch.step():
            plan = self.scheduler.schedule()
            if plan is not None:
                self._dispatch(plan)

    def end_step(self) -> None:
        """Waits for the results of the oldest dispatched step, once the pipeline is full."""
        depth = self.scheduler.limits.pipeline_depth
        if not self._pipeline or (self._is_filling and len(self._pipeline) <= depth):
            return
        with self.runner.watch.step():
            step = self._pipeline.collect()
            if isinstance(step, FailedStep):
                self._recover(step)
            else:
                self._take(step)

    def _take(self, step: FinishedStep) -> None:
        """Takes what a step sampled, and starts the step whose masks have waited for that."""
        now = time.monotonic()
        results = self.scheduler.update(step.plan, step.results)
        ended = self._masks.advance(results)
        for sequence in ended.complete:
            self.scheduler.finish(sequence, "stop")
            sequence.finish_reason = "stop"  # even if its length would have ended it here
        failed = {sequence for sequence, _ in ended.failed}
        self._unread += [
            (row, result, row.sequence.finish_reason, now)
            for row, result in results
            if row.sequence not in failed
        ]
        self._end_failed(ended.failed)
        held = self._pipeline.take_held()
        if held is not None:
            self._launch(held)

    def take_deltas(self) -> list[OutputDelta]:
        """Returns as text what ended steps have produced.

        Best between `start_step` and `end_step`: the device works meanwhile.
        """
        self._read()
        deltas, self._deltas = self._deltas, []
        return deltas

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        for row, result, finish_reason, now in unread:
            completion = self._completions.get(row.sequence.seq_id)
            if completion is None:  # ended since
                continue
            try:
                delta = self._row_delta(row, result, finish_reason, completion, now)
            except Exception as error:
                self._end(row.sequence, _fault(error, f"{row.sequence.seq_id}: no text"))
                continue
            if delta is not None:
                self._deltas.append(delta)

    def clear_prefix_cache(self) -> None:
        """Forgets what earlier requests computed; what now runs leaves nothing behind either."""
        self.scheduler.clear_prefix_cache()

    def stats(self) -> EngineStats:
        """Returns counters and gauges."""
        pool, cache = self.scheduler.tables.pools[0], self.scheduler.cache
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_pages=pool.num_total,
            num_free_pages=pool.num_free,
            num_preemptions=self.scheduler.num_preemptions,
            prompt_tokens=self._totals.prompt_tokens,
            generation_tokens=self._totals.generation_tokens,
            num_compilations_after_warmup=self.runner.watch.num_after_warmup,
            steps=self._totals.steps,
            finished=dict(self._totals.finished),
            failed_steps=self._totals.failed_steps,
            prefix_cache_queries=0 if cache is None else cache.num_queried_tokens,
            prefix_cache_hits=0 if cache is None else cache.num_hit_tokens,
            num_drafts=self.scheduler.drafts.num_drafts,
            num_draft_tokens=self.scheduler.drafts.num_tokens,
            num_accepted_tokens=self.scheduler.drafts.num_accepted,
        )

    def _dispatch(self, plan: StepPlan) -> None:
        self._is_filling = True
        now = time.monotonic()
        for sequence in plan.admitted:
            completion = self._completions[sequence.seq_id]
            if completion.began_at is None:
                completion.began_at = now
            try:
                self.runner.reset(
                    sequence.row,
                    completion.params,
                    sequence.stop.stop_ids,
                    sequence.token_ids,
                    sequence.prompt_len,
                    sequence.pages,
                )
            except Exception as error:
                if not self.runner.has_state:
                    self._pipeline.fail(plan, error)
                    return
                plan.rows = [row for row in plan.rows if row.sequence is not sequence]
                self._end(sequence, _fault(error, f"{sequence.seq_id} could not be admitted"))
        self._is_filling = bool(plan.rows)
        if self._masks.must_wait(plan):
            self._pipeline.hold(plan)
        elif plan.rows:
            self._launch(plan)

    def _launch(self, plan: StepPlan) -> None:
        masks = None
        if self._masks.are_needed(plan):
            masks = self.runner.masks(plan)
            # Those that fail stay in the step: what it samples of them is dropped.
            self._end_failed(self._masks.fill(plan, masks))
        self._totals.steps += 1
        self._pipeline.dispatch(plan, masks)

    def _recover(self, step: FailedStep) -> None:
        """Starts over after a step that failed: the device state it was given is gone."""
        self._totals.failed_steps += 1
        logger.error(
            "a step of %d sequences failed, and they run again: %s: %s",
            len(step.plan.rows),
            type(step.error).__name__,
            str(step.error).partition("\n")[0],
        )
        logger.debug("the step's error", exc_info=step.error)
        culprit = self.scheduler.fail(step.plan, step.lost)
        self.runner.rebuild()
        if culprit is not None:
            self._end(culprit, _fault(step.error, f"{culprit.seq_id} makes steps fail"))

    def _end_failed(self, failed: Iterable[tuple[Sequence, Exception]]) -> None:
        """Ends completions that their grammar can lead no further."""
        for sequence, error in failed:
            if isinstance(error, GrammarFailure):
                self._end(sequence, str(error), error.param)
            else:
                name = sequence.seq_id
                self._end(sequence, _fault(error, f"{name} is led no further by its grammar"))

    def _end(self, sequence: Sequence, message: str, param: str | None = None) -> None:
        """Ends one completion with an error, after the text it has so far."""
        self.scheduler.finish(sequence, "error")
        self._read()
        completion = self._completions.get(sequence.seq_id)
        if completion is not None:
            self._deltas.append(completion.ended("error", message, param))
            self._forget(sequence, "error")

    def _row_delta(
        self,
        row: PlannedRow,
        result: RowResult,
        finish_reason: FinishReason | None,
        completion: Completion,
        now: float,
    ) -> OutputDelta | None:
        sequence = row.sequence
        if result.prompt_logprobs:
            completion.prompt_logprobs += result.prompt_logprobs
        if completion.index == 0:  # its siblings find what it has computed
            completion.num_cached_tokens = sequence.num_cached
        if not result.finite:
            self.scheduler.finish(sequence, "error")
            delta = completion.ended("error", "the model's output is not finite")
        elif not result.token_ids and finish_reason is None:
            return None
        else:
            if not completion.has_prompt and row.start + row.num_tokens >= sequence.prompt_len:
                completion.has_prompt = True
                completion.prompt_ended_at = now
                self._totals.prompt_tokens += sequence.prompt_len
            delta = completion.delta(
                result.token_ids, result.logprobs, finish_reason, sequence.stop_token
            )
            if delta.finish_reason is not None:
                delta.times = completion.times(now)
                delta.hidden = result.hidden
        self._totals.generation_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self.scheduler.finish(sequence, delta.finish_reason)
            self._forget(sequence, delta.finish_reason)
        return delta

    def _forget(self, sequence: Sequence, reason: str) -> None:
        completion = self._completions.pop(sequence.seq_id)
        self._masks.drop(sequence.seq_id)
        self._totals.finished[reason] += 1
        siblings = self._sequences.get(completion.request_id, [])
        if not any(sibling.seq_id in self._completions for sibling in siblings):
            self._sequences.pop(completion.request_id, None)


def _fault(error: Exception, what: str) -> str:
    """Logs what went wrong; returns what its client may know: an error's text may hold a prompt."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {frames[-1].name}, {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    logger.error("%s: %s%s", what, type(error).__name__, where)
    logger.debug("its error", exc_info=error)
    return f"internal error ({type(error).__name__})"
