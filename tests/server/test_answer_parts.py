"""What parameters of other servers add to an answer: usage, scores, ids, cuts, echoes, choices."""

import pytest
from server.fake_engine import chat

from jaxinfer.outputs import OutputDelta, PhaseTimes, TokenLogprob
from jaxinfer.server.answers import Usage

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


async def ask(server, path, **body):
    status, reply, _ = await server.post(path, {"max_tokens": 5, **body})
    assert status == 200, reply
    return reply


# Usage: requirements 18 to 21.


def test_speeds_are_tokens_by_time():
    usage = Usage(prompt_tokens=30)
    usage.add(0, OutputDelta("r", 0, token_ids=(1, 2), num_cached_tokens=10))
    usage.add(0, OutputDelta("r", 0, token_ids=(3,), times=PhaseTimes(0.5, 1.5)))
    assert usage.as_json() == {
        "prompt_tokens": 30,
        "completion_tokens": 3,
        "total_tokens": 33,
        "prompt_tokens_details": {"cached_tokens": 10},
        "avg_tok_per_sec": (20 + 3) / 2.0,
        "avg_prompt_tok_per_sec": 20 / 0.5,
        "avg_compl_tok_per_sec": 3 / 1.5,
        "total_time_sec": 2.0,
        "total_prompt_time_sec": 0.5,
        "total_completion_time_sec": 1.5,
    }


def test_a_duration_of_zero_is_a_speed_of_zero():
    usage = Usage(prompt_tokens=30)
    usage.add(0, OutputDelta("r", 0, token_ids=(1,), times=PhaseTimes(0.0, 0.0)))
    speeds = usage.speeds()
    assert set(speeds.values()) == {0.0}
    assert all(isinstance(value, float) for value in speeds.values())


def test_prompts_are_timed_once_and_completions_each():
    usage = Usage(prompt_tokens=20)
    for prompt in (0, 1):
        for index in (0, 1, 2):
            times = PhaseTimes(0.5 + index, 2.0)
            usage.add(prompt, OutputDelta("r", index, token_ids=(1,) * 4, times=times))
    assert usage.prompt_time == 1.0
    assert usage.completion_time == 12.0
    assert usage.speeds()["avg_compl_tok_per_sec"] == 24 / 12.0


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_usage_of_a_stream_is_that_of_the_whole_reply(server, engine, path):
    """A client that adds up the usage of all chunks (W13) gets the right one."""
    engine.times, engine.num_cached = PhaseTimes(0.25, 0.5), 2
    body = {**chat(), "n": 2} if path == CHAT else {"prompt": ["ab", "c"], "n": 2}
    whole = (await ask(server, path, **body))["usage"]
    options = {"stream_options": {"include_usage": True}}
    chunks = await server.chunks(path, {"max_tokens": 5, **body, **options})
    assert [chunk["usage"] for chunk in chunks if chunk["usage"] is not None] == [whole]
    assert chunks[-1]["choices"] == []
    assert whole["total_completion_time_sec"] == 0.5 * (2 if path == CHAT else 4)
    assert whole["total_prompt_time_sec"] == 0.25 * (1 if path == CHAT else 2)


# Cut prompts.


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        ({}, b"abcdef"),
        ({"truncate_prompt_tokens": 2}, b"ef"),
        ({"truncate_prompt_tokens": 2, "truncation_side": "left"}, b"ef"),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, b"ab"),
        ({"truncate_prompt_tokens": 6}, b"abcdef"),
        ({"truncate_prompt_tokens": -1}, b"abcdef"),
        ({"truncation_side": "right"}, b"abcdef"),
    ],
    ids=str,
)
async def test_prompts_are_cut(server, engine, options, ids):
    reply = await ask(server, COMPLETIONS, prompt="abcdef", echo=True, **options)
    assert bytes(engine.requests[-1].prompt_token_ids) == ids
    assert reply["choices"][0]["text"] == ids.decode() + "hello"
    assert reply["usage"]["prompt_tokens"] == len(ids)


async def test_chats_are_cut(server, engine):
    await ask(server, CHAT, **chat("abc"), truncate_prompt_tokens=4)
    assert bytes(engine.requests[-1].prompt_token_ids) == b"ant>"


async def test_minus_one_cuts_to_the_context(server, engine):
    for max_tokens, kept in ((1, 255), (5, 255), (0, 256)):
        body = {"prompt": "x" * 300, "max_tokens": max_tokens, "echo": True}
        await ask(server, COMPLETIONS, **body, truncate_prompt_tokens=-1)
        assert len(engine.requests[-1].prompt_token_ids) == kept
    status, reply, _ = await server.post(
        COMPLETIONS, {"prompt": "x" * 300, "truncate_prompt_tokens": 280}
    )
    assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")


# Scores of the prompt.


