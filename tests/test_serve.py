"""`python serve.py` with the real model, as its clients see it; and overload, on a tiny engine."""

import asyncio
import contextlib
import json
import signal
import socket
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import aiohttp
import openai
import pytest
from aiohttp import web
from serve_process import ServeProcess
from server.fake_engine import Server, until
from tiny_engine import MAX_OPEN, empty, shared

from jaxinfer import async_engine
from jaxinfer.async_engine import AsyncEngine
from jaxinfer.config import EngineConfig, ServerConfig
from jaxinfer.server.app import make_app
from jaxinfer.server.connection import accept, listen

# `--exact`, so that a text does not depend on who else is answered.
SMALL = (
    *("--max-model-len", "512", "--max-num-seqs", "12", "--max-num-batched-tokens", "64"),
    *("--exact", "--served-model-name", "mistral", "--served-model-name", "smol"),
)
PROMPTS = [
    "The capital of France is",
    "1, 2, 3, 4,",
    "Once upon a time",
    "def add(a, b):\n",
    "日本語: こんにちは、世界。\n日本語: こんにちは、世界。\n日本語:",
    "🌶️ 你好 👩‍👩‍👧 🌶️ 你好 👩‍👩‍👧 🌶️ 你好",
    "Roses are red,",
    "Привет, как дела? Привет, как дела? Привет",
    "The sum of 2 and 2 is",
    "Water boils at",
]


@pytest.fixture(scope="module")
def real_server(smollm2_path):
    with ServeProcess("--model", str(smollm2_path), *SMALL) as server:
        yield server


