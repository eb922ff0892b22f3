"""The offline API on a tiny engine: what goes in, what comes out, what an interrupt leaves."""

import asyncio
import signal
import threading
import time

import numpy as np
import pytest
from tiny_engine import CONTEXT, empty, shared

import jaxinfer
from jaxinfer.async_engine import AsyncEngine
from jaxinfer.llm import DEFAULT_MAX_TOKENS, LLM
from jaxinfer.sampling_params import InvalidParameter, SamplingParams
from jaxinfer.scheduler.plan import RowResult

GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture
def llm():
    loaded = shared()
    llm = LLM.from_engine(AsyncEngine.from_loaded(loaded))
    yield llm
    llm.engine.close()  # not the memory: this engine is shared
    empty(loaded.engine)


def ids_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_one_text(llm):
    [output] = llm.generate("ab", max_tokens=5, **GREEDY)
    assert (output.prompt, output.prompt_token_ids) == ("ab", [97, 98])
    [completion] = output.outputs
    assert (len(completion.token_ids), completion.finish_reason) == (5, "length")
    assert completion.text == llm.tokenizer.decode(completion.token_ids)


@pytest.mark.parametrize("ids", [[97, 98], (97, 98), range(97, 99)])
def test_ids_of_any_kind_are_one_prompt(llm, ids):
    [output] = llm.generate(ids, max_tokens=5, **GREEDY)
    assert (output.prompt, output.prompt_token_ids) == (None, [97, 98])
    assert ids_of([output]) == ids_of(llm.generate("ab", max_tokens=5, **GREEDY))


def test_texts_and_ids_mixed_keep_their_order(llm):
    prompts = ["ab", [1, 2, 3], "xyz", (97, 98)]
    outputs = llm.generate(iter(prompts), max_tokens=4, **GREEDY)
    assert [output.prompt for output in outputs] == ["ab", None, "xyz", None]
    assert ids_of(outputs)[0] == ids_of(outputs)[3]
    alone = [llm.generate(prompt, max_tokens=4, **GREEDY)[0] for prompt in prompts]
    assert ids_of(outputs) == ids_of(alone)


def test_more_prompts_than_run_at_once(llm):
    outputs = llm.generate([[i] for i in range(9)], max_tokens=3, **GREEDY)
    assert [output.prompt_token_ids for output in outputs] == [[i] for i in range(9)]
    assert all(output.finished for output in outputs)


def test_no_prompts(llm):
    assert llm.generate([]) == []
    assert llm.chat([]) == []


def test_params_for_all_one_per_prompt_and_overrides(llm):
    params = SamplingParams(max_tokens=2, **GREEDY)
    assert [len(ids) for ids in ids_of(llm.generate(["a", "b"], params))] == [2, 2]
    several = [params, SamplingParams(max_tokens=3, n=2, **GREEDY)]
    outputs = llm.generate(["a", "b"], several)
    assert [[len(c.token_ids) for c in output.outputs] for output in outputs] == [[2], [3, 3]]
    outputs = llm.generate(["a", "b"], several, max_tokens=1)
    assert [[len(c.token_ids) for c in output.outputs] for output in outputs] == [[1], [1, 1]]
    with pytest.raises(ValueError, match="2 SamplingParams were given for 1 prompts"):
        llm.generate(["a"], several)


def test_checkpoint_defaults_hold_where_nothing_is_said(llm):
    llm.engine.default_params["temperature"] = 0.0
    try:
        [settings] = llm._settings(None, {}, 1)
        assert (settings.temperature, settings.max_tokens) == (0.0, DEFAULT_MAX_TOKENS)
        [settings] = llm._settings(None, {"temperature": 1.0, "max_tokens": 1}, 1)
        assert (settings.temperature, settings.max_tokens) == (1.0, 1)
        assert llm._settings(SamplingParams(), {}, 1) == [SamplingParams()]
    finally:
        llm.engine.default_params.clear()


def test_unknown_options_are_named_with_the_nearest(llm):
    with pytest.raises(ValueError, match=r"'max_token' is no field .* nearest is 'max_tokens'"):
        llm.generate("a", max_token=3)
    with pytest.raises(ValueError, match=r"'max_seqs' is no field of EngineConfig"):
        LLM("nosuch", max_seqs=3)
    with pytest.raises(ValueError, match=r"'max_token' is no field of SamplingParams and Engine"):
        jaxinfer.generate("a", max_token=3)


