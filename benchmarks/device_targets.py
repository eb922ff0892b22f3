"""The speed this project wants of one H200, and whether a run's numbers reach it. No jax."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

MET, MISSED, NOT_MEASURED = "met", "missed", "not measured here"


class Numbers(Protocol):
    """What a target looks at: a report."""

    def of_section(self, section: str) -> dict[str, dict[str, Any]]:
        """Returns the values of a section's cases, by name."""


Verdict = tuple[str, str]


def _at_least(wanted: float, value: float, found: str) -> Verdict:
    return (MET if value >= wanted else MISSED), found


def _best(cases: Mapping[str, dict[str, Any]], pattern: str) -> dict[str, tuple[float, str]]:
    """For each call that matches: the largest share of a copy, and whose it is.

    Names are "call implementation"; the pattern is of the call.
    """
    best: dict[str, tuple[float, str]] = {}
    for name, values in cases.items():
        call, _, implementation = name.rpartition(" ")
        if re.fullmatch(pattern, call) and "of_copy" in values:
            best[call] = max(best.get(call, (0.0, "")), (values["of_copy"], implementation))
    return best


def _share(section: str, pattern: str, wanted: float, report: Numbers) -> Verdict:
    """The worst of some calls, each by its best implementation."""
    best = _best(report.of_section(section), pattern)
    if not best:
        return NOT_MEASURED, ""
    call, (share, implementation) = min(best.items(), key=lambda item: item[1])
    found = f"{share:.1%} at worst ({call}, {implementation}), of {len(best)} calls"
    return _at_least(wanted, share, found)


def _decode(report: Numbers, scheme: str, batch: int) -> tuple[str, dict[str, Any]] | None:
    """A decode step of the real number of layers: the one that was run, else extrapolated."""
    case = f"{scheme} decode {batch}"
    for section in ("models", "all layers"):
        for name, values in report.of_section(section).items():
            if values.get("case") == case and "tok_per_s" in values:
                return name, values
    return None


def _speedup(scheme: str, wanted: float, report: Numbers) -> Verdict:
    plain, quantized = _decode(report, "bf16", 1), _decode(report, scheme, 1)
    if plain is None or quantized is None:
        return NOT_MEASURED, ""
    ratio = quantized[1]["tok_per_s"] / plain[1]["tok_per_s"]
    found = (
        f"{ratio:.2f} ({quantized[1]['tok_per_s']:.0f} against {plain[1]['tok_per_s']:.0f} tok/s)"
    )
    return _at_least(wanted, ratio, found)


def _throughput(wanted: float, report: Numbers) -> Verdict:
    decode = _decode(report, "bf16", 64)
    if decode is None:
        return NOT_MEASURED, ""
    name, values = decode
    return _at_least(wanted, values["tok_per_s"], f"{values['tok_per_s']:,.0f} ({name})")


def _host(limit_us: float, report: Numbers) -> Verdict:
    cases = {n: v["host_us"] for n, v in report.of_section("models").items() if "host_us" in v}
    if not cases:
        return NOT_MEASURED, ""
    worst = max(cases, key=lambda name: cases[name])
    verdict = MET if cases[worst] <= limit_us else MISSED
    return verdict, f"{cases[worst]:.0f} us at worst ({worst}), of {len(cases)} cases"


TARGETS: tuple[tuple[str, Callable[[Numbers], Verdict]], ...] = (
    (
        "decode attention from 2k context, 16 and 64 rows: 80 % of a copy",
        partial(_share, "attention", r".*B=(16|64) S=(2048|8192) .*", 0.8),
    ),
    (
        "decode attention from 2k context, one row: 80 % of a copy",
        partial(_share, "attention", r".*B=1 S=(2048|8192) .*", 0.8),
    ),
    (
        "int8 matmul, T of 1 and 16: 80 % of a copy",
        partial(_share, "matmul", r"llama8b-.*-int8-(1|16)", 0.8),
    ),
    (
        "int4 matmul, T of 1 and 16: 70 % of a copy",
        partial(_share, "matmul", r"llama8b-.*-int4-(1|16)", 0.7),
    ),
    ("8B decode at B=1: int8 1.8 times bf16", partial(_speedup, "int8", 1.8)),
    ("8B decode at B=1: int4 3 times bf16", partial(_speedup, "int4", 3.0)),
    ("8B bf16 decode at B=64, 1k context: 7,000 tok/s", partial(_throughput, 7000.0)),
    ("host: 200 us per step", partial(_host, 200.0)),
)
