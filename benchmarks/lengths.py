"""Writes `lengths.jsonl`, which `jaxinfer bench serve --replay` sends: lengths with long tails.

    python benchmarks/lengths.py

Chats have many short messages and a few long ones, which a log-normal distribution imitates:
prompts with a median of 100 tokens and a sigma of 1.1, answers of 120 and 0.8, both cut to 4 ...
1,024. Medians and sigmas are our choice, fitted to nobody's data; only lengths are drawn, no text.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

FILE = Path(__file__).parent / "lengths.jsonl"
COUNT = 500
SHORTEST, LONGEST = 4, 1024


def lines() -> list[str]:
    """Returns the lines of the file."""
    source = random.Random(0)

    def draw(median: float, sigma: float) -> int:
        return min(LONGEST, max(SHORTEST, round(source.lognormvariate(math.log(median), sigma))))

    return [
        json.dumps({"prompt_tokens": draw(100, 1.1), "output_tokens": draw(120, 0.8)})
        for _ in range(COUNT)
    ]


if __name__ == "__main__":
    FILE.write_text("\n".join(lines()) + "\n", encoding="utf-8")
