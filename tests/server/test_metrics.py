"""What /metrics says, and what it never says."""

import asyncio
import dataclasses

from prometheus_client.parser import text_string_to_metric_families
from server.fake_engine import chat, until

from jaxinfer.async_engine import QueueFullError

CHAT = "/v1/chat/completions"


async def scrape(server):
    """Returns {(sample name, sorted labels): value}."""
    async with server.session.get(server.url + "/metrics") as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = await response.text()
    samples = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        assert family.type != "unknown"
        for sample in family.samples:
            samples[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return samples


def value(samples, name, **labels):
    return samples[name, tuple(sorted(labels.items()))]


async def test_counters_agree_with_the_usage_of_replies(server):
    usages = [(await server.post(CHAT, chat(n=n)))[1]["usage"] for n in (1, 3)]
    samples = await scrape(server)
    tiny = {"model_name": "tiny"}
    # A prompt counts for each of its completions, as vLLM counts.
    assert value(samples, "vllm:prompt_tokens_total", **tiny) == sum(
        n * usage["prompt_tokens"] for n, usage in zip((1, 3), usages, strict=True)
    )
    generated = sum(usage["completion_tokens"] for usage in usages)
    assert value(samples, "vllm:generation_tokens_total", **tiny) == generated
    assert value(samples, "vllm:request_generation_tokens_sum", **tiny) == generated
    assert value(samples, "vllm:request_success_total", finished_reason="stop", **tiny) == 4
    assert value(samples, "vllm:num_requests_running", **tiny) == 0
    assert value(samples, "vllm:kv_cache_usage_perc", **tiny) == 0
    assert value(samples, "vllm:time_to_first_token_seconds_count", **tiny) == 2
    assert value(samples, "vllm:inter_token_latency_seconds_count", **tiny) == 4 * 5
    assert value(samples, "vllm:request_time_per_output_token_seconds_count", **tiny) == 4
    assert value(samples, "vllm:e2e_request_latency_seconds_count", **tiny) == 4
    assert value(samples, "vllm:request_params_n_sum", **tiny) == 4
    assert value(samples, "xla_compilations_total", phase="after_warmup") == 0
    assert any(name == "process_resident_memory_bytes" for name, _ in samples)


async def test_the_prefix_cache_is_counted_in_tokens(server, engine):
    engine.num_cached = 3
    usages = [(await server.post(CHAT, chat(n=n)))[1]["usage"] for n in (1, 2)]
    samples = await scrape(server)
    queries = value(samples, "vllm:prefix_cache_queries_total", model_name="tiny")
    assert queries == sum(n * usage["prompt_tokens"] for n, usage in enumerate(usages, start=1))
    hits = value(samples, "vllm:prefix_cache_hits_total", model_name="tiny")
    assert hits == 6 == sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)


async def test_drafts_are_counted(server, engine, monkeypatch):
    stats = dataclasses.replace(
        engine.stats(), num_drafts=3, num_draft_tokens=12, num_accepted_tokens=7
    )
    monkeypatch.setattr(engine, "stats", lambda: stats)
    samples = await scrape(server)
    counts = [
        value(samples, f"vllm:spec_decode_num_{name}_total", model_name="tiny")
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    ]
    assert counts == [3, 12, 7]


async def test_gauges_show_running_requests(server, engine):
    engine.gate.clear()
    request = asyncio.create_task(server.post(CHAT, chat()))
    await until(lambda: engine.running)
    assert value(await scrape(server), "vllm:num_requests_running", model_name="tiny") == 1
    engine.gate.set()
    await request


async def test_what_clients_invent_makes_no_series(server):
    await server.get("/v1/models/tiny")
    before = {key for key in await scrape(server) if key[0].startswith("http_requests")}
    methods = ["PROPFIND", "LOCK", "MKCOL", "REPORT"] * 5
    for number, method in enumerate(methods):
        async with server.session.request(method, server.url + f"/path{number}"):
            pass
        await server.get(f"/v1/models/model{number}")
        await server.post(CHAT, chat(model=f"model{number}"))
    samples = await scrape(server)
    labels = {labels for name, labels in samples if name == "http_requests_total"}
    assert len(labels) <= len(before) + 6
    text = str(samples)
    assert "path1" not in text
    assert "LOCK" not in text
    assert "model1" not in text
    other = value(samples, "http_requests_total", handler="other", method="other", status="404")
    assert other == 20


async def test_refusals_are_counted(server, engine):
    engine.fault = QueueFullError("full")
    await server.post(CHAT, chat())
    samples = await scrape(server)
    labels = {"model_name": "tiny", "reason": "queue_full"}
    assert value(samples, "vllm:admission_rejections_total", **labels) == 1
