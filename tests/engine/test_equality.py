"""DESIGN §6: what must be bit-equal (E0), and what must agree to 1e-4 (E1)."""

import dataclasses

import pytest

GREEDY = {"temperature": 0.0, "max_tokens": 12, "logprobs": 3}
SEEDED = {
    "temperature": 0.9,
    "top_p": 0.95,
    "top_k": 40,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "seed": 7,
    "max_tokens": 12,
    "logprobs": 3,
}


def ids(outputs):
    return [choice.token_ids for output in outputs for choice in output.outputs]


def logprobs(outputs):
    return [
        entry.logprob
        for output in outputs
        for choice in output.outputs
        for entry in choice.logprobs
    ]


def whole(outputs):
    """Everything a client could see, for bit-equality."""
    return [dataclasses.asdict(output) for output in outputs]


@pytest.fixture
def requests(prompt):
    """Nine requests of mixed lengths, greedy and seeded."""
    return [
        (prompt(length, seed), {**(GREEDY if seed % 2 else SEEDED), "ignore_eos": True})
        for seed, length in enumerate([1, 3, 4, 5, 31, 33, 60, 17, 8])
    ]


def assert_e1(outputs, expected):
    """Same ids, and log-probabilities within 1e-4."""
    assert ids(outputs) == ids(expected)
    assert logprobs(outputs) == pytest.approx(logprobs(expected), abs=1e-4)


def in_pairs(run, engine, requests):
    """Runs two at a time, so that every decode step has the one rung of a two-row engine."""
    outputs = []
    for first in range(0, len(requests), 2):
        outputs += run(engine, requests[first : first + 2])
    return whole(outputs)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
@pytest.mark.parametrize(
    "options",
    [{"pipeline_depth": 1}, {"decode_steps": 5}, {"decode_steps": 4, "pipeline_depth": 1}],
    ids=["depth 1", "5 steps", "4 steps at depth 1"],
)
def test_e0_depth_and_bulk_decode(make_engine, run, requests, model_type, options):
    plain = in_pairs(run, make_engine(model_type, max_num_seqs=2), requests)
    other = in_pairs(run, make_engine(model_type, max_num_seqs=2, **options), requests)
    assert other == plain


def test_e1_depth_and_bulk_decode_under_load(make_engine, run, requests):
    expected = run(make_engine(), requests)
    assert_e1(run(make_engine(pipeline_depth=1), requests), expected)
    assert_e1(run(make_engine(decode_steps=3, pipeline_depth=1), requests), expected)


def test_e0_batchmates_at_one_rung(make_engine, run, prompt):
    engine = make_engine(max_num_seqs=2)
    mine = (prompt(9, 1), {**SEEDED, "ignore_eos": True})
    first, second = (
        run(engine, [mine, (prompt(9, other), {**SEEDED, "seed": other, "ignore_eos": True})])[0]
        for other in (2, 3)
    )
    assert whole([first]) == whole([second])


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"])
def test_e1_batched_or_alone(make_engine, run, requests, model_type):
    engine = make_engine(model_type)
    assert_e1(run(engine, requests), run(engine, requests, together=False))


@pytest.mark.parametrize("depth", [0, 1])
def test_e1_preempted_or_not(make_engine, run, requests, depth):
    engine = make_engine(num_pages=24, pipeline_depth=depth)
    outputs = run(engine, requests)
    assert engine.stats().num_preemptions > 0, "the pool was meant to be too small"
    assert_e1(outputs, run(make_engine(), requests))


def test_e1_chunked_prefill(make_engine, run, requests):
    small = make_engine(max_num_batched_tokens=5)
    assert_e1(run(small, requests), run(make_engine(), requests))


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_e1_tensor_parallel(make_engine, run, requests, model_type):
    two = make_engine(model_type, tensor_parallel=2)
    assert_e1(run(two, requests), run(make_engine(model_type), requests))


def test_prompt_scores_do_not_depend_on_chunks_or_preemption(make_engine, run, prompt):
    params = {"temperature": 0.0, "max_tokens": 12, "prompt_logprobs": 2, "ignore_eos": True}
    requests = [(prompt(length, length), params) for length in (30, 30, 1, 2, 50, 41)]
    plain = run(make_engine(), requests)
    engine = make_engine(max_num_batched_tokens=6, num_pages=16)
    small = run(engine, requests)
    assert engine.stats().num_preemptions > 0, "the pool was meant to be too small"
    for output, expected in zip(small, plain, strict=True):
        length = len(expected.prompt_token_ids)
        scores = output.prompt_logprobs
        assert len(scores) == length
        assert scores[0] is None
        for mine, theirs in zip(scores[1:], expected.prompt_logprobs[1:], strict=True):
            assert mine.token_id == theirs.token_id
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
