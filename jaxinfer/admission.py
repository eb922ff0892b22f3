"""What a request must be to be taken, and the completions that are made of it."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np

from jaxinfer.constraints import GrammarCompiler, GrammarFailure, GrammarMatcher, TokenRules
from jaxinfer.request import (
    UNSATISFIABLE,
    Completion,
    EngineRequest,
    QueueFullError,
    TokenMatcher,
)
from jaxinfer.runner.row_state import MAX_STOP_IDS
from jaxinfer.sampling_params import InvalidParameter, SamplingParams
from jaxinfer.scheduler.ngram import NgramDrafter
from jaxinfer.scheduler.scheduler import Scheduler
from jaxinfer.scheduler.sequence import Sequence, StopRule
from jaxinfer.text.detokenizer import Detokenizer
from jaxinfer.text.stop_strings import StopMatcher
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.token_masks import num_words


class Admission:
    """Turns requests into sequences to schedule and the completions of their text.

    Args:
      scheduler: whose pool and queue they must fit.
      tokenizer: of the model.
      eos_token_ids: ids that end a completion.
      max_model_len, vocab_size: of the model.
      max_queued_requests: waiting sequences beyond which `make` refuses.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        vocab_size: int,
        max_queued_requests: int,
    ) -> None:
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._max_queued_requests = max_queued_requests
        self._grammars = GrammarCompiler(tokenizer, vocab_size, eos_token_ids)

    def prepare_grammars(self) -> None:
        """See `GrammarCompiler.prepare`."""
        self._grammars.prepare()

    def make(self, request: EngineRequest) -> list[tuple[Sequence, Completion]]:
        """Returns a request's completions, none of them queued yet.

        Raises:
          InvalidParameter: as `check`.
          QueueFullError: too many are waiting.
        """
        self.check(request)
        params = request.params
        if len(self._scheduler.waiting) + params.n > self._max_queued_requests:
            raise QueueFullError(
                f"{len(self._scheduler.waiting)} requests are waiting; the limit is "
                f"{self._max_queued_requests}"
            )
        seed = random.getrandbits(63) if params.seed is None else params.seed
        return [
            self._make_completion(request, index, params.for_choice(index, seed))
            for index in range(params.n)
        ]

    def max_tokens(self, request: EngineRequest) -> int:
        """Output tokens a request may have: what it asked for, within the context."""
        room = self._max_model_len - len(request.prompt_token_ids)
        wanted = request.params.max_tokens
        return room if wanted is None else min(room, wanted)

    def check(self, request: EngineRequest) -> None:
        """Checks a request against the model and the pool; changes nothing, from any thread.

        A grammar is compiled, which may take seconds. What leaves no first token is refused; what
        leaves none later shows only then.

        Raises:
          InvalidParameter: `add` would refuse it.
          QueueFullError: other grammars are being compiled, which take long.
        """
        self._check_prompt(request)
        request.params.validate_for(self._vocab_size)
        self._check_engine_limits(request)
        if request.params.grammar is not None and not request.compiled:
            request.compiled.append(self._grammars.compile(request.params.grammar))
        try:
            self._check_first_token(request)
        except GrammarFailure as error:
            raise InvalidParameter(error.param or "grammar", str(error), UNSATISFIABLE) from None

    def _check_prompt(self, request: EngineRequest) -> None:
        prompt = request.prompt_token_ids
        if not prompt:
            raise InvalidParameter("prompt", "the prompt has no tokens", "empty_array")
        outside = [token for token in prompt if not 0 <= token < self._vocab_size]
        if outside:
            raise InvalidParameter(
                "prompt", f"token id {outside[0]} is outside the vocabulary of {self._vocab_size}"
            )
        scores_only = request.params.max_tokens == 0
        if request.embeds and not (scores_only and request.params.n == 1):
            raise InvalidParameter(
                "max_tokens",
                "a request that embeds generates nothing: its max_tokens must be 0, got "
                f"{request.params.max_tokens}, and its n 1, got {request.params.n}",
            )
        if len(prompt) + (not scores_only) > self._max_model_len:
            raise InvalidParameter(
                "prompt",
                f"This model's maximum context length is {self._max_model_len} tokens, but the "
                f"prompt has {len(prompt)}",
                "context_length_exceeded",
            )

    def _check_engine_limits(self, request: EngineRequest) -> None:
        """Checks what depends on how the engine was started."""
        params, num_prompt_tokens = request.params, len(request.prompt_token_ids)
        if params.n > self._max_queued_requests:
            raise InvalidParameter(
                "n",
                f"n is {params.n}, but at most {self._max_queued_requests} completions may "
                "be waiting here",
                "integer_above_max_value",
            )
        if params.speculation and not self._scheduler.limits.num_draft_tokens:
            raise InvalidParameter(
                "speculation",
                "speculation is off in this engine; start it with --speculation ngram, or leave "
                "speculation out",
                "unsupported_parameter",
            )
        if len(self._stop_ids(params)) > MAX_STOP_IDS:
            raise InvalidParameter(
                "stop_token_ids",
                f"stop_token_ids and the model's {len(self._eos_token_ids)} end-of-sequence ids "
                f"together must be at most {MAX_STOP_IDS}",
            )
        max_tokens = self.max_tokens(request)
        if not self._scheduler.fits(num_prompt_tokens + max_tokens):
            raise InvalidParameter(
                "max_tokens",
                f"{num_prompt_tokens} prompt tokens and max_tokens {max_tokens} need more KV pages "
                "than the pool has; ask for fewer tokens",
                "context_length_exceeded",
            )

    def _check_first_token(self, request: EngineRequest) -> None:
        params = request.params
        if params.allowed_token_ids is not None or params.bad_words:
            matcher, _ = self._matcher(request, params)
            if matcher is not None:
                matcher.fill(np.zeros((num_words(self._vocab_size),), np.uint32))

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        stop_ids = frozenset(params.stop_token_ids)
        return stop_ids if params.ignore_eos else stop_ids | self._eos_token_ids

    def _matcher(
        self, request: EngineRequest, params: SamplingParams
    ) -> tuple[TokenMatcher | None, SamplingParams]:
        """Returns what a completion must follow, and its settings without what that sees to."""
        matcher: TokenMatcher | None = None
        if params.grammar is not None:
            [grammar] = request.compiled
            param = params.grammar.param
            matcher = GrammarMatcher(grammar, params.min_tokens, params.ignore_eos, param)
            # The masks see to it, as not even they may forbid all that the grammar allows.
            params = replace(params, min_tokens=0)
        stop_ids = self._stop_ids(params)
        rules = TokenRules.of(params, self._tokenizer, self._vocab_size, stop_ids, matcher)
        return rules, params

    def _make_completion(
        self, request: EngineRequest, index: int, params: SamplingParams
    ) -> tuple[Sequence, Completion]:
        max_tokens = self.max_tokens(request)
        num_drafts = self._scheduler.limits.num_draft_tokens
        matcher, params = self._matcher(request, params)
        stop_ids = self._stop_ids(params)
        # Where each token changes what may follow, nothing can be sampled ahead.
        speculates = (
            num_drafts > 0
            and params.speculation is not False
            and not params.has_penalties
            and matcher is None
        )
        sequence = Sequence(
            seq_id=f"{request.request_id}/{index}",
            token_ids=list(request.prompt_token_ids),
            prompt_len=len(request.prompt_token_ids),
            stop=StopRule(max_tokens, params.min_tokens, stop_ids),
            priority=request.priority,
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs if index == 0 else None,
            embeds=request.embeds,
            steps_in_bulk=not params.stop and matcher is None,
            drafter=NgramDrafter(num_drafts, request.prompt_token_ids) if speculates else None,
            cache_salt=(request.cache_salt or "").encode(errors="surrogatepass"),
        )
        return sequence, Completion(
            request.request_id,
            index,
            params,
            Detokenizer(self._tokenizer, params.skip_special_tokens, continuation=True),
            StopMatcher(params.stop, params.include_stop_str_in_output),
            matcher,
        )
