"""Every row of the parameter tables: below, at and above its limits, wrong type, null, unknown."""

import json

import pytest
from server.fake_engine import chat

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


# name -> (accepted values, refused values with their codes)
BELOW, ABOVE = "integer_below_min_value", "integer_above_max_value"
LOW, HIGH = "decimal_below_min_value", "decimal_above_max_value"
TYPE = "invalid_type"
RANGES = {
    "temperature": ([0, 2, 0.5, 5e-324], [(-0.1, LOW), (2.1, HIGH), ("1", TYPE), (True, TYPE)]),
    "top_p": ([0, 1], [(-0.1, LOW), (1.1, HIGH), ([], TYPE)]),
    "min_p": ([0, 1], [(-0.1, LOW), (1.1, HIGH)]),
    "top_k": ([-1, 0, 1, 8.0, 2**31 - 1], [(-2, BELOW), (2**31, ABOVE), (8.5, TYPE)]),
    "n": ([1, 128, 2.0], [(0, BELOW), (-1, BELOW), (129, ABOVE), (10**6, ABOVE), (2.5, TYPE)]),
    "seed": (
        [0, -(2**63), 2**63 - 1],
        [(2**63, ABOVE), (-(2**63) - 1, BELOW), (2**64, ABOVE), (10**5000, ABOVE), (True, TYPE)],
    ),
    "presence_penalty": ([-2, 2], [(-2.1, LOW), (2.1, HIGH), (10**400, HIGH)]),
    "frequency_penalty": ([-2, 2], [(-2.1, LOW), (2.1, HIGH)]),
    "repetition_penalty": ([1, 1.5, 0.5], [(0, LOW), (-1, LOW), (1e9, HIGH), ("1", TYPE)]),
    "repeat_penalty": ([1.2], [(0, LOW)]),
    "min_tokens": ([0, 1], [(-1, BELOW), (2**31, ABOVE)]),
    "priority": ([0, -5, 2**63 - 1], [(2**63, ABOVE), ("1", TYPE)]),
    "stop": (["a", ["a"], ["a"] * 16, []], [("", None), ([""], None), ([1], TYPE), (1, TYPE)]),
    "stop_token_ids": ([[], [0, 257]], [([258], None), ([-1], BELOW), ("1", TYPE)]),
    "ignore_eos": ([True, False], [(1, TYPE), ("true", TYPE)]),
    "include_stop_str_in_output": ([True], [(0, TYPE)]),
    "skip_special_tokens": ([False], [("no", TYPE)]),
    "speculation": ([True, False], [("ngram", TYPE), (1, TYPE)]),
    "return_token_ids": ([True], [(1, TYPE)]),
    "add_special_tokens": ([True], [(1, TYPE)]),
    "logit_bias": (
        [{}, {"0": -100, "257": 100}, {"5": 1.5}],
        [
            ({key: 1}, None)
            for key in ("258", "-1", "999999999999", "1e3", "abc", "257.0", "", "\u0663")
        ]
        + [({"1": 101}, HIGH), ({"1": -101}, LOW), ({"1": None}, TYPE), ({"1": "5"}, TYPE)]
        + [([], TYPE), ({str(i): 0 for i in range(301)}, None)],
    ),
    "cache_salt": (["mine"], [(5, TYPE)]),
    "user": (["me"], [(5, TYPE)]),
    "metadata": ([{}], [("x", TYPE)]),
    "store": ([True], [("x", TYPE)]),
    "service_tier": (["auto"], [(1, TYPE)]),
    "stream": ([False, True], [("true", TYPE), (1, TYPE)]),
}
CHAT_RANGES = {
    "max_tokens": ([1, 2**31, 2**63 - 1, 2**63], [(0, BELOW), (-1, BELOW), (1.5, TYPE)]),
    "max_completion_tokens": ([1, 2**63], [(0, BELOW), ("5", TYPE)]),
    "logprobs": ([True, False], [(1, TYPE)]),
    "reasoning_effort": (["low"], [("wild", "invalid_value"), (1, TYPE)]),
    "modalities": ([["text"]], [(["audio"], "unsupported_parameter"), ("text", TYPE)]),
    "documents": ([[{"text": "x"}]], [(["x"], TYPE), ({}, TYPE)]),
    "chat_template_kwargs": ([{"enable_thinking": False}], [([], TYPE), ({"tools": []}, None)]),
}
COMPLETION_RANGES = {
    "max_tokens": ([1, 2**63], [(0, BELOW), (-1, BELOW), (True, TYPE)]),
    "logprobs": ([0, 20], [(-1, BELOW), (21, ABOVE), (2**40, ABOVE), (True, TYPE)]),
    "echo": ([True, False], [(1, TYPE)]),
    "best_of": ([1], [(0, None), (2, "unsupported_parameter"), (21, ABOVE), (-1, BELOW)]),
    "suffix": ([""], [("x", "unsupported_parameter")]),
}
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
    assert (error["param"] or "").split("[")[0] in (name, "repetition_penalty")
    assert error["type"] == "invalid_request_error"
    if code is not None:
        assert error["code"] == code


