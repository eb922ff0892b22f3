"""What an answer must match: every name for it, and that it is refused before anything is sent."""

import asyncio
import json
import threading

import aiohttp
import pytest
from server.fake_engine import chat
from tiny_server import tiny_server

from jaxinfer.async_engine import QueueFullError
from jaxinfer.config import ServerConfig
from jaxinfer.grammar import Grammar
from jaxinfer.sampling_params import InvalidParameter
from jaxinfer.server.constraints import CONSTRAINTS, read_constraint
from jaxinfer.server.errors import ApiError
from jaxinfer.server.protocol_chat import parse_chat
from jaxinfer.server.protocol_completions import parse_completion

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA)
LARK = 'start: "a"'
GBNF = 'root ::= "a"'
NAMED = {"name": "an-answer_1", "schema": SCHEMA, "strict": True, "description": "d"}


def read_chat(**parameters):
    body = {**chat(), **parameters}
    return parse_chat(body, defaults={}, vocab_size=258, config=ServerConfig()).options.params


def read_completion(**parameters):
    body = {"prompt": "x", **parameters}
    return parse_completion(body, defaults={}, vocab_size=258, config=ServerConfig()).options.params


both = pytest.mark.parametrize("read", [read_chat, read_completion])

WAYS = [
    ("response_format", {"type": "json_object"}, ("json_object", None)),
    ("response_format", {"type": "json_object", "schema": SCHEMA}, ("json_schema", SCHEMA)),
    ("response_format", {"type": "json_schema", "json_schema": NAMED}, ("json_schema", SCHEMA)),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {"schema": {}, "strict": None}},
        ("json_schema", {}),
    ),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {"name": "x"}},
        ("json_object", None),
    ),
    ("guided_json", SCHEMA, ("json_schema", SCHEMA)),
    ("guided_json", TEXT, ("json_schema", SCHEMA)),
    ("json_schema", SCHEMA, ("json_schema", SCHEMA)),
    ("json_schema", TEXT, ("json_schema", SCHEMA)),
    ("guided_regex", "a+", ("regex", "a+")),
    ("regex", "a+", ("regex", "a+")),
    ("guided_choice", ["a", "b"], ("choice", ("a", "b"))),
    ("guided_grammar", LARK, ("lark", LARK)),
    ("guided_grammar", GBNF, ("lark", GBNF)),
    ("grammar", GBNF, ("lark", GBNF)),
    ("ebnf", GBNF, ("lark", GBNF)),
    ("grammar", {"type": "regex", "value": "a+"}, ("regex", "a+")),
    ("grammar", {"type": "lark", "value": LARK}, ("lark", LARK)),
    ("grammar", {"type": "json_schema", "value": SCHEMA}, ("json_schema", SCHEMA)),
    ("grammar", {"type": "llguidance", "value": LARK}, ("lark", LARK)),
    ("grammar", {"type": "llguidance", "value": {"grammars": []}}, ("lark", '{"grammars": []}')),
    ("structured_outputs", {"json": SCHEMA}, ("json_schema", SCHEMA)),
    ("structured_outputs", {"json": TEXT, "regex": None}, ("json_schema", SCHEMA)),
    ("structured_outputs", {"json_object": True}, ("json_object", None)),
    ("structured_outputs", {"regex": "a+", "json_object": False}, ("regex", "a+")),
    ("structured_outputs", {"choice": ["a"], "disable_fallback": True}, ("choice", ("a",))),
    ("structured_outputs", {"grammar": LARK, "_backend": "guidance"}, ("lark", LARK)),
]


@both
@pytest.mark.parametrize(("name", "value", "expected"), WAYS)
def test_every_way_to_ask_for_a_grammar(read, name, value, expected):
    grammar = read(**{name: value}).grammar
    assert (grammar.kind, grammar.value) == expected
    assert grammar.param.startswith(name)


@both
@pytest.mark.parametrize("name", ["response_format", *CONSTRAINTS])
def test_null_and_text_ask_for_none(read, name):
    assert read(**{name: None}).grammar is None
    assert read(**{name: None, "response_format": {"type": "text"}}).grammar is None


