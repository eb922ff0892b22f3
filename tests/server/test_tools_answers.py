"""Calls and reasoning in answers, streamed and whole."""

import pytest
from server.fake_engine import chat
from server.test_tools import F, named
from server.tool_answers import CHAT, LIST, OSLO, TOOLS, ask, calls_of, speak
from text.tool_call_cases import CALL, CALL_END, CALLS, CALLS_END, SEP, hermes, tokenizer_with

from jaxinfer.outputs import OutputDelta
from jaxinfer.request import EngineRequest
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.server.chat_answer import ChatAnswer
from jaxinfer.server.parameters import GenerationOptions
from jaxinfer.testing import byte_tokenizer
from jaxinfer.text.tool_calls import AnswerSyntax, ReasoningTags

ANSWERS = [
    ("hermes", hermes("get_weather", '{"city": "Oslo"}'), None, [OSLO]),
    (
        "hermes",
        f"Hm.\n{hermes('list_files', '{}')}\n{hermes('list_files', '{}')}",
        "Hm.\n",
        [LIST] * 2,
    ),
    ("mistral", '[TOOL_CALLS][{"name": "list_files", "arguments": {}}]', None, [LIST]),
    (
        "deepseek",
        f'{CALLS}{CALL}get_weather{SEP}{{"city": "Oslo"}}{CALL_END}{CALLS_END}',
        None,
        [OSLO],
    ),
    ("llama3_json", '{"name": "list_files", "parameters": {}}', None, [LIST]),
]


@pytest.mark.parametrize(("template", "text", "content", "calls"), ANSWERS)
async def test_calls(server, engine, template, text, content, calls):
    speak(engine, template, text)
    [choice] = await ask(server, chat(tools=TOOLS))
    assert choice["message"]["content"] == content
    assert calls_of(choice) == calls
    assert choice["finish_reason"] == "tool_calls"
    assert len({call["id"] for call in choice["message"]["tool_calls"]}) == len(calls)


async def test_wire_rules_of_streamed_calls(server, engine):
    speak(
        engine,
        "hermes",
        f"{hermes('get_weather', OSLO['arguments'])}\n{hermes('list_files', '{}')}",
    )
    chunks = await server.chunks(CHAT, chat(tools=TOOLS))
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    pieces = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert all(len(piece) == 1 for piece in pieces)
    seen = set()
    for [piece] in pieces:
        index = piece["index"]
        assert type(index) is int
        if index in seen:  # W2: the rest is arguments
            assert set(piece) == {"index", "function"}
            assert set(piece["function"]) == {"arguments"}
        else:
            assert set(piece) == {"index", "id", "type", "function"}
            assert piece["type"] == "function"
            assert piece["function"]["name"]
        seen.add(index)
    assert seen == {0, 1}
    assert len(pieces) > 4  # arguments come as they are written
    assert "".join(delta.get("content", "") for delta in deltas) == ""
    for delta in deltas:  # W5
        assert not any(isinstance(value, int) for value in delta.values())
    assert (deltas[-1], chunks[-1]["choices"][0]["finish_reason"]) == ({}, "tool_calls")


async def test_every_choice_has_calls_of_its_own(server, engine):
    speak(engine, "hermes", f"a{hermes('list_files', '{}')}")
    choices = await ask(server, chat(tools=TOOLS, n=2))
    assert [choice["index"] for choice in choices] == [0, 1]
    ids = {call["id"] for choice in choices for call in choice["message"]["tool_calls"]}
    assert len(ids) == 2


@pytest.mark.parametrize(
    ("parameters", "content"),
    [
        ({}, hermes("list_files", "{}")),
        ({"tools": TOOLS, "tool_choice": "none"}, hermes("list_files", "{}")),
        ({"tools": F}, hermes("list_files", "{}")),
        (
            {
                "tools": TOOLS,
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [named("get_weather")]},
                },
            },
            hermes("list_files", "{}"),
        ),
    ],
)
async def test_what_may_not_be_called_is_text(server, engine, parameters, content):
    speak(engine, "hermes", content)
    [choice] = await ask(server, chat(**parameters))
    assert choice["message"]["content"] == content
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


