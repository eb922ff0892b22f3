"""The step programs of an engine: which there are, and what each takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxinfer.runner.buckets import Ladders
from jaxinfer.runner.programs import ModelPrograms
from jaxinfer.runner.runner_config import RunnerConfig
from jaxinfer.runner.step_layout import StepLayout, decode_layout, ragged_layout


@dataclass(frozen=True, slots=True)
class StepProgram:
    """One program, not yet traced.

    Attributes:
      kind: decode, decode_k or ragged.
      rung: rows, or tokens of a ragged one.
      layout: of the fields that are uploaded for a step.
      body: what is traced.
      num_masks: rows of the masks it takes; None for one that takes none.
    """

    kind: str
    rung: int
    layout: StepLayout
    body: Callable[..., Any]
    num_masks: int | None


def step_programs(
    config: RunnerConfig, ladders: Ladders, programs: ModelPrograms
) -> dict[tuple[str, int], StepProgram]:
    """Returns every step program by kind and rung."""
    page_size, num_groups = config.cache.page_size, config.num_groups
    table = []
    for rung in ladders.decode:
        layout = decode_layout(rung, num_groups, page_size, 1)
        table.append(StepProgram("decode", rung, layout, partial(programs.decode, layout), rung))
    for rung in ladders.bulk:
        layout = decode_layout(rung, num_groups, page_size, config.decode_steps)
        body = partial(programs.decode_bulk, layout, config.decode_steps)
        table.append(StepProgram("decode_k", rung, layout, body, None))
    for rung in ladders.tokens:
        rows = config.max_num_seqs
        layout = ragged_layout(rung, rows, num_groups, page_size, programs.logit_block)
        table.append(StepProgram("ragged", rung, layout, partial(programs.ragged, layout), rows))
    return {(program.kind, program.rung): program for program in table}
