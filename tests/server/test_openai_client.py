"""OpenAI's own Python client against the application."""

import asyncio

import openai
import pytest
from server.fake_engine import until

MESSAGES = [{"role": "user", "content": "hi"}]


async def test_chat(client):
    reply = await client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert reply.choices[0].message.content == "hello"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.completion_tokens == 6


async def test_chat_stream(client):
    stream = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "hello"
    assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + 6


async def test_the_accumulating_stream_helper(client):
    async with client.chat.completions.stream(model="tiny", messages=MESSAGES, n=2) as stream:
        async for _ in stream:
            pass
        reply = await stream.get_final_completion()
    for choice in reply.choices:
        assert (choice.message.role, choice.message.content) == ("assistant", "hello")


async def test_completions(client):
    reply = await client.completions.create(
        model="tiny", prompt=["a", "b"], max_tokens=3, logprobs=1
    )
    assert [choice.text for choice in reply.choices] == ["hel", "hel"]
    assert reply.choices[0].logprobs.tokens == ["h", "e", "l"]
    stream = await client.completions.create(model="tiny", prompt="a", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "hello"


async def test_models(client):
    models = [model async for model in client.models.list()]
    assert [model.id for model in models] == ["tiny"]
    assert (await client.models.retrieve("tiny")).object == "model"


async def test_errors_are_the_clients_exceptions(client, engine):
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=9)
    assert (caught.value.param, caught.value.code) == ("temperature", "decimal_above_max_value")
    assert caught.value.request_id.startswith("req-")
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    engine.fault, engine.fault_after = "error", 2
    stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="internal error"):
        _ = [chunk async for chunk in stream]


async def test_ten_concurrent_streams(client, engine):
    engine.gate.clear()

    async def ask(number):
        stream = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, max_tokens=1 + number % 5
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    tasks = [asyncio.create_task(ask(number)) for number in range(10)]
    await until(lambda: len(engine.running) == 10)
    engine.gate.set()
    assert await asyncio.gather(*tasks) == ["hello"[: 1 + number % 5] for number in range(10)]


async def test_leaving_a_stream_early_aborts(client, engine):
    engine.text = "x" * 200
    stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    async for _ in stream:
        engine.gate.clear()
        break
    await stream.close()
    await until(lambda: not engine.running, timeout_s=4)
    assert engine.aborted
