"""An engine that does nothing but steps of one kind, for measuring them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from jaxinfer import cpu
from jaxinfer.compilation_cache import set_compilation_cache
from jaxinfer.config import EngineConfig
from jaxinfer.engine import Engine
from jaxinfer.model_loading import load_model
from jaxinfer.nn.config import KVGroup
from jaxinfer.nn.decoder import CausalLM
from jaxinfer.request import EngineRequest
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.startup import assemble_engine, open_model

WARM_STEPS = 4
"""Decode steps before any is measured."""

_numbers = itertools.count(1)  # of all requests of this process: two drivers may share an engine

# Stop strings are looked for after each step, so that rows which have one decode step by step.
_NEVER_GENERATED = "\0 no model writes this \0"


@dataclass(slots=True)
class StepDriver:
    """Drives an engine that nothing else uses.

    Attributes:
      engine, model, groups: the engine, and what it was made of.
    """

    engine: Engine
    model: CausalLM
    groups: tuple[KVGroup, ...]

    @classmethod
    def load(cls, config: EngineConfig, progress: bool) -> StepDriver:
        """Loads a model, and assembles an engine whose requests end only by their length.

        Raises:
          ValueError: the model cannot be used, or the configuration does not fit it.
        """
        cpu.set_num_threads(config.num_threads)
        _, checkpoint, tokenizer = open_model(config)
        set_compilation_cache(config.compilation_cache_dir)
        model, groups = load_model(config, checkpoint, progress)
        engine = assemble_engine(config, model, groups, tokenizer, frozenset(), progress)
        return cls(engine, model, groups)

    @property
    def device_kind(self) -> str:
        """What the model runs on."""
        return str(self.model.context.mesh.devices.flat[0].device_kind)

    def add(self, prompt_tokens: int, max_tokens: int | None, in_bulk: bool = True) -> str:
        """Queues a request, and returns its name.

        Its prompt begins as no other does, so that nothing of it is in a prefix cache.
        """
        number, vocab = next(_numbers), self.engine.vocab_size
        name = f"step-{number}"
        begins = (number % vocab, number // vocab % vocab)
        rest = tuple((number * 7 + p * 13) % vocab for p in range(2, prompt_tokens))
        prompt = (begins + rest)[:prompt_tokens]
        stop = () if in_bulk else (_NEVER_GENERATED,)
        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            stop=stop,
            speculation=False,  # a decode shall be one
        )
        self.engine.add(EngineRequest(name, prompt, params))
        return name

    def drain(self) -> None:
        """Steps until nothing is left."""
        while self.engine.has_work:
            self.engine.step()

    @contextlib.contextmanager
    def decoding(self, rows: int, prompt_tokens: int, in_bulk: bool = True) -> Iterator[None]:
        """Inside, each step decodes so many sequences, a token or, `in_bulk`, several of each."""
        names = [self.add(prompt_tokens, None, in_bulk) for _ in range(rows)]
        waiting = set(names)
        while waiting:
            waiting -= {delta.request_id for delta in self.engine.step() if delta.token_ids}
        for _ in range(WARM_STEPS):
            self.engine.step()
        yield
        for name in names:
            self.engine.abort(name)
        self.drain()
