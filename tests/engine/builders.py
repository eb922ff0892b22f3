"""Engines around tiny random models, and loops to run them.

Compiling is nearly all of the cost: engines that differ only in what the scheduler may do share
one compiled runner. Those that several files use are here: pytest imports a test file under another
name than its neighbours do, so that what a test file caches is compiled once for each.
"""

import dataclasses
import functools

import jax.numpy as jnp
import kept_programs
import numpy as np
import tiny_engine
from tiny_engine import EOS

from jaxinfer.config import EngineConfig
from jaxinfer.engine import Engine
from jaxinfer.outputs import RequestOutput
from jaxinfer.quantization import SCHEMES
from jaxinfer.request import EngineRequest
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.scheduler.limits import SchedulerLimits
from jaxinfer.scheduler.page_tables import GroupSpec, PageTables
from jaxinfer.scheduler.prefix_cache import PrefixCache
from jaxinfer.scheduler.scheduler import Scheduler
from jaxinfer.testing import byte_tokenizer

PAGE_SIZE = 4
NUM_PAGES = 120
# Two decode rungs (2, 6), each for one step and for up to five, and the ragged rung 32.
NUM_ROWS = 6
MAX_NUM_SEQS = 4
"""Of an engine that does not say how many of the rows it uses."""
MAX_NUM_BATCHED_TOKENS = 32
MAX_DECODE_STEPS = 5
SPECULATION = {"num_draft_tokens": 7, "max_tokens_with_drafts": 16}

CHUNK = 8 * PAGE_SIZE
"""Tokens of a deterministic engine's chunks."""
NARROW = (("weight_dtype", np.dtype(jnp.bfloat16)), ("precision", None))
DETERMINISTIC = {
    "bfloat16": ("llama", NARROW, {}, "bfloat16"),
    "windows": ("gemma3_text", NARROW, {}, "float32"),
    # All layers in one call, where there is one; products round otherwise from 32 tokens on.
    "codes": (
        "llama",
        (*NARROW, ("quant", SCHEMES["int8"])),
        {"intermediate_size": 128},
        "bfloat16",
    ),
    # What rounding to fewer bits would hide: every other order of a sum.
    "float32": ("llama", (("precision", None),), {}, "float32"),
}
"""By name: a model, what its context and its configuration change, and the cache's dtype."""

tiny_model = functools.partial(tiny_engine.tiny_model, max_position_embeddings=256)


def assemble(model, groups, **config):
    """An engine as it is started with these settings, compiled."""
    config = EngineConfig(**{"page_size": PAGE_SIZE, "num_pages": NUM_PAGES, **config})
    return kept_programs.assemble(config, model, groups, byte_tokenizer(), frozenset({EOS}))


def compiled_runner(model_type="llama", tensor_parallel=1):
    """The one runner of a model; only llama's and gemma's can decode several steps at once."""
    return _compiled_runner(model_type, tensor_parallel)


@functools.cache
def _compiled_runner(model_type, tensor_parallel):
    bulk = model_type in ("llama", "gemma3_text") and tensor_parallel == 1
    return assemble(
        *tiny_model(model_type, tensor_parallel),
        exact=True,
        max_num_seqs=NUM_ROWS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS if bulk else 16,
        decode_steps=MAX_DECODE_STEPS if bulk else 1,
    ).runner


def int8_runner(model_type="llama", tensor_parallel=1):
    """The one runner of a model over an int8 cache: one decode rung and one ragged one."""
    return _int8_runner(model_type, tensor_parallel)


@functools.cache
def _int8_runner(model_type, tensor_parallel):
    return assemble(
        *tiny_model(model_type, tensor_parallel),
        dtype="float32",
        kv_cache_dtype="int8",
        max_num_seqs=2,
        max_num_batched_tokens=16,
    ).runner


@functools.cache
def deterministic_engine(name):
    """An engine as it is started with the flag; those of `deterministic` share its runner."""
    model_type, context, changes, kv_dtype = DETERMINISTIC[name]
    return assemble(
        *tiny_model(model_type, context=context, **changes),
        deterministic=True,
        kv_cache_dtype=kv_dtype,
        max_num_seqs=5,
        max_num_batched_tokens=3 * CHUNK,
        max_prefill_chunk_tokens=CHUNK + 1,
        num_pages=70,  # less than two of the longest need
    )


