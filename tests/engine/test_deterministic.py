"""B11: with `--deterministic` every bit of an answer is the same in any crowd, cold or cached.

In dtypes that round: there another order of sums shows.
"""

import dataclasses
import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from engine.builders import EOS, PAGE_SIZE, assert_idle, tiny_model

from jaxinfer import startup
from jaxinfer.config import EngineConfig
from jaxinfer.engine import Engine
from jaxinfer.outputs import RequestOutput
from jaxinfer.quantization import SCHEMES
from jaxinfer.request import EngineRequest
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.scheduler.page_tables import PageTables
from jaxinfer.scheduler.prefix_cache import PrefixCache
from jaxinfer.scheduler.scheduler import Scheduler
from jaxinfer.startup import assemble_engine, load_engine
from jaxinfer.testing import byte_tokenizer

CHUNK = 8 * PAGE_SIZE
NARROW = (("weight_dtype", np.dtype(jnp.bfloat16)), ("precision", None))
MODELS = {
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
_names = itertools.count()


@functools.cache
def tiny_engine(name):
    """An engine as it is started with the flag; others share its runner."""
    model_type, context, changes, kv_dtype = MODELS[name]
    model, groups = tiny_model(model_type, context=context, **changes)
    config = EngineConfig(
        deterministic=True,
        kv_cache_dtype=kv_dtype,
        max_num_seqs=5,
        max_num_batched_tokens=3 * CHUNK,
        max_prefill_chunk_tokens=CHUNK + 1,
        page_size=PAGE_SIZE,
        num_pages=70,  # less than two of the longest need
    )
    return assemble_engine(config, model, groups, byte_tokenizer(), frozenset({EOS}))


def fresh(engine, depth=1):
    """An engine around the same runner that has computed nothing."""
    old = engine.scheduler
    limits = dataclasses.replace(old.limits, pipeline_depth=depth)
    tables = PageTables(old.tables.groups, old.tables.page_size)
    scheduler = Scheduler(limits, tables, PrefixCache(tables, b"", limits.chunk_tokens))
    return Engine(engine.runner, scheduler, engine.tokenizer, frozenset({EOS}), 512)


def run(engine, requests, arrivals=None, doomed=()):
    """Runs (prompt, params) pairs that arrive at steps of their own; returns what each answers.

    The `doomed` are cancelled on the way and answer None.
    """
    arrivals = [0] * len(requests) if arrivals is None else arrivals
    outputs, ends = {}, {}
    waiting = sorted(zip(arrivals, range(len(requests)), strict=True))
    step = 0
    while waiting or engine.has_work:
        while waiting and waiting[0][0] <= step:
            index = waiting.pop(0)[1]
            prompt, params = requests[index]
            request = EngineRequest(f"r{next(_names)}", tuple(prompt), SamplingParams(**params))
            engine.add(request)
            outputs[request.request_id] = RequestOutput.empty(
                request.request_id, None, request.prompt_token_ids, request.params.n
            )
            ends[index] = request.request_id
        for delta in engine.step():
            outputs[delta.request_id].extend(delta)
        step += 1
        for index in doomed:
            if index in ends and step == arrivals[index] + 5:
                engine.abort(ends[index])
        assert step < 20_000, "the engine has work but does not advance"
    assert_idle(engine)
    assert engine.stats().num_preemptions == 0
    return [
        None if index in doomed else answer(outputs[ends[index]]) for index in range(len(requests))
    ]


def answer(output):
    """All that must be equal: everything but the name and what was found in the cache."""
    assert output.finished
    choices = [dataclasses.asdict(choice) for choice in output.outputs]
    return {"choices": choices, "prompt_logprobs": output.prompt_logprobs}


def make_requests(token, lengths, max_tokens):
    """Greedy and seeded ones whose prompts share beginnings; `token(seed, i)` gives their ids."""
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_p": 0.95, "top_k": 40, "seed": 3},
        {"temperature": 0.8, "min_p": 0.01, "repetition_penalty": 1.1, "seed": 4, "logprobs": 0},
        {"temperature": 0.0, "presence_penalty": 0.5, "prompt_logprobs": 2},
        {"temperature": 1.2, "seed": 5, "n": 2, "logit_bias": {7: 2.0}, "logprobs": 0},
    ]
    requests = []
    for index, length in enumerate(lengths):
        split = length if index % 3 == 0 else length * 2 // 3
        prompt = [token(0, i) for i in range(split)]
        prompt += [token(1 + index, i) for i in range(split, length)]
        params = {"max_tokens": max_tokens, "logprobs": 3, "ignore_eos": True}
        requests.append((prompt, {**params, **kinds[index % len(kinds)]}))
    return requests


