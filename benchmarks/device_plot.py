"""Draws a run's plot; needs matplotlib."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import matplotlib
from device_report import Report

matplotlib.use("Agg")
from matplotlib import pyplot


def draw(report: Report, path: Path) -> None:
    """Draws shares of a copy's bandwidth, and tokens per second of all layers."""
    figure, (attention, matmul, models) = pyplot.subplots(1, 3, figsize=(18, 6))
    _bars(attention, report.of_section("attention"), "decode attention")
    small = {n: v for n, v in report.of_section("matmul").items() if re.search(r"-1 ", n)}
    _bars(matmul, small, "matmul, one token")
    _decodes(models, report.of_section("all layers"))
    figure.suptitle(f"{report.header.get('device')}, jax {report.header.get('jax')}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _bars(axes: Any, cases: dict[str, dict[str, Any]], title: str) -> None:
    names = [name for name, values in cases.items() if "of_copy" in values][::-1]
    axes.barh(names, [100 * cases[name]["of_copy"] for name in names])
    axes.axvline(100, color="grey", linewidth=0.8)
    axes.tick_params(axis="y", labelsize=5)
    axes.set(title=title, xlabel="% of a copy's bandwidth")


def _decodes(axes: Any, cases: dict[str, dict[str, Any]]) -> None:
    lines: dict[str, list[tuple[int, float]]] = {}
    for values in cases.values():
        scheme, kind, *batch = values["case"].split()
        if kind == "decode":
            lines.setdefault(scheme, []).append((int(batch[0]), values["tok_per_s"]))
    for scheme, points in lines.items():
        axes.loglog(*zip(*sorted(points), strict=True), marker="o", label=scheme)
    if lines:
        axes.legend()
    axes.set(title="decode, all layers", xlabel="rows", ylabel="tokens per second")
