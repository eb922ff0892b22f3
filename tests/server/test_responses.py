"""/v1/responses: the items and events of an answer, with the real client and on raw bytes."""

import itertools
import json

import openai
import pytest
from pydantic import BaseModel
from server.fake_engine import TEMPLATE, until
from tiny_server import tiny_server

from jaxinfer.outputs import PhaseTimes
from jaxinfer.text import ChatTemplate

RESPONSES = "/v1/responses"
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "of a place",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    "strict": False,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Bern"}}\n</tool_call>'
LIFECYCLE = ("response.created", "response.in_progress")
MESSAGE_EVENTS = [
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]
REASONING_EVENTS = [event.replace("output_text", "reasoning_text") for event in MESSAGE_EVENTS]
CALL_EVENTS = [
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
]


async def respond(server, body=None, path=RESPONSES, **more):
    status, reply, _ = await server.post(path, {"input": "hi", **(body or {}), **more})
    assert status == 200, reply
    return reply


async def events(server, **body):
    """Returns the events of a stream, after the checks that hold for every stream."""
    found = []
    for event in await server.events(RESPONSES, {"input": "hi", **body}):
        name, data = event.decode().split("\n")
        payload = json.loads(data.removeprefix("data: "))
        assert name == f"event: {payload['type']}"
        found.append(payload)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    lifecycle = [event["response"] for event in found if "response" in event]
    assert len({response["id"] for response in lifecycle}) == 1
    assert [event["type"] for event in found[:2]] == [*LIFECYCLE]
    return found


def kinds(found):
    """Returns the types, runs of equal ones once."""
    return [kind for kind, _ in itertools.groupby(event["type"] for event in found)]


def stable(response):
    """Returns a response without what differs from one to the next."""
    text = json.dumps({**response, "created_at": 0, "completed_at": 0, "id": ""})
    return json.loads(text, object_hook=_without_ids)


def _without_ids(item):
    return {name: value for name, value in item.items() if name not in ("id", "call_id")}


@pytest.fixture
def thinking(engine):
    """An engine whose model reasons, with room for tools to be told in the prompt."""
    engine.chat_template = ChatTemplate(TEMPLATE + "{# <think></think> #}")
    engine.max_model_len = 2000
    return engine


@pytest.mark.parametrize("path", [RESPONSES, "/responses"])
async def test_a_whole_response(server, path):
    reply = await respond(server, path=path, instructions="be brief", metadata={"a": "b"})
    (item,) = reply["output"]
    assert item.pop("id").startswith("msg_")
    part = {"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}
    assert item == {
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [part],
    }
    assert reply["id"].startswith("resp_")
    assert (reply["object"], reply["status"], reply["model"]) == ("response", "completed", "tiny")
    assert reply["completed_at"] >= reply["created_at"]
    assert (reply["error"], reply["incomplete_details"]) == (None, None)
    assert (reply["instructions"], reply["metadata"]) == ("be brief", {"a": "b"})
    assert (reply["store"], reply["truncation"], reply["background"]) == (False, "disabled", False)
    assert (reply["tools"], reply["tool_choice"]) == ([], "auto")
    assert reply["parallel_tool_calls"] is True
    assert (reply["temperature"], reply["top_p"], reply["top_logprobs"]) == (1.0, 1.0, 0)
    assert reply["text"] == {"format": {"type": "text"}}


async def test_usage(server, engine):
    engine.num_cached, engine.times = 3, PhaseTimes(0.5, 2.0)
    usage = (await respond(server))["usage"]
    count = usage["input_tokens"]
    assert usage["input_tokens_details"] == {"cached_tokens": 3}
    assert usage["output_tokens"] == 6
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}
    assert usage["total_tokens"] == count + 6
    assert usage["avg_compl_tok_per_sec"] == 3.0
    assert usage["avg_prompt_tok_per_sec"] == (count - 3) / 0.5


