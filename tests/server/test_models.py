"""Several models in one process: routing, names, loading and unloading, and their metrics."""

import asyncio
import weakref

import pytest
from server.fake_engine import FakeAsyncEngine, chat, until
from tiny_engine import build

from jaxinfer.async_engine import AsyncEngine
from jaxinfer.config import ConfigError, EngineConfig
from jaxinfer.server.served_model import Models, ServedModel
from jaxinfer.server.state import LIFECYCLE, MODELS
from jaxinfer.text import ChatTemplate

CHAT = "/v1/chat/completions"


class Shelf:
    """Two models with engines that say who they are; engines made anew are kept."""

    def __init__(self, b_loads_at_start=True):
        self.made = []
        self.a, self.b = self._engine("a"), self._engine("b")
        self.models = Models(
            [
                ServedModel(self.a, ["a", "first"]),
                ServedModel(
                    self.b, ["b"], loads_at_start=b_loads_at_start, make_engine=self._make_b
                ),
            ]
        )

    def _engine(self, name):
        engine = FakeAsyncEngine(name=f"root-of-{name}")
        engine.text = f"I am {name}"
        self.made.append(engine)
        return engine

    def _make_b(self, config):
        assert isinstance(config, EngineConfig)
        engine = self._engine("b")
        engine.text = "I am b again"
        return engine


@pytest.fixture
async def shelf():
    return Shelf()


async def say(server, model=None, **parameters):
    body = chat(**({} if model is None else {"model": model}), **parameters)
    status, answer, _ = await server.post(CHAT, body)
    if status != 200:
        return status, answer["error"]["code"]
    return answer["model"], answer["choices"][0]["message"]["content"]


async def test_the_model_field_picks_the_model(start, shelf):
    server = await start(models=shelf.models)
    assert await say(server, "a") == ("a", "I am a")
    assert await say(server, "b") == ("b", "I am b")
    assert await say(server, "first") == ("first", "I am a")
    assert await say(server) == ("a", "I am a")
    assert await say(server, "root-of-a") == (404, "model_not_found")
    assert await say(server, "") == (404, "model_not_found")
    status, answer, _ = await server.post(CHAT, chat(model=3))
    assert (status, answer["error"]["param"]) == (400, "model")
    assert [len(engine.requests) for engine in (shelf.a, shelf.b)] == [3, 1]


async def test_a_stream_and_the_other_endpoints_go_by_the_model_too(start, shelf):
    shelf.b.max_model_len = 99
    server = await start(models=shelf.models)
    chunks = await server.chunks(CHAT, chat(model="b"))
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert (chunks[0]["model"], text) == ("b", "I am b")
    _, answer, _ = await server.post("/v1/completions", {"model": "b", "prompt": "x"})
    assert answer["choices"][0]["text"] == "I am b"
    _, answer, _ = await server.post("/tokenize", {"model": "b", "prompt": "x"})
    assert answer["max_model_len"] == 99
    shelf.b.tokenizer.chat_template = "of b"
    assert (await server.get("/tokenizer_info?model=b"))[1]["chat_template"] == "of b"
    assert (await server.get("/tokenizer_info?model=c"))[0] == 404
    await server.post("/reset_prefix_cache", {})
    assert (shelf.a.num_clears, shelf.b.num_clears) == (1, 1)


async def test_each_model_has_its_own_chat_template(start, shelf):
    shelf.b.chat_template = ChatTemplate("{{ messages[0].content }}!", {})
    server = await start(models=shelf.models)
    for model in "ab":
        await say(server, model)
    prompts = [
        engine.tokenizer.decode(engine.requests[0].prompt_token_ids)
        for engine in (shelf.a, shelf.b)
    ]
    assert prompts == ["<user>hi<assistant>", "hi!"]


async def test_all_are_listed_with_what_becomes_of_them(start):
    server = await start(models=Shelf(b_loads_at_start=False).models)
    for path in ("/v1/models", "/models"):
        _, answer, _ = await server.get(path)
        assert [(model["id"], model["status"]) for model in answer["data"]] == [
            ("a", "loaded"),
            ("first", "loaded"),
            ("b", "unloaded"),
        ]
    assert [model["root"] for model in answer["data"]] == ["root-of-a", "root-of-a", "root-of-b"]
    assert [model["max_model_len"] for model in answer["data"]] == [256, 256, None]
    _, answer, _ = await server.get("/v1/models/b")
    assert (answer["id"], answer["status"]) == ("b", "unloaded")
    assert (await server.get("/v1/models/c"))[0] == 404


