"""Draws the comparison of `compare_cpu.py`; needs matplotlib (`pip install -e '.[bench]'`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

OURS = "jaxinfer"


def draw(report: dict[str, Any], path: Path) -> None:
    """Draws a row of panels for each model: one bar for each engine, ours in another color."""
    models = report["models"]
    columns = max(len(panels_of(found["engines"])) for found in models.values())
    figure, grid = pyplot.subplots(
        len(models), columns, figsize=(3 * columns, 3.2 * len(models)), squeeze=False
    )
    for row, (model, found) in zip(grid, models.items(), strict=True):
        panels = panels_of(found["engines"])
        for axes in row[len(panels) :]:
            axes.axis("off")
        for axes, (title, values) in zip(row, panels.items(), strict=False):
            colors = ["tab:orange" if name == OURS else "tab:gray" for name in values]
            bars = axes.bar(list(values), list(values.values()), color=colors)
            axes.bar_label(bars, fmt="{:,.0f}", fontsize=8)
            axes.set_title(title, fontsize=9)
            axes.tick_params(axis="x", labelrotation=20, labelsize=8)
            axes.margins(y=0.15)
        row[0].set_ylabel(model.removesuffix(".gguf"), fontsize=9)
    machine = report["machine"]
    figure.suptitle(f"{machine['cpu']}, {machine['cores']} cores, {report['date'][:10]}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def panels_of(engines: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Returns title -> engine -> value: every gen[C], prefill, memory; failed engines have none."""
    measured = {name: found for name, found in engines.items() if "error" not in found}
    levels = sorted({level for found in measured.values() for level in found["gen"]}, key=int)
    panels = {
        f"gen[{level}], tok/s": {
            name: found["gen"][level] for name, found in measured.items() if level in found["gen"]
        }
        for level in levels
    }
    panels["prefill, tok/s"] = {name: found["prefill"] for name, found in measured.items()}
    panels["peak RSS, MB (less is better)"] = {
        name: found["rss_mb"] for name, found in measured.items()
    }
    return panels
