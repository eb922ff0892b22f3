"""`benchmarks/soak.py`: what it sends, what it compares, its rules, and a short run of it."""

import random
import sys
from importlib import import_module
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_engine import TEMPLATE, VOCAB_SIZE
from tiny_server import tiny_server

from jaxinfer.load_test.client import make_session
from jaxinfer.server.logprobs import CompletionLogprobs
from jaxinfer.testing import byte_tokenizer
from kernels.token_sampler.xla import inverse_cdf

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # where scripts find each other
soak, traffic = import_module("soak"), import_module("soak_traffic")
answers, rules = import_module("soak_answers"), import_module("soak_rules")


@pytest.fixture
async def server(monkeypatch):
    async with tiny_server(monkeypatch, max_body_bytes=traffic.MAX_BODY_BYTES) as running:
        yield running


# Answers.


def body_of(*choices, **fields):
    return {
        "choices": [{"index": index, **choice} for index, choice in enumerate(choices)],
        **fields,
    }


def answer_of(*events):
    answer = answers.Answer()
    for event in events:
        answer.take(event)
    return answer


LOGPROBS = {"token_logprobs": [None, -0.5, -1.0, -2.0]}
SOLO = answer_of(
    body_of({"text": "a bc", "token_ids": [5, 6, 7], "finish_reason": "length",
             "logprobs": LOGPROBS, "prompt_token_ids": [1, 2]})
)  # fmt: skip


def test_streams_and_bodies_fold_to_the_same():
    chat = body_of(
        {"message": {"content": "abc"}, "token_ids": [5, 6], "finish_reason": "stop",
         "logprobs": {"content": [{"logprob": -1.0}, {"logprob": -2.0}]}},
        usage={"completion_tokens": 2},
    )  # fmt: skip
    chunks = [
        body_of({"delta": {"role": "assistant", "content": ""}}),
        body_of({"delta": {"content": "a"}, "token_ids": [5],
                 "logprobs": {"content": [{"logprob": -1.0}]}}),
        body_of({"delta": {"content": "bc"}, "token_ids": [6], "finish_reason": None,
                 "logprobs": {"content": [{"logprob": -2.0}]}}),
        body_of({"delta": {}, "finish_reason": "stop"}),
        {"choices": [], "usage": {"completion_tokens": 2}},
    ]  # fmt: skip
    whole, streamed = answer_of(chat), answer_of(*chunks)
    assert whole.choices == streamed.choices
    assert whole.choices[0].logprobs == [-1.0, -2.0]
    assert whole.usage == streamed.usage
    assert (whole.num_events, streamed.num_events) == (1, 5)


def other(**fields):
    piece = {"text": "a bc", "token_ids": [5, 6, 7], "finish_reason": "length", **fields}
    return answer_of(body_of(piece))


def test_equal_answers():
    assert answers.compare(other(), SOLO, 1e-4) == ([], 0.0)
    near = {"token_logprobs": [None, -0.5, -1.00005, -2.0]}
    differences, error = answers.compare(other(logprobs=near), SOLO, 1e-4)
    assert (differences, error) == ([], pytest.approx(5e-5))


def test_the_first_difference_is_kept_and_what_follows_it_is_not_compared():
    scores = {"token_logprobs": [None, -0.5, -9.0, -9.0]}
    found = other(text="a xy", token_ids=[5, 8, 9], logprobs=scores)
    differences, error = answers.compare(found, SOLO, 1e-4)
    assert differences == [answers.Difference(0, (1, 2, 5), 8, 6)]
    assert error == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text": "a bd"}, "text 'a bd', alone 'a bc'"),
        ({"finish_reason": "stop"}, "finish_reason 'stop', alone 'length'"),
        ({"token_ids": [5, 6]}, r"ids \[5, 6\], alone \[5, 6, 7\]"),
        ({"logprobs": {"token_logprobs": [None, -0.5, -1.0, -2.1]}}, "choice 0 are 0.1 off"),
        ({"logprobs": {"token_logprobs": [None, -0.5, -1.0]}}, "3 log-probabilities, alone 4"),
    ],
)
def test_what_no_rounding_explains(fields, message):
    with pytest.raises(answers.Wrong, match=message):
        answers.compare(other(**fields), SOLO, 1e-4)


def test_a_choice_too_many():
    found = answer_of(body_of({"text": ""}, {"text": ""}))
    with pytest.raises(answers.Wrong, match=r"choices \[0, 1\], expected \[0\]"):
        answers.compare(found, SOLO, 1e-4)


