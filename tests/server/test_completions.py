"""Completions in detail: batches, echo, scoring, log-probabilities, token ids."""

import pytest
from server.fake_engine import chat

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


async def complete(server, **body):
    status, reply, _ = await server.post(COMPLETIONS, {"max_tokens": 5, **body})
    assert status == 200, reply
    return reply


async def stream(server, **body):
    """Returns the choices that the chunks of a stream add up to."""
    choices = {}
    for chunk in await server.chunks(COMPLETIONS, {"max_tokens": 5, **body}):
        for piece in chunk["choices"]:
            choice = choices.setdefault(piece["index"], {"text": "", "logprobs": None})
            choice["text"] += piece["text"]
            choice["finish_reason"] = piece["finish_reason"]
            if piece["logprobs"] is not None:
                logprobs = choice["logprobs"] or {name: [] for name in piece["logprobs"]}
                for name, values in piece["logprobs"].items():
                    logprobs[name] += values
                choice["logprobs"] = logprobs
    return [choices[index] for index in sorted(choices)]


BODIES = [
    {"prompt": "ab"},
    {"prompt": ["ab", "cd"], "n": 2},
    {"prompt": [[1, 2], [3]], "echo": True},
    {"prompt": "ab", "echo": True, "n": 2},
    {"prompt": "ab", "logprobs": 2},
    {"prompt": "ab", "logprobs": 0, "echo": True},
    {"prompt": ["ab", "xyz"], "logprobs": 3, "echo": True, "n": 2},
    {"prompt": "ab", "logprobs": 1, "echo": True, "max_tokens": 0},
    {"prompt": "ab", "echo": True, "max_tokens": 0},
    {"prompt": "ab", "stop": ["l"]},
]


@pytest.mark.parametrize("body", BODIES, ids=str)
async def test_streams_add_up_to_whole_replies(server, body):
    whole = (await complete(server, **body))["choices"]
    streamed = await stream(server, **body)
    assert len(whole) == len(streamed)
    for expected, got in zip(whole, streamed, strict=True):
        assert {name: expected[name] for name in got} == got


