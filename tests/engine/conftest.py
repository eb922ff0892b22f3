"""Engines around tiny random models, compiled once per set of options, and a loop to run them."""

import functools

import numpy as np
import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.models import load_model_module
from jaxinfer.nn.context import ModelContext
from jaxinfer.outputs import RequestOutput
from jaxinfer.request import EngineRequest
from jaxinfer.runner.loader import init_random, make_abstract_model
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.startup import assemble_engine, make_mesh
from jaxinfer.testing import byte_tokenizer

VOCAB_SIZE = 258
EOS = 257


@functools.cache
def tiny_model(model_type="llama", tensor_parallel=1, seed=0, **changes):
    """A filled model of the family's tiny configuration with the byte vocabulary."""
    module = load_model_module(model_type)
    config = module.Config.from_hf(
        {**module.TINY_HF_CONFIG, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 256}
        | changes
    )
    context = ModelContext(
        mesh=make_mesh(tensor_parallel),
        platform="cpu",
        dtype=np.dtype("float32"),
        weight_dtype=np.dtype("float32"),
        precision="highest",
    )
    model = make_abstract_model(module, config, context)
    init_random(model, seed)
    return model, module.kv_groups(config)


@functools.cache
def _engine(model_type, tensor_parallel, options):
    model, groups = tiny_model(model_type, tensor_parallel)
    settings = {
        "exact": True,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "page_size": 4,
        "num_pages": 120,
        **dict(options),
    }
    return assemble_engine(
        EngineConfig(**settings), model, groups, byte_tokenizer(), frozenset({EOS})
    )


@pytest.fixture(scope="session")
def make_engine():
    """Returns an idle engine; equal options share one, so that programs are compiled once."""

    def make(model_type="llama", tensor_parallel=1, **options):
        engine = _engine(model_type, tensor_parallel, tuple(sorted(options.items())))
        assert not engine.has_work
        engine.scheduler.check_integrity()
        return engine

    return make


@pytest.fixture(scope="session")
def run():
    return run_requests


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
            if on_step is not None:
                on_step(step)
    engine.scheduler.check_integrity()
    assert all(output.finished for output in outputs.values())
    assert engine.stats().num_compilations_after_warmup == 0
    return list(outputs.values())


@pytest.fixture(scope="session")
def prompt():
    """Returns `length` byte ids that depend on the seed."""

    def make(length, seed=0):
        return np.random.default_rng(seed).integers(0, 256, length).tolist()

    return make