def test_the_beginning_of_an_answer():
    begun = other(text="a", token_ids=[5, 6], finish_reason=None)
    assert answers.compare(begun, SOLO, 1e-4, is_complete=False) == ([], 0.0)
    with pytest.raises(answers.Wrong, match="no beginning"):
        answers.compare(other(text="x", token_ids=[5]), SOLO, 1e-4, is_complete=False)


def test_gaps_to_a_tie():
    assert answers.greedy_gap([-3.0, -0.5, -0.75]) == 0.25
    # Kept: ids 2, 5, 9 with probabilities 0.25, 0.5, 0.25 in this order.
    top = {5: np.log(0.5), 2: np.log(0.25), 9: np.log(0.25), 7: np.log(0.01)}
    for u, gap in ((0.26, 0.01), (0.2, 0.05), (0.5, 0.25), (0.74, 0.01), (0.99, 0.24), (0.0, 0.25)):
        assert answers.draw_gap(top, 1.0, 3, u) == pytest.approx(gap)
    # At half the temperature they are 1/6, 4/6, 1/6.
    assert answers.draw_gap(top, 0.5, 3, 0.2) == pytest.approx(0.2 - 1 / 6)
    # Two that are all but equal compete for the last place.
    assert answers.draw_gap({**top, 7: np.log(0.2499)}, 1.0, 3, 0.5) < 1e-3


@pytest.mark.parametrize("seed", [0, 7, -1, 2**63 - 1, 2**63, -(2**62)])
def test_the_number_drawn_is_the_samplers(seed):
    """Next to an edge of the sampler's own CDF, the gap is nothing and the token changes."""
    u = answers.drawn(seed, 12)
    assert 0 <= u < 1
    assert u != answers.drawn(seed, 13)
    assert u != answers.drawn(seed + 1, 12)
    assert u == answers.drawn(seed + 2**64, 12)
    shares = np.array([[u - 1e-3, 1 - u + 1e-3], [u + 1e-3, 1 - u - 1e-3]])
    weights = jnp.asarray(shares, jnp.float32)
    assert inverse_cdf(weights, jnp.full(2, u, jnp.float32)).tolist() == [1, 0]
    top = {**dict(enumerate(np.log(shares[0]))), 2: -30.0}
    assert answers.draw_gap(top, 1.0, 2, u) == pytest.approx(1e-3, rel=0.01)


# The soak's traffic and rules.


def test_cases_are_of_all_kinds_and_variants_leave_what_decides():
    rng = random.Random(0)
    found = traffic.cases(rng, soak.NUM_CASES)
    assert found == traffic.cases(random.Random(0), soak.NUM_CASES)
    bodies = [case.body for case in found]
    assert {case.path for case in found} == {traffic.CHAT, traffic.COMPLETIONS}
    assert sum(case.is_greedy for case in found) == soak.NUM_CASES // 2
    for name in ("n", "stop", "seed", "ignore_eos", "echo"):
        assert sum(name in body for body in bodies) > 2, name
    # A seed's answer can be explained from the best 20 alone.
    assert all(case.is_greedy or case.body["top_k"] < 20 for case in found)
    prompts = [str(body.get("prompt") or body["messages"]) for body in bodies]
    assert max(sum(other[:400] == prompt[:400] for other in prompts) for prompt in prompts) > 3
    streams = 0
    for case in found:
        body = traffic.variant(rng, case)
        streams += body["stream"]
        assert case.body.items() <= body.items()
    assert 10 < streams < 54


def run_of(**changes):
    return {
        "counts": {"tokens": 1000, "queue_full": 1, "cancelled": 1},
        "rss_growth": 0.02,
        "differences": 9,
        "largest_gap": 1e-4,
        "happened": {"preemptions": 1.0},
        "left": {"running": 0.0},
        "compilations": 0.0,
        "failed_steps": 0.0,
        "log_errors": [],
        "open_files": [5.0, 7.0],
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rss_growth": 0.0201}, "memory grew by 2.01%"),
        ({"differences": 10}, "1.00% of all tokens differ"),
        ({"largest_gap": 2e-4}, "a token differs 0.0002 from a tie"),
        ({"happened": {"preemptions": 0.0}}, "never happened"),
        ({"counts": {"tokens": 1000, "queue_full": 1}}, "never happened"),
        ({"left": {"running": 1.0}}, "left over"),
        ({"compilations": 2.0}, "2 compilations"),
        ({"failed_steps": 1.0}, "1 failed steps"),
        ({"log_errors": ["x"]}, "the log has"),
        ({"open_files": [5.0, 8.0]}, "open files"),
        ({"counts": run_of()["counts"] | {"wrong": 3}}, "3 answers were wrong"),
    ],
)
def test_each_rule_is_kept_or_broken(changes, message):
    assert rules.violations(run_of(), 1e-4) == []
    [broken] = rules.violations(run_of(**changes), 1e-4)
    assert message in broken


