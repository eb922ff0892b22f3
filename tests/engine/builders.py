"""Engines around tiny random models, and a loop to run them.

Compiling is nearly all of the cost: engines that differ only in what the scheduler may do share
one compiled runner.
"""

import dataclasses
import functools

import numpy as np

from jaxinfer.config import EngineConfig
from jaxinfer.engine import Engine
from jaxinfer.model_loading import make_mesh
from jaxinfer.models import load_model_module
from jaxinfer.nn.context import ModelContext
from jaxinfer.outputs import RequestOutput
from jaxinfer.request import EngineRequest
from jaxinfer.runner.loader import init_random, make_abstract_model
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.scheduler.limits import SchedulerLimits
from jaxinfer.scheduler.page_tables import GroupSpec, PageTables
from jaxinfer.scheduler.prefix_cache import PrefixCache
from jaxinfer.scheduler.scheduler import Scheduler
from jaxinfer.startup import assemble_engine
from jaxinfer.testing import byte_tokenizer

VOCAB_SIZE = 258
EOS = 257
PAGE_SIZE = 4
NUM_PAGES = 120
# Two decode rungs (2, 4), each for one step and for up to five, and the ragged rungs 16 and 32.
MAX_NUM_SEQS = 4
MAX_NUM_BATCHED_TOKENS = 32
MAX_DECODE_STEPS = 5


def tiny_model(model_type="llama", tensor_parallel=1, context=(), **changes):
    """A family's tiny model with the byte vocabulary and random weights, and its KV groups.

    `context` are (name, value) pairs of a ModelContext that is not the exact one; `changes` are of
    the model's configuration.
    """
    return _tiny_model(model_type, tensor_parallel, tuple(context), tuple(changes.items()))


@functools.cache
def _tiny_model(model_type, tensor_parallel, context_changes, changes):
    module = load_model_module(model_type)
    config = module.Config.from_hf(
        {**module.TINY_HF_CONFIG, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 256}
        | dict(changes)
    )
    context = ModelContext(
        mesh=make_mesh(tensor_parallel),
        platform="cpu",
        dtype=np.dtype("float32"),
        weight_dtype=np.dtype("float32"),
        precision="highest",
    )
    context = dataclasses.replace(context, **dict(context_changes))
    model = make_abstract_model(module, config, context)
    init_random(model, seed=0)
    return model, module.kv_groups(config)


def compiled_runner(model_type="llama", tensor_parallel=1):
    """The one runner of a model; only llama's and gemma's can decode several steps at once."""
    return _compiled_runner(model_type, tensor_parallel)


@functools.cache
def _compiled_runner(model_type, tensor_parallel):
    model, groups = tiny_model(model_type, tensor_parallel)
    bulk = model_type in ("llama", "gemma3_text") and tensor_parallel == 1
    config = EngineConfig(
        exact=True,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS if bulk else 16,
        decode_steps=MAX_DECODE_STEPS if bulk else 1,
        page_size=PAGE_SIZE,
        num_pages=NUM_PAGES,
    )
    return assemble_engine(config, model, groups, byte_tokenizer(), frozenset({EOS})).runner


def new_engine(
    runner, groups, num_pages=NUM_PAGES, max_queued_requests=512, prefix_cache=False, **limits
):
    """An engine of its own around a compiled runner; it may use less than the runner could."""
    settings = {
        "max_num_seqs": runner.config.max_num_seqs,
        "max_num_batched_tokens": runner.config.max_num_batched_tokens,
        **limits,
    }
    settings.setdefault("max_prefill_chunk_tokens", max(1, settings["max_num_batched_tokens"] // 2))
    tables = PageTables([GroupSpec(num_pages + 1, group.window) for group in groups], PAGE_SIZE)
    cache = PrefixCache(tables, b"", limits.get("chunk_tokens")) if prefix_cache else None
    scheduler = Scheduler(SchedulerLimits(**settings), tables, cache)
    return Engine(runner, scheduler, byte_tokenizer(), frozenset({EOS}), max_queued_requests)


def run_requests(engine, requests, together=True, on_step=None):
    """Runs (prompt ids, SamplingParams or dict) pairs; returns their RequestOutputs in order.

    `together` adds all at once; otherwise one after the other. `on_step(n)` is called per step.
    """
    requests = [
        EngineRequest(
            f"r{i}",
            tuple(prompt),
            params if isinstance(params, SamplingParams) else SamplingParams(**params),
        )
        for i, (prompt, params) in enumerate(requests)
    ]
    outputs = {
        request.request_id: RequestOutput.empty(
            request.request_id, None, request.prompt_token_ids, request.params.n
        )
        for request in requests
    }
    step = 0
    for batch in [requests] if together else [[request] for request in requests]:
        for request in batch:
            engine.add(request)
        while engine.has_work:
            for delta in engine.step():
                outputs[delta.request_id].extend(delta)
            step += 1
            assert step < 20_000, "the engine has work but does not advance"
            if on_step is not None:
                on_step(step)
    assert_idle(engine)
    assert all(output.finished for output in outputs.values())
    return list(outputs.values())


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
