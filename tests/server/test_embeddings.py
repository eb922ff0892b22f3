"""/v1/embeddings: forms of the input, encodings, what is refused, and the real client."""

import base64
import math

import numpy as np
import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError
from server.fake_engine import chat, until
from tiny_engine import CONTEXT
from tiny_server import tiny_server

from jaxinfer.config import EngineConfig
from jaxinfer.request import QueueFullError

EMBEDDINGS = "/v1/embeddings"


def unit(*values):
    return pytest.approx([value / math.hypot(*values) for value in values], abs=1e-6)


async def embed(server, **body):
    status, reply, _ = await server.post(EMBEDDINGS, body)
    assert status == 200, reply
    return reply


async def refused(server, **body):
    """Returns the error, after a check that the server still answers."""
    status, reply, _ = await server.post(EMBEDDINGS, body)
    assert status == 400, reply
    assert (await server.post(EMBEDDINGS, {"input": "ab"}))[0] == 200
    return reply["error"]


@pytest.mark.parametrize("path", [EMBEDDINGS, "/embeddings"])
async def test_one_text_and_its_place_in_the_reply(server, path):
    status, reply, _ = await server.post(path, {"input": "abc", "model": "tiny", "user": "u"})
    assert status == 200
    assert reply == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": unit(97, 98)}],
        "model": "tiny",
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
    }


@pytest.mark.parametrize(
    ("texts", "states"),
    [
        (["ab", "cd"], [(97, 98), (99, 100)]),
        ([5, 6, 7], [(5, 6)]),
        ([[5, 6, 7], [3, 4]], [(5, 6), (3, 4)]),
    ],
)
async def test_batches_and_ids_keep_their_order(server, texts, states):
    reply = await embed(server, input=texts)
    assert [item["index"] for item in reply["data"]] == list(range(len(states)))
    assert [item["embedding"] for item in reply["data"]] == [unit(*state) for state in states]


async def test_nothing_is_generated_and_priority_goes_on(server, engine):
    await embed(server, input=["ab", "c"], priority=7)
    assert all(request.embeds for request in engine.requests)
    assert [request.params.max_tokens for request in engine.requests] == [0, 0]
    assert [request.priority for request in engine.requests] == [7, 7]


async def test_base64_is_little_endian_float32(server):
    (item,) = (await embed(server, input="ab", encoding_format="base64"))["data"]
    assert np.frombuffer(base64.b64decode(item["embedding"]), "<f4").tolist() == unit(97, 98)


async def test_without_normalization_it_is_the_hidden_state(server):
    (item,) = (await embed(server, input="ab", normalize=False))["data"]
    assert item["embedding"] == [97.0, 98.0]


@pytest.mark.parametrize(
    ("options", "state"),
    [
        ({"truncate_prompt_tokens": 2}, (99, 100)),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, (97, 98)),
        ({"truncate_prompt_tokens": 9}, (97, 98)),
        ({"truncate_prompt_tokens": None}, (97, 98)),
    ],
)
async def test_truncation(server, options, state):
    (item,) = (await embed(server, input="abcd", **options))["data"]
    assert item["embedding"] == unit(*state)


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "input", "missing_required_parameter"),
        ({"input": None}, "input", "missing_required_parameter"),
        ({"input": ""}, "input", "empty_array"),
        ({"input": []}, "input", "empty_array"),
        ({"input": [[]]}, "input", "empty_array"),
        ({"input": ["a", ""]}, "input", "empty_array"),
        ({"input": 5}, "input", "invalid_type"),
        ({"input": {"text": "a"}}, "input", "invalid_type"),
        ({"input": ["a", [1]]}, "input[1]", "invalid_type"),
        ({"input": [1, "a"]}, "input", "invalid_type"),
        ({"input": [1.5]}, "input", "invalid_type"),
        ({"input": [-1]}, "input", "invalid_value"),
        ({"input": [999]}, "input", "invalid_value"),
        ({"input": ["a"] * 2049}, "input", "array_above_max_length"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "invalid_value"),
        ({"input": "a", "encoding_format": 1}, "encoding_format", "invalid_type"),
        ({"input": "a", "dimensions": 64}, "dimensions", "unsupported_parameter"),
        ({"input": "a", "dimensions": 0}, "dimensions", "integer_below_min_value"),
        ({"input": "a", "dimensions": "2"}, "dimensions", "invalid_type"),
        ({"input": "a", "pooling": "mean"}, "pooling", "unsupported_parameter"),
        ({"input": "a", "embd_normalize": -1}, "embd_normalize", "unsupported_parameter"),
        ({"input": "a", "normalize": 1}, "normalize", "invalid_type"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
        (
            {"input": "a", "truncate_prompt_tokens": -2},
            "truncate_prompt_tokens",
            "integer_below_min_value",
        ),
        ({"input": "a", "user": 5}, "user", "invalid_type"),
    ],
    ids=str,
)
async def test_refusals(server, body, param, code):
    error = await refused(server, **body)
    assert (error["param"], error["code"]) == (param, code), error["message"]


