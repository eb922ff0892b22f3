"""Every row of the parameter tables: below, at and above its limits, wrong type, null, unknown."""

import json
import re

import pytest
from server.fake_engine import chat
from server.parameter_rows import (
    ABOVE,
    CHAT_RANGES,
    CHAT_UNSUPPORTED,
    COMPLETION_RANGES,
    HIGH,
    OFF,
    RANGES,
    UNSUPPORTED,
)

from jaxinfer.config import ServerConfig
from jaxinfer.server.errors import ApiError
from jaxinfer.server.json_body import parse_object
from jaxinfer.server.parameters import SHARED
from jaxinfer.server.protocol_chat import CHAT, parse_chat
from jaxinfer.server.protocol_completions import COMPLETIONS, parse_completion

VOCAB = 258


def read_chat(parameters, **settings):
    body = {**chat(), **parameters}
    config = ServerConfig(**settings)
    return parse_chat(body, defaults={}, vocab_size=VOCAB, config=config)


def read_completion(parameters, **settings):
    body = {"prompt": "x", **parameters}
    config = ServerConfig(**settings)
    return parse_completion(body, defaults={}, vocab_size=VOCAB, config=config)


def refusal(read, parameters, **settings):
    with pytest.raises(ApiError) as caught:
        read(parameters, **settings)
    assert caught.value.status == 400
    error = caught.value.body["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    assert len(error["message"]) < 400
    return error


READERS = {"chat": read_chat, "completions": read_completion}


def label(value):
    return "huge" if isinstance(value, tuple) and value[0] == 10**5000 else str(value)[:20]


def rows(position):
    tables = [("chat", RANGES), ("completions", RANGES)]
    tables += [("chat", CHAT_RANGES), ("completions", COMPLETION_RANGES)]
    for endpoint, table in tables:
        for name, row in table.items():
            for value in row[position]:
                yield pytest.param(endpoint, name, value, id=f"{endpoint}-{name}-{label(value)}")


@pytest.mark.parametrize(("endpoint", "name", "value"), list(rows(0)))
def test_values_within_limits_are_accepted(endpoint, name, value):
    READERS[endpoint]({name: value})


@pytest.mark.parametrize(("endpoint", "name", "value"), list(rows(1)))
def test_values_outside_limits_name_the_parameter(endpoint, name, value):
    value, code = value
    error = refusal(READERS[endpoint], {name: value})
    assert re.split(r"[\[.]", error["param"] or "")[0] in (name, "repetition_penalty")
    assert error["type"] == "invalid_request_error"
    if code is not None:
        assert error["code"] == code


@pytest.mark.parametrize("endpoint", READERS)
def test_null_is_absent_for_every_known_parameter(endpoint):
    table = {"chat": CHAT, "completions": COMPLETIONS}[endpoint]
    given = {name: None for name in table if name not in ("messages", "prompt")}
    assert READERS[endpoint](given).options == READERS[endpoint]({}).options


def unsupported_rows():
    for endpoint in READERS:
        table = {**UNSUPPORTED, **(CHAT_UNSUPPORTED if endpoint == "chat" else {})}
        for name, values in table.items():
            for value in values:
                yield endpoint, name, value


@pytest.mark.parametrize(("endpoint", "name", "value"), list(unsupported_rows()))
def test_what_would_change_the_answer_and_is_not_offered_is_refused(endpoint, name, value):
    error = refusal(READERS[endpoint], {name: value})
    assert (error["code"], error["param"]) == ("unsupported_parameter", name)


@pytest.mark.parametrize("endpoint", READERS)
@pytest.mark.parametrize("name", OFF)
def test_off_values_are_accepted(endpoint, name):
    READERS[endpoint]({name: OFF[name]})


def test_a_boolean_is_not_the_number_it_equals():
    assert refusal(read_chat, {"typical_p": True})["code"] == "unsupported_parameter"
    assert refusal(read_chat, {"use_beam_search": 0})["code"] == "unsupported_parameter"


def test_unknown_names_are_ignored_and_logged_or_refused_when_strict(caplog):
    assert read_chat({"num_ctx": 5}).options == read_chat({}).options
    assert "num_ctx" in caplog.text
    error = refusal(read_chat, {"num_ctx": 5}, strict_params=True)
    assert error["message"] == "Unrecognized request argument supplied: 'num_ctx'"


def test_limits_of_the_operator():
    assert refusal(read_chat, {"n": 5}, max_n=4)["code"] == ABOVE
    assert refusal(read_chat, {"stop": list("abcde")}, strict_params=True)["param"] == "stop"
    error = refusal(read_completion, {"prompt": ["a"] * 3}, max_prompts=2)
    assert error["code"] == "array_above_max_length"


def test_parameters_that_depend_on_each_other():
    assert refusal(read_chat, {"top_logprobs": 3})["param"] == "top_logprobs"
    assert refusal(read_chat, {"logprobs": False, "top_logprobs": 0})["param"] == "top_logprobs"
    assert refusal(read_chat, {"logprobs": True, "top_logprobs": 21})["code"] == ABOVE
    assert read_chat({"logprobs": True}).options.params.logprobs == 0
    assert refusal(read_chat, {"stream_options": {}})["param"] == "stream_options"
    assert refusal(read_chat, {"stream": True, "stream_options": {"include_usage": 1}})
    read_chat({"stream": True, "stream_options": {"include_obfuscation": True}})
    assert refusal(read_chat, {"min_tokens": 5, "max_tokens": 4})["param"] == "min_tokens"
    both = {"add_generation_prompt": True, "continue_final_message": True}
    assert refusal(read_chat, both)["param"] == "continue_final_message"
    options = read_chat({"continue_final_message": True}).template_options
    assert options["add_generation_prompt"] is False
    assert read_chat({"max_tokens": 5, "max_completion_tokens": 7}).options.params.max_tokens == 7
    assert read_completion({"n": 2, "best_of": 2}).num_best is None
    of_three = read_completion({"n": 2, "best_of": 3})
    assert (of_three.options.params.n, of_three.num_best, of_three.logprobs) == (3, 2, None)
    assert refusal(read_completion, {"n": 2, "best_of": 1})["param"] == "best_of"
    assert refusal(read_completion, {"best_of": 5}, max_n=4)["code"] == ABOVE
    assert refusal(read_completion, {"best_of": 2, "stream": True})["param"] == "best_of"
    assert refusal(read_chat, {"prompt_logprobs": 1, "stream": True})["param"] == "prompt_logprobs"
    assert read_completion({"max_tokens": 0, "echo": True}).options.params.max_tokens == 0
    assert read_completion({}).options.params.max_tokens == 16


def test_defaults_of_the_checkpoint_yield_to_the_request_and_to_the_operator():
    body = {**chat(), "top_p": 0.5}
    defaults = {"temperature": 0.3, "top_p": 0.9, "eos_token_id": 7}

    def params(**settings):
        config = ServerConfig(**settings)
        return parse_chat(body, defaults=defaults, vocab_size=VOCAB, config=config).options.params

    assert (params().temperature, params().top_p) == (0.3, 0.5)
    assert params(generation_config="none").temperature == 1.0


MESSAGES = {
    "messages": [[], None, "x", {}, 5],
    "messages[0]": [[None], ["x"], [[]]],
    "messages[0].role": [[{}], [{"role": "wizard", "content": "x"}], [{"role": 5, "content": "x"}]],
    "messages[0].content": [
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "assistant", "content": None}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": {}}],
    ],
    "messages[0].content[0].text": [
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "text", "text": None}]}],
        [{"role": "user", "content": [{"type": "text", "text": 5}]}],
    ],
    "messages[0].content[0].type": [[{"role": "user", "content": [{"type": "smell"}]}]],
    "messages[0].content[0]": [
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
        [{"role": "user", "content": ["x"]}],
    ],
    "messages[0].tool_call_id": [[{"role": "tool", "content": "x"}]],
    "messages[0].name": [[{"role": "user", "content": "x", "name": 5}]],
    "messages[0].tool_calls[0].function": [
        [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]
    ],
}


