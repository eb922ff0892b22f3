"""What the host does for a decode step of many rows: schedule, pack, read, make and hand over text.

The engine is real, around a tiny model whose decode program is replaced by one that answers at
once, so that all that is timed is the host's own. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import numpy as np

from jaxinfer.config import EngineConfig
from jaxinfer.delivery import Batch, Mailbox, deliver_all
from jaxinfer.engine import Engine
from jaxinfer.model_loading import make_mesh
from jaxinfer.models import load_model_module
from jaxinfer.nn.context import ModelContext
from jaxinfer.outputs import OutputDelta
from jaxinfer.request import EngineRequest
from jaxinfer.runner.loader import init_random, make_abstract_model
from jaxinfer.runner.programs import StepOutput
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.startup import assemble_engine
from jaxinfer.testing import byte_tokenizer

WARM_UP = 20  # steps


def make_engine(num_rows: int) -> Engine:
    """An engine of `num_rows` around a tiny model of bytes."""
    module = load_model_module("llama")
    hf = {**module.TINY_HF_CONFIG, "vocab_size": 258, "max_position_embeddings": 1024}
    context = ModelContext(
        mesh=make_mesh(1),
        platform="cpu",
        dtype=np.dtype("float32"),
        weight_dtype=np.dtype("float32"),
        precision="highest",
    )
    config = module.Config.from_hf(hf)
    model = make_abstract_model(module, config, context)
    init_random(model, seed=0)
    engine_config = EngineConfig(
        max_num_seqs=num_rows,
        max_num_batched_tokens=2 * num_rows,
        decode_steps=1,
        page_size=16,
        num_pages=64 * num_rows,
        pipeline_depth=1,
    )
    groups = module.kv_groups(config)
    return assemble_engine(engine_config, model, groups, byte_tokenizer(), frozenset({257}))


def answer_at_once(engine: Engine, num_rows: int) -> None:
    """Replaces the decode programs: each row samples the same letter in every step."""
    like = np.zeros((1, num_rows, 20), np.int32)
    output = jax.device_put(
        StepOutput(
            np.full((1, num_rows), ord("a"), np.int32), like[..., 0].astype("f4"), like,
            like.astype("f4"), like[..., 0],
        )
    )  # fmt: skip
    for key in engine.runner._executables:
        if key[0] == "decode":
            engine.runner._executables[key] = lambda params, state, *_: (output, state)


class Clock:
    """Seconds of each call by name, of functions that are replaced by timed ones."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)

    def watch(self, owner: Any, name: str) -> None:
        """Times every call of `owner.name` from here on."""
        call: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            result = call(*args)
            self.seconds[name].append(time.perf_counter() - began)
            return result

        setattr(owner, name, timed)


def measure(num_rows: int, num_steps: int) -> dict[str, float]:
    """Microseconds of a step and of its parts: medians of steps."""
    engine = make_engine(num_rows)
    params = SamplingParams(max_tokens=900, ignore_eos=True)
    for index in range(num_rows):
        engine.add(EngineRequest(f"r{index}", [1, 2, 3, 4 + index % 100], params))
    while any(not sequence.is_decoding for sequence in engine.scheduler.running) or (
        engine.scheduler.waiting
    ):
        engine.step()
    answer_at_once(engine, num_rows)
    for _ in range(WARM_UP):
        engine.step()
    clock = Clock()
    clock.watch(engine.scheduler, "schedule")
    clock.watch(engine.scheduler, "update")
    clock.watch(engine.runner, "dispatch")
    clock.watch(engine.runner, "collect")
    clock.watch(engine, "take_deltas")
    whole = []
    for _ in range(num_steps):
        began = time.perf_counter()
        deltas = engine.step()
        whole.append(time.perf_counter() - began)
        assert len(deltas) == num_rows
    clock.seconds |= {"step": whole, "deliver": deliver_often(deltas, num_steps)}
    return {name: statistics.median(seconds) * 1e6 for name, seconds in clock.seconds.items()}


def deliver_often(deltas: list[OutputDelta], num_steps: int) -> list[float]:
    """Seconds it takes to hand deltas over to a loop on which each has a client of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    batches: list[tuple[str, Mailbox, Batch]] = [
        (delta.request_id, Mailbox(loop, asyncio.Queue()), [delta]) for delta in deltas
    ]
    seconds = []
    for _ in range(num_steps):
        began = time.perf_counter()
        deliver_all(batches)
        seconds.append(time.perf_counter() - began)
        # Nothing of this step is left to do when the next is measured.
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    return seconds


def main() -> None:
    """Prints the parts of a step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    found = {name: round(us, 1) for name, us in measure(args.rows, args.steps).items()}
    for name, us in found.items():
        print(f"{name:12} {us:9,.1f} us a step  {us / args.rows:6.2f} us a row")
    print(json.dumps({"rows": args.rows, "us": found}))


if __name__ == "__main__":
    main()