def test_memory_is_that_of_two_windows():
    # The first minute warms up and does not count; windows are a tenth of the time.
    rss = [(float(at), 50.0 if at < 60 else 100.0 if at < 180 else 103.0) for at in range(200)]
    assert rules.rss_growth(rss, 200.0) == (100.0, 103.0)


def test_faults_in_a_log():
    fine = "2026-01-01 00:00:00,000 INFO jaxinfer: an error of a client: 400"
    bad = ["x ERROR jaxinfer: failed", "Traceback (most recent call last):", "ValueError: x"]
    assert rules.error_lines([fine, *bad]) == bad


# The soak on a tiny engine.


@pytest.fixture
def small(monkeypatch):
    """Requests that fit the tiny engine."""
    bodies = [
        {"prompt": "ab" * 9, "max_tokens": 9, "temperature": 0, "n": 2, "top_p": 1},
        {"prompt": "ab" * 9 + "c", "max_tokens": 30, "temperature": 1, "seed": 3, "top_k": 5},
        {"prompt": "x", "max_tokens": 5, "temperature": 0, "ignore_eos": True, "echo": True},
    ]
    found = [traffic.Case(traffic.COMPLETIONS, body) for body in bodies]
    free = traffic.Case(
        traffic.COMPLETIONS, {"prompt": "q", "max_tokens": 3, "n": 1, "stream": True}
    )
    monkeypatch.setattr(soak, "cases", lambda rng, count: found)
    monkeypatch.setattr(soak, "noise", lambda rng: free)
    monkeypatch.setattr(soak, "NUM_CASES", len(found))
    return found


async def test_a_short_soak(server, small):
    async with make_session(None) as session:
        found = soak.Soak(server.url, session, 1)
        found.tolerance = 1e-4
        for bad in found.bad:
            await found.check_refused(bad)
        await found.ask_alone()
        await found.run(1.5)
        after = await soak.drained(found)
        assert found.wrong == []
        assert await found.explain(None) == []
        assert after[soak.PAGES] == after[soak.WAITING] == 0
        assert after["vllm:prefix_cache_hits_total"] > 0
        for name in ("answers", "tokens", "refused", "queue_full", "cancelled", "noise"):
            assert found.counts[name], name
        assert found.largest_error < 1e-4
        assert found.rss


async def test_a_planted_difference_is_found_and_no_tie(server, small, monkeypatch):
    monkeypatch.setattr(soak, "ids_by_name", lambda model: NAMES)
    async with make_session(None) as session:
        found = soak.Soak(server.url, session, 1)
        found.tolerance = 1e-4
        await found.ask_alone()
        for number, index in ((0, 1), (1, 0)):  # the greedy one and the seeded one
            found.solo[number].choices[index].ids[3] += 1
        while len({id(case) for case, _ in found.differences}) < 2:
            await found._case()
        for case, difference in found.differences:
            assert case in small[:2]
            assert difference.expected == difference.found + 1
        assert min(await found.explain(None)) > 1e-4


NAMES = {
    name: token_id
    for token_id, name in enumerate(
        CompletionLogprobs(byte_tokenizer(TEMPLATE), frozenset()).piece(
            range(VOCAB_SIZE), [None] * VOCAB_SIZE
        )["tokens"]
    )
}


async def test_a_draw_follows_from_its_seed_and_place(server, small):
    """What the soak says of ties is what the engine does: the same number, the same edges."""
    case = small[1]
    async with make_session(None) as session:
        found = soak.Soak(server.url, session, 1)
        alone, _ = await found.ask(case.path, traffic.solo(case))
        ids = alone.choices[0].ids
        for at in range(8):
            before = [*alone.prompt_ids, *ids[:at]]
            ask = {"prompt": before, "max_tokens": 1, "temperature": 0, "logprobs": 20}
            async with session.post(server.url + traffic.COMPLETIONS, json=ask) as response:
                [choice] = (await response.json())["choices"]
            [top] = choice["logprobs"]["top_logprobs"]
            best = sorted(sorted(top, key=top.get)[-case.body["top_k"] :], key=NAMES.get)
            weights = np.exp([top[name] for name in best])
            u = answers.drawn(case.body["seed"], len(before))
            drawn = best[int(np.searchsorted(np.cumsum(weights) / np.sum(weights), u, "right"))]
            assert NAMES[drawn] == ids[at]