async def test_two_names_are_never_one():
    engines = [FakeAsyncEngine(), FakeAsyncEngine()]
    assert Models([ServedModel(engine, "ab") for engine in engines[:1]]).names == ("a", "b")
    models = Models([ServedModel(engines[0], ["a"]), ServedModel(engines[1])])
    assert models.names == ("a", "tiny")


class TestStart:
    async def test_models_are_loaded_one_after_the_other(self, start, shelf):
        shelf.a.loaded_event.clear()
        shelf.b.loaded_event.clear()
        server = await start(models=shelf.models, wait=False)
        assert (await server.get("/health"))[0] == 503
        assert (await server.get("/v1/models"))[0] == 503
        assert (await server.get("/v1/models/b"))[1]["status"] == "loading"
        shelf.b.loaded_event.set()
        await asyncio.sleep(0.05)
        assert shelf.b.state == "loading"
        assert await say(server, "b") == (503, "unavailable")
        shelf.a.loaded_event.set()
        await until(lambda: server.app[LIFECYCLE].is_ready)
        assert (await server.get("/health"))[0] == 200

    async def test_the_first_answers_while_the_second_loads(self, start, shelf):
        shelf.b.loaded_event.clear()
        server = await start(models=shelf.models, wait=False)
        await until(lambda: shelf.a.state == "ready")
        assert await say(server, "a") == ("a", "I am a")
        status, answer, headers = await server.post(CHAT, chat(model="b"))
        assert (status, answer["error"]["message"]) == (503, "Loading model")
        assert int(headers["Retry-After"]) > 0
        assert (await server.get("/health"))[0] == 503
        assert (await server.get("/health/live"))[0] == 200
        shelf.b.loaded_event.set()
        await until(lambda: server.app[LIFECYCLE].is_ready)
        assert await say(server, "b") == ("b", "I am b")

    async def test_pools_leave_room_for_the_models_that_are_not_loaded(self, start, tmp_path):
        shelf = Shelf(b_loads_at_start=False)
        file = tmp_path / "b.gguf"
        file.write_bytes(bytes(1000))
        b = list(shelf.models)[1]
        b.config = EngineConfig(model=str(file))
        await start(models=shelf.models)
        assert shelf.a.config.reserve_memory == 1000
        assert shelf.a.config.kv_cache_share == 0.5
        await b.load()
        assert (shelf.b.config.reserve_memory, shelf.b.config.kv_cache_share) == (0, 1.0)