@pytest.mark.parametrize("endpoint", READERS)
def test_null_is_absent_for_every_known_parameter(endpoint):
    table = {"chat": CHAT, "completions": COMPLETIONS}[endpoint]
    given = {name: None for name in table if name not in ("messages", "prompt")}
    assert READERS[endpoint](given).options == READERS[endpoint]({}).options


UNSUPPORTED = {
    "guided_json": [{}, {"type": "object"}],
    "guided_regex": ["a+"],
    "guided_choice": [["a"]],
    "guided_grammar": ["root ::= 'a'"],
    "structured_outputs": [{"json": {}}],
    "regex": ["a"],
    "grammar": ["x", {"type": "regex", "value": "a"}],
    "ebnf": ["x"],
    "json_schema": [{}],
    "typical_p": [0.9],
    "tfs": [0.5],
    "top_a": [0.1],
    "mirostat": [2],
    "xtc_probability": [0.5],
    "dynatemp_range": [1],
    "smoothing_factor": [0.1],
    "dry_multiplier": [0.8],
    "use_beam_search": [True],
    "bad_words": [["x"]],
    "allowed_token_ids": [[1]],
    "truncate_prompt_tokens": [1, -1],
    "prompt_logprobs": [0, 1, -1],
    "return_tokens_as_token_ids": [True],
    "response_format": [{"type": "json_object"}, {"type": "json_schema", "json_schema": {}}],
}
CHAT_UNSUPPORTED = {
    "tools": [[{"type": "function", "function": {"name": "f"}}]],
    "tool_choice": ["required", {"type": "function", "function": {"name": "f"}}],
    "functions": [[{"name": "f"}]],
    "function_call": [{"name": "f"}],
    "audio": [{"voice": "x"}],
    "web_search_options": [{}],
    "chat_template": ["{{ 1 }}"],
    "echo": [True],
}
OFF = {
    "typical_p": 1,
    "top_a": 0,
    "mirostat": 0,
    "xtc_probability": 0.0,
    "dry_multiplier": 0,
    "dry_base": 1.75,
    "use_beam_search": False,
    "length_penalty": 1,
    "early_stopping": False,
    "bad_words": [],
    "response_format": {"type": "text"},
    "return_tokens_as_token_ids": False,
    "spaces_between_special_tokens": True,
    "cache_prompt": True,
    "n_predict": -1,
}


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


def test_off_values_of_tools_are_accepted():
    read_chat({"tools": [], "tool_choice": "auto", "parallel_tool_calls": True})
    read_chat({"tool_choice": "none", "functions": []})


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
    assert read_completion({"n": 2, "best_of": 2}).options.params.n == 2
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
