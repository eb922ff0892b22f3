"""add, step, abort: the only place where scheduler, runner and text meet."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

from jaxinfer.outputs import OutputDelta
from jaxinfer.request import Completion, EngineRequest, QueueFullError
from jaxinfer.runner.model_runner import ModelRunner, PendingStep
from jaxinfer.runner.output_reader import RowResult
from jaxinfer.runner.row_state import MAX_STOP_IDS
from jaxinfer.sampling_params import InvalidParameter, SamplingParams
from jaxinfer.scheduler.plan import PlannedRow, StepPlan
from jaxinfer.scheduler.scheduler import Scheduler
from jaxinfer.scheduler.sequence import Sequence, StopRule
from jaxinfer.text.detokenizer import Detokenizer
from jaxinfer.text.stop_strings import StopMatcher
from jaxinfer.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts since the engine started, and what it holds now."""

    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int
    num_preemptions: int
    prompt_tokens: int
    generation_tokens: int
    num_compilations_after_warmup: int
    steps: int
    finished: dict[str, int]


@dataclass(slots=True)
class _Totals:
    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    finished: Counter[str] = field(default_factory=Counter)


class Engine:
    """Generates for many requests at once. Not thread-safe: one thread owns it.

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
        self.eos_token_ids = eos_token_ids
        self.max_queued_requests = max_queued_requests
        self.max_num_seqs = runner.config.max_num_seqs
        self._completions: dict[str, Completion] = {}
        self._sequences: dict[str, list[Sequence]] = {}
        self._pending: deque[PendingStep] = deque()
        self._is_filling = False  # whether the last step was dispatched
        self._unread: list[tuple[PlannedRow, RowResult]] = []
        self._totals = _Totals()

    def add(self, request: EngineRequest) -> None:
        """Queues the n completions of a request.

        Raises:
          InvalidParameter: the request does not fit the model; nothing was queued.
          QueueFullError: too many are waiting.
        """
        if request.request_id in self._sequences:
            raise ValueError(f"request id {request.request_id!r} is already in flight")
        self.check(request)
        params = request.params
        if len(self.scheduler.waiting) + params.n > self.max_queued_requests:
            raise QueueFullError(
                f"{len(self.scheduler.waiting)} requests are waiting; the limit is "
                f"{self.max_queued_requests}"
            )
        seed = random.getrandbits(63) if params.seed is None else params.seed
        sequences = [
            self._make_sequence(request, index, params.for_choice(index, seed))
            for index in range(params.n)
        ]
        self._sequences[request.request_id] = sequences
        for sequence in sequences:
            self.scheduler.add(sequence)

    def abort(self, request_id: str) -> list[OutputDelta]:
        """Ends a request; returns the last delta of each completion that was still open.

        What `take_deltas` has not returned of it is lost.
        """
        deltas = []
        for sequence in self._sequences.pop(request_id, []):
            completion = self._completions.pop(sequence.seq_id, None)
            if completion is not None:
                self.scheduler.finish(sequence, "abort")
                self._totals.finished["abort"] += 1
                deltas.append(completion.ended("abort"))
        return deltas

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_work or bool(self._pending) or bool(self._unread)

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
        with self.runner.watch.step():
            plan = self.scheduler.schedule()
            self._is_filling = plan is not None
            if plan is not None:
                self._pending.append(self._dispatch(plan))

    def end_step(self) -> None:
        """Waits for the results of the oldest dispatched step, once the pipeline is full."""
        depth = self.scheduler.limits.pipeline_depth
        if not self._pending or (self._is_filling and len(self._pending) <= depth):
            return
        with self.runner.watch.step():
            pending = self._pending.popleft()
            results = self.runner.collect(pending, self._num_logprobs)
        by_id = {
            row.sequence.seq_id: result
            for row, result in zip(pending.plan.rows, results, strict=True)
        }
        updates = self.scheduler.update(
            pending.plan, {seq_id: result.token_ids for seq_id, result in by_id.items()}
        )
        self._unread += [(update.planned, by_id[update.sequence.seq_id]) for update in updates]

    def take_deltas(self) -> list[OutputDelta]:
        """Returns as text what ended steps have produced.

        Best between `start_step` and `end_step`: the device works meanwhile.
        """
        unread, self._unread = self._unread, []
        deltas = (self._row_delta(row, result) for row, result in unread)
        return [delta for delta in deltas if delta is not None]

    def stats(self) -> EngineStats:
        """Returns counters and gauges."""
        pool = self.scheduler.tables.pools[0]
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
        )

    def max_tokens(self, request: EngineRequest) -> int:
        """Output tokens a request may have: what it asked for, within the context."""
        room = self.max_model_len - len(request.prompt_token_ids)
        wanted = request.params.max_tokens
        return room if wanted is None else min(room, wanted)

    def check(self, request: EngineRequest) -> None:
        """Checks a request against the model and the pool; changes nothing, from any thread.

        Raises:
          InvalidParameter: `add` would refuse it.
        """
        prompt = request.prompt_token_ids
        if not prompt:
            raise InvalidParameter("prompt", "the prompt has no tokens", "empty_array")
        outside = [token for token in prompt if not 0 <= token < self.vocab_size]
        if outside:
            raise InvalidParameter(
                "prompt", f"token id {outside[0]} is outside the vocabulary of {self.vocab_size}"
            )
        scores_only = request.params.max_tokens == 0
        if len(prompt) + (not scores_only) > self.max_model_len:
            raise InvalidParameter(
                "prompt",
                f"This model's maximum context length is {self.max_model_len} tokens, but the "
                f"prompt has {len(prompt)}",
                "context_length_exceeded",
            )
        request.params.validate_for(self.vocab_size)
        if len(self._stop_ids(request.params)) > MAX_STOP_IDS:
            raise InvalidParameter(
                "stop_token_ids",
                f"stop_token_ids and the model's {len(self.eos_token_ids)} end-of-sequence ids "
                f"together must be at most {MAX_STOP_IDS}",
            )
        if not self.scheduler.fits(len(prompt) + self.max_tokens(request)):
            raise InvalidParameter(
                "max_tokens",
                f"{len(prompt)} prompt tokens and max_tokens {self.max_tokens(request)} need more "
                "KV pages than the pool has; ask for fewer tokens",
                "context_length_exceeded",
            )

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        stop_ids = frozenset(params.stop_token_ids)
        return stop_ids if params.ignore_eos else stop_ids | self.eos_token_ids

    def _make_sequence(
        self, request: EngineRequest, index: int, params: SamplingParams
    ) -> Sequence:
        max_tokens = self.max_tokens(request)
        sequence = Sequence(
            seq_id=f"{request.request_id}/{index}",
            token_ids=list(request.prompt_token_ids),
            prompt_len=len(request.prompt_token_ids),
            stop=StopRule(max_tokens, params.min_tokens, self._stop_ids(params)),
            priority=request.priority,
            score_prompt=params.prompt_logprobs is not None and index == 0,
            steps_in_bulk=not params.stop,
        )
        self._completions[sequence.seq_id] = Completion(
            request.request_id,
            index,
            params,
            Detokenizer(self.tokenizer, params.skip_special_tokens, continuation=True),
            StopMatcher(params.stop, params.include_stop_str_in_output),
        )
        return sequence

    def _dispatch(self, plan: StepPlan) -> PendingStep:
        for sequence in plan.admitted:
            self.runner.reset(
                sequence.row,
                self._completions[sequence.seq_id].params,
                sequence.stop.stop_ids,
                sequence.token_ids,
                sequence.prompt_len,
            )
        wants_top = any(max(self._num_logprobs(row)) > 0 for row in plan.rows)
        self._totals.steps += 1
        self._totals.prompt_tokens += plan.num_prompt_tokens
        return self.runner.dispatch(plan, wants_top)

    def _num_logprobs(self, row: PlannedRow) -> tuple[int, int]:
        """Alternatives wanted for output and for prompt tokens; -1 for none and no value either."""
        completion = self._completions.get(row.sequence.seq_id)
        if completion is None:
            return (-1, -1)
        output, prompt = completion.params.logprobs, completion.params.prompt_logprobs
        return (-1 if output is None else output, -1 if prompt is None else prompt)

    def _row_delta(self, row: PlannedRow, result: RowResult) -> OutputDelta | None:
        sequence = row.sequence
        completion = self._completions.get(sequence.seq_id)
        if completion is None:  # aborted since
            return None
        completion.prompt_logprobs.extend(result.prompt_logprobs)
        if not result.finite:
            self.scheduler.finish(sequence, "error")
            delta = completion.ended("error", "the model's output is not finite")
        elif not result.token_ids and sequence.finish_reason is None:
            return None
        else:
            delta = completion.delta(
                result.token_ids,
                result.logprobs,
                sequence.finish_reason,
                sequence.stop_token,
                prompt_done=row.start + row.num_tokens >= sequence.prompt_len,
            )
        self._totals.generation_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self.scheduler.finish(sequence, delta.finish_reason)
            self._forget(sequence, delta.finish_reason)
        return delta

    def _forget(self, sequence: Sequence, reason: str) -> None:
        completion = self._completions.pop(sequence.seq_id)
        self._totals.finished[reason] += 1
        siblings = self._sequences.get(completion.request_id, [])
        if not any(sibling.seq_id in self._completions for sibling in siblings):
            self._sequences.pop(completion.request_id, None)