async def test_prompt_logprobs_of_a_completion(server, engine):
    reply = await ask(server, COMPLETIONS, prompt=[[97, 98], [99, 100]], n=2, prompt_logprobs=1)
    first, second = reply["choices"][0], reply["choices"][2]
    assert first["prompt_logprobs"] == [
        None,
        {"98": {"logprob": -0.5, "rank": None, "decoded_token": "b"}},
    ]
    assert list(second["prompt_logprobs"][1]) == ["100"]
    assert first["logprobs"] is None
    assert first["text"] == "hello"


async def test_prompt_logprobs_of_a_chat(server, engine):
    reply = await ask(server, CHAT, **chat("a"), prompt_logprobs=3)
    scores = reply["prompt_logprobs"]
    assert len(scores) == reply["usage"]["prompt_tokens"]
    assert scores[0] is None
    prompt = engine.requests[-1].prompt_token_ids
    for token_id, score in zip(prompt[1:], scores[1:], strict=True):
        assert next(iter(score)) == str(token_id)
        assert [entry["rank"] for entry in list(score.values())[1:]] == [2, 3]
    assert "prompt_logprobs" not in await ask(server, CHAT, **chat("a"))


async def test_prompt_logprobs_beside_an_echo(server, engine):
    """Each shows as many alternatives as it was asked for."""
    body = {"prompt": "ab", "echo": True, "logprobs": 1}
    plain = (await ask(server, COMPLETIONS, **body))["choices"][0]
    both = (await ask(server, COMPLETIONS, **body, prompt_logprobs=4))["choices"][0]
    assert both["logprobs"] == plain["logprobs"]
    assert len(both["prompt_logprobs"][1]) == 4
    assert "prompt_logprobs" not in plain


async def test_ranks_are_those_of_the_whole_vocabulary(server, engine, monkeypatch):
    entry = TokenLogprob(98, -9.0, ((5, -0.1), (6, -0.2)), 40)

    async def generate(request):
        scores = (None, entry)
        yield OutputDelta(request.request_id, 0, "h", (104,), None, "length", None, scores)

    monkeypatch.setattr(engine, "generate", generate)
    for count, ids in ((0, ["98"]), (1, ["98", "5"]), (2, ["98", "5", "6"])):
        reply = await ask(server, COMPLETIONS, prompt="ab", prompt_logprobs=count)
        score = reply["choices"][0]["prompt_logprobs"][1]
        assert list(score) == ids
        assert [value["rank"] for value in score.values()] == [40, 1, 2][: len(ids)]


# Names of tokens.


async def test_tokens_named_by_their_ids(server):
    body = {"prompt": "ab", "logprobs": 1, "echo": True, "return_tokens_as_token_ids": True}
    logprobs = (await ask(server, COMPLETIONS, **body))["choices"][0]["logprobs"]
    assert logprobs["tokens"][:3] == ["token_id:97", "token_id:98", "token_id:104"]
    assert logprobs["top_logprobs"][1] == {"token_id:98": -0.5}
    assert logprobs["text_offset"][:3] == [0, 1, 2]
    body = {**chat(), "logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": True}
    (choice,) = (await ask(server, CHAT, **body))["choices"]
    entry = choice["logprobs"]["content"][0]
    assert (entry["token"], entry["bytes"]) == ("token_id:104", [104])
    assert entry["top_logprobs"][1]["token"] == "token_id:1"


# Echo of a chat.


@pytest.mark.parametrize("n", [1, 2])
async def test_an_echo_is_the_last_message_of_the_assistant(server, n):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "I say "}]
    body = {"messages": messages, "echo": True, "continue_final_message": True, "n": n}
    reply = await ask(server, CHAT, **body)
    assert [c["message"]["content"] for c in reply["choices"]] == ["I say hello"] * n
    chunks = await server.chunks(CHAT, {"max_tokens": 5, **body})
    texts = [""] * n
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == ["I say hello"] * n
    assert [chunk["choices"][0]["delta"].get("role") for chunk in chunks].count("assistant") == n


async def test_no_echo_of_what_others_say(server):
    reply = await ask(server, CHAT, **chat("q"), echo=True)
    assert reply["choices"][0]["message"]["content"] == "hello"


# The best of several.


async def test_the_best_of_several_are_those_of_the_highest_mean(server, engine, monkeypatch):
    """Not of the highest sum: a longer one is not worse for its length."""
    means = [-3.0, -1.0, -2.0, -0.5]

    async def generate(request):
        assert request.params.n == 4
        assert request.params.logprobs == 0
        for index, mean in enumerate(means):
            ids = (104,) * (index + 1)
            logprobs = (TokenLogprob(104, mean),) * len(ids)
            yield OutputDelta(request.request_id, index, f"<{index}>", ids, logprobs, "stop")

    monkeypatch.setattr(engine, "generate", generate)
    reply = await ask(server, COMPLETIONS, prompt=["a", "b"], n=2, best_of=4)
    assert [choice["text"] for choice in reply["choices"]] == ["<3>", "<1>", "<3>", "<1>"]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in reply["choices"])
    assert reply["usage"]["completion_tokens"] == 2 * (1 + 2 + 3 + 4)
