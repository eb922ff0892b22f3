"""Draws a run: how TTFT and ITL are distributed, and tokens over time. Needs matplotlib."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxinfer.config import ConfigError
from jaxinfer.load_test.metrics import tokens_over_time
from jaxinfer.load_test.record import RequestRecord

_INTERVALS = 60
"""How many intervals a run is shown in; each is at least a second long."""


def load_figure() -> Any:
    """Returns matplotlib's class of figures.

    Raises:
      ConfigError: matplotlib is not installed.
    """
    try:
        return importlib.import_module("matplotlib.figure").Figure
    except ModuleNotFoundError as error:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed: pip install 'jaxinfer[bench]', or "
            "leave --plot out"
        ) from error


def draw(figure_class: Any, records: Sequence[RequestRecord], title: str, path: Path) -> None:
    """Writes the picture of a run to a file, in the format that its name ends with."""
    figure = figure_class(figsize=(12, 3.6), layout="constrained")
    first, second, third = figure.subplots(1, 3)
    done = [record for record in records if record.error is None]
    ttft = [record.ttft_s for record in done if record.ttft_s is not None]
    _draw_cdf(first, "time to first token", ttft)
    _draw_cdf(second, "inter-token latency", [gap for record in done for gap in record.itl_s])
    width_s = max(1.0, max(record.end_s for record in records) / _INTERVALS)
    rates = tokens_over_time(records, width_s)
    third.stairs(rates, [index * width_s for index in range(len(rates) + 1)], fill=True)
    third.set(title="output tokens/s", xlabel="s", ylim=(0, None))
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def _draw_cdf(axes: Any, title: str, seconds: Sequence[float]) -> None:
    axes.set(title=title, xlabel="ms", ylabel="share below", ylim=(0, 1))
    axes.grid(alpha=0.3)
    if seconds:
        axes.ecdf([1e3 * value for value in seconds])
