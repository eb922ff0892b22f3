"""A real engine around a tiny random model, compiled once, for tests of what stands above it."""

import dataclasses
import functools

import kept_programs
import numpy as np

from jaxinfer.config import EngineConfig
from jaxinfer.model_loading import make_mesh
from jaxinfer.models import load_model_module
from jaxinfer.nn.context import ModelContext
from jaxinfer.runner.loader import init_random, make_abstract_model
from jaxinfer.startup import LoadedEngine
from jaxinfer.testing import byte_tokenizer
from jaxinfer.text import ChatTemplate

VOCAB_SIZE = 258
EOS = 257
CONTEXT = 128
MAX_NUM_SEQS = 4
MAX_OPEN = 10
TEMPLATE = "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ suffix | default('') }}"


def tiny_model(model_type="llama", tensor_parallel=1, context=(), **changes):
    """A filled float32 model with the byte vocabulary, and its KV groups.

    `context` are (name, value) pairs of a ModelContext that is not the exact one; `changes` are of
    the model's configuration.
    """
    return _tiny_model(model_type, tensor_parallel, tuple(context), tuple(changes.items()))


@functools.cache
def _tiny_model(model_type, tensor_parallel, context_changes, changes):
    module = load_model_module(model_type)
    sizes = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": CONTEXT}
    config = module.Config.from_hf(module.TINY_HF_CONFIG | sizes | dict(changes))
    context = ModelContext(
        mesh=make_mesh(tensor_parallel),
        platform="cpu",
        dtype=np.dtype("float32"),
        weight_dtype=np.dtype("float32"),
        precision="highest",
    )
    model = make_abstract_model(
        module, config, dataclasses.replace(context, **dict(context_changes))
    )
    init_random(model, seed=0)
    return model, module.kv_groups(config)


def build(**changes):
    """A LoadedEngine of its own, with some settings; takes a second or two."""
    model, groups = tiny_model()
    settings = {
        "exact": True,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": 32,
        "page_size": 4,
        "num_pages": MAX_NUM_SEQS * CONTEXT // 4,
        "max_queued_requests": MAX_OPEN,
    }
    config = EngineConfig(**{**settings, **changes})
    tokenizer = byte_tokenizer(TEMPLATE)
    return LoadedEngine(
        engine=kept_programs.assemble(config, model, groups, tokenizer, frozenset({EOS})),
        model_name="tiny",
        tokenizer=tokenizer,
        chat_template=ChatTemplate.from_tokenizer(tokenizer),
        default_params={},
        device_kind="cpu",
    )


shared = functools.cache(build)


def empty(engine):
    """Brings a shared engine back to nothing running, and checks that nothing is lost."""
    for request_id in list(engine._sequences):
        engine.abort(request_id)
    while engine.has_work:
        engine.step()
    engine.scheduler.check_integrity()
    stats = engine.stats()
    assert stats.num_free_pages == stats.num_pages
    assert stats.num_running == stats.num_waiting == 0