async def test_the_prompt_shows_what_may_be_called(server, engine):
    speak(engine, "hermes", "x")
    for parameters, shown in (
        ({}, []),
        ({"tools": TOOLS}, ["get_weather", "list_files"]),
        ({"tools": TOOLS, "tool_choice": named("list_files")}, ["list_files"]),
        ({"tools": TOOLS, "tool_choice": "none"}, []),
    ):
        await server.post(CHAT, chat(**parameters))
        prompt = bytes(engine.requests[-1].prompt_token_ids).decode()
        assert [each for each in ("get_weather", "list_files") if each in prompt] == shown


async def test_one_call_at_most_without_parallel_calls(server, engine):
    speak(engine, "hermes", hermes("get_weather", OSLO["arguments"]) + hermes("list_files", "{}"))
    [choice] = await ask(server, chat(tools=TOOLS, parallel_tool_calls=False))
    assert calls_of(choice) == [OSLO]


@pytest.mark.parametrize(
    ("num_tokens", "content", "calls"),
    [
        (20, "<tool_call>\n{\"name\"", []),  # nothing is certain yet: text
        (56, None, [{"name": "get_weather", "arguments": '{"city"'}]),
        (80, None, [OSLO]),
    ],
)  # fmt: skip
async def test_a_call_that_the_length_cuts(server, engine, num_tokens, content, calls):
    speak(engine, "hermes", hermes("get_weather", OSLO["arguments"]) + " " * 50)
    [choice] = await ask(server, chat(tools=TOOLS, max_tokens=num_tokens))
    assert (choice["message"]["content"] or "").startswith(content or "")
    assert calls_of(choice) == calls
    assert choice["finish_reason"] == "length"


async def test_stop_strings_end_calls_too(server, engine):
    speak(engine, "hermes", hermes("get_weather", OSLO["arguments"]))
    [choice] = await ask(server, chat(tools=TOOLS, stop="</tool_call>"))
    assert calls_of(choice) == [OSLO]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", "</tool_call>")


@pytest.mark.parametrize(
    ("template", "text"),
    [("hermes", "<think>\nHm.\n</think>\n\nYes."), ("opened", "Hm.\n</think>\n\nYes.")],
)
async def test_reasoning(server, engine, template, text):
    speak(engine, template, text)
    [choice] = await ask(server, chat())
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == ("Yes.", "Hm.")
    assert message["reasoning"] == "Hm."
    [choice] = await ask(server, chat(include_reasoning=False))
    assert choice["message"] == {"role": "assistant", "content": "Yes.", "refusal": None}
    speak(engine, template, text.replace("Yes.", hermes("list_files", "{}")))
    [choice] = await ask(server, chat(tools=TOOLS))
    assert choice["message"]["reasoning_content"] == "Hm."
    assert calls_of(choice) == [LIST]