def check_crowds(engine, requests, depth, seed, rounds):
    """Each alone in a fresh engine, and in crowds of any order, some cancelled, some again."""
    rng = np.random.default_rng(seed)
    alone = [run(fresh(engine, depth), [request])[0] for request in requests]
    crowded = fresh(engine, depth)
    for _ in range(rounds):
        picked = rng.integers(0, len(requests), 2 * len(requests)).tolist()
        arrivals = rng.integers(0, 4 * len(requests), len(picked)).tolist()
        doomed = set(rng.integers(0, len(picked), 3).tolist())
        found = run(crowded, [requests[i] for i in picked], arrivals, doomed)
        for place, index in enumerate(picked):
            if place not in doomed:
                assert found[place] == alone[index], f"request {index}"
    stats = crowded.stats()
    assert stats.prefix_cache_hits > 0, "some were meant to be cached"
    assert stats.steps < stats.generation_tokens, "they were meant to run together"
    return alone


LENGTHS = (1, 7, 32, 45, 33, 50, 65, 96, 99, 140)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("depth", [0, 1])
def test_e0_in_any_crowd(name, depth):
    engine = tiny_engine(name)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 256, (len(LENGTHS) + 1, max(LENGTHS))).tolist()
    requests = make_requests(lambda seed, i: ids[seed][i], LENGTHS, 14)
    alone = check_crowds(engine, requests, depth, seed=depth, rounds=3)
    other = [run(fresh(engine, 1 - depth), [request])[0] for request in requests[:3]]
    assert other == alone[:3], "either depth"


@pytest.mark.parametrize("name", MODELS)
def test_what_was_generated_is_no_different_in_the_next_turn(name):
    """A prompt that ends in an answer: cold, and after the answer was generated beside others."""
    engine = tiny_engine(name)
    greedy = {"temperature": 0.0, "max_tokens": 30, "logprobs": 3, "ignore_eos": True}
    prompt = [i * 7 % 256 for i in range(13)]
    (first,) = run(fresh(engine), [(prompt, greedy)])
    turn = ([*prompt, *first["choices"][0]["token_ids"], 1, 2, 3], greedy)
    (cold,) = run(fresh(engine), [turn])
    warm = fresh(engine)
    run(warm, [(prompt, greedy), (prompt[::-1], greedy)])
    assert run(warm, [turn, (prompt, greedy)])[0] == cold
    assert run(warm, [(prompt, greedy), turn])[1] == cold


@pytest.mark.parametrize("name", MODELS)
def test_the_last_chunk_of_a_shorter_prompt_is_not_taken_over(name):
    engine = tiny_engine(name)
    greedy = {"temperature": 0.0, "max_tokens": 6, "logprobs": 3, "ignore_eos": True}
    prompt = [i * 11 % 256 for i in range(3 * CHUNK)]
    requests = [(prompt[:length], greedy) for length in (CHUNK + PAGE_SIZE, 70, 2 * CHUNK, 80)]
    cold = [run(fresh(engine), [request])[0] for request in requests]
    warm = fresh(engine)
    for _ in range(2):
        for request, expected in zip(requests, cold, strict=True):
            assert run(warm, [request]) == [expected]


def test_the_flag_decides_programs_and_limits(caplog):
    caplog.set_level("INFO", "jaxinfer")
    engine, (model_type, context, *_) = tiny_engine("bfloat16"), MODELS["bfloat16"]
    model, _ = tiny_model(model_type, context=context)
    startup._log_setup(engine.runner, engine.scheduler.limits, model, engine.runner.watch, True)
    assert engine.runner.ladders.decode == (16,)
    assert engine.runner.ladders.tokens == (3 * CHUNK,)
    assert engine.runner.ladders.bulk == ()
    assert engine.scheduler.limits.chunk_tokens == CHUNK
    assert f"deterministic: prompts cut at multiples of {CHUNK}, no decodes beside" in caplog.text


@pytest.mark.slow
@pytest.mark.real_model
def test_smollm2_in_any_crowd(smollm2_path):
    config = EngineConfig(
        model=str(smollm2_path),
        deterministic=True,
        max_model_len=320,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        max_prefill_chunk_tokens=64,
    )
    engine = load_engine(config, progress=False).engine
    requests = make_requests(
        lambda seed, i: 1000 + (seed * 7919 + i * 104729) % 30000,
        (1, 20, 63, 64, 65, 130, 129, 192, 200, 250),
        24,
    )
    check_crowds(engine, requests, depth=1, seed=0, rounds=1)
