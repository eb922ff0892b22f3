"""What operators watch: vLLM's metric names for what clients feel, and HTTP counters."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    ProcessCollector,
)
from prometheus_client.exposition import generate_latest

from jaxinfer.outputs import OutputDelta, PhaseTimes
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.server.engine_metrics import EngineCollector
from jaxinfer.server.rates import WINDOW_S, RequestRate
from jaxinfer.server.served_model import Models

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

_LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)

LAG_INTERVAL_S = 0.25
"""How often the event loop's lag is measured."""

_METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS"})


class Metrics:
    """The registry of one application.

    Args:
      models: whose counters and settings are shown, each with its name as a label.
      settings: the server's own settings, by name, as text.
    """

    def __init__(self, models: Models, settings: Mapping[str, str]) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self.registry.register(EngineCollector(models, settings))
        self._watch_http()
        self._watch_generation()

    def _watch_http(self) -> None:
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
        self._rate = RequestRate()
        Gauge(
            "requests_per_second",
            f"Requests to models, mean of the last {WINDOW_S} seconds.",
            registry=self.registry,
        ).set_function(self._rate.per_second)
        self._loop_lag = Histogram(
            "event_loop_lag_seconds",
            "How late the event loop woke who slept.",
            buckets=_LAG_BUCKETS,
            registry=self.registry,
        )

    def _watch_generation(self) -> None:
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
        self.queue_seconds = self._histogram(
            "request_queue_time_seconds", "From the request until it ran.", _REQUEST_BUCKETS
        )
        self.prefill_seconds = self._histogram(
            "request_prefill_time_seconds", "From there to the end of its prompt.", _REQUEST_BUCKETS
        )
        self.decode_seconds = self._histogram(
            "request_decode_time_seconds", "From there to its end.", _REQUEST_BUCKETS
        )
        self.inference_seconds = self._histogram(
            "request_inference_time_seconds", "While it ran: prompt and decoding.", _REQUEST_BUCKETS
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
    ) -> Callable[[str, float], None]:
        metric = Histogram(
            f"vllm:{name}", about, ("model_name",), buckets=buckets, registry=self.registry
        )
        child = functools.cache(metric.labels)
        return lambda model, value: child(model).observe(value)

    def _counter(self, name: str, about: str, label: str) -> Callable[[str, str], None]:
        metric = Counter(f"vllm:{name}", about, ("model_name", label), registry=self.registry)
        return lambda model, value: metric.labels(model, value).inc()

    def http_request(self, route: str, method: str, status: int, seconds: float) -> None:
        """Counts one HTTP request; `route` is a template, never a path."""
        method = method if method in _METHODS else "other"
        self._http_requests.labels(route, method, str(status)).inc()
        self._http_seconds.labels(route, method).observe(seconds)

    def model_request(self) -> None:
        """Counts a request that asks a model, as it comes."""
        self._rate.count()

    async def watch_loop(self) -> None:
        """Measures how late the running event loop wakes a task, until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            self._loop_lag.observe(max(0.0, loop.time() - due))

    def generation(
        self, model: str, params: SamplingParams, num_prompt_tokens: int
    ) -> GenerationTimer:
        """Counts one admitted prompt of a model, and returns what times its tokens."""
        self.prompt_tokens(model, num_prompt_tokens)
        self.n(model, params.n)
        self.max_tokens(model, params.max_tokens or 0)
        return GenerationTimer(self, model, params.n)

    def render(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class GenerationTimer:
    """Times the tokens of one prompt's completions.

    Attributes:
      first_token_s: from the request to its first token; None before it.
      queue_s: from the request until its first completion ran; None before that has ended.
    """

    def __init__(self, metrics: Metrics, model: str, n: int) -> None:
        self._metrics, self._model = metrics, model
        self._start = time.monotonic()
        self.first_token_s: float | None = None
        self.queue_s: float | None = None
        self._first_at: list[float | None] = [None] * n
        self._last_at = [self._start] * n
        self._num_tokens = [0] * n

    def observe(self, delta: OutputDelta) -> None:
        """Takes note of a delta that has just come."""
        now = time.monotonic()
        index, count = delta.index, len(delta.token_ids)
        if count:
            if self.first_token_s is None:
                self.first_token_s = now - self._start
                self._metrics.first_token(self._model, self.first_token_s)
            if self._first_at[index] is None:
                self._first_at[index] = now
            else:
                self._metrics.token_gap(self._model, (now - self._last_at[index]) / count)
            self._last_at[index] = now
            self._num_tokens[index] += count
        if delta.finish_reason is not None:
            self._finish(index, now, delta.times)

    def _finish(self, index: int, now: float, times: PhaseTimes | None) -> None:
        metrics, model = self._metrics, self._model
        metrics.request_seconds(model, now - self._start)
        metrics.generation_tokens(model, self._num_tokens[index])
        if times is not None:
            inference = times.prompt + times.completion
            waited = max(0.0, now - self._start - inference)
            self.queue_s = waited if self.queue_s is None else min(self.queue_s, waited)
            metrics.queue_seconds(model, waited)
            metrics.prefill_seconds(model, times.prompt)
            metrics.decode_seconds(model, times.completion)
            metrics.inference_seconds(model, inference)
        first_at = self._first_at[index]
        if first_at is not None and self._num_tokens[index] > 1:
            metrics.mean_gap(
                model, (self._last_at[index] - first_at) / (self._num_tokens[index] - 1)
            )
