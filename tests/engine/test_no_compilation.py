"""B25: after warm-up no request, whatever it asks for, compiles or traces anything."""

import jax
import numpy as np
import pytest
from engine.test_embeddings import embed

from jaxinfer.grammar import Grammar
from jaxinfer.sampling_params import SamplingParams

_events: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, _, **__: _events.append(event) if event.startswith("/jax/core/compile") else None
)


def random_request(rng):
    def maybe(name, *values):
        return {name: values[rng.integers(len(values))]} if rng.random() < 0.4 else {}

    bias = {int(token): float(rng.uniform(-5, 5)) for token in rng.permutation(258)}
    biases = dict(list(bias.items())[: rng.choice([0, 1, 258])])
    max_tokens = int(rng.integers(0, 12))
    params = {
        "temperature": float(rng.choice([0.0, 0.7, 1.5])),
        "max_tokens": max_tokens,
        "n": int(rng.integers(1, 5)),
        "logit_bias": biases,
        **maybe("logprobs", 0, 1, 5, 20),
        **maybe("prompt_logprobs", 0, 1, 5, 20),
        **maybe("top_k", 1, 40),
        **maybe("top_p", 0.0, 0.9),
        **maybe("min_p", 0.1, 1.0),
        **maybe("repetition_penalty", 1.3),
        **maybe("presence_penalty", 0.5),
        **maybe("frequency_penalty", -0.5),
        **maybe("seed", 0, 2**63 - 1),
        **maybe("stop", ["a"], ["xyz", "b"]),
        **maybe("stop_token_ids", [5], list(range(12))),
        **maybe("ignore_eos", True),
        **maybe("min_tokens", max_tokens // 2),
        **maybe("grammar", Grammar("json_object"), Grammar("regex", "[a-z]*"), None),
    }
    length = int(rng.choice([1, 2, 15, 16, 17, rng.integers(1, 240)]))
    return rng.integers(0, 256, length).tolist(), SamplingParams(**params)


@pytest.mark.parametrize("depth", [0, 1])
def test_no_request_compiles_anything(make_engine, run, depth):
    rng = np.random.default_rng(depth)
    engine = make_engine(pipeline_depth=depth, decode_steps=5, num_pages=64)
    executables = engine.runner.num_programs
    _events.clear()
    for size in (1, 1, 2, 3, 4, 5, 12, 50):
        run(engine, [random_request(rng) for _ in range(size)])
    embed(engine, [rng.integers(0, 256, length).tolist() for length in (1, 40)])
    growing = {"max_tokens": 60, "repetition_penalty": 1.1, "logprobs": 1, "ignore_eos": True}
    run(engine, [(rng.integers(0, 256, 40).tolist(), growing) for _ in range(4)])
    assert _events == []
    assert engine.stats().num_compilations_after_warmup == 0
    assert engine.runner.num_programs == executables
    assert engine.stats().num_preemptions > 0, "resumed rows are meant to be among them"


def test_the_watch_sees_a_compilation_inside_a_step(make_engine, caplog):
    watch = make_engine().runner.watch
    before = watch.num_after_warmup
    _events.clear()
    jax.jit(lambda x: x + 1)(jax.numpy.zeros((3,)))
    assert watch.num_after_warmup == before
    with watch.step():
        jax.jit(lambda x: x + 2)(jax.numpy.zeros((3,)))
    assert watch.num_after_warmup == before + 1
    assert "compiled a program inside a step" in caplog.text
    assert _events
    watch.num_after_warmup = before  # the runner is shared
