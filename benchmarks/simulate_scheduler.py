"""The scheduler at the scale of a large service, without a model: microseconds and bytes.

Requests have log-normal lengths, and every second begins as some others do; a fake step samples one
token for each row that wants one, and what ends is replaced. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
import tracemalloc
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxinfer.scheduler.limits import SchedulerLimits
from jaxinfer.scheduler.page_tables import GroupSpec, PageTables
from jaxinfer.scheduler.plan import RowResult, StepPlan
from jaxinfer.scheduler.prefix_cache import PrefixCache
from jaxinfer.scheduler.scheduler import Scheduler
from jaxinfer.scheduler.sequence import Sequence, StopRule

PAGE_SIZE = 16
MOST_PROMPT, MOST_OUTPUT = 4_000, 1_000
NUM_PREFIXES, PREFIX_LEN = 100, 256
TOKENS_OF_A_ROW = 1_000  # of the pool: about what a row needs on average
WARM_UP = 100  # steps


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one run: what it held, and what a token, a row of a step and an arrival cost."""

    requests: int
    waiting: int
    running: int
    tokens: int
    us_per_token: float
    us_per_row: float
    worst_step_ms: float
    us_per_add: float
    preemptions: int


class Traffic:
    """Requests of random tokens, with log-normal lengths; every second begins as some others do."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._tokens = [self._rng.randrange(50_000) for _ in range(1_000_000)]
        self._prefixes = [self._cut(PREFIX_LEN) for _ in range(NUM_PREFIXES)]
        self._count = 0

    def next(self) -> Sequence:
        """Another request."""
        self._count += 1
        prompt = self._cut(self._length(300, MOST_PROMPT))
        if self._count % 2:
            prompt = self._rng.choice(self._prefixes) + prompt
        stop = StopRule(self._length(150, MOST_OUTPUT))
        priority = self._rng.randrange(3)
        return Sequence(str(self._count), prompt, len(prompt), stop, priority=priority)

    def _cut(self, size: int) -> list[int]:
        start = self._rng.randrange(len(self._tokens) - size)
        return self._tokens[start : start + size]

    def _length(self, median: int, most: int) -> int:
        """Its spread is that of public traces of chat services, about 1."""
        return max(1, min(most, int(self._rng.lognormvariate(0, 1) * median)))


def make_scheduler(num_rows: int, num_pages: int) -> Scheduler:
    """Pages for all rows at an average length: the longest make others wait, or go."""
    limits = SchedulerLimits(
        max_num_seqs=num_rows,
        max_num_batched_tokens=8 * num_rows,
        max_prefill_chunk_tokens=8 * num_rows,
        pipeline_depth=1,
    )
    tables = PageTables([GroupSpec(num_pages)], PAGE_SIZE)
    return Scheduler(limits, tables, PrefixCache(tables))


def sample(plan: StepPlan) -> list[RowResult]:
    """One token for each row that samples."""
    return [RowResult([7] * row.num_sampled) for row in plan.rows]


def run(num_requests: int, num_rows: int, num_steps: int, seed: int) -> Measured:
    """Adds requests, fills the rows, then times steps while as many arrive as end."""
    traffic = Traffic(seed)
    scheduler = make_scheduler(num_rows, num_rows * TOKENS_OF_A_ROW // PAGE_SIZE)
    sequences = [traffic.next() for _ in range(num_requests)]
    gc.collect()
    gc.freeze()
    began = time.perf_counter()
    for sequence in sequences:
        scheduler.add(sequence)
    add_us = (time.perf_counter() - began) * 1e6 / num_requests
    for _ in range(WARM_UP):
        step(scheduler, num_requests, traffic)
    waiting, running = len(scheduler.waiting), len(scheduler.running)
    gc.collect()
    tokens, times = 0, []
    for _ in range(num_steps):
        count, seconds = step(scheduler, num_requests, traffic)
        tokens += count
        times.append(seconds)
    scheduler.check_integrity()
    gc.unfreeze()
    return Measured(
        requests=num_requests,
        waiting=waiting,
        running=running,
        tokens=tokens,
        us_per_token=round(sum(times) * 1e6 / tokens, 2),
        us_per_row=round(sum(times) * 1e6 / num_steps / running, 2),
        worst_step_ms=round(max(times) * 1e3, 2),
        us_per_add=round(add_us, 2),
        preemptions=scheduler.num_preemptions,
    )


def bytes_of_a_request(num_requests: int, seed: int) -> int:
    """Memory that a waiting request takes, its prompt's tokens but not their numbers included."""
    traffic = Traffic(seed)
    scheduler = make_scheduler(num_requests, num_requests * TOKENS_OF_A_ROW // PAGE_SIZE)
    tracemalloc.start()
    for _ in range(num_requests):
        scheduler.add(traffic.next())
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return held // num_requests


def step(scheduler: Scheduler, num_requests: int, traffic: Traffic) -> tuple[int, float]:
    """Replaces what has ended, and runs one step; returns its tokens and seconds."""
    for _ in range(num_requests - len(scheduler.waiting) - len(scheduler.running)):
        scheduler.add(traffic.next())
    began = time.perf_counter()
    plan = scheduler.schedule()
    if plan is None:
        return 0, time.perf_counter() - began
    scheduler.update(plan, sample(plan))
    seconds = time.perf_counter() - began
    return sum(row.num_tokens for row in plan.rows), seconds


def main() -> None:
    """Prints a line for each number of requests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", default="12000,30000,100000", help="comma-separated")
    parser.add_argument("--rows", type=int, default=10_000, help="sequences running at once")
    parser.add_argument("--steps", type=int, default=50, help="steps that are timed")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    held = bytes_of_a_request(10_000, args.seed)
    print(f"a waiting request takes {held:,} bytes")
    results = []
    for count in map(int, args.requests.split(",")):
        results.append(asdict(run(count, args.rows, args.steps, args.seed)))
        print("  ".join(f"{name} {value:,}" for name, value in results[-1].items()))
    print(json.dumps({"rows": args.rows, "bytes_per_request": held, "runs": results}))


if __name__ == "__main__":
    main()