@pytest.mark.slow
@pytest.mark.real_model
class TestTheRealModel:
    @pytest.fixture
    def server(self, real_server):
        return real_server

    @pytest.fixture
    def client(self, server):
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            yield client

    def test_the_log_says_what_was_decided(self, server):
        wait_for(lambda: " ready: " in server.text, 2.0)
        for said in ("device: 1 ×", "paged_attention: cpu", "quantized_matmul (uint4): cpu",
                     "ladder: decode (2, 12)", "KV pool: ", "listening on",
                     "ready: "):  # fmt: skip
            assert said in server.text
        assert "Traceback" not in server.text

    def test_curl(self, server):
        body = {
            "model": "mistral",
            "messages": [
                {"role": "system", "content": "You are a helpful assistant."},
                {"role": "user", "content": "What is the capital of France?"},
            ],
            "max_tokens": 40,
            "temperature": 0.0,
            "stream": False,
        }
        request = urllib.request.Request(
            f"{server.url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            answer = json.load(reply)
        [choice] = answer["choices"]
        assert "Paris" in choice["message"]["content"]
        assert choice["finish_reason"] in ("stop", "length")
        assert answer["model"] == "mistral"
        usage = answer["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage["prompt_tokens"] > 20

    def test_chat_streamed_and_not(self, client):
        chat = {
            "model": "smol",
            "messages": [{"role": "user", "content": "Count from one to five."}],
            "max_tokens": 24,
            "temperature": 0,
        }
        whole = client.chat.completions.create(**chat)
        chunks = list(
            client.chat.completions.create(
                **chat, stream=True, stream_options={"include_usage": True}
            )
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content != ""
        usage = chunks[-1].usage
        assert usage.prompt_tokens == whole.usage.prompt_tokens
        assert usage.completion_tokens == whole.usage.completion_tokens
        # The first one's pages of 16 tokens; one token at least is computed again.
        cached = (usage.prompt_tokens - 1) // 16 * 16
        assert usage.prompt_tokens_details.cached_tokens == cached > 0
        assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason

    @pytest.mark.parametrize("prompt", PROMPTS[:6])
    def test_streamed_text_is_the_whole_text(self, client, prompt):
        ask = {"model": "smol", "prompt": prompt, "max_tokens": 20, "temperature": 0}
        whole = client.completions.create(**ask).choices[0].text
        chunks = client.completions.create(**ask, stream=True)
        pieces = [chunk.choices[0].text for chunk in chunks]
        assert "".join(pieces) == whole
        assert len([piece for piece in pieces if piece]) > 3
        if not prompt.isascii():
            assert not whole.isascii()

    def test_echo_with_log_probabilities(self, client):
        prompt = "The capital of France is"
        answer = client.completions.create(
            model="smol", prompt=prompt, max_tokens=3, temperature=0, echo=True, logprobs=2
        )
        [choice] = answer.choices
        scores = choice.logprobs
        assert choice.text.startswith(prompt + " Paris")
        assert "".join(scores.tokens) == choice.text
        assert len(scores.tokens) == answer.usage.total_tokens
        assert scores.token_logprobs[0] is None
        assert all(value <= 0 for value in scores.token_logprobs[1:])
        # Greedy output is the best alternative, at every generated position.
        for value, top in list(zip(scores.token_logprobs, scores.top_logprobs, strict=True))[-3:]:
            assert value == max(top.values())

    def test_n_completions_differ_and_a_seed_repeats_them(self, client):
        ask = {"model": "smol", "prompt": "My favourite", "max_tokens": 12, "n": 2, "seed": 5}
        first, again = (client.completions.create(**ask) for _ in range(2))
        texts = [choice.text for choice in first.choices]
        assert texts == [choice.text for choice in again.choices]
        assert texts[0] != texts[1]
        assert [choice.index for choice in first.choices] == [0, 1]
        assert first.usage.completion_tokens == 24

    def test_a_stop_string_ends_before_it(self, client):
        ask = {"model": "smol", "prompt": "1, 2, 3, 4,", "max_tokens": 20, "temperature": 0}
        free = client.completions.create(**ask).choices[0].text
        assert "7" in free
        for stream in (False, True):
            reply = client.completions.create(**ask, stop=["7", "never"], stream=stream)
            if stream:
                choices = [chunk.choices[0] for chunk in reply]
                text, reason = "".join(c.text for c in choices), choices[-1].finish_reason
            else:
                text, reason = reply.choices[0].text, reply.choices[0].finish_reason
            assert (text, reason) == (free.split("7")[0], "stop")

    def test_models(self, client):
        assert [model.id for model in client.models.list()] == ["mistral", "smol"]
        assert client.models.retrieve("smol").id == "smol"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("gpt-4")

    def test_errors(self, client):
        messages = [{"role": "user", "content": "hi"}]
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model="gpt-4", messages=messages)
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="smol", messages=messages, temperature=3)
        assert caught.value.param == "temperature"
        assert caught.value.code
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="smol", prompt="word " * 600)
        assert caught.value.code == "context_length_exceeded"
        assert "512" in str(caught.value)

    async def test_ten_streams_at_once_say_what_each_says_alone(self, server):
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:

            async def stream(prompt):
                chunks = await client.completions.create(
                    model="smol", prompt=prompt, max_tokens=24, temperature=0, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in chunks])

            alone = [await stream(prompt) for prompt in PROMPTS]
            assert await asyncio.gather(*map(stream, PROMPTS)) == alone
        assert len(set(alone)) == len(PROMPTS)

    def test_health_and_metrics(self, server, client):
        before = server.metrics()
        answer = client.completions.create(model="smol", prompt="Hello", max_tokens=7, n=2,
                                           extra_body={"ignore_eos": True})  # fmt: skip
        after = server.metrics()

        def grew(name):
            return after[name] - before.get(name, 0.0)

        assert grew("vllm:prompt_tokens_total") >= answer.usage.prompt_tokens
        assert grew("vllm:generation_tokens_total") == answer.usage.completion_tokens == 14
        assert grew('vllm:request_success_total{finished_reason="length"}') == 2
        assert grew("vllm:time_to_first_token_seconds_count") == 1
        assert after['xla_compilations_total{phase="after_warmup"}'] == 0
        assert_idle(after)
        assert server.get("/health/live")
        assert server.get("/health")

    @pytest.mark.parametrize("stream", [True, False])
    def test_a_client_that_leaves_frees_its_pages_within_a_second(self, server, stream):
        aborted = server.metrics().get('vllm:request_success_total{finished_reason="abort"}', 0)
        body = json.dumps(
            {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "n": 4, "stream": stream}
        )
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            connection.sendall((head + body).encode())
            wait_for(lambda: server.metrics()["vllm:num_requests_running"] == 4, 10.0)
            if stream:
                assert connection.recv(12) == b"HTTP/1.1 200"
        left = time.monotonic()
        wait_for(lambda: server.metrics()["vllm:kv_cache_usage_perc"] == 0, 10.0)
        assert time.monotonic() - left < 1.0
        metrics = server.metrics()
        assert_idle(metrics)
        reasons = metrics['vllm:request_success_total{finished_reason="abort"}']
        assert reasons - aborted == 4

    def test_nothing_was_compiled_while_serving(self, server):
        assert server.metrics()['xla_compilations_total{phase="after_warmup"}'] == 0
        assert "Traceback" not in server.text

    def test_sigterm_lets_a_stream_finish(self, smollm2_path):
        """Runs last: two servers at once would be slow."""
        with ServeProcess("--model", str(smollm2_path), *SMALL) as server:
            body = {"prompt": "Once", "max_tokens": 60, "ignore_eos": True, "stream": True}
            request = urllib.request.Request(
                f"{server.url}/v1/completions", json.dumps(body).encode()
            )
            with urllib.request.urlopen(request, timeout=60) as reply:
                lines = [reply.readline()]
                server.process.send_signal(signal.SIGTERM)
                wait_for(lambda: "stopping: 1 requests are running" in server.text, 5.0)
                with pytest.raises(urllib.error.HTTPError) as caught:
                    server.get("/health")
                caught.value.close()
                assert caught.value.code == 503
                lines += reply.readlines()
            assert lines[-2] == b"data: [DONE]\n"
            assert b'"finish_reason":"length"' in b"".join(lines)
            assert server.process.wait(5) == 0