def test_what_does_not_fit_is_refused_before_anything_runs(llm):
    steps = llm.engine.stats().steps
    for prompts in (["a", [999]], ["a", ""], ["a", "x" * CONTEXT]):
        with pytest.raises(InvalidParameter):
            llm.generate(prompts, max_tokens=2)
    with pytest.raises(InvalidParameter, match="temperature"):
        llm.generate("a", temperature=-1.0)
    assert llm.engine.stats().steps == steps


def test_score_is_the_prompts_log_probabilities(llm):
    prompts = ["abc", [5, 6]]
    scores = llm.score(prompts, top=2)
    outputs = llm.generate(prompts, max_tokens=1, prompt_logprobs=2, **GREEDY)
    assert scores == [output.prompt_logprobs for output in outputs]
    for ids, row in zip(([97, 98, 99], [5, 6]), scores, strict=True):
        assert row[0] is None
        assert [token.token_id for token in row[1:]] == ids[1:]
        assert all(token.logprob < 0 and len(token.top) == 2 for token in row[1:])
    assert llm.score([7]) == [[None]]


def test_embeddings_are_rows_of_length_one(llm):
    prompts = ["abc", [5, 6], "abc", "x" * CONTEXT]
    vectors = llm.embed(prompts)
    assert vectors.shape == (4, 64)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-6)
    np.testing.assert_allclose(vectors[0], vectors[2], atol=1e-5)
    assert vectors[0] @ vectors[1] < 0.999
    states = llm.embed(prompts, normalize=False)
    assert states.dtype == np.float32
    lengths = np.linalg.norm(states, axis=1, keepdims=True)
    np.testing.assert_allclose(states / lengths, vectors, atol=1e-5)
    np.testing.assert_allclose(llm.embed("abc"), vectors[:1], atol=1e-5)
    assert llm.embed([]).shape == (0, 0)


def test_what_cannot_be_embedded_says_so(llm, monkeypatch):
    for prompts in (["a", ""], "x" * (CONTEXT + 1), [[999]]):
        with pytest.raises(InvalidParameter):
            llm.embed(prompts)
    collect = llm.engine.loaded.engine.runner.collect

    def broken(*args):
        results = collect(*args)
        for result in results:
            result.finite = False
        return results

    monkeypatch.setattr(llm.engine.loaded.engine.runner, "collect", broken)
    with pytest.raises(RuntimeError, match="prompt 0 failed: the model's output is not finite"):
        llm.embed("a")


def test_embedding_has_a_bar_of_its_own(llm, capsys):
    llm.embed(["abc", "abcd"])
    printed = capsys.readouterr().err
    assert "Embedding: 100%" in printed
    assert "2/2" in printed
    assert " 0.0 tok/s" not in printed.splitlines()[-1]


def test_times_of_a_completion(llm):
    """They are those of this completion alone, and waiting for room is in none of them."""
    began = time.perf_counter()
    outputs = llm.generate(["a" * 20] * 9, max_tokens=9, **GREEDY)
    elapsed = time.perf_counter() - began
    for output in outputs:
        times = output.outputs[0].times
        assert times.prompt > 0
        assert times.completion > 0
    # Four run at a time, so that nine take three times as long as one.
    longest = max(
        output.outputs[0].times.prompt + output.outputs[0].times.completion for output in outputs
    )
    assert longest < elapsed / 1.5
    (single,) = llm.generate("abc", max_tokens=1, **GREEDY)
    assert single.outputs[0].times.completion == 0.0


def test_stream_is_generate(llm):
    deltas = list(llm.stream("ab", max_tokens=6, **GREEDY))
    [output] = llm.generate("ab", max_tokens=6, **GREEDY)
    assert "".join(delta.text for delta in deltas) == output.outputs[0].text
    assert [id_ for delta in deltas for id_ in delta.token_ids] == output.outputs[0].token_ids
    assert deltas[-1].finish_reason == "length"


