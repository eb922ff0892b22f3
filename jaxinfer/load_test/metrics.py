"""From the records of a run to its numbers: percentiles, throughput, goodput."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from jaxinfer.config import ConfigError
from jaxinfer.load_test.record import RequestRecord

SLO_METRICS = ("ttft", "tpot", "e2e")


def percentile(ordered: Sequence[float], share: float) -> float:
    """Returns what `share` percent of ascending values are below, interpolated between two.

    The same as numpy's default.
    """
    position = (len(ordered) - 1) * share / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and percentiles of some milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Distribution | None:
        """Returns the distribution of some seconds, None of none."""
        ordered = sorted(1e3 * value for value in seconds)
        if not ordered:
            return None
        mean = math.fsum(ordered) / len(ordered)
        return cls(mean, *(percentile(ordered, share) for share in (50.0, 90.0, 99.0)))

    def as_json(self) -> dict[str, float]:
        """The numbers, to the microsecond."""
        return {name: round(getattr(self, name), 3) for name in ("mean", "p50", "p90", "p99")}


@dataclass(frozen=True, slots=True)
class Slo:
    """Bounds in milliseconds that a good answer keeps: of ttft, tpot or e2e."""

    bounds_ms: dict[str, float]

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Reads `ttft:500,tpot:50`.

        Raises:
          ConfigError: a name is unknown or a bound is not a positive number.
        """
        bounds = {}
        for part in text.split(","):
            name, _, bound = part.strip().partition(":")
            if name not in SLO_METRICS:
                known = ", ".join(SLO_METRICS)
                raise ConfigError(f"an SLO bounds {known}, as in ttft:500,tpot:50 (got {part!r})")
            try:
                bounds[name] = float(bound)
            except ValueError as error:
                raise ConfigError(f"an SLO of {name} needs milliseconds (got {bound!r})") from error
            if not 0 < bounds[name] < math.inf:
                raise ConfigError(f"an SLO of {name} must be above 0 and finite (got {bound})")
        return cls(bounds)

    def is_met(self, record: RequestRecord) -> bool:
        """Whether a request came through, within every bound; one token alone has no TPOT."""
        if record.error is not None:
            return False
        found = {"ttft": record.ttft_s, "tpot": record.tpot_s, "e2e": record.e2e_s}
        values = {name: found[name] for name in self.bounds_ms}
        return all(
            value is None or 1e3 * value <= self.bounds_ms[name] for name, value in values.items()
        )