@pytest.mark.parametrize(
    ("template", "text", "special", "count"),
    [
        ("opened", "Hm.</think>Yes.", ("<think>", "</think>"), 3),
        ("opened", "Hm.", ("<think>", "</think>"), 3),
        ("hermes", "<think>Hm.</think>Yes.", ("<think>", "</think>"), 4),
        ("hermes", "<think>Hm.</think>Yes.", (), len(">Hm.</think")),
        ("hermes", "Yes.", (), 0),
        ("mistral", "Yes.", (), None),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
async def test_usage_counts_reasoning(server, engine, template, text, special, count, n):
    speak(engine, template, text, special)
    body = chat(n=n, include_reasoning=n == 1)
    _, whole, _ = await server.post(CHAT, body)
    *_, last = await server.chunks(CHAT, {**body, "stream_options": {"include_usage": True}})
    for usage in (whole["usage"], last["usage"]):
        details = None if count is None else {"reasoning_tokens": n * count}
        assert usage.get("completion_tokens_details") == details


async def test_reasoning_that_ends_within_a_step_is_counted_up_to_there(engine):
    speak(engine, "opened", "", ("<think>", "</think>"))
    tokenizer = engine.tokenizer
    syntax = AnswerSyntax(reasoning=ReasoningTags("<think>", "</think>"), starts_in_reasoning=True)
    params = SamplingParams()
    options = GenerationOptions("m", params, False, False, False, False, None, 0, None)
    request = EngineRequest("r", (1,), params)
    answer = ChatAnswer("m", "f", tokenizer, options, [request], syntax=syntax)
    for text in ("ab", "c</think>de"):
        ids = tuple(tokenizer.encode(text))
        answer.take(0, OutputDelta("r", 0, text, ids))
    assert answer.usage.reasoning_tokens == 3


async def test_reasoning_that_the_length_cuts(server, engine):
    speak(engine, "opened", "So it begins")
    [choice] = await ask(server, chat(max_tokens=5))
    assert choice["message"]["reasoning_content"] == "So it"
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")


@pytest.mark.parametrize(
    ("last", "text", "reasoning"),
    [("<think>Hm", " so</think>Yes.", "so"), ("<think>Hm</think>", "Yes.", None)],
)
async def test_a_continued_message_may_be_within_its_reasoning(
    server, engine, last, text, reasoning
):
    speak(engine, "hermes", text)
    body = chat(continue_final_message=True)
    body["messages"].append({"role": "assistant", "content": last})
    [choice] = await ask(server, body)
    assert choice["message"]["content"] == "Yes."
    assert choice["message"].get("reasoning_content") == reasoning


SPECIAL = ("[TOOL_CALLS]", "[ARGS]", "<|im_end|>", "<think>", "</think>")


async def test_markers_that_are_special_tokens(server, engine):
    call = '[TOOL_CALLS]list_files[ARGS]{"a": "<|im_end|>"}'
    speak(engine, "mistral", f"<|im_end|>a{call}", SPECIAL)
    [choice] = await ask(server, chat(tools=TOOLS))
    assert choice["message"]["content"] == "a"
    assert calls_of(choice) == [{"name": "list_files", "arguments": '{"a": ""}'}]
    # Where nothing is marked, they are left out as ever.
    [choice] = await ask(server, chat())
    assert choice["message"]["content"] == 'alist_files{"a": ""}'
    [choice] = await ask(server, chat(tools=TOOLS, skip_special_tokens=False))
    assert choice["message"]["content"] == "<|im_end|>a"
    speak(engine, "opened", "Hm<|im_end|></think>Yes.", SPECIAL)
    [choice] = await ask(server, chat())
    assert choice["message"]["reasoning_content"] == "Hm"
    assert choice["message"]["content"] == "Yes."


async def test_log_probabilities_are_of_all_tokens_and_sent_once(server, engine):
    text = f"ok{hermes('list_files', '{}')}"
    speak(engine, "hermes", text)
    _, whole, _ = await server.post(CHAT, chat(tools=TOOLS, logprobs=True))
    chunks = await server.chunks(CHAT, chat(tools=TOOLS, logprobs=True, return_token_ids=True))
    choices = [chunk["choices"][0] for chunk in chunks]
    entries = [e for choice in choices if choice["logprobs"] for e in choice["logprobs"]["content"]]
    assert entries == whole["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == text
    ids = [token for choice in choices for token in choice.get("token_ids", [])]
    assert bytes(ids[:-1]).decode() == text


async def test_old_functions_get_old_answers(server, engine):
    speak(engine, "hermes", hermes("get_weather", OSLO["arguments"]))
    functions = [each["function"] for each in TOOLS]
    [choice] = await ask(server, chat(functions=functions))
    assert choice["message"]["function_call"] == OSLO
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "function_call"


async def test_a_template_that_knows_no_tools_is_told_in_words(server, engine):
    engine.max_model_len = 4096
    engine.text = hermes("list_files", "{}")
    [choice] = await ask(server, chat(tools=TOOLS))
    assert calls_of(choice) == [LIST]
    assert b"<tools>" in bytes(engine.requests[-1].prompt_token_ids)


def test_the_texts_of_special_tokens_are_found_once_for_a_tokenizer():
    from jaxinfer.server.chat_prompt import _other_special_texts

    tokenizer = tokenizer_with(SPECIAL)
    markers = {"<think>": tokenizer.token_id("<think>")}
    first = _other_special_texts(tokenizer, markers)
    assert _other_special_texts(tokenizer, dict(markers)) is first
    assert _other_special_texts(byte_tokenizer(), {}) is not first
