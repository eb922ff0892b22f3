"""What the soak reads of a server's metrics."""

from __future__ import annotations

import asyncio

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
PAGES, RSS = "vllm:kv_cache_usage_perc", "process_resident_memory_bytes"
COMPILATIONS = 'xla_compilations_total{phase="after_warmup"}'
FAILED_STEPS = "jaxinfer_failed_steps_total"
MUST_HAPPEN = {
    "preemptions": "vllm:num_preemptions_total",
    "cached_tokens": "vllm:prefix_cache_hits_total",
    "accepted_drafts": "vllm:spec_decode_num_accepted_tokens_total",
}

LIMIT_S = 10.0


async def metrics(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Values of a server's metrics by name and labels, without the model's name."""
    async with asyncio.timeout(LIMIT_S), session.get(f"{url}/metrics") as response:
        text = await response.text()
    values = {}
    for family in text_string_to_metric_families(text):
        for name, labels, value, *_ in family.samples:
            kept = [f'{key}="{of}"' for key, of in labels.items() if key != "model_name"]
            values[f"{name}{{{','.join(kept)}}}" if kept else name] = value
    return values