class TestLoading:
    @pytest.fixture
    async def shelf(self):
        return Shelf(b_loads_at_start=False)

    @pytest.fixture
    async def server(self, start, shelf):
        return await start(models=shelf.models, shutdown_timeout=0.3)

    async def test_load_and_unload(self, server, shelf):
        assert await say(server, "b") == (404, "model_not_loaded")
        assert (await server.get("/health"))[0] == 200
        status, answer, _ = await server.post("/v1/models/load", {"model": "b"})
        assert (status, answer["id"], answer["status"]) == (200, "b", "loaded")
        assert await say(server, "b") == ("b", "I am b")
        status, answer, _ = await server.post("/models/unload", {"model": "b"})
        assert (status, answer["status"]) == (200, "unloaded")
        assert shelf.b.state == "dead"
        assert await say(server, "b") == (404, "model_not_loaded")
        assert await say(server, "a") == ("a", "I am a")
        assert (await server.post("/models/load", {"model": "b"}))[0] == 200
        assert await say(server, "b") == ("b", "I am b again")
        assert (await server.get("/health"))[0] == 200

    async def test_to_do_it_twice_is_to_do_it_once(self, server, shelf):
        for path, status in (("load", "loaded"), ("unload", "unloaded")):
            for _ in range(2):
                code, answer, _ = await server.post(f"/v1/models/{path}", {"model": "b"})
                assert (code, answer["status"]) == (200, status)
        assert len(shelf.made) == 2
        shelf.b.loaded_event.clear()
        both = [server.post("/v1/models/load", {"model": "b"}) for _ in range(2)]
        assert [reply[0] for reply in await asyncio.gather(*both)] == [200, 200]
        assert len(shelf.made) == 3

    async def test_running_requests_finish_before_a_model_is_gone(self, server, shelf):
        await server.post("/v1/models/load", {"model": "b"})
        shelf.b.gate.clear()
        stream = asyncio.create_task(server.chunks(CHAT, chat(model="b")))
        await until(lambda: shelf.b.running)
        unloading = asyncio.create_task(server.post("/v1/models/unload", {"model": "b"}))
        await until(lambda: list(server.app[MODELS])[1].status == "unloading")
        assert (await server.get("/v1/models/b"))[1]["status"] == "unloading"
        assert await say(server, "b") == (503, "unavailable")
        assert await say(server, "a") == ("a", "I am a")
        shelf.b.gate.set()
        assert (await stream)[-1]["choices"][0]["finish_reason"] == "stop"
        assert (await unloading)[1]["status"] == "unloaded"

    async def test_what_takes_longer_than_the_timeout_gets_an_error(self, server, shelf):
        await server.post("/v1/models/load", {"model": "b"})
        shelf.b.text = "x" * 100
        reader, writer = await server.raw(chat(model="b", stream=True))
        await reader.readuntil(b'"content":"x"')
        shelf.b.gate.clear()
        whole = asyncio.create_task(server.post(CHAT, chat(model="b")))
        await until(lambda: len(shelf.b.running) == 2)
        assert (await server.post("/v1/models/unload", {"model": "b"}))[0] == 200
        assert (await whole)[0] == 503
        rest = await reader.readuntil(b"0\r\n\r\n")
        assert b'"code":"unavailable"' in rest
        assert b"the model was unloaded" in rest
        assert not shelf.b.running
        writer.close()
        await writer.wait_closed()
        # The cut is not the next engine's.
        await server.post("/v1/models/load", {"model": "b"})
        assert await say(server, "b") == ("b", "I am b again")

    async def test_a_failed_load_fails_alone(self, server, shelf, caplog):
        shelf.b.load_error = ValueError("/models/b.gguf: bad magic")
        status, answer, _ = await server.post("/v1/models/load", {"model": "b"})
        error = answer["error"]
        assert (status, error["code"], error["param"]) == (400, "model_load_failed", "model")
        assert "/models" not in error["message"]
        assert "/models/b.gguf: bad magic" in caplog.text
        assert (await server.get("/v1/models/b"))[1]["status"] == "failed"
        assert await say(server, "b") == (404, "model_not_loaded")
        assert await say(server, "a") == ("a", "I am a")
        assert (await server.get("/health"))[0] == (await server.get("/health/live"))[0] == 200
        assert (await server.post("/v1/models/load", {"model": "b"}))[0] == 200
        assert await say(server, "b") == ("b", "I am b again")

    async def test_what_a_setting_says_is_told(self, server, shelf):
        shelf.b.load_error = ConfigError("max_model_len is 4096, but the KV pool holds 99")
        _, answer, _ = await server.post("/v1/models/load", {"model": "b"})
        assert "the KV pool holds 99" in answer["error"]["message"]

    async def test_a_fault_of_ours_is_a_500(self, server, shelf):
        shelf.b.load_error = KeyError("secret")
        status, answer, _ = await server.post("/v1/models/load", {"model": "b"})
        assert (status, answer["error"]["code"]) == (500, "internal_error")
        assert (await server.get("/v1/models/b"))[1]["status"] == "failed"
        assert (await server.get("/health/live"))[0] == 200

    async def test_a_load_goes_on_without_its_client(self, server, shelf):
        shelf.b.loaded_event.clear()
        _, writer = await server.raw({"model": "b"}, path="/v1/models/load")
        model = list(server.app[MODELS])[1]
        await until(lambda: model.status == "loading")
        writer.close()
        await writer.wait_closed()
        await asyncio.sleep(0.1)
        assert (await server.post("/v1/models/unload", {"model": "b"}))[0] == 409
        shelf.b.loaded_event.set()
        await until(lambda: model.status == "loaded")

    @pytest.mark.parametrize(
        ("body", "status", "code"),
        [
            ({}, 400, "missing_required_parameter"),
            ({"model": 3}, 400, "invalid_type"),
            ({"model": "c"}, 404, "model_not_found"),
        ],
    )
    @pytest.mark.parametrize("path", ["load", "unload"])
    async def test_bad_bodies(self, server, path, body, status, code):
        got, answer, _ = await server.post(f"/v1/models/{path}", body)
        assert (got, answer["error"]["code"], answer["error"]["param"]) == (status, code, "model")

    async def test_keys_are_asked_for(self, start, shelf):
        server = await start(models=shelf.models, api_key=("k",))
        for path in ("/v1/models/load", "/models/unload"):
            assert (await server.post(path, {"model": "b"}))[0] == 401

    async def test_without_any_model_the_server_is_not_ready(self, server):
        await server.post("/v1/models/unload", {"model": "a"})
        status, answer, _ = await server.get("/health")
        assert (status, answer["error"]["message"]) == (503, "no model is loaded")
        assert (await server.get("/health/live"))[0] == 200
        assert (await server.get("/v1/models"))[0] == 200


