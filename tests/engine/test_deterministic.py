"""B11: with `--deterministic` every bit of an answer is the same in any crowd, cold or cached.

In dtypes that round: there another order of sums shows.
"""

import dataclasses

import numpy as np
import pytest
from engine.builders import (
    CHUNK,
    DETERMINISTIC,
    PAGE_SIZE,
    deterministic_engine,
    fresh,
    run_schedule,
    tiny_model,
)

from jaxinfer import startup_log
from jaxinfer.config import EngineConfig
from jaxinfer.startup import load_engine

MODELS = tuple(DETERMINISTIC)


def run(engine, requests, arrivals=None, doomed=()):
    """Runs (prompt, params) pairs that arrive at steps of their own; returns what each answers.

    The `doomed` are cancelled on the way and answer None.
    """
    arrivals = [0] * len(requests) if arrivals is None else arrivals
    departures = {index: arrivals[index] + 5 for index in doomed}
    outputs = run_schedule(engine, requests, arrivals, departures)
    assert engine.stats().num_preemptions == 0
    return [None if index in doomed else answer(output) for index, output in enumerate(outputs)]


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
    engine = deterministic_engine(name)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 256, (len(LENGTHS) + 1, max(LENGTHS))).tolist()
    requests = make_requests(lambda seed, i: ids[seed][i], LENGTHS, 14)
    alone = check_crowds(engine, requests, depth, seed=depth, rounds=3)
    other = [run(fresh(engine, 1 - depth), [request])[0] for request in requests[:3]]
    assert other == alone[:3], "either depth"


@pytest.mark.parametrize("name", MODELS)
def test_what_was_generated_is_no_different_in_the_next_turn(name):
    """A prompt that ends in an answer: cold, and after the answer was generated beside others."""
    engine = deterministic_engine(name)
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
    engine = deterministic_engine(name)
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
    engine = deterministic_engine("bfloat16")
    model_type, context, *_ = DETERMINISTIC["bfloat16"]
    model, _ = tiny_model(model_type, context=context)
    startup_log.log_setup(engine.runner, engine.scheduler.limits, model, engine.runner.watch, True)
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
