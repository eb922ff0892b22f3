"""The cells of openai-python."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from cells import FLAT_TOOL, MESSAGES, NAMED, TOOL, cell, check_city, city_model


def _openai(at: Any) -> Any:
    import openai

    return openai.OpenAI(base_url=at.v1, api_key="EMPTY", max_retries=0, timeout=120)


def _async_openai(at: Any) -> Any:
    import openai

    return openai.AsyncOpenAI(base_url=at.v1, api_key="EMPTY", max_retries=0, timeout=120)


@cell("openai", "chat")
def openai_chat(at: Any) -> None:
    reply = _openai(at).chat.completions.create(model=at.model, messages=MESSAGES, max_tokens=8)
    assert reply.choices[0].message.content
    assert reply.choices[0].finish_reason in ("stop", "length")
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


@cell("openai", "chat stream with usage")
def openai_chat_stream(at: Any) -> None:
    chunks = list(
        _openai(at).chat.completions.create(
            model=at.model, messages=MESSAGES, max_tokens=8, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chunks[-1].usage.completion_tokens > 0


@cell("openai", ".stream helper, n = 2")
def openai_stream_helper(at: Any) -> None:
    with _openai(at).chat.completions.stream(
        model=at.model, messages=MESSAGES, n=2, max_tokens=200, stop=[" "]
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "content.delta" in kinds
    assert [choice.message.role for choice in final.choices] == ["assistant"] * 2


@cell("openai", ".parse of a pydantic model")
def openai_parse(at: Any) -> None:
    reply = _openai(at).chat.completions.parse(
        model=at.model, messages=MESSAGES, response_format=city_model(), max_tokens=80
    )
    assert reply.choices[0].message.parsed.size in ("s", "l")


@cell("openai", ".stream helper of a pydantic model")
def openai_stream_parse(at: Any) -> None:
    with _openai(at).chat.completions.stream(
        model=at.model, messages=MESSAGES, response_format=city_model(), max_tokens=80
    ) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.parsed.size in ("s", "l")


@cell("openai", "json_object")
def openai_json_object(at: Any) -> None:
    reply = _openai(at).chat.completions.create(
        model=at.model, messages=[{"role": "user", "content": "A small JSON object, please."}],
        response_format={"type": "json_object"}, max_tokens=200, temperature=0,
    )  # fmt: skip
    choice = reply.choices[0]
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)
    assert choice.message.content.lstrip().startswith("{")


@cell("openai", "tool, named")
def openai_tool_named(at: Any) -> None:
    reply = _openai(at).chat.completions.create(
        model=at.model, messages=MESSAGES, tools=[TOOL], tool_choice=NAMED, max_tokens=100
    )
    [call] = reply.choices[0].message.tool_calls
    assert call.function.name == "note"
    check_city(call.function.arguments)


@cell("openai", "tool, required, streamed")
def openai_tool_stream(at: Any) -> None:
    with _openai(at).chat.completions.stream(
        model=at.model, messages=MESSAGES, tools=[TOOL], tool_choice="required", max_tokens=100,
        parallel_tool_calls=False,
    ) as stream:  # fmt: skip
        for _ in stream:
            pass
        final = stream.get_final_completion()
    [call] = final.choices[0].message.tool_calls
    assert call.function.name == "note"
    assert final.choices[0].finish_reason == "tool_calls"
    check_city(call.function.arguments)


@cell("openai", "tool result sent back")
def openai_tool_result(at: Any) -> None:
    call = {
        "id": "call_1", "type": "function",
        "function": {"name": "note", "arguments": '{"city": "Rome", "size": "l"}'},
    }  # fmt: skip
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noted"},
    ]
    reply = _openai(at).chat.completions.create(
        model=at.model, messages=messages, tools=[TOOL], max_tokens=8
    )
    assert reply.choices[0].message.role == "assistant"


@cell("openai", "logprobs")
def openai_logprobs(at: Any) -> None:
    reply = _openai(at).chat.completions.create(
        model=at.model, messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=3
    )
    assert all(len(entry.top_logprobs) == 3 for entry in reply.choices[0].logprobs.content)


@cell("openai", "completions, echo and logprobs")
def openai_completions(at: Any) -> None:
    reply = _openai(at).completions.create(
        model=at.model, prompt=["One two", "A b"], max_tokens=4, echo=True, logprobs=1
    )
    assert [choice.text[:3] for choice in reply.choices] == ["One", "A b"]
    assert reply.choices[0].logprobs.token_logprobs[0] is None


@cell("openai", "completions stream")
def openai_completions_stream(at: Any) -> None:
    chunks = _openai(at).completions.create(
        model=at.model, prompt="One two", max_tokens=6, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in chunks)


@cell("openai", "embeddings, base64 by default")
def openai_embeddings(at: Any) -> None:
    client = _openai(at)
    packed = client.embeddings.create(model=at.model, input=["red", "a house"])
    plain = client.embeddings.create(
        model=at.model, input=["red", "a house"], encoding_format="float"
    )
    assert len(packed.data) == 2
    for one, other in zip(packed.data, plain.data, strict=True):
        gap = max(abs(a - b) for a, b in zip(one.embedding, other.embedding, strict=True))
        assert gap < 1e-5, gap


@cell("openai", "responses")
def openai_responses(at: Any) -> None:
    reply = _openai(at).responses.create(
        model=at.model, input="Name one colour.", instructions="Be brief.", max_output_tokens=16
    )
    assert reply.output_text
    assert reply.status in ("completed", "incomplete")
    assert reply.usage.output_tokens > 0


@cell("openai", "responses stream")
def openai_responses_stream(at: Any) -> None:
    events = list(
        _openai(at).responses.create(
            model=at.model, input=MESSAGES, max_output_tokens=16, stream=True
        )
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-1] in ("response.completed", "response.incomplete")


@cell("openai", "responses .stream helper")
def openai_responses_helper(at: Any) -> None:
    # The helper takes a response that the length has cut for none.
    with _openai(at).responses.stream(
        model=at.model, input="Name one colour.", extra_body={"stop": [" "]}
    ) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text


@cell("openai", "responses tool, required")
def openai_responses_tool(at: Any) -> None:
    reply = _openai(at).responses.create(
        model=at.model, input="Name one city.", tools=[FLAT_TOOL], tool_choice="required",
        max_output_tokens=100,
    )  # fmt: skip
    [call] = [item for item in reply.output if item.type == "function_call"]
    check_city(call.arguments)


@cell("openai", "responses .parse")
def openai_responses_parse(at: Any) -> None:
    reply = _openai(at).responses.parse(
        model=at.model, input="Name one city.", text_format=city_model(), max_output_tokens=80
    )
    assert reply.output_parsed.size in ("s", "l")


@cell("openai", "models")
def openai_models(at: Any) -> None:
    client = _openai(at)
    assert at.model in [model.id for model in client.models.list()]
    assert client.models.retrieve(at.model).object == "model"


@cell("openai", "raw response")
def openai_raw(at: Any) -> None:
    raw = _openai(at).chat.completions.with_raw_response.create(
        model=at.model, messages=MESSAGES, max_tokens=4
    )
    assert raw.headers["x-request-id"]
    assert raw.parse().choices


@cell("openai", "streamed raw response")
def openai_streaming_raw(at: Any) -> None:
    with _openai(at).chat.completions.with_streaming_response.create(
        model=at.model, messages=MESSAGES, max_tokens=4, stream=True
    ) as raw:
        lines = [line for line in raw.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"


@cell("openai", "errors are its exceptions")
def openai_errors(at: Any) -> None:
    import openai

    client = _openai(at)
    for options, kind in (
        ({"model": at.model, "temperature": 9}, openai.BadRequestError),
        ({"model": "no-such-model"}, openai.NotFoundError),
    ):
        try:
            client.chat.completions.create(messages=MESSAGES, **options)
        except kind as error:
            caught = error
        else:
            raise AssertionError(f"{options} was accepted")
        assert caught.param in ("temperature", "model")
        assert caught.request_id


@cell("openai", "async, 8 at once")
async def openai_async(at: Any) -> None:
    async with _async_openai(at) as client:
        replies = await asyncio.gather(
            *(
                client.chat.completions.create(model=at.model, messages=MESSAGES, max_tokens=6)
                for _ in range(8)
            )
        )
    assert all(reply.choices[0].message.content for reply in replies)


@cell("openai", "async stream, left early")
async def openai_async_stream(at: Any) -> None:
    async with _async_openai(at) as client:
        stream = await client.chat.completions.create(
            model=at.model, messages=MESSAGES, max_tokens=200, stream=True
        )
        async for _ in stream:
            break
        await stream.close()
        reply = await client.completions.create(model=at.model, prompt="a", max_tokens=2)
    assert reply.choices
