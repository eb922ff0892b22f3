"""What each sampling setting does to a completion, end to end."""

import dataclasses

import numpy as np
import pytest
from engine.builders import EOS, forced, tiny_model
from models.conftest import PagedModel

from jaxinfer.request import EngineRequest
from jaxinfer.sampling_params import InvalidParameter, SamplingParams


@pytest.fixture(scope="module")
def full_forward():
    """Logits of every position of a sequence of at most 64 tokens, from one step without reuse."""
    paged = PagedModel(tiny_model()[0], num_seqs=1)

    def logits(token_ids):
        paged.kv_lens[0] = 0
        return paged.step({0: list(token_ids)}, num_tokens=64)[0].astype(np.float64)

    return logits


def log_softmax(x):
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def one(outputs):
    (output,) = outputs
    (choice,) = output.outputs
    return choice


# Seeds and siblings.


def test_a_seed_gives_the_same_tokens_whatever_else_runs(make_engine, run, prompt, depth):
    engine = make_engine(pipeline_depth=depth)
    mine = (prompt(11, 1), {"seed": 5, "max_tokens": 20, "ignore_eos": True})
    alone = one(run(engine, [mine]))
    other_seed = one(run(engine, [(mine[0], {**mine[1], "seed": 6})]))
    assert other_seed.token_ids != alone.token_ids
    for load in range(1, 5):
        crowd = [
            (prompt(3 + 9 * i, i), {"max_tokens": 5 + i, "top_k": 20, "presence_penalty": 1.0})
            for i in range(load)
        ]
        assert run(engine, [*crowd, mine])[-1].outputs[0].token_ids == alone.token_ids
        assert run(engine, [mine, *crowd])[0].outputs[0].token_ids == alone.token_ids


def test_siblings_differ_and_can_be_reproduced(make_engine, run, prompt):
    engine = make_engine()
    base = {"max_tokens": 12, "ignore_eos": True, "logprobs": 0}
    (output,) = run(engine, [(prompt(7), {**base, "seed": 2**63 - 2, "n": 6})])
    texts = [tuple(choice.token_ids) for choice in output.outputs]
    assert len(set(texts)) == 6
    (again,) = run(engine, [(prompt(7), {**base, "seed": 2**63 - 2, "n": 6})])
    assert [tuple(choice.token_ids) for choice in again.outputs] == texts
    seeds = [2**63 - 2, 2**63 - 1, *range(-(2**63), -(2**63) + 4)]  # int64 wraps round
    for seed, text in zip(seeds, texts, strict=True):
        assert tuple(one(run(engine, [(prompt(7), {**base, "seed": seed})])).token_ids) == text


def test_without_a_seed_every_request_is_its_own(make_engine, run, prompt):
    params = {"max_tokens": 12, "ignore_eos": True}
    outputs = run(make_engine(), [(prompt(7), params)] * 4)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 4


# Stop ids.


def test_end_of_sequence_ends_and_has_no_text(make_engine, run, depth):
    choice = one(run(make_engine(pipeline_depth=depth), [([1], forced(b"ab\xc3", max_tokens=9))]))
    assert choice.finish_reason == "length"
    params = forced(b"ab")
    params["logit_bias"] |= {EOS: 80.0}
    choice = one(run(make_engine(pipeline_depth=depth), [([1], params)]))
    assert choice.text == "ab"
    assert choice.token_ids == [97, 98, EOS]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", None)


def test_ignore_eos_goes_on_to_the_length(make_engine, run, depth):
    params = {"temperature": 0.0, "logit_bias": {EOS: 100.0}, "ignore_eos": True, "max_tokens": 4}
    choice = one(run(make_engine(pipeline_depth=depth), [([1], params)]))
    assert choice.token_ids == [EOS] * 4
    assert choice.text == "", "a special token has no text"
    assert choice.finish_reason == "length"
    shown = {**params, "skip_special_tokens": False}
    assert one(run(make_engine(), [([1], shown)])).text == "</s>" * 4


