"""What the engines of a server have counted, and what they hold: read at every scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from jaxinfer.async_engine import EngineStats
from jaxinfer.runner.compile_watch import CompileWatch
from jaxinfer.server.served_model import Models

_Read = Callable[[EngineStats], float]

_GAUGES: tuple[tuple[str, str, _Read], ...] = (
    ("vllm:num_requests_running", "Sequences in the running batch.", lambda s: s.num_running),
    ("vllm:num_requests_waiting", "Sequences waiting for room.", lambda s: s.num_waiting),
    (
        "vllm:kv_cache_usage_perc",
        "Used share of the KV pool, 0 to 1.",
        lambda s: 1 - s.num_free_pages / max(s.num_pages, 1),
    ),
)
_COUNTERS: tuple[tuple[str, str, _Read], ...] = (
    (
        "vllm:num_preemptions",
        "Sequences preempted and recomputed.",
        lambda s: s.num_preemptions,
    ),
    (
        "vllm:prompt_tokens",
        "Prompt tokens of completions, cached ones as well.",
        lambda s: s.prompt_tokens,
    ),
    (
        "vllm:prompt_tokens_cached",
        "Prompt tokens that the prefix cache supplied.",
        lambda s: s.prefix_cache_hits,
    ),
    ("vllm:generation_tokens", "Tokens generated.", lambda s: s.generation_tokens),
    (
        "vllm:prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
        lambda s: s.prefix_cache_queries,
    ),
    (
        "vllm:prefix_cache_hits",
        "Prompt tokens found in the prefix cache.",
        lambda s: s.prefix_cache_hits,
    ),
    ("vllm:spec_decode_num_drafts", "Verifications of drafts.", lambda s: s.num_drafts),
    ("vllm:spec_decode_num_draft_tokens", "Tokens guessed.", lambda s: s.num_draft_tokens),
    (
        "vllm:spec_decode_num_accepted_tokens",
        "Tokens guessed right.",
        lambda s: s.num_accepted_tokens,
    ),
    ("jaxinfer_steps", "Engine steps.", lambda s: s.steps),
    (
        "jaxinfer_failed_steps",
        "Engine steps that failed and were repaired.",
        lambda s: s.failed_steps,
    ),
)
# jax's names of what a device tells of its memory.
_MEMORY_KINDS = {"in_use": "bytes_in_use", "peak": "peak_bytes_in_use", "limit": "bytes_limit"}


class EngineCollector(Collector):
    """Reads the engines' own counters, none of them kept twice.

    Args:
      models: whose counters and settings are shown, each with its name as a label.
      server_settings: by name, as text.
    """

    def __init__(self, models: Models, server_settings: Mapping[str, str]) -> None:
        self._models = models
        self._server_settings = server_settings
        self._compilations = CompileWatch()

    def describe(self) -> list[Metric]:
        """Returns nothing: names are known when the counters are read."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yields nothing of a model that never got to count anything."""
        counts = {model.name: model.stats() for model in self._models}
        known = {name: stats for name, stats in counts.items() if stats is not None}
        yield self._config()
        yield self._loaded()
        for metric, about, read in _GAUGES:
            gauge = GaugeMetricFamily(metric, about, labels=["model_name"])
            for name, stats in known.items():
                gauge.add_metric([name], read(stats))
            yield gauge
        yield self._queue_depth()
        for metric, about, read in _COUNTERS:
            counter = CounterMetricFamily(metric, about, labels=["model_name"])
            for name, stats in known.items():
                counter.add_metric([name], read(stats))
            yield counter
        yield _finished(known)
        yield self._step_tokens(known)
        yield from self._compiled(known)
        yield from self._memory()

    def _config(self) -> Metric:
        config = InfoMetricFamily(
            "jaxinfer_config", "Settings: the values in effect.", labels=["model_name"]
        )
        for model in self._models:
            if model.status == "loaded":
                settings = {**model.engine.settings, **self._server_settings}
                config.add_metric([model.name], settings)
        return config

    def _loaded(self) -> Metric:
        loaded = GaugeMetricFamily(
            "jaxinfer_model_loaded", "1 for a model that takes requests.", labels=["model_name"]
        )
        for model in self._models:
            loaded.add_metric([model.name], model.status == "loaded")
        return loaded

    def _queue_depth(self) -> Metric:
        depth = GaugeMetricFamily(
            "queue_depth", "Sequences taken that do not run yet.", labels=["model_name"]
        )
        for model in self._models:
            depth.add_metric([model.name], model.engine.queue_depth)
        return depth

    def _step_tokens(self, known: Mapping[str, EngineStats]) -> Metric:
        steps = HistogramMetricFamily(
            "vllm:iteration_tokens_total",
            "Tokens of a step: generated ones, and prompts when they end.",
            labels=["model_name"],
        )
        for model in self._models:
            if model.name in known:
                counts = model.engine.step_tokens
                steps.add_metric([model.name], counts.cumulative(), counts.total)
        return steps

    def _compiled(self, known: Mapping[str, EngineStats]) -> Iterator[Metric]:
        compilations = CounterMetricFamily(
            "xla_compilations",
            "Programs compiled by XLA, or read from its cache.",
            labels=["phase"],
        )
        in_steps = sum(stats.num_compilations_after_warmup for stats in known.values())
        in_all = max(self._compilations.num_compiles, in_steps)
        compilations.add_metric(["start"], in_all - in_steps)
        compilations.add_metric(["after_warmup"], in_steps)
        yield compilations
        yield CounterMetricFamily(
            "xla_compile_seconds", "Time that compiling took.", value=self._compilations.seconds
        )

    def _memory(self) -> Iterator[Metric]:
        """Yields nothing where devices do not tell: a CPU's memory is the process's."""
        memory = GaugeMetricFamily(
            "device_memory_bytes", "Memory of a device, of which", labels=["device", "kind"]
        )
        used = GaugeMetricFamily(
            "gpu_memory_utilization", "Used share of a device's memory, 0 to 1.", labels=["device"]
        )
        for device in self._devices():
            stats = device.memory_stats() or {}
            for kind, name in _MEMORY_KINDS.items():
                if name in stats:
                    memory.add_metric([str(device.id), kind], stats[name])
            if stats.get("bytes_limit"):
                used.add_metric([str(device.id)], stats["bytes_in_use"] / stats["bytes_limit"])
        yield from (family for family in (memory, used) if family.samples)

    def _devices(self) -> list[Any]:
        """Devices that hold a model; not jax's list, the first look at which takes seconds."""
        held = (device for model in self._models for device in model.engine.devices)
        return list({device.id: device for device in held}.values())


def _finished(known: Mapping[str, EngineStats]) -> Metric:
    finished = CounterMetricFamily(
        "vllm:request_success",
        "Finished completions by reason.",
        labels=["model_name", "finished_reason"],
    )
    for name, stats in known.items():
        for reason, count in stats.finished.items():
            finished.add_metric([name, reason], count)
    return finished