@dataclass(frozen=True, slots=True)
class Summary:
    """The numbers of a run. Latencies and tokens are those of the requests that came through.

    Attributes:
      duration_s: from the first request sent to the last one answered.
      num_requests, num_completed: sent, and answered without an error.
      errors: how often what went wrong.
      messages: what was said the first time of each.
      prompt_tokens, cached_tokens, output_tokens: sums.
      peak_in_flight: most requests open at once.
      ttft, itl, tpot, e2e: latencies; `lag`: how late requests were sent, which is the client's
        fault.
      slo, num_good: bounds, and requests that kept them.
    """

    duration_s: float
    num_requests: int
    num_completed: int
    errors: dict[str, int]
    messages: dict[str, str]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    peak_in_flight: int
    ttft: Distribution | None
    itl: Distribution | None
    tpot: Distribution | None
    e2e: Distribution | None
    lag: Distribution | None
    slo: Slo | None
    num_good: int

    @classmethod
    def of(cls, records: Sequence[RequestRecord], slo: Slo | None = None) -> Summary:
        """Returns the numbers of at least one request."""
        done = [record for record in records if record.error is None]
        failed = [record for record in records if record.error is not None]
        first = min(record.start_s for record in records)
        return cls(
            duration_s=max(record.end_s for record in records) - first,
            num_requests=len(records),
            num_completed=len(done),
            errors=dict(Counter(str(record.error) for record in failed)),
            messages={str(record.error): record.message for record in reversed(failed)},
            prompt_tokens=sum(record.prompt_tokens for record in done),
            cached_tokens=sum(record.cached_tokens for record in done),
            output_tokens=sum(record.output_tokens for record in done),
            peak_in_flight=_peak(records),
            ttft=Distribution.of(r.ttft_s for r in done if r.ttft_s is not None),
            itl=Distribution.of(gap for record in done for gap in record.itl_s),
            tpot=Distribution.of(r.tpot_s for r in done if r.tpot_s is not None),
            e2e=Distribution.of(record.e2e_s for record in done),
            lag=Distribution.of(record.start_s - record.planned_s for record in records),
            slo=slo,
            num_good=sum(slo.is_met(record) for record in records) if slo else 0,
        )

    def per_second(self, count: int) -> float:
        """A count as a rate over the run."""
        return count / self.duration_s if self.duration_s > 0 else 0.0

    def as_json(self) -> dict[str, Any]:
        """The numbers as the last line prints them; latencies in milliseconds."""
        latencies = {
            f"{name}_ms": found.as_json() if found is not None else None
            for name, found in self._latencies().items()
        }
        goodput = self.slo and {
            "slo_ms": self.slo.bounds_ms,
            "share": round(self.num_good / self.num_requests, 4),
            "requests_per_s": round(self.per_second(self.num_good), 4),
        }
        return {
            "duration_s": round(self.duration_s, 3),
            "num_requests": self.num_requests,
            "num_completed": self.num_completed,
            "errors": self.errors,
            "requests_per_s": round(self.per_second(self.num_completed), 4),
            "output_tokens_per_s": round(self.per_second(self.output_tokens), 2),
            "tokens_per_s": round(self.per_second(self.prompt_tokens + self.output_tokens), 2),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "peak_in_flight": self.peak_in_flight,
            **latencies,
            "goodput": goodput,
        }

    def table(self) -> str:
        """The numbers in lines of text."""
        prompt, output = self.prompt_tokens, self.output_tokens
        lines = [
            f"{self.num_completed} of {self.num_requests} requests in {self.duration_s:.1f} s, "
            f"{self.peak_in_flight} at once at most: "
            f"{self.per_second(self.num_completed):.2f} requests/s",
            f"tokens: {prompt:,} in ({self.cached_tokens:,} cached), {output:,} out: "
            f"{self.per_second(output):,.1f} out/s, {self.per_second(prompt + output):,.1f} in all",
            f"{'ms':<6}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}",
        ]
        for name, found in self._latencies().items():
            numbers = [f"{value:,.1f}" for value in found.as_json().values()] if found else "----"
            lines.append(f"{name:<6}" + "".join(f"{number:>10}" for number in numbers))
        if self.slo is not None:
            bounds = ", ".join(f"{name} ≤ {b:g} ms" for name, b in self.slo.bounds_ms.items())
            lines.append(
                f"goodput: {self.per_second(self.num_good):.2f} requests/s "
                f"({self.num_good / self.num_requests:.1%}) with {bounds}"
            )
        lines += [
            f"failed: {count} × {error}: {self.messages[error]}"
            for error, count in self.errors.items()
        ]
        return "\n".join(lines)

    def _latencies(self) -> dict[str, Distribution | None]:
        return {
            "ttft": self.ttft,
            "itl": self.itl,
            "tpot": self.tpot,
            "e2e": self.e2e,
            "lag": self.lag,
        }


def _peak(records: Sequence[RequestRecord]) -> int:
    # An end sorts before a start of the same moment.
    changes = sorted(
        [(record.start_s, 1) for record in records] + [(record.end_s, -1) for record in records]
    )
    return max(accumulate(change for _, change in changes))


def tokens_over_time(records: Sequence[RequestRecord], width_s: float) -> list[float]:
    """Returns output tokens a second in each of the run's intervals of `width_s`.

    The tokens of a request are shared evenly among its events.
    """
    done = [record for record in records if record.error is None and record.token_s]
    if not done:
        return []
    last = max(record.token_s[-1] for record in done)
    rates = [0.0] * (int(last / width_s) + 1)
    for record in done:
        for moment in record.token_s:
            rates[int(moment / width_s)] += record.output_tokens / len(record.token_s) / width_s
    return rates