async def test_unknown_names_are_refused_when_strict(start):
    server = await start(strict_params=True)
    assert (await refused(server, input="ab", inputs="cd"))["message"].endswith("'inputs'")


async def test_an_unknown_model_is_not_found(server):
    status, reply, _ = await server.post(EMBEDDINGS, {"input": "ab", "model": "other"})
    assert (status, reply["error"]["code"]) == (404, "model_not_found")


async def test_many_texts_do_not_overrun_the_queue(server, engine):
    engine.config = EngineConfig(max_queued_requests=10)
    seen = []

    class Gate:
        async def wait(self):
            seen.append(len(engine.running))

    engine.gate = Gate()
    reply = await embed(server, input=[[7, i % 250] for i in range(100)])
    assert [item["embedding"] for item in reply["data"]] == [unit(7, i % 250) for i in range(100)]
    assert max(seen) == 5


async def test_a_full_queue_and_a_fault(server, engine):
    engine.fault = QueueFullError("full")
    status, reply, headers = await server.post(EMBEDDINGS, {"input": "ab"})
    assert (status, reply["error"]["code"]) == (429, "queue_full")
    assert headers["Retry-After"] == "1"


async def test_a_client_that_leaves_cancels(server, engine):
    engine.gate.clear()
    _, writer = await server.raw({"input": ["ab", "cd"]}, path=EMBEDDINGS)
    await until(lambda: len(engine.running) == 2)
    writer.close()
    await until(lambda: len(engine.aborted) == 2)


@pytest.fixture
async def tiny(monkeypatch):
    async with tiny_server(monkeypatch) as server:
        yield server


async def test_the_real_client_on_a_real_engine(tiny):
    """The client asks for base64 unless told otherwise."""
    async with AsyncOpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0) as client:
        texts = ["hello", "x" * CONTEXT, "a", "hello"]
        reply = await client.embeddings.create(model="tiny", input=texts)
        vectors = np.array([item.embedding for item in reply.data])
        assert vectors.shape == (4, 64)
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-6)
        np.testing.assert_allclose(vectors[0], vectors[3], atol=1e-5)
        assert vectors[0] @ vectors[2] < 0.999
        assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(map(len, texts))
        floats = await client.embeddings.create(model="tiny", input=texts, encoding_format="float")
        np.testing.assert_allclose([item.embedding for item in floats.data], vectors, atol=1e-5)
        with pytest.raises(BadRequestError, match="maximum context length") as caught:
            await client.embeddings.create(model="tiny", input=["a", "x" * (CONTEXT + 1)])
        assert (caught.value.param, caught.value.code) == ("input", "context_length_exceeded")
        with pytest.raises(NotFoundError):
            await client.embeddings.create(model="other", input="a")
        many = await client.embeddings.create(model="tiny", input=["a", "bc", "def"] * 20)
        assert len(many.data) == 60


async def test_chat_goes_on_beside_it(server):
    await embed(server, input="ab")
    status, reply, _ = await server.post("/v1/chat/completions", chat())
    assert status == 200
    assert reply["choices"][0]["message"]["content"] == "hello"