BAD = [
    ("response_format", "json", "response_format must be an object"),
    ("response_format", {}, "response_format.type is required"),
    ("response_format", {"type": "sound"}, "must be one of text, json_object, json_schema"),
    ("response_format", {"type": 1}, "response_format.type must be a string"),
    ("response_format", {"type": "json_schema"}, "response_format.json_schema is required"),
    ("response_format", {"type": "json_schema", "json_schema": []}, "must be an object"),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "a b"}}, "1 to 64 of"),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "a" * 65}}, "1 to 64 of"),
    ("response_format", {"type": "json_schema", "json_schema": {"name": ""}}, "1 to 64 of"),
    ("response_format", {"type": "json_schema", "json_schema": {"name": 1}}, "must be a string"),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {**NAMED, "schema": "{}"}},
        "schema must be an object",
    ),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {**NAMED, "strict": "yes"}},
        "strict must be a boolean",
    ),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {**NAMED, "description": 1}},
        "description must be a string",
    ),
    ("response_format", {"type": "json_object", "schema": 123}, "schema must be an object"),
    ("guided_json", "{", "guided_json is not a JSON text"),
    ("guided_json", "[" * 100_000, "guided_json is not a JSON text"),
    ("guided_json", "[]", "guided_json must be an object"),
    ("guided_json", True, "guided_json must be an object"),
    ("json_schema", 1, "json_schema must be an object"),
    ("guided_regex", 1, "guided_regex must be a string"),
    ("guided_choice", [], "at least 1 item"),
    ("guided_choice", ["a", None], r"guided_choice\[1\] must be a string"),
    ("guided_choice", "ab", "guided_choice must be an array"),
    ("guided_grammar", {"type": "lark"}, "guided_grammar must be a string"),
    ("grammar", {"type": "ebnf", "value": ""}, "grammar.type must be one of"),
    ("grammar", {"type": "regex"}, "grammar.value is required"),
    ("grammar", {"type": "regex", "value": {}}, "grammar.value must be a string"),
    ("grammar", 1, "grammar must be an object"),
    ("structured_outputs", {}, "exactly one of json, regex, choice, grammar, json_object, got 0"),
    ("structured_outputs", {"json": {}, "regex": "a"}, "exactly one of .* got 2"),
    ("structured_outputs", {"json_object": False}, "got 0"),
    ("structured_outputs", {"structural_tag": "{}"}, "structural_tag' is not supported"),
    ("structured_outputs", {"regex": 1}, "structured_outputs.regex must be a string"),
    ("structured_outputs", [], "structured_outputs must be an object"),
]


@both
@pytest.mark.parametrize(("name", "value", "says"), BAD)
def test_what_is_no_constraint_is_refused(read, name, value, says):
    with pytest.raises(ApiError, match=says) as error:
        read(**{name: value})
    assert error.value.status == 400
    assert error.value.body["error"]["param"].startswith(name)


@both
def test_two_at_once_are_refused(read):
    with pytest.raises(ApiError, match="guided_regex excludes response_format") as error:
        read(response_format={"type": "json_object"}, guided_regex="a")
    assert error.value.body["error"]["param"] == "guided_regex"
    with pytest.raises(ApiError, match="regex excludes guided_choice"):
        read(guided_choice=["a"], regex="b")


def test_which_parameter_it_was():
    grammar = Grammar("regex", "a")
    assert read_constraint({"guided_regex": grammar, "n": 1}) == ("guided_regex", grammar)
    assert read_constraint({"response_format": None}) is None


async def test_what_does_not_compile_is_refused_before_the_stream(server, engine):
    engine.refusal = InvalidParameter("guided_regex", "guided_regex cannot be used: why")
    for stream in (False, True):
        status, body, headers = await server.post(
            "/v1/chat/completions", chat(guided_regex="(", stream=stream)
        )
        assert status == 400
        assert headers["Content-Type"].startswith("application/json")
        assert body["error"]["param"] == "guided_regex"
        assert body["error"]["message"] == "guided_regex cannot be used: why"
    assert engine.requests == []