@pytest.mark.parametrize("steps", [1, 5])
def test_stop_ids_end_after_min_tokens(make_engine, run, depth, steps):
    engine = make_engine(pipeline_depth=depth, decode_steps=steps)
    for temperature in (0.0, 1.0):
        params = {
            "temperature": temperature,
            "logit_bias": {65: 100.0, EOS: 90.0},
            "stop_token_ids": (65,),
            "max_tokens": 9,
            "seed": 1,
        }
        for min_tokens in (0, 1, 3, 8):
            choice = one(run(engine, [([1, 2], {**params, "min_tokens": min_tokens})]))
            assert len(choice.token_ids) == min_tokens + 1
            assert choice.token_ids[-1] == 65
            assert not {65, EOS} & set(choice.token_ids[:-1])
            assert (choice.finish_reason, choice.stop_reason) == ("stop", 65)
        never = one(run(engine, [([1, 2], {**params, "min_tokens": 9})]))
        assert never.finish_reason == "length"
        assert not {65, EOS} & set(never.token_ids)


def test_min_tokens_beyond_any_context_never_stops(make_engine, run, depth):
    params = {"temperature": 0.0, "logit_bias": {EOS: 100.0}, "min_tokens": 2**31 - 1}
    choice = one(run(make_engine(pipeline_depth=depth), [([1] * 240, params)]))
    assert len(choice.token_ids) == 16
    assert choice.finish_reason == "length"


# Forced text and stop strings.


@pytest.mark.parametrize("num_tokens", range(1, 13))
def test_characters_of_several_tokens(make_engine, num_tokens):
    text = "dé€🌶n"
    data = text.encode()
    engine = make_engine(pipeline_depth=1)
    params = SamplingParams(**forced(text, max_tokens=num_tokens, logprobs=1))
    engine.add(EngineRequest("r", (1,), params))
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    written = b"".join(bytes(delta.token_ids) for delta in deltas)
    assert written[: len(data)] == data[:num_tokens]
    assert len(written) == num_tokens
    assert "".join(delta.text for delta in deltas) == written.decode(errors="replace")
    if num_tokens <= len(data):
        assert not any("\ufffd" in delta.text for delta in deltas[:-1]), "only a cut end is"
    assert [len(delta.logprobs) for delta in deltas] == [len(delta.token_ids) for delta in deltas]


@pytest.mark.parametrize(
    ("text", "stop", "shown", "matched"),
    [
        ("ABCOPQR", ["OPQ"], "ABC", "OPQ"),
        ("ABCOPQR", ["OPX", "C"], "AB", "C"),
        ("ABCOPQR", ["A"], "", "A"),
        ("xyEN", ["END"], "xyEN", None),
        ("xfobarz", ["fo", "fobar"], "x", "fo"),
        ("xfobarz", ["fobar", "ob"], "xf", "ob"),
        ("abéc", ["é"], "ab", "é"),
        ("a\ncd", ["\n"], "a", "\n"),
        ("ab€", ["b€"], "a", "b€"),
        ("OPxyz", ["STOP"], "OPxyz", None),
    ],
    ids=str,
)
def test_stop_strings(make_engine, run, depth, text, stop, shown, matched):
    engine = make_engine(pipeline_depth=depth, decode_steps=5)
    prompt = list(b"\x01ST")  # what would complete "STOP" is prompt, and takes no part
    params = forced(text, stop=stop, max_tokens=len(text.encode()))
    seen = []
    engine_step = engine.step

    def step():
        deltas = engine_step()
        seen.extend(delta.text for delta in deltas)
        return deltas

    engine.step = step
    # A neighbour keeps the engine busy after the match.
    neighbour = ([1], {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True})
    choice = run(engine, [(prompt, params), neighbour])[0].outputs[0]
    assert choice.text == shown
    assert choice.finish_reason == ("length" if matched is None else "stop")
    assert choice.stop_reason == matched
    end = len(text) if matched is None else text.index(matched) + len(matched)
    assert bytes(choice.token_ids) == text[:end].encode(), "nothing after the match is kept"
    (whole,) = run(engine, [(prompt, {**params, "include_stop_str_in_output": True, "n": 2})])
    for choice in whole.outputs:
        assert choice.text == shown + (matched or "")
        assert choice.stop_reason == matched


def test_a_stop_string_and_an_open_character_at_the_end(make_engine, run, depth):
    engine = make_engine(pipeline_depth=depth)
    params = forced("a€", stop=["a€"], max_tokens=3)
    assert one(run(engine, [([1], params)])).text == "a\ufffd"
    params = forced("a€", stop=["a\ufffd"], max_tokens=3)
    choice = one(run(engine, [([1], params)]))
    assert (choice.text, choice.finish_reason) == ("", "stop")


