"""The names of /metrics, the rules Prometheus has for them, and what must always hold (C9, C14)."""

import asyncio
import json
import re

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server.fake_engine import chat, until
from tiny_server import tiny_server

from jaxinfer.outputs import PhaseTimes
from jaxinfer.server import rates
from jaxinfer.server.metrics import Metrics
from jaxinfer.server.state import METRICS

CHAT = "/v1/chat/completions"
TTFT = [.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
        640, 2560]  # fmt: skip
ITL = [.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40,
       80]  # fmt: skip
E2E = [.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920,
       7680]  # fmt: skip
GAUGES = ["vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
          "queue_depth", "requests_per_second", "jaxinfer_model_loaded"]  # fmt: skip
COUNTERS = ["vllm:prefix_cache_queries", "vllm:prefix_cache_hits", "vllm:num_preemptions",
            "vllm:prompt_tokens", "vllm:generation_tokens", "vllm:prompt_tokens_cached",
            "vllm:request_success", "vllm:admission_rejections", "http_requests",
            "xla_compilations", "xla_compile_seconds", "jaxinfer_steps"]  # fmt: skip
HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": TTFT,
    "vllm:inter_token_latency_seconds": ITL,
    "vllm:request_time_per_output_token_seconds": ITL,
    "vllm:e2e_request_latency_seconds": E2E,
    "vllm:request_queue_time_seconds": E2E,
    "vllm:request_prefill_time_seconds": E2E,
    "vllm:request_decode_time_seconds": E2E,
    "vllm:request_inference_time_seconds": E2E,
    "vllm:request_prompt_tokens": None,
    "vllm:request_generation_tokens": None,
    "vllm:request_params_n": None,
    "vllm:request_params_max_tokens": None,
    "vllm:iteration_tokens_total": None,
    "http_request_duration_seconds": TTFT,
    "event_loop_lag_seconds": None,
}
LABELS = {"model_name", "finished_reason", "reason", "handler", "method", "status", "phase", "le",
          "device", "kind", "generation", "implementation"}  # fmt: skip


async def text_of(server):
    async with server.session.get(server.url + "/metrics") as response:
        assert response.status == 200
        return await response.text()


def families(text):
    return {family.name: family for family in text_string_to_metric_families(text)}