def assert_idle(metrics):
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert metrics[f"vllm:{gauge}"] == 0


def wait_for(condition, timeout_s):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def answer(request):
    """Returns (status, body), of errors too."""
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


class TestOverloadAndDeath:
    @pytest.fixture
    async def server(self, monkeypatch):
        """The application in front of a tiny engine."""
        loaded = shared()  # here, since the first time takes seconds
        monkeypatch.setattr(async_engine, "load_engine", lambda config: loaded)
        engine = AsyncEngine(EngineConfig())
        app = make_app(engine, ServerConfig())
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        listener = await listen(runner, "127.0.0.1", 0, access_log=None)
        await runner.setup()
        await accept(listener)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(runner.cleanup)
            stack.callback(listener.close)
            session = await stack.enter_async_context(aiohttp.ClientSession())
            await until(lambda: engine.state == "ready")
            yield Server(app, listener.sockets[0].getsockname()[1], session)
        empty(shared().engine)

    async def test_exactly_the_excess_is_429(self, server, monkeypatch):
        body = {"prompt": "abc", "max_tokens": 4, "ignore_eos": True}
        replies = await asyncio.gather(
            *(server.post("/v1/completions", body) for _ in range(MAX_OPEN * 3))
        )
        refused = [reply for reply in replies if reply[0] == 429]
        assert {reply[0] for reply in replies} <= {200, 429}
        assert sum(reply[0] == 200 for reply in replies) >= MAX_OPEN
        assert refused
        for _, answer, headers in refused:
            assert answer["error"]["code"] == "queue_full"
            assert int(headers["Retry-After"]) > 0
        assert (await server.post("/v1/completions", body))[0] == 200

    async def test_more_completions_in_one_request_than_may_wait_are_a_400(self, server):
        body = {"prompt": "abc", "max_tokens": 4, "n": MAX_OPEN + 1}
        status, answer, _ = await server.post("/v1/completions", body)
        assert (status, answer["error"]["param"]) == (400, "n")
        status, answer, _ = await server.post("/v1/completions", {**body, "n": MAX_OPEN})
        assert (status, len(answer["choices"])) == (200, MAX_OPEN)

    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_dead_engine_tells_those_it_was_answering(self, server, monkeypatch, stream):
        def fail():
            raise ArithmeticError("injected")

        monkeypatch.setattr(shared().engine, "start_step", fail)
        body = {"prompt": "abc", "max_tokens": 4, "stream": stream}
        status, answer, _ = await server.post("/v1/completions", body)
        assert (status, answer["error"]["code"]) == (503, "unavailable")
        assert (await server.get("/health"))[0] == 503
        assert (await server.post("/v1/completions", body))[0] == 503

    @pytest.mark.parametrize("fault", ["die", "hang"])
    def test_the_process_ends_after_it_told_its_clients(self, fault):
        server = ServeProcess(fault, "--step-timeout", "2", script="tests/faulty_server.py")
        try:
            server._wait_until_ready()
            body = {"prompt": "abc", "max_tokens": 100, "ignore_eos": True}
            whole, stream = (
                urllib.request.Request(
                    f"{server.url}/v1/completions", json.dumps({**body, "stream": streams}).encode()
                )
                for streams in (False, True)
            )
            with ThreadPoolExecutor(1) as pool:
                other = pool.submit(answer, whole)
                status, lines = answer(stream)
                assert status == 200
                assert b'"code":"unavailable"' in lines
                assert b'"text":' in lines
                assert b"[DONE]" not in lines
                status, text = other.result(20)
                assert (status, json.loads(text)["error"]["code"]) == (503, "unavailable")
            assert server.process.wait(20) == 1, server.text
            server._reader.join(5)
            said = "a step did not end within 2 s" if fault == "hang" else "no room for the pool"
            assert said in server.text
            assert "the engine has stopped; exiting" in server.text
            with pytest.raises(OSError, match="refused"):
                server.get("/health")
        finally:
            server.process.kill()
            server.process.wait()
            server._reader.join(5)
            server.process.stderr.close()