async def test_choices_are_ordered_by_prompt_then_by_n(server, engine):
    reply = await complete(server, prompt=["ab", "cde"], n=2, echo=True)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in reply["choices"]] == ["abhello", "abhello", "cdehello", "cdehello"]
    usage = reply["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 20)
    assert reply["object"] == "text_completion"
    seeds = {request.params.seed for request in engine.requests}
    assert len(seeds) == 1
    assert seeds != {None}


async def test_without_a_seed_each_request_gets_another(server, engine):
    for _ in range(2):
        await complete(server, prompt="ab")
    first, second = (request.params.seed for request in engine.requests)
    assert first != second


async def test_the_operators_seed_is_that_of_requests_without_one(start, engine):
    server = await start(seed=11)
    for parameters in ({}, {"seed": 0}, {}):
        await complete(server, prompt="ab", **parameters)
    await server.post(CHAT, chat())
    assert [request.params.seed for request in engine.requests] == [11, 0, 11, 11]


async def test_scoring_as_lm_eval_asks_for_it(server):
    reply = await complete(
        server, prompt=[[104, 105, 106]], max_tokens=1, logprobs=1, echo=True, temperature=0, seed=1
    )
    logprobs = reply["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["h", "i", "j", "h"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"] == [None, {"i": -0.5}, {"j": -0.5}, {"h": -0.5}]
    assert logprobs["text_offset"] == [0, 1, 2, 3]


async def test_scoring_without_generating(server):
    for body in ({"logprobs": 1}, {}):
        reply = await complete(server, prompt="abc", echo=True, max_tokens=0, **body)
        choice = reply["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
        assert reply["usage"]["completion_tokens"] == 0
        if body:
            assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]


async def test_a_full_context_can_be_scored(server):
    body = {"prompt": [1] * 256, "echo": True, "max_tokens": 0, "logprobs": 0}
    assert len((await complete(server, **body))["choices"][0]["logprobs"]["tokens"]) == 256


async def test_offsets_count_characters_and_names_are_never_ambiguous(server, engine):
    engine.text = "é日"
    reply = await complete(server, prompt="a", logprobs=1)
    logprobs = reply["choices"][0]["logprobs"]
    assert logprobs["text_offset"] == [0, 0, 1, 1, 1]
    assert logprobs["tokens"][:2] == ["bytes:\\xc3", "bytes:\\xa9"]
    for token, value, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[token] == value


async def test_the_chosen_token_is_in_its_dict_also_when_it_is_not_among_the_best(server):
    reply = await complete(server, prompt="a", logprobs=0)
    logprobs = reply["choices"][0]["logprobs"]
    assert [list(top) for top in logprobs["top_logprobs"]] == [[c] for c in "hello"]


async def test_chat_logprobs_join_to_the_content(server, engine):
    engine.text = "d\u010f🌶"
    for top, body in ((0, {}), (3, {"top_logprobs": 3})):
        _status, reply, _ = await server.post(CHAT, chat(logprobs=True, **body))
        content = reply["choices"][0]["logprobs"]["content"]
        joined = b"".join(bytes(entry["bytes"]) for entry in content)
        assert joined.decode() == reply["choices"][0]["message"]["content"] == engine.text
        assert len(content) == reply["usage"]["completion_tokens"]
        for entry in content:
            values = [item["logprob"] for item in entry["top_logprobs"]]
            assert len(values) == top
            assert values == sorted(values, reverse=True)


async def test_streamed_chat_logprobs_are_those_of_the_whole_reply(server):
    body = chat(logprobs=True, top_logprobs=2)
    _, reply, _ = await server.post(CHAT, body)
    pieces = [
        entry
        for chunk in await server.chunks(CHAT, body)
        for choice in chunk["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert pieces == reply["choices"][0]["logprobs"]["content"]


async def test_logprobs_are_always_json(server, engine, monkeypatch):
    from jaxinfer.outputs import OutputDelta, TokenLogprob

    async def generate(request):
        entry = TokenLogprob(104, float("-inf"), ((104, float("-inf")),))
        yield OutputDelta(request.request_id, 0, "h", (104,), (entry,), "length")

    engine.generate = generate
    reply = await complete(server, prompt="a", logprobs=1)
    assert reply["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]


async def test_stop_reasons_and_token_ids(server):
    reply = await complete(server, prompt="a", stop=["l"], return_token_ids=True)
    choice = reply["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("he", "l")
    assert choice["token_ids"] == [104, 101, 108]
    assert choice["prompt_token_ids"] == [97]
    reply = await complete(server, prompt="a", stop_token_ids=[108])
    assert reply["choices"][0]["stop_reason"] == 108
    body = chat(stop="l", include_stop_str_in_output=True, return_token_ids=True)
    _, reply, _ = await server.post(CHAT, body)
    assert reply["choices"][0]["message"]["content"] == "hel"
    chunks = await server.chunks(CHAT, body)
    ids = [i for chunk in chunks for c in chunk["choices"] for i in c.get("token_ids", [])]
    assert ids == reply["choices"][0]["token_ids"]


async def test_ignore_eos_runs_to_max_tokens(server):
    reply = await complete(server, prompt="a", ignore_eos=True, max_tokens=40)
    assert reply["usage"]["completion_tokens"] == 40


async def test_tokenizing_over_http(server):
    status, reply, _ = await server.post("/tokenize", {"prompt": "hi", "add_special_tokens": False})
    assert (status, reply) == (200, {"tokens": [104, 105], "count": 2, "max_model_len": 256})
    _, reply, _ = await server.post("/tokenize", {"content": "h", "with_pieces": True})
    assert reply["tokens"] == [{"id": 104, "piece": "h"}]
    _, reply, _ = await server.post("/detokenize", {"tokens": [104, 105, 257]})
    assert reply == {"prompt": "hi</s>", "content": "hi</s>"}
    for path, body in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": 5}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [258]}),
        ("/detokenize", {"tokens": [-1]}),
    ):
        status, reply, _ = await server.post(path, body)
        assert (status, reply["error"]["type"]) == (400, "invalid_request_error")
    status, reply, _ = await server.get("/tokenizer_info")
    assert status == 200
    assert (reply["bos_token"], reply["eos_token"]) == ("<s>", "</s>")
    assert "messages" in reply["chat_template"]