def test_leaving_a_stream_aborts(llm):
    stream = llm.stream("ab", max_tokens=100, **GREEDY)
    next(stream)
    stream.close()
    assert len(ids_of(llm.generate("a", max_tokens=2, **GREEDY))[0]) == 2
    until_idle(llm)


def until_idle(llm):
    """Waits for aborts to be carried out, then checks that nothing was kept."""
    list(llm.stream("a", max_tokens=1))
    stats = llm.engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_pages == stats.num_pages


def test_chat(llm):
    user = {"role": "user", "content": "hi"}
    [output] = llm.chat([user], max_tokens=2, **GREEDY)
    assert output.prompt_token_ids == list(b"[hi]")
    outputs = llm.chat([[user], [user, user]], max_tokens=2, template={"suffix": "!"}, **GREEDY)
    prompts = [output.prompt_token_ids for output in outputs]
    assert prompts == [list(b"[hi]!"), list(b"[hi][hi]!")]


def test_the_bar_counts_completions_and_tokens(llm, capsys):
    llm.generate(["a", "b"], max_tokens=3, n=2, **GREEDY)
    shown = capsys.readouterr()
    assert shown.out == ""
    last = shown.err.rsplit("\r", 1)[-1]
    assert last.startswith("Generating: 100%")
    assert "4/4" in last
    assert "tok/s" in last
    assert not shown.err.endswith(" 0.0 tok/s]\n")


def test_scoring_has_a_bar_of_its_own(llm, capsys):
    llm.score(["abc", "abcd"])
    shown = capsys.readouterr().err
    assert "Scoring: 100%" in shown
    assert "Generating" not in shown
    assert ", 0.0 tok/s" not in shown.rsplit("\r", 1)[-1]


def test_no_bar(llm, capsys):
    llm.generate("a", max_tokens=1, progress=False)
    llm.score("ab", progress=False)
    assert capsys.readouterr().err == ""


async def test_inside_a_running_event_loop(llm):
    assert asyncio.get_running_loop()
    assert len(ids_of(llm.generate("a", max_tokens=3, **GREEDY))[0]) == 3
    assert list(llm.stream("a", max_tokens=1))


def test_two_threads_at_once(llm):
    prompts = [[1, 2], [3, 4, 5], [6]]
    expected = ids_of(llm.generate(prompts, max_tokens=20, **GREEDY))
    results = {}

    def work(number):
        results[number] = ids_of(llm.generate(prompts, max_tokens=20, progress=False, **GREEDY))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == {0: expected, 1: expected}


def test_an_interrupt_aborts_the_batch_and_leaves_the_engine_usable(llm, monkeypatch):
    main = threading.get_ident()
    step = shared().engine.start_step
    interrupted = []

    def step_and_interrupt():
        # In the middle: some tokens have come, none has its last.
        if llm.engine.stats().generation_tokens - before > 20 and not interrupted:
            interrupted.append(True)
            signal.pthread_kill(main, signal.SIGINT)
        return step()

    expected = llm.generate("a", max_tokens=8, **GREEDY)
    before = llm.engine.stats().generation_tokens
    aborted = llm.engine.stats().finished.get("abort", 0)
    monkeypatch.setattr(shared().engine, "start_step", step_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c", "d", "e", "f"], max_tokens=100, **GREEDY)
    until_idle(llm)
    assert llm.engine.stats().finished["abort"] == aborted + 6
    assert llm.engine.stats().generation_tokens - before < 400
    assert ids_of(llm.generate("a", max_tokens=8, **GREEDY)) == ids_of(expected)


def test_one_failing_completion_does_not_take_the_others_with_it(llm, monkeypatch):
    runner = shared().engine.runner
    collect = runner.collect

    def collect_with_a_fault(pending):
        results = collect(pending)
        for number, row in enumerate(pending.plan.rows):
            if row.sequence.prompt_len == 2:
                results[number] = RowResult([], finite=False)
        return results

    monkeypatch.setattr(runner, "collect", collect_with_a_fault)
    broken, whole = llm.generate(["ab", "a"], max_tokens=3, **GREEDY)
    assert broken.outputs[0].finish_reason == "error"
    assert "not finite" in broken.outputs[0].error
    assert len(whole.outputs[0].token_ids) == 3
    assert llm.engine.state == "ready"
