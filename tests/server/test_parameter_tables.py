"""Every parameter of the other endpoints over HTTP, at and beyond its limits, and of wrong types.

The limits are those its reader tells; test_parameters.py has chats and completions.
"""

import jsonschema
import pytest
from server.fake_engine import chat

from jaxinfer.server.embeddings import EMBEDDINGS
from jaxinfer.server.fields import schema_of
from jaxinfer.server.openapi_schemas import BY_HAND
from jaxinfer.server.responses_protocol import RESPONSES
from jaxinfer.server.tokenizer_api import DETOKENIZE, TOKENIZE

TABLES = {
    "/v1/responses": (RESPONSES, {"input": "x"}),
    "/v1/embeddings": (EMBEDDINGS, {"input": "x"}),
    "/tokenize": (TOKENIZE, {"content": "x"}),
    "/detokenize": (DETOKENIZE, {"tokens": [97]}),
}
WRONG = [True, -1.5, "x", [{}], {"a": {}}]
# What else a parameter needs, and parameters that exclude those of the plain request.
NEEDS = {
    "stream_options": {"stream": True},
    "add_generation_prompt": {},
    "min_tokens": {"max_output_tokens": 2**31 - 1},
}
OF_ANY_TYPE = {"early_stopping", "moderation", "adapter", "grammar", "ebnf", "messages"}


def schema(table, name):
    return schema_of(table[name].read) or BY_HAND.get(name, {})


def cases(limit):
    """Yields (path, name, value) of numbers at `limit`, and one step beyond."""
    for path, (table, _) in TABLES.items():
        for name in table:
            found = schema(table, name)
            if found.get("type") in ("integer", "number") and limit in found:
                bound = found[limit]
                step = 1 if found["type"] == "integer" else 0.01
                beyond = bound - step if limit == "minimum" else bound + step
                yield path, name, bound, beyond, f"{found['type']}_{limit}"


CODES = {
    "integer_minimum": "integer_below_min_value",
    "integer_maximum": "integer_above_max_value",
    "number_minimum": "decimal_below_min_value",
    "number_maximum": "decimal_above_max_value",
}


async def ask(server, path, **parameters):
    return await server.post(path, {**TABLES[path][1], **parameters})


async def refused(server, path, name, value):
    status, reply, headers = await ask(server, path, **{**NEEDS.get(name, {}), name: value})
    assert status == 400, (name, value, reply)
    assert headers["Content-Type"].startswith("application/json")
    error = reply["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    status, reply, _ = await ask(server, path)
    assert status == 200, "the request after it is answered"
    return error


@pytest.mark.parametrize("case", [*cases("minimum"), *cases("maximum")], ids=str)
async def test_numbers_at_their_limits_and_beyond(server, case):
    path, name, bound, beyond, kind = case
    status, reply, _ = await ask(server, path, **{**NEEDS.get(name, {}), name: bound})
    if status != 200:
        # A value may be within its range, and be refused because it is not offered.
        assert reply["error"]["code"] in ("unsupported_parameter", "invalid_value"), reply
        assert "must be at" not in reply["error"]["message"] or name == "truncate_prompt_tokens"
    error = await refused(server, path, name, beyond)
    assert (error["param"], error["code"]) == (name, CODES[kind])


@pytest.mark.parametrize("path", TABLES)
async def test_wrong_types(server, path):
    table = TABLES[path][0]
    checked = set()
    for name in table:
        check = jsonschema.Draft202012Validator(schema(table, name))
        for value in [value for value in WRONG if not check.is_valid(value)]:
            if name not in ("model", "messages"):
                error = await refused(server, path, name, value)
                assert name in (error["param"] or "") or table[name].name == error["param"], error
            checked.add(name)
    assert set(table) - checked <= OF_ANY_TYPE


@pytest.mark.parametrize("path", TABLES)
async def test_null_is_absent(server, path):
    table, plain = TABLES[path]
    _, expected, _ = await ask(server, path)
    nulls = {name: None for name in table if name not in plain}
    status, reply, _ = await ask(server, path, **nulls)
    assert status == 200, reply
    for name in ("data", "tokens", "content"):
        assert reply.get(name) == expected.get(name)
    for name in plain:
        status, reply, _ = await ask(server, path, **{name: None})
        assert (status, reply["error"]["code"]) == (400, "missing_required_parameter")


async def test_a_chat_in_tokenize_takes_what_a_chat_takes(server):
    for name, value in (("tools", 5), ("chat_template_kwargs", []), ("add_special_tokens", 1)):
        status, reply, _ = await server.post("/tokenize", {**chat(), name: value})
        assert (status, reply["error"]["param"]) == (400, name)
