"""The parameter tables over HTTP: each bad value is a 400, and the next request is answered."""

import re

import jsonschema
import pytest
from server.fake_engine import chat
from server.parameter_rows import (
    CHAT_RANGES,
    CHAT_UNSUPPORTED,
    COMPLETION_RANGES,
    OFF,
    RANGES,
    UNSUPPORTED,
)
from server.test_parameters import READERS, rows

from jaxinfer.server.fields import schema_of
from jaxinfer.server.openapi_schemas import BY_HAND
from jaxinfer.server.protocol_chat import CHAT
from jaxinfer.server.protocol_completions import COMPLETIONS

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
TABLES = {"chat": CHAT, "completions": COMPLETIONS}
PLAIN = {"chat": chat(), "completions": {"prompt": "x"}}
WRONG = [True, -1.5, "x", [{}], {"a": {}}]


async def text_of(server, endpoint, **parameters):
    status, body, _ = await server.post(PATHS[endpoint], {**PLAIN[endpoint], **parameters})
    assert status == 200, body
    [choice] = body["choices"]
    return choice["message"]["content"] if endpoint == "chat" else choice["text"]


async def refused_over_http(server, endpoint, name, value):
    """Sends a bad value, then a plain request, which must be answered as ever."""
    for stream in (False, True):
        body = {**PLAIN[endpoint], "stream": stream, name: value}
        status, reply, headers = await server.post(PATHS[endpoint], body)
        assert status == 400, (name, value, reply)
        assert headers["Content-Type"].startswith("application/json")
        error = reply["error"]
        assert set(error) >= {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert error["param"] is None or isinstance(error["param"], str)
    assert await text_of(server, endpoint) == "hello"
    return error


@pytest.mark.parametrize("endpoint", READERS)
async def test_every_value_outside_its_limits_over_http(server, endpoint):
    for row in rows(1):
        where, name, (value, code) = row.values
        if where == endpoint and value != 10**5000:  # which json.dumps refuses to write
            error = await refused_over_http(server, endpoint, name, value)
            assert re.split(r"[\[.]", error["param"] or "")[0] in (name, "repetition_penalty")
            assert code in (None, error["code"])


@pytest.mark.parametrize("endpoint", READERS)
async def test_every_parameter_as_null_over_http(server, endpoint):
    for name in TABLES[endpoint]:
        if name not in ("messages", "prompt"):
            assert await text_of(server, endpoint, **{name: None}) == "hello", name


@pytest.mark.parametrize("endpoint", READERS)
async def test_every_parameter_of_a_wrong_type_over_http(server, endpoint):
    of_any_type = set()
    for name, field in TABLES[endpoint].items():
        schema = schema_of(field.read) or BY_HAND.get(name, {})
        check = jsonschema.Draft202012Validator(schema)
        wrong = [value for value in WRONG if not check.is_valid(value)]
        if not wrong:
            of_any_type.add(name)
        for value in wrong:
            if name != "model":
                error = await refused_over_http(server, endpoint, name, value)
                assert name in (error["param"] or "") or field.name == error["param"], error
    assert of_any_type <= {"early_stopping", "moderation", "adapter", "grammar", "ebnf"}


@pytest.mark.parametrize("endpoint", READERS)
def test_every_parameter_has_rows(endpoint):
    own = {"chat": (CHAT_RANGES, CHAT_UNSUPPORTED), "completions": (COMPLETION_RANGES,)}
    tables = (RANGES, UNSUPPORTED, OFF, *own[endpoint])
    listed = {name for table in tables for name in table}
    honoured = {name for name, field in TABLES[endpoint].items() if field.is_honoured}
    # Each of these has tests of its own below or above.
    elsewhere = {"messages", "prompt", "model", "stream_options", "enable_thinking"}
    elsewhere |= {"add_generation_prompt", "continue_final_message", "top_logprobs"}
    assert honoured - listed - elsewhere == set()