async def test_the_events_of_a_text(server):
    found = await events(server)
    assert kinds(found) == [*LIFECYCLE, *MESSAGE_EVENTS, "response.completed"]
    by_kind = {kind: list(group) for kind, group in itertools.groupby(found, lambda e: e["type"])}
    assert by_kind["response.created"][0]["response"]["status"] == "in_progress"
    assert by_kind["response.in_progress"][0]["response"]["usage"] is None
    (added,) = by_kind["response.output_item.added"]
    assert (added["output_index"], added["item"]["status"]) == (0, "in_progress")
    assert added["item"]["content"] == []
    item_id = added["item"]["id"]
    inside = [event for event in found if "item_id" in event]
    assert {(e["item_id"], e["output_index"], e["content_index"]) for e in inside} == {
        (item_id, 0, 0)
    }
    deltas = by_kind["response.output_text.delta"]
    assert "".join(event["delta"] for event in deltas) == "hello"
    assert all(event["logprobs"] == [] for event in deltas)
    assert by_kind["response.output_text.done"][0]["text"] == "hello"
    assert by_kind["response.content_part.done"][0]["part"]["text"] == "hello"
    done = by_kind["response.output_item.done"][0]["item"]
    last = found[-1]["response"]
    assert last["output"] == [done]
    assert last["usage"]["output_tokens"] == 6


TEXTS = {
    "text": ("hello", {}),
    "nothing": ("", {}),
    "bytes": ("grüße 🙂", {}),
    "length": ("hello", {"max_output_tokens": 3}),
    "stop": ("hello", {"stop": ["l"]}),
    "logprobs": ("hello", {"top_logprobs": 2}),
    "reasoning": ("<think>why</think>\n\nso", {}),
    "only reasoning": ("<think>why is", {"max_output_tokens": 9}),
    "call": (CALL, {"tools": [WEATHER]}),
    "text and calls": (f"I look.\n{CALL}\n{CALL}", {"tools": [WEATHER]}),
    "one call": (f"{CALL}\n{CALL}", {"tools": [WEATHER], "parallel_tool_calls": False}),
    "all": (f"<think>why</think>I look.{CALL}", {"tools": [WEATHER], "top_logprobs": 1}),
    "cut call": (CALL, {"tools": [WEATHER], "max_output_tokens": 50}),
}


@pytest.mark.parametrize("name", TEXTS)
async def test_streams_add_up_to_whole_responses(server, thinking, name):
    thinking.text, body = TEXTS[name]
    whole = await respond(server, body)
    found = await events(server, **body)
    assert stable(found[-1]["response"]) == stable(whole)
    assert found[-1]["type"] == f"response.{whole['status']}"
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert done == found[-1]["response"]["output"]
    for index, item in enumerate(done):
        deltas = [e for e in found if e["type"].endswith(".delta") and e["output_index"] == index]
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert "".join(event["delta"] for event in deltas) == text
        if item["type"] == "message":
            logprobs = [entry for event in deltas for entry in event["logprobs"]]
            assert logprobs == item["content"][0]["logprobs"]


async def test_an_answer_of_nothing_is_an_empty_message(server, engine):
    engine.text = ""
    (item,) = (await respond(server))["output"]
    assert item["content"][0]["text"] == ""


@pytest.mark.parametrize("name", ["length", "only reasoning", "cut call"])
async def test_a_length_that_is_reached_is_incomplete(server, thinking, name):
    thinking.text, body = TEXTS[name]
    reply = await respond(server, body)
    assert reply["status"] == "incomplete"
    assert reply["incomplete_details"] == {"reason": "max_output_tokens"}
    assert reply["output"][-1]["status"] == "incomplete"
    assert reply["completed_at"] is None