@pytest.mark.parametrize(
    ("param", "messages"), [(p, m) for p, row in MESSAGES.items() for m in row]
)
def test_bad_messages_are_refused_by_path(param, messages):
    assert refusal(read_chat, {"messages": messages})["param"] == param


def test_messages_the_template_gets():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    given = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "c"},
    ]
    read = read_chat({"messages": given}).messages
    assert read[0] == {"role": "system", "content": "be brief"}
    assert [part["text"] for part in read[1]["content"]] == ["a", "b"]
    assert read[2]["content"] == ""
    assert read[3]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert read[4]["tool_call_id"] == "c"


PROMPTS = [None, "", [""], [], [[]], ["a", ""], ["a", [1]], ["a", 1], [1, "a"], [[1], [""]]]
PROMPTS += [[258], [-1], [1.5], [True], [[258]], [None], {}, 5, [10**30]]


@pytest.mark.parametrize("prompt", PROMPTS, ids=str)
def test_bad_prompts_are_refused(prompt):
    assert refusal(read_completion, {"prompt": prompt})["param"].startswith("prompt")


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 257], ((1, 257),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ],
)
def test_the_four_forms_of_a_prompt(prompt, prompts):
    assert read_completion({"prompt": prompt}).prompts == prompts


def test_every_shared_parameter_is_known_to_both_endpoints():
    assert set(SHARED) <= set(CHAT)
    assert set(SHARED) <= set(COMPLETIONS)


BODIES = [
    b"",
    b"  ",
    b"{",
    b"[]",
    b"null",
    b'"x"',
    b"\xff{}",
    b'{"a": "\xc0\x80"}',
    b'{"temperature": NaN}',
    b'{"temperature": -Infinity}',
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"a":' * 500 + b"1" + b"}" * 500,
    b'{"messages": [{"role": "user", "content": "a\\ud800b"}]}',
    b'{"\\udc00": 1}',
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: str(body[:20]))
def test_bodies_that_are_no_json_object(body):
    with pytest.raises(ApiError) as caught:
        parse_object(body)
    assert caught.value.status == 400


def test_a_lone_surrogate_is_named_by_its_path():
    with pytest.raises(ApiError) as caught:
        parse_object(b'{"messages": [{"role": "user", "content": "a\\uD800b"}]}')
    assert caught.value.body["error"]["param"] == "messages[0].content"


def test_json_that_is_unusual_but_right():
    assert parse_object(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}
    assert parse_object(b'{"a": "\\ud83d\\ude00\\u0000"}') == {"a": "😀\0"}
    assert parse_object(b'{"a": 1, "a": 2}') == {"a": 2}
    assert parse_object(json.dumps({"a": [[[]]]}).encode()) == {"a": [[[]]]}
    huge = parse_object(b'{"seed": ' + b"9" * 5000 + b"}")
    assert refusal(read_chat, huge)["code"] == ABOVE
    assert refusal(read_chat, parse_object(b'{"temperature": 1e400}'))["code"] == HIGH