class TestRealEngines:
    @pytest.fixture
    async def runners(self, monkeypatch):
        """Weak references to what holds the memory of each engine that was loaded."""
        found = []

        def load_engine(config):
            loaded = build()
            found.append(weakref.ref(loaded.engine.runner))
            if config.max_num_seqs == 1:
                raise ValueError("it does not fit after all")
            return loaded

        monkeypatch.setattr("jaxinfer.async_engine.load_engine", load_engine)
        # Collecting garbage would find what other tests left; here nothing needs it.
        monkeypatch.setattr(AsyncEngine, "free", lambda self: None)
        return found

    async def test_an_unloaded_model_leaves_nothing(self, start, runners):
        models = [ServedModel(AsyncEngine(EngineConfig(model="./none")), [n]) for n in "ab"]
        server = await start(models=Models(models), wait=False)
        await until(lambda: server.app[LIFECYCLE].is_ready, 120.0)
        body = {"prompt": "abc", "max_tokens": 3, "ignore_eos": True, "temperature": 0}
        first = (await server.post("/v1/completions", {**body, "model": "b"}))[1]["choices"]
        assert (await server.post("/v1/models/unload", {"model": "b"}))[0] == 200
        # A thread may still be moving its memory to huge pages.
        await until(lambda: runners[1]() is None, 10.0)
        assert runners[0]() is not None
        assert (await server.post("/v1/completions", {**body, "model": "a"}))[0] == 200
        assert (await server.post("/v1/models/load", {"model": "b"}))[0] == 200
        again = (await server.post("/v1/completions", {**body, "model": "b"}))[1]["choices"]
        assert again == first

    async def test_nor_does_one_that_could_not_be_loaded(self, start, runners):
        bad = EngineConfig(model="./none", max_num_seqs=1)
        models = [
            ServedModel(AsyncEngine(EngineConfig(model="./none")), ["a"]),
            ServedModel(AsyncEngine(bad), ["b"], loads_at_start=False),
        ]
        server = await start(models=Models(models), wait=False)
        await until(lambda: server.app[LIFECYCLE].is_ready, 120.0)
        status, answer, _ = await server.post("/v1/models/load", {"model": "b"})
        assert (status, answer["error"]["code"]) == (400, "model_load_failed")
        await until(lambda: runners[1]() is None, 10.0)
        assert (await server.get("/health"))[0] == 200


async def test_metrics_are_told_apart_by_model_and_outlive_it(start, shelf):
    server = await start(models=shelf.models)

    async def counted(name):
        async with server.session.get(server.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        found = [line.split() for line in lines if line.startswith(f"vllm:{name}{{")]
        return {label.split('"')[1]: float(value) for label, value in found}

    await say(server, "a")
    await say(server, "first")
    await say(server, "b")
    assert await counted("generation_tokens_total") == {"a": 14, "b": 7}
    assert await counted("time_to_first_token_seconds_count") == {"a": 2, "b": 1}
    await server.post("/v1/models/unload", {"model": "b"})
    assert await counted("generation_tokens_total") == {"a": 14, "b": 7}
    await server.post("/v1/models/load", {"model": "b"})
    assert await counted("generation_tokens_total") == {"a": 14, "b": 7}
    await say(server, "b")
    assert await counted("generation_tokens_total") == {"a": 14, "b": 7 + len("I am b again") + 1}
    assert await counted("num_requests_running") == {"a": 0, "b": 0}
