"""What must hold after the soak."""

from __future__ import annotations

import statistics
from typing import Any

MAX_RSS_GROWTH = 0.02
MAX_SHARE_OF_DIFFERENCES = 0.01
WARM_UP_SHARE, MIN_WARM_UP_S, WINDOW_SHARE = 0.1, 60.0, 0.1


def rss_growth(rss: list[tuple[float, float]], seconds: float) -> tuple[float, float]:
    """Medians of memory just behind the warm-up, and at the end."""
    warm = min(max(MIN_WARM_UP_S, WARM_UP_SHARE * seconds), seconds / 2)
    width = WINDOW_SHARE * seconds
    windows = ((warm, warm + width), (seconds - width, seconds))
    first, last = (
        statistics.median(value for at, value in rss if low <= at <= high) for low, high in windows
    )
    return first, last


def violations(found: dict[str, Any], tolerance: float) -> list[str]:
    """The rules that a run broke."""
    counts = found["counts"]
    share = found["differences"] / max(1, counts.get("tokens", 0))
    happened = {**found["happened"], **{n: counts.get(n, 0) for n in ("queue_full", "cancelled")}}
    rules = {
        f"{counts.get('wrong', 0)} answers were wrong": not counts.get("wrong"),
        f"memory grew by {found['rss_growth']:.2%}": found["rss_growth"] <= MAX_RSS_GROWTH,
        f"a token differs {found['largest_gap']:.2g} from a tie": found["largest_gap"] <= tolerance,
        f"{share:.2%} of all tokens differ": share < MAX_SHARE_OF_DIFFERENCES,
        f"left over: {found['left']}": not any(found["left"].values()),
        f"{found['compilations']:.0f} compilations": found["compilations"] == 0,
        f"{found['failed_steps']:.0f} failed steps": found["failed_steps"] == 0,
        f"the log has {found['log_errors'][:3]}": not found["log_errors"],
        f"some of these never happened: {happened}": all(happened.values()),
        # One more or less is a connection of the metrics.
        f"open files: {found['open_files']}": found["open_files"][1] - found["open_files"][0] <= 2,
    }
    return [broken for broken, holds in rules.items() if not holds]


def error_lines(log: list[str]) -> list[str]:
    """Lines of a log that tell of faults."""
    words = (" ERROR ", " CRITICAL ", "Traceback", "Error:", "never awaited", "never retrieved")
    return [line for line in log if any(word in line for word in words)]
