"""The published document: valid, complete, true of replies, and never stricter than readers."""

import json

import jsonschema
import pytest
from server.fake_engine import chat
from server.test_parameters import READERS, label, rows

from jaxinfer.server.errors import ApiError
from jaxinfer.server.fields import Field, array, described, integer, schema_of
from jaxinfer.server.openapi import document, undescribed
from jaxinfer.server.openapi_schemas import nullable

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES = {"chat": "ChatCompletionsRequest", "completions": "CompletionsRequest"}


@pytest.fixture
async def published(server):
    status, body, _ = await server.get("/openapi.json")
    assert status == 200
    return body


def validator(published, name):
    schema = {**published, "$ref": f"#/components/schemas/{name}"}
    return jsonschema.Draft202012Validator(schema)


async def test_every_route_is_described_and_nothing_else(server):
    assert undescribed(server.app) == []


async def test_every_schema_is_a_schema_and_every_reference_has_an_end(published):
    names = set(published["components"]["schemas"])
    for schema in published["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    used = {part.split('"')[0] for part in json.dumps(published).split("#/components/schemas/")[1:]}
    assert used <= names
    assert published["openapi"].startswith("3.1.")


async def test_operations_have_a_name_a_summary_and_error_replies(published):
    operations = [each for path in published["paths"].values() for each in path.values()]
    assert len({each["operationId"] for each in operations}) == len(operations)
    for operation in operations:
        assert operation["summary"]
        assert {"200", "400", "401", "404", "500", "503"} <= set(operation["responses"])
    generating = published["paths"][CHAT]["post"]
    assert {"408", "413", "415", "429", "504"} <= set(generating["responses"])
    assert set(generating["responses"]["200"]["content"]) == {
        "application/json",
        "text/event-stream",
    }


async def test_keys_are_mentioned_where_they_are_needed(server, start):
    assert "security" not in document(server.app)
    keyed = await start(api_key=("k",))
    assert document(keyed.app)["security"] == [{"key": []}]
    assert (await keyed.get("/openapi.json"))[0] == 401


async def test_the_models_are_those_served(start):
    server = await start(served_model_name=("a", "b"))
    for name in BODIES.values():
        schema = document(server.app)["components"]["schemas"][name]
        assert schema["properties"]["model"]["enum"] == ["a", "b", None]


REPLIES = [
    (CHAT, chat(), "ChatCompletion"),
    (CHAT, chat(n=2, logprobs=True, top_logprobs=3, max_tokens=2), "ChatCompletion"),
    (CHAT, chat(stop="l", return_token_ids=True), "ChatCompletion"),
    (COMPLETIONS, {"prompt": "a"}, "Completion"),
    (COMPLETIONS, {"prompt": ["a", "b"], "echo": True, "logprobs": 2, "n": 2}, "Completion"),
    (COMPLETIONS, {"prompt": "a", "stop_token_ids": [108]}, "Completion"),
    (CHAT, chat(temperature=9), "ErrorResponse"),
    (COMPLETIONS, {"prompt": [1] * 300}, "ErrorResponse"),
    (CHAT, chat(model="other"), "ErrorResponse"),
    ("/tokenize", {"prompt": "hi", "return_token_strs": True}, "Tokens"),
    ("/tokenize", {"content": "hi", "with_pieces": True}, "Tokens"),
    ("/detokenize", {"tokens": [104]}, "Text"),
    ("/v1/responses", {"input": "hi"}, "Response"),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 2}, "Response"),
    ("/v1/embeddings", {"input": ["a", "b"]}, "Embeddings"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "base64"}, "Embeddings"),
    ("/v1/reset_prefix_cache", {}, "Status"),
]
GETS = [("/v1/models", "ModelList"), ("/v1/models/tiny", "Model"), ("/version", "Version")]
GETS += [("/health", "Status"), ("/tokenizer_info", "TokenizerInfo"), ("/no", "ErrorResponse")]


@pytest.mark.parametrize(("path", "body", "name"), REPLIES, ids=str)
async def test_replies_are_as_described(server, published, path, body, name):
    _, reply, _ = await server.post(path, body)
    validator(published, name).validate(reply)


@pytest.mark.parametrize(("path", "name"), GETS)
async def test_what_is_got_is_as_described(server, published, path, name):
    _, reply, _ = await server.get(path)
    validator(published, name).validate(reply)


@pytest.mark.parametrize(("endpoint", "name", "value"), list(rows(0)))
async def test_what_is_accepted_fits_the_document(published, endpoint, name, value):
    body = {**(chat() if endpoint == "chat" else {"prompt": "x"}), name: value}
    validator(published, BODIES[endpoint]).validate(body)


ANYTHING = [True, False, 0, 1, -1, 1.5, 10**20, "", "x", [], [1], ["x"], [[]], {}, {"a": 1}]


@pytest.mark.parametrize("endpoint", READERS)
@pytest.mark.parametrize("value", ANYTHING, ids=label)
async def test_what_does_not_fit_the_document_is_refused(published, endpoint, value):
    table = published["components"]["schemas"][BODIES[endpoint]]["properties"]
    unfit = [
        name
        for name in sorted(set(table) - {"model"})
        if not validator(published, f"{BODIES[endpoint]}/properties/{name}").is_valid(value)
    ]
    assert len(unfit) > 5
    assert [name for name in unfit if accepts(READERS[endpoint], name, value)] == []


def accepts(read, name, value):
    try:
        read({name: value})
    except ApiError:
        return False
    return True


async def test_null_fits_every_optional_parameter(published):
    for name, needed in (("ChatCompletionsRequest", "messages"), ("CompletionsRequest", "prompt")):
        schema = published["components"]["schemas"][name]
        assert schema["required"] == [needed]
        for parameter in set(schema["properties"]) - {needed}:
            assert validator(published, f"{name}/properties/{parameter}").is_valid(None), parameter


def test_readers_tell_their_schema():
    assert schema_of(array(integer(0, 5), low=1, high=3)) == {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": 5},
        "minItems": 1,
        "maxItems": 3,
    }
    read = described({"type": "string"})(lambda value, path: value)
    assert (read("x", "y"), schema_of(read)) == ("x", {"type": "string"})
    assert schema_of(Field(lambda value, path: value).read) == {}


@pytest.mark.parametrize(
    ("schema", "fits", "does_not"),
    [
        ({}, [None, 1, "x"], []),
        ({"type": "integer", "minimum": 1}, [None, 1], [0, "x"]),
        ({"enum": [0, "a"]}, [None, 0, "a"], [1, ""]),
        ({"type": "string", "enum": ["a"]}, [None, "a"], ["b", 1]),
        ({"not": {}}, [None], [0, "", [], {}]),
        ({"anyOf": [{"type": "string"}]}, [None, "a"], [1]),
    ],
    ids=str,
)
def test_nullable(schema, fits, does_not):
    check = jsonschema.Draft202012Validator(nullable(schema))
    assert all(check.is_valid(value) for value in fits)
    assert not any(check.is_valid(value) for value in does_not)