WANTED = {
    "type": "object",
    "properties": {"a": {"enum": [1, 22]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False, "whitespace_pattern": None},
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_what_waits_for_others_to_compile_is_sent_away_later(server, engine, path):
    engine.refusal = QueueFullError("other grammars are being compiled")
    body = chat() if path.endswith("chat/completions") else {"prompt": "x"}
    status, answer, headers = await server.post(path, {**body, "regex": "a"})
    assert (status, answer["error"]["code"]) == (429, "queue_full")
    assert headers["Retry-After"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_compiling_leaves_the_event_loop_free(server, engine, path, monkeypatch):
    threads = []
    monkeypatch.setattr(engine, "check", lambda _: threads.append(threading.current_thread()))
    body = chat() if path.endswith("chat/completions") else {"prompt": "x"}
    status, _, _ = await server.post(path, {**body, "regex": "a", "max_tokens": 1})
    assert status == 200
    assert threads
    assert threading.main_thread() not in threads


async def test_answers_of_a_real_engine_match(monkeypatch):
    """Through all of it: read, compiled, masked; streamed or not, one or several."""
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": WANTED}}
    async with tiny_server(monkeypatch) as server, aiohttp.ClientSession(server.url) as session:

        async def ask(path, **parameters):
            async with session.post(path, json={"seed": 1, **parameters}) as response:
                return response.status, (await response.read()).decode()

        body = chat(response_format=schema, n=3, max_tokens=40)
        status, whole = await ask("/v1/chat/completions", **body)
        assert status == 200, whole
        texts = [choice["message"]["content"] for choice in json.loads(whole)["choices"]]
        assert all(choice["finish_reason"] == "stop" for choice in json.loads(whole)["choices"])
        for text in texts:
            value = json.loads(text)
            assert list(value) == ["a", "b"]
            assert value["a"] in (1, 22)
        status, stream = await ask("/v1/chat/completions", **body, stream=True)
        events = [line.removeprefix("data: ") for line in stream.split("\n\n") if line]
        assert events.pop() == "[DONE]"
        streamed = ["", "", ""]
        for event in map(json.loads, events):
            for choice in event["choices"]:
                streamed[choice["index"]] += choice["delta"].get("content") or ""
        assert streamed == texts

        status, reply = await ask("/v1/completions", prompt="x", guided_choice=["yes", "no"])
        assert (status, json.loads(reply)["choices"][0]["text"]) in [(200, "yes"), (200, "no")]
        for refused in ({"guided_regex": "("}, {"guided_json": {"type": "stsring"}}):
            for streams in (False, True):
                status, reply = await ask("/v1/completions", prompt="x", stream=streams, **refused)
                assert status == 400, reply
                error = json.loads(reply)["error"]
                assert [error["param"]] == list(refused)
                assert "cannot be used" in error["message"]


DEAD_ENDS = {
    "allowed, at once": ({"guided_choice": ["yes"], "allowed_token_ids": [65]}, 0),
    "banned, at once": ({"guided_choice": ["yes"], "bad_words": ["y"]}, 0),
    "no grammar, at once": ({"allowed_token_ids": [65], "bad_words": ["A"]}, 0),
    "allowed, later": ({"guided_choice": ["yes"], "allowed_token_ids": [101, 121]}, 2),
    "banned, later": ({"guided_regex": "yes|yet", "bad_words": ["es", "et"]}, 2),
    "no grammar, later": ({"allowed_token_ids": [65], "bad_words": ["AAA"]}, 2),
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("name", DEAD_ENDS)
async def test_where_no_token_is_left_a_request_ends_alone_with_a_400(monkeypatch, name, path):
    parameters, num_tokens = DEAD_ENDS[name]
    wanted = {"seed": 1, "max_tokens": 12, "ignore_eos": True}
    prompt = {"prompt": "x"} if path == "/v1/completions" else chat("x")

    async with tiny_server(monkeypatch) as server, aiohttp.ClientSession(server.url) as session:

        async def ask(**parameters):
            async with session.post(path, json={**prompt, **wanted, **parameters}) as response:
                return response.status, (await response.read()).decode()

        def choices(reply):
            return json.loads(reply)["choices"]

        _, alone = await ask()
        whole, stream, *others = await asyncio.gather(
            ask(**parameters), ask(**parameters, stream=True), ask(), ask()
        )
        assert [choices(other) for _, other in others] == [choices(alone)] * 2
        health, _ = await ask(max_tokens=1)
        assert health == 200
    assert whole[0] == 400, whole
    error = json.loads(whole[1])["error"]
    assert error["param"] in parameters
    assert error["param"] in ("allowed_token_ids", "bad_words")
    assert error["code"] == "unsatisfiable_constraint"
    assert "no token" in error["message"]
    if not num_tokens:
        assert stream == whole
        return
    assert stream[0] == 200
    *events, last = [json.loads(event[6:]) for event in stream[1].split("\n\n") if event]
    assert last == {"error": error}
    shown = [
        choice.get("text", choice.get("delta", {}).get("content"))
        for event in events
        for choice in event["choices"]
    ]
    assert len("".join(text or "" for text in shown)) == num_tokens
    assert all(choice["finish_reason"] is None for event in events for choice in event["choices"])


async def test_a_bias_against_all_that_may_come_bans_nothing(monkeypatch):
    body = {"prompt": "x", "guided_choice": ["yes"], "logit_bias": dict.fromkeys(b"yes", -100)}
    async with (
        tiny_server(monkeypatch) as server,
        aiohttp.ClientSession(server.url) as session,
        session.post("/v1/completions", json=body) as response,
    ):
        reply = await response.json()
    assert reply["choices"][0]["text"] == "yes"


async def test_a_response_that_cannot_go_on_says_so_in_its_last_event(monkeypatch):
    body = {"input": "x", "bad_words": ["es"], "stream": True, "max_output_tokens": 9}
    body["text"] = {"format": {"type": "json_schema", "name": "x", "schema": {"const": "yes"}}}
    async with (
        tiny_server(monkeypatch) as server,
        aiohttp.ClientSession(server.url) as session,
        session.post("/v1/responses", json=body) as response,
    ):
        assert response.status == 200
        *_, last = [line for line in (await response.text()).split("\n") if "data: " in line]
    answer = json.loads(last.removeprefix("data: "))
    assert answer["type"] == "response.failed"
    assert answer["response"]["error"]["code"] == "invalid_prompt"
    assert "no token" in answer["response"]["error"]["message"]