# The context.


@pytest.mark.parametrize("length", [254, 255])
def test_the_last_positions_of_the_context(make_engine, run, prompt, length, depth):
    engine = make_engine(pipeline_depth=depth)
    params = {"temperature": 0.0, "ignore_eos": True, "logprobs": 0}
    choice = one(run(engine, [(prompt(length), {**params, "max_tokens": 1})]))
    assert (len(choice.token_ids), choice.finish_reason) == (1, "length")
    for asked in (2, 10, None):
        cut = one(run(engine, [(prompt(length), {**params, "max_tokens": asked})]))
        assert len(cut.token_ids) == 256 - length
        assert cut.token_ids[0] == choice.token_ids[0]
        assert cut.finish_reason == "length"


def test_max_tokens_is_cut_to_the_room(make_engine, run, prompt):
    params = {"temperature": 0.0, "ignore_eos": True}
    for length, asked, expected in [(250, 10, 6), (8, 250, 248), (3, 2**63 - 1, 253)]:
        choice = one(run(make_engine(), [(prompt(length), {**params, "max_tokens": asked})]))
        assert len(choice.token_ids) == expected
        assert choice.finish_reason == "length"


@pytest.mark.parametrize("length", [256, 257])
def test_a_full_context_is_refused_by_name(make_engine, prompt, length):
    engine = make_engine()
    request = EngineRequest("r", tuple(prompt(length)), SamplingParams(n=3, max_tokens=1))
    with pytest.raises(InvalidParameter, match=f"256 tokens, but the prompt has {length}") as error:
        engine.add(request)
    assert error.value.code == "context_length_exceeded"
    assert not engine.has_work


def test_a_request_the_pool_can_never_hold_is_refused(make_engine):
    engine = make_engine(num_pages=10)
    with pytest.raises(InvalidParameter, match="need more KV pages than the pool has"):
        engine.add(EngineRequest("r", (1,) * 30, SamplingParams(max_tokens=11)))
    assert not engine.has_work


def test_more_completions_than_may_ever_wait_are_refused(make_engine):
    engine = make_engine(max_queued_requests=3)
    with pytest.raises(InvalidParameter, match="n is 4, but at most 3"):
        engine.add(EngineRequest("r", (1,), SamplingParams(n=4, max_tokens=1)))
    engine.add(EngineRequest("r", (1,), SamplingParams(n=3, max_tokens=1)))


@pytest.mark.parametrize(
    ("prompt_ids", "params", "param"),
    [
        ((), {}, "prompt"),
        ((258,), {}, "prompt"),
        ((-1,), {}, "prompt"),
        ((1,), {"logit_bias": {258: 1.0}}, "logit_bias"),
        ((1,), {"stop_token_ids": [258]}, "stop_token_ids"),
    ],
    ids=str,
)
def test_ids_outside_the_vocabulary_are_refused(make_engine, prompt_ids, params, param):
    engine = make_engine()
    with pytest.raises(InvalidParameter) as error:
        engine.add(EngineRequest("r", prompt_ids, SamplingParams(**params)))
    assert error.value.param == param
    assert not engine.has_work


def test_the_largest_id_can_be_biased(make_engine, run):
    params = {"temperature": 0.0, "logit_bias": {257: 100.0}, "ignore_eos": True, "max_tokens": 2}
    assert one(run(make_engine(), [([257], params)])).token_ids == [257, 257]


# Scores.


def check_scores(entries, token_ids, expected):
    """`entries` score `token_ids[1:]` as `expected`, the log-probabilities per position, does."""
    assert len(entries) == len(token_ids)
    assert entries[0] is None
    for position, entry in enumerate(entries[1:]):
        token = token_ids[position + 1]
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(expected[position, token], abs=1e-4)
        best = np.sort(expected[position])[::-1][: len(entry.top)]
        np.testing.assert_allclose([value for _, value in entry.top], best, atol=1e-4)
        for top_id, value in entry.top:
            assert value == pytest.approx(expected[position, top_id], abs=1e-4)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 33, 60])