async def test_reasoning_and_calls_are_items(server, thinking):
    thinking.text = f"<think>why</think>I look.{CALL}\n{CALL}"
    reply = await respond(server, tools=[WEATHER])
    assert [item["type"] for item in reply["output"]] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    reasoning, message, call, other = reply["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "why"}]
    assert reasoning["summary"] == []
    assert message["content"][0]["text"] == "I look."
    assert call["name"] == "weather"
    assert json.loads(call["arguments"]) == {"place": "Bern"}
    assert call["id"].startswith("fc_")
    assert call["call_id"].startswith("call_")
    assert call["call_id"] != other["call_id"]
    assert (
        len("why")
        <= reply["usage"]["output_tokens_details"]["reasoning_tokens"]
        <= len("<think>why</think>")
    )
    found = await events(server, tools=[WEATHER])
    assert kinds(found) == [
        *LIFECYCLE,
        *REASONING_EVENTS,
        *MESSAGE_EVENTS,
        *CALL_EVENTS,
        *CALL_EVENTS,
        "response.completed",
    ]


async def test_log_probabilities_are_those_of_the_message(server, thinking):
    thinking.text = f"<think>why</think>ok{CALL}"
    reply = await respond(server, tools=[WEATHER], include=["message.output_text.logprobs"])
    part = reply["output"][1]["content"][0]
    assert [entry["token"] for entry in part["logprobs"]][-2:] == ["o", "k"]
    assert all(entry["top_logprobs"] == [] for entry in part["logprobs"])
    thinking.text = "ok"
    reply = await respond(server, top_logprobs=2)
    logprobs = reply["output"][0]["content"][0]["logprobs"]
    assert [len(entry["top_logprobs"]) for entry in logprobs] == [2, 2, 2]
    assert bytes(byte for entry in logprobs for byte in entry["bytes"]) == b"ok"


async def test_an_error_before_the_first_event_has_its_own_status(server, engine):
    engine.fault = "error"
    status, reply, headers = await server.post(RESPONSES, {"input": "hi", "stream": True})
    assert (status, reply["error"]["code"]) == (500, "internal_error")
    assert headers["Content-Type"].startswith("application/json")


@pytest.mark.parametrize("fault", ["error", RuntimeError("boom")], ids=str)
async def test_an_error_on_the_way_is_a_failed_response(server, engine, fault):
    engine.fault, engine.fault_after = fault, 2
    found = await events(server)
    assert found[-1]["type"] == "response.failed"
    response = found[-1]["response"]
    assert response["status"] == "failed"
    assert response["error"]["code"] == "server_error"
    assert "boom" not in response["error"]["message"]
    (item,) = response["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "he")


async def test_a_client_that_leaves_cancels(server, engine):
    for stream in (True, False):
        engine.gate.clear()
        _, writer = await server.raw({"input": "hi", "stream": stream}, path=RESPONSES)
        await until(lambda: engine.running)
        writer.close()
        await until(lambda: not engine.running)
    assert len(engine.aborted) == 2


class Place(BaseModel):
    place: str


async def test_the_real_client(client, thinking):
    reply = await client.responses.create(model="tiny", input="hi", instructions="be brief")
    assert reply.output_text == "hello"
    assert reply.usage.total_tokens == reply.usage.input_tokens + 6
    thinking.text = f"<think>why</think>I look.{CALL}"
    reply = await client.responses.create(model="tiny", input="hi", tools=[WEATHER])
    again = await client.responses.create(
        model="tiny",
        input=[
            {"role": "user", "content": "hi"},
            *(item.model_dump(exclude_none=True) for item in reply.output),
        ],
        tools=[WEATHER],
    )
    assert again.output_text == "I look."
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="tiny", input="hi", previous_response_id="resp_1")
    assert caught.value.code == "unsupported_parameter"


async def test_the_real_clients_raw_stream(client, thinking):
    thinking.text = f"<think>why</think>I look.{CALL}"
    stream = await client.responses.create(model="tiny", input="hi", tools=[WEATHER], stream=True)
    found = [event async for event in stream]
    assert found[0].type == "response.created"
    assert found[-1].type == "response.completed"
    assert found[-1].response.output_text == "I look."


async def test_the_real_clients_accumulating_stream(client, thinking):
    """The helper raises where ids change, or where an event has no place to belong to."""
    thinking.text = f"<think>why</think>I look.{CALL}"
    async with client.responses.stream(model="tiny", input="hi", tools=[WEATHER]) as stream:
        snapshots = [e.snapshot async for e in stream if e.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert snapshots[-1] == "I look."
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output[-1].arguments == '{"place": "Bern"}'


async def test_on_a_real_engine(monkeypatch):
    async with tiny_server(monkeypatch) as server:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            body = {"model": "tiny", "input": "hi", "temperature": 0, "max_output_tokens": 8}
            whole = await client.responses.create(**body)
            assert whole.usage.output_tokens <= 8
            assert whole.usage.model_extra["total_time_sec"] > 0
            async with client.responses.stream(**body) as stream:
                async for event in stream:
                    last = event
            assert last.response.output[0].content[0].text == whole.output_text