def values(text, name):
    """Returns {labels without the model: value} of one sample name."""
    return {
        tuple(value for key, value in sample.labels.items() if key != "model_name"): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


@pytest.fixture
async def busy(server, engine):
    """A server that has answered, failed and refused."""
    engine.times = PhaseTimes(0.02, 0.03)
    await server.post(CHAT, chat())
    await server.chunks(CHAT, chat(n=2))
    await server.post("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2})
    await server.post(CHAT, chat(temperature=9))
    engine.most_running = 0
    assert (await server.post(CHAT, chat()))[0] == 429
    engine.most_running = None
    return server


async def test_the_names_that_dashboards_know(busy):
    found = families(await text_of(busy))
    for names, kind in ((GAUGES, "gauge"), (COUNTERS, "counter"), (HISTOGRAMS, "histogram")):
        for name in names:
            assert found[name].type == kind, name
            assert found[name].samples, name
    for name, bounds in HISTOGRAMS.items():
        edges = {s.labels["le"] for s in found[name].samples if s.name.endswith("_bucket")}
        if bounds is not None:
            assert {float(edge) for edge in edges} == {*bounds, float("inf")}, name
    for name in ("process_resident_memory_bytes", "process_open_fds", "python_gc_collections"):
        assert name in found


async def test_the_rules_of_promtool(busy):
    text = await text_of(busy)
    described, typed = (
        re.findall(rf"^# {word} (\S+)", text, re.MULTILINE) for word in ("HELP", "TYPE")
    )
    assert described == typed
    assert len(set(typed)) == len(typed), "a family is there twice"
    assert not re.search(r"^# HELP \S+\s*$", text, re.MULTILINE)
    series = [line.rsplit(" ", 1)[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(set(series)) == len(series)
    for name, family in families(text).items():
        assert re.fullmatch(r"[a-z_]+(:[a-z_]+)?", name.replace("e2e", "e")), name
        is_counter = family.type == "counter"
        for sample in family.samples:
            assert is_counter <= sample.name.endswith("_total"), sample.name
            # What its documentation promises to be in [0, 1] is a ratio whatever its name says.
            assert not re.search(r"(milli|micro|_ms$|kilo|mega|percent$)", sample.name)
            is_config = name == "jaxinfer_config_info"
            assert is_config or name == "python_info" or set(sample.labels) <= LABELS, sample
        # vLLM's own name for a histogram.
        if family.type in ("gauge", "histogram") and name != "vllm:iteration_tokens_total":
            assert not name.endswith(("_total", "_count", "_sum", "_bucket")), name


async def test_buckets_add_up(busy):
    for name, family in families(await text_of(busy)).items():
        if family.type != "histogram":
            continue
        rows = {}
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key != "le"}
            row = rows.setdefault(tuple(sorted(labels.items())), {"buckets": []})
            if sample.name.endswith("_bucket"):
                row["buckets"].append((float(sample.labels["le"]), sample.value))
            else:
                row[sample.name.removeprefix(name)] = sample.value
        for row in rows.values():
            bounds, counts = zip(*row["buckets"], strict=True)
            assert list(bounds) == sorted(bounds), name
            assert list(counts) == sorted(counts), name
            assert (bounds[-1], counts[-1]) == (float("inf"), row["_count"]), name


async def test_phases_of_a_request_are_timed(busy):
    text = await text_of(busy)
    for name, total in (("prefill", 0.02), ("decode", 0.03), ("inference", 0.05)):
        [count] = values(text, f"vllm:request_{name}_time_seconds_count").values()
        [seconds] = values(text, f"vllm:request_{name}_time_seconds_sum").values()
        assert (count, seconds) == (5, pytest.approx(5 * total))
    [count] = values(text, "vllm:request_queue_time_seconds_count").values()
    assert count == 5


async def test_counters_never_fall_and_gauges_come_back(server, engine):
    def counters(text):
        return {
            (sample.name, tuple(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if family.type in ("counter", "histogram")
        }

    before = counters(await text_of(server))
    for step in range(4):
        engine.fault = RuntimeError("boom") if step == 2 else None
        requests = [server.post(CHAT, chat(n=n)) for n in (1, 2)]
        await asyncio.gather(*requests, server.get("/nowhere"))
        after = counters(await text_of(server))
        assert {key for key, value in before.items() if after.get(key, 0.0) < value} == set()
        before = after
    text = await text_of(server)
    for name in GAUGES[:4]:
        assert set(values(text, name).values()) == {0.0}, name


async def test_requests_per_second(server, engine, monkeypatch):
    now = [100.0]
    rate = rates.RequestRate(lambda: now[0])
    assert rate.per_second() == 0.0
    for second in range(3):
        now[0] = 100.0 + second
        for _ in range(10):
            rate.count()
    now[0] = 103.5
    assert rate.per_second() == pytest.approx(30 / rates.WINDOW_S)
    now[0] = 100.0 + rates.WINDOW_S + 1
    assert rate.per_second() == pytest.approx(20 / rates.WINDOW_S)
    now[0] += rates.WINDOW_S
    assert rate.per_second() == 0.0
    # Requests to models count, health checks do not.
    counted = []
    monkeypatch.setattr(Metrics, "model_request", lambda self: counted.append(1))
    await server.post(CHAT, chat())
    await server.get("/health")
    await server.get("/v1/models")
    assert counted == [1]


class FakeDevice:
    id = 3

    def __init__(self, stats):
        self.memory_stats = lambda: stats


async def test_memory_of_devices_that_tell_it(server, engine, monkeypatch):
    assert "device_memory_bytes" not in await text_of(server), "a CPU tells nothing"
    stats = {"bytes_in_use": 30, "peak_bytes_in_use": 40, "bytes_limit": 120}
    devices = [FakeDevice(stats), FakeDevice(stats)]
    monkeypatch.setattr(type(engine), "devices", devices)
    text = await text_of(server)
    assert values(text, "device_memory_bytes") == {
        ("3", "in_use"): 30,
        ("3", "peak"): 40,
        ("3", "limit"): 120,
    }
    assert values(text, "gpu_memory_utilization") == {("3",): 0.25}
    devices[:] = [FakeDevice(None)]
    assert "gpu_memory_utilization" not in await text_of(server)


async def test_the_lag_of_the_event_loop(server):
    await until(lambda: lag(server)[0] >= 1)
    assert lag(server)[1] < 1.0


def lag(server):
    text = server.app[METRICS].render().decode()
    return [values(text, f"event_loop_lag_seconds_{name}")[()] for name in ("count", "sum")]


async def usage_of(session, url, body):
    """Asks, and returns the usage of the answer."""
    if body.get("stream"):
        body = {**body, "stream_options": {"include_usage": True}}
    async with session.post(url, json=body) as response:
        assert response.status == 200
        text = await response.text()
    if not body.get("stream"):
        return json.loads(text)["usage"]
    *_, last, done, _ = text.split("\n\n")
    assert done == "data: [DONE]"
    return json.loads(last.removeprefix("data: "))["usage"]


LONG = "the same words again and again, " * 2
# Where, completions, of how many each prompt counts, and what is asked.
CALLS = [
    ("/v1/completions", 1, 1, {"prompt": "abc", "max_tokens": 5}),
    ("/v1/completions", 1, 1, {"prompt": "abc", "max_tokens": 5, "stream": True}),
    ("/v1/completions", 3, 3, {"prompt": "abc", "max_tokens": 6, "n": 3}),
    ("/v1/completions", 2, 2, {"prompt": "abc", "max_tokens": 6, "n": 2, "stream": True}),
    ("/v1/completions", 2, 1, {"prompt": ["a", "bc"], "max_tokens": 3}),
    ("/v1/completions", 4, 2, {"prompt": [[1], [2, 3]], "max_tokens": 3, "n": 2}),
    ("/v1/completions", 1, 1, {"prompt": "ab", "max_tokens": 0, "echo": True, "logprobs": 1}),
    (CHAT, 1, 1, {**chat(LONG), "max_tokens": 4}),
    (CHAT, 1, 1, {**chat(LONG), "max_tokens": 4, "stream": True}),
]


async def test_usage_adds_up_on_a_real_engine(monkeypatch):
    async with tiny_server(monkeypatch) as server, aiohttp.ClientSession() as session:
        before = await asyncio.to_thread(server.metrics)
        usages = [await usage_of(session, server.url + path, body) for path, _, _, body in CALLS]
        after = await asyncio.to_thread(server.metrics)

    def grew(name):
        return after[name] - before.get(name, 0.0)

    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached[-1] > 0
    prompts = [usage["prompt_tokens"] for usage in usages]
    # A prompt counts for each of its completions, as vLLM counts.
    computed = sum(n * count for (_, _, n, _), count in zip(CALLS, prompts, strict=True))
    generated = sum(usage["completion_tokens"] for usage in usages)
    assert grew("vllm:prompt_tokens_total") == computed
    assert grew("vllm:generation_tokens_total") == generated
    assert grew("vllm:request_generation_tokens_sum") == generated
    assert grew("vllm:request_prompt_tokens_sum") == sum(prompts)
    assert grew("vllm:prompt_tokens_cached_total") == grew("vllm:prefix_cache_hits_total")
    assert grew("vllm:prefix_cache_hits_total") >= sum(cached)
    reasons = [name for name in after if name.startswith("vllm:request_success_total")]
    assert sum(map(grew, reasons)) == sum(count for _, count, _, _ in CALLS)
    assert grew("vllm:iteration_tokens_total_sum") == computed + generated
    assert 0 < grew("vllm:iteration_tokens_total_count") <= grew("jaxinfer_steps_total")