def new_engine(
    runner, groups, num_pages=NUM_PAGES, max_queued_requests=512, prefix_cache=False, **limits
):
    """An engine of its own around a compiled runner; it may use less than the runner could."""
    settings = {
        "max_num_seqs": min(MAX_NUM_SEQS, runner.config.max_num_seqs),
        "max_num_batched_tokens": runner.config.max_num_batched_tokens,
        **limits,
    }
    settings.setdefault("max_prefill_chunk_tokens", max(1, settings["max_num_batched_tokens"] // 2))
    tables = PageTables([GroupSpec(num_pages + 1, group.window) for group in groups], PAGE_SIZE)
    return _engine(runner, SchedulerLimits(**settings), tables, prefix_cache, max_queued_requests)


def fresh(engine, depth=1):
    """An engine around the same runner, with a prefix cache, that has computed nothing."""
    old = engine.scheduler
    limits = dataclasses.replace(old.limits, pipeline_depth=depth)
    tables = PageTables(old.tables.groups, old.tables.page_size)
    return _engine(engine.runner, limits, tables, True, 512)


def _engine(runner, limits, tables, prefix_cache, max_queued_requests):
    cache = PrefixCache(tables, b"", limits.chunk_tokens) if prefix_cache else None
    scheduler = Scheduler(limits, tables, cache)
    return Engine(runner, scheduler, byte_tokenizer(), frozenset({EOS}), max_queued_requests)


class Client:
    """Sends requests to an engine and folds its answers; looks at the books after every event.

    Attributes:
      outputs: by request id, in order of arrival.
    """

    def __init__(self, engine):
        self.engine, self.outputs, self.num_steps = engine, {}, 0

    def add(self, prompt, params, **options):
        """Sends one request; returns its id."""
        if not isinstance(params, SamplingParams):
            params = SamplingParams(**params)
        request = EngineRequest(f"r{len(self.outputs)}", tuple(prompt), params, **options)
        self.engine.add(request)
        self.outputs[request.request_id] = RequestOutput.empty(
            request.request_id, None, request.prompt_token_ids, params.n
        )
        self._take(())
        return request.request_id

    def step(self):
        self.num_steps += 1
        assert self.num_steps < 20_000, "the engine has work but does not advance"
        self._take(self.engine.step())

    def abort(self, request_id):
        self._take(self.engine.abort(request_id))

    def _take(self, deltas):
        for delta in deltas:
            delta.times = None  # all else can be compared with other runs
            self.outputs[delta.request_id].extend(delta)
        self.engine.scheduler.check_integrity()

    def drain(self):
        """Steps until nothing is left, and checks that nothing is."""
        while self.engine.has_work:
            self.step()
        assert_idle(self.engine)
        assert all(output.finished for output in self.outputs.values())


def run_requests(engine, requests, together=True):
    """Runs (prompt ids, SamplingParams or dict) pairs; returns their RequestOutputs in order.

    `together` adds all at once; otherwise one after the other.
    """
    client = Client(engine)
    for prompt, params in requests:
        client.add(prompt, params)
        if not together:
            client.drain()
    client.drain()
    return list(client.outputs.values())


def run_schedule(engine, requests, arrivals, departures):
    """Runs (prompt, params) pairs that arrive at steps of their own, and some are cancelled.

    `departures` are steps by index of a request, counted from the first. Returns RequestOutputs.
    """
    client, names = Client(engine), {}
    waiting = sorted(zip(arrivals, range(len(requests)), strict=True), reverse=True)
    while waiting or engine.has_work:
        while waiting and waiting[-1][0] <= client.num_steps:
            index = waiting.pop()[1]
            names[index] = client.add(*requests[index])
        client.step()
        for index, step in departures.items():
            if index in names and step == client.num_steps:
                client.abort(names[index])
    client.drain()
    return [client.outputs[names[index]] for index in range(len(requests))]


def assert_idle(engine):
    """Nothing is held, nothing was compiled."""
    engine.scheduler.check_integrity()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_pages == stats.num_pages
    assert stats.num_compilations_after_warmup == 0
    assert not engine._completions
    assert not engine._sequences


def forced(text, **params):
    """Settings under which a greedy completion writes `text`, whose bytes must all differ.

    Each byte has a larger bias than the next, and sinks below it once it was written.
    """
    data = text.encode() if isinstance(text, str) else text
    assert len(set(data)) == len(data) <= 12
    bias = {byte: 100.0 - 7 * index for index, byte in enumerate(data)}
    return {"temperature": 0.0, "repetition_penalty": 1e3, "logit_bias": bias, **params}
