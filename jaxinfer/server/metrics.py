"""What operators watch: vLLM's metric names, HTTP counters, and XLA's compilations.

Counters of the engine are read when scraped and never kept twice.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, GCCollector, Histogram, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from jaxinfer.async_engine import AsyncEngine, EngineDeadError
from jaxinfer.outputs import OutputDelta
from jaxinfer.sampling_params import SamplingParams

_TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640, 2560,
)  # fmt: skip
_TOKEN_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_REQUEST_BUCKETS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
_COUNT_BUCKETS = tuple(factor * 10**power for power in range(6) for factor in (1, 2, 5))
_N_BUCKETS = (1, 2, 5, 10, 20, 50, 100)

_METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS"})


class Metrics:
    """The registry of one application.

    Args:
      engine: whose counters and settings are shown.
      settings: the server's own settings, by name, as text.
    """

    def __init__(self, engine: AsyncEngine, settings: Mapping[str, str]) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self.registry.register(_EngineCollector(engine, settings))
        self._engine = engine
        self._http_requests = Counter(
            "http_requests",
            "Requests by route, method and status.",
            ("handler", "method", "status"),
            registry=self.registry,
        )
        self._http_seconds = Histogram(
            "http_request_duration_seconds",
            "Time from a request to the end of its answer.",
            ("handler", "method"),
            buckets=_TTFT_BUCKETS,
            registry=self.registry,
        )
        self.rejections = self._counter(
            "admission_rejections", "Requests refused for lack of room.", "reason"
        )
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From the request to its first token.", _TTFT_BUCKETS
        )
        self.token_gap = self._histogram(
            "inter_token_latency_seconds", "Between the tokens of a completion.", _TOKEN_BUCKETS
        )
        self.mean_gap = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time per token after the first, per completion.",
            _TOKEN_BUCKETS,
        )
        self.request_seconds = self._histogram(
            "e2e_request_latency_seconds", "From the request to its end.", _REQUEST_BUCKETS
        )
        self.prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", _COUNT_BUCKETS
        )
        self.generation_tokens = self._histogram(
            "request_generation_tokens", "Tokens generated for a completion.", _COUNT_BUCKETS
        )
        self.n = self._histogram("request_params_n", "n of a request.", _N_BUCKETS)
        self.max_tokens = self._histogram(
            "request_params_max_tokens", "max_tokens of a request.", _COUNT_BUCKETS
        )

    def _histogram(
        self, name: str, about: str, buckets: tuple[int | float, ...]
    ) -> Callable[[float], None]:
        metric = Histogram(
            f"vllm:{name}", about, ("model_name",), buckets=buckets, registry=self.registry
        )
        child = functools.cache(metric.labels)
        return lambda value: child(self._engine.model_name).observe(value)

    def _counter(self, name: str, about: str, label: str) -> Callable[[str], None]:
        metric = Counter(f"vllm:{name}", about, ("model_name", label), registry=self.registry)
        return lambda value: metric.labels(self._engine.model_name, value).inc()

    def http_request(self, route: str, method: str, status: int, seconds: float) -> None:
        """Counts one HTTP request; `route` is a template, never a path."""
        method = method if method in _METHODS else "other"
        self._http_requests.labels(route, method, str(status)).inc()
        self._http_seconds.labels(route, method).observe(seconds)

    def generation(self, params: SamplingParams, num_prompt_tokens: int) -> GenerationTimer:
        """Counts one admitted prompt, and returns what times its tokens."""
        self.prompt_tokens(num_prompt_tokens)
        self.n(params.n)
        self.max_tokens(params.max_tokens or 0)
        return GenerationTimer(self, params.n)

    def render(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class GenerationTimer:
    """Times the tokens of one prompt's completions."""

    def __init__(self, metrics: Metrics, n: int) -> None:
        self._metrics = metrics
        self._start = time.monotonic()
        self._has_token = False
        self._first_at: list[float | None] = [None] * n
        self._last_at = [self._start] * n
        self._num_tokens = [0] * n

    def observe(self, delta: OutputDelta) -> None:
        """Takes note of a delta that has just come."""
        now = time.monotonic()
        index, count = delta.index, len(delta.token_ids)
        if count:
            if not self._has_token:
                self._has_token = True
                self._metrics.first_token(now - self._start)
            if self._first_at[index] is None:
                self._first_at[index] = now
            else:
                self._metrics.token_gap((now - self._last_at[index]) / count)
            self._last_at[index] = now
            self._num_tokens[index] += count
        if delta.finish_reason is not None:
            self._finish(index, now)

    def _finish(self, index: int, now: float) -> None:
        self._metrics.request_seconds(now - self._start)
        self._metrics.generation_tokens(self._num_tokens[index])
        first_at = self._first_at[index]
        if first_at is not None and self._num_tokens[index] > 1:
            self._metrics.mean_gap(
                (self._last_at[index] - first_at) / (self._num_tokens[index] - 1)
            )


class _EngineCollector(Collector):
    """Reads the engine's own counters at every scrape."""

    def __init__(self, engine: AsyncEngine, server_settings: Mapping[str, str]) -> None:
        self._engine = engine
        self._server_settings = server_settings

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        try:
            stats, name = self._engine.stats(), self._engine.model_name
            settings = {**self._engine.settings, **self._server_settings}
        except EngineDeadError:
            return  # it never got to count anything
        yield InfoMetricFamily("jaxinfer_config", "Settings: the values in effect.", value=settings)
        usable = max(stats.num_pages, 1)
        gauges = (
            ("num_requests_running", "Sequences in the running batch.", stats.num_running),
            ("num_requests_waiting", "Sequences waiting for room.", stats.num_waiting),
            ("kv_cache_usage_perc", "Used share of the KV pool, 0 to 1.",
             1 - stats.num_free_pages / usable),
        )  # fmt: skip
        counters = (
            ("num_preemptions", "Sequences preempted and recomputed.", stats.num_preemptions),
            ("prompt_tokens", "Prompt tokens of completions, cached ones as well.",
             stats.prompt_tokens),
            ("generation_tokens", "Tokens generated.", stats.generation_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.",
             stats.prefix_cache_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.",
             stats.prefix_cache_hits),
            ("spec_decode_num_drafts", "Verifications of drafts.", stats.num_drafts),
            ("spec_decode_num_draft_tokens", "Tokens guessed.", stats.num_draft_tokens),
            ("spec_decode_num_accepted_tokens", "Tokens guessed right.",
             stats.num_accepted_tokens),
        )  # fmt: skip
        for metric, about, value in gauges:
            gauge = GaugeMetricFamily(f"vllm:{metric}", about, labels=["model_name"])
            gauge.add_metric([name], value)
            yield gauge
        for metric, about, value in counters:
            counter = CounterMetricFamily(f"vllm:{metric}", about, labels=["model_name"])
            counter.add_metric([name], value)
            yield counter
        finished = CounterMetricFamily(
            "vllm:request_success",
            "Finished completions by reason.",
            labels=["model_name", "finished_reason"],
        )
        for reason, count in stats.finished.items():
            finished.add_metric([name, reason], count)
        yield finished
        compilations = CounterMetricFamily(
            "xla_compilations", "Programs compiled by XLA.", labels=["phase"]
        )
        compilations.add_metric(["after_warmup"], stats.num_compilations_after_warmup)
        yield compilations
        yield CounterMetricFamily("jaxinfer_steps", "Engine steps.", value=stats.steps)
        yield CounterMetricFamily(
            "jaxinfer_failed_steps", "Engine steps that failed and were repaired.",
            value=stats.failed_steps,
        )  # fmt: skip