def test_prompt_and_output_logprobs_are_the_models(make_engine, run, prompt, full_forward, length):
    params = {"seed": 1, "max_tokens": 4, "ignore_eos": True, "logprobs": 20, "prompt_logprobs": 5}
    params |= {"repetition_penalty": 2.0, "logit_bias": {3: 9.0}, "temperature": 0.5}
    crowd = (prompt(40, 9), {"max_tokens": 12, "ignore_eos": True})
    output = run(make_engine(pipeline_depth=1), [(prompt(length), params), crowd])[0]
    token_ids = output.prompt_token_ids + output.outputs[0].token_ids
    expected = log_softmax(full_forward(token_ids))
    check_scores(output.prompt_logprobs + output.outputs[0].logprobs, token_ids, expected)
    assert all(len(entry.top) == 5 for entry in output.prompt_logprobs[1:])
    assert all(len(entry.top) == 20 for entry in output.outputs[0].logprobs)


@pytest.mark.parametrize("length", [1, 2, 40, 64, 256])
def test_max_tokens_0_only_scores(make_engine, run, prompt, full_forward, length, depth):
    engine = make_engine(pipeline_depth=depth, max_num_batched_tokens=20)
    params = {"max_tokens": 0, "prompt_logprobs": 0, "n": 2}
    (output,) = run(engine, [(prompt(length), params)])
    for choice in output.outputs:
        assert (choice.text, choice.token_ids, choice.finish_reason) == ("", [], "length")
    assert len(output.prompt_logprobs) == length
    if length <= 64:
        expected = log_softmax(full_forward(prompt(length)))
        check_scores(output.prompt_logprobs, prompt(length), expected)
    assert engine.stats().generation_tokens == 0


# Penalties, against a loop that recomputes everything.


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.05},
        {"frequency_penalty": 0.02},
        {"repetition_penalty": 0.9, "presence_penalty": -0.02, "frequency_penalty": 0.03},
        {"logit_bias": {7: 0.5, 9: 0.4}, "repetition_penalty": 1.2, "frequency_penalty": 0.1},
    ],
    ids=str,
)
def test_penalised_greedy_equals_a_naive_loop(make_engine, run, prompt, full_forward, params):
    expected, token_ids = [], prompt(9, 3)
    for _ in range(24):
        x = full_forward(token_ids)[-1]
        for token, bias in params.get("logit_bias", {}).items():
            x[token] += bias
        seen, times = (
            sorted({*prompt(9, 3), *expected}),
            np.bincount(expected or [0], minlength=258),
        )
        times = times if expected else times * 0
        factor = params.get("repetition_penalty", 1.0)
        x[seen] = np.where(x[seen] > 0, x[seen] / factor, x[seen] * factor)
        x -= params.get("frequency_penalty", 0.0) * times
        x -= params.get("presence_penalty", 0.0) * (times > 0)
        best, second = np.sort(x)[::-1][:2]
        assert best - second > 1e-4, "a near tie proves nothing: choose another prompt"
        expected.append(int(np.argmax(x)))
        token_ids = [*token_ids, expected[-1]]
    settings = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **params}
    for options in ({}, {"decode_steps": 5, "pipeline_depth": 1}):
        crowd = (prompt(20, 4), {"max_tokens": 9, "seed": 3, "ignore_eos": True})
        outputs = run(make_engine(**options), [(prompt(9, 3), settings), crowd])
        assert outputs[0].outputs[0].token_ids == expected


@pytest.mark.parametrize("temperature", [1e-3, 1e-5, 1e-9, 5e-324])
def test_tiny_temperatures_are_greedy(make_engine, run, prompt, temperature):
    params = forced("San Jose"[:5] + "x", max_tokens=6, logprobs=2)
    crowd = (prompt(8, 1), {"seed": 2, "max_tokens": 10, "ignore_eos": True})
    greedy = run(make_engine(), [([1], params), crowd])
    for extra in ({}, {"top_p": 0.9}, {"min_p": 1.0}, {"top_k": 3}):
        warm = {**params, "temperature": temperature, **extra}
        outputs = run(make_engine(), [([1], warm), crowd])
        assert dataclasses.asdict(outputs[0]) == dataclasses.asdict(greedy[0])
        assert outputs[1].outputs[0].token_ids == greedy[1].outputs[0].token_ids
