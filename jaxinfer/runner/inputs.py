"""Turns a StepPlan into the one padded array of a step: the only place that pays for raggedness."""

from __future__ import annotations

import numpy as np

from jaxinfer.runner.step_layout import StepLayout
from jaxinfer.scheduler.plan import PlannedRow, StepPlan


class StepBuffer:
    """Reused host arrays of one layout.

    They take turns: with pipeline depth 1 the previous step may still be read while the next is
    filled.
    """

    def __init__(
        self, layout: StepLayout, dummy_row: int, table_shape: tuple[int, int, int]
    ) -> None:
        self.layout = layout
        self._dummy_row = dummy_row
        self._table_shape = table_shape
        self._buffers = [np.zeros((layout.size,), np.int32) for _ in range(3)]
        self._views = [layout.views(buffer) for buffer in self._buffers]
        self._slots = np.arange(layout.size, dtype=np.int32)  # logit rows by number
        self._turn = 0

    def fill_decode(self, plan: StepPlan, has_masks: bool = False) -> np.ndarray:
        """Returns the packed fields of a decode step."""
        fields = self._next()
        rows, num_seqs = plan.rows, len(plan.rows)
        limits = [row.num_tokens for row in rows]
        fields["num_seqs"][...] = num_seqs
        fields["num_steps"][...] = max(limits)
        fields["wants_top"][...] = plan.wants_top
        fields["has_masks"][...] = has_masks
        fields["rows"][:] = self._dummy_row
        fields["rows"][:num_seqs] = [row.row for row in rows]
        fields["kv_lens"][:] = 0
        fields["kv_lens"][:num_seqs] = [row.start + 1 for row in rows]
        fields["limits"][:] = 0
        fields["limits"][:num_seqs] = limits
        self._fill_page_updates(fields, plan)
        return self._buffers[self._turn]

    def fill_ragged(self, plan: StepPlan, has_masks: bool = False) -> np.ndarray:
        """Returns the packed fields of a step with prompt tokens or drafts."""
        fields = self._next()
        rows, num_seqs = plan.rows, len(plan.rows)
        q_lens = [row.num_queries for row in rows]
        ends = np.cumsum(q_lens, dtype=np.int32)
        fields["num_decodes"][...] = plan.num_decodes
        fields["num_seqs"][...] = num_seqs
        fields["wants_top"][...] = plan.wants_top
        fields["wants_hidden"][...] = plan.embeds
        fields["has_masks"][...] = has_masks
        fields["rows"][:] = self._dummy_row
        fields["rows"][:num_seqs] = [row.row for row in rows]
        fields["kv_lens"][:] = 0
        fields["kv_lens"][:num_seqs] = [
            row.start + q_len for row, q_len in zip(rows, q_lens, strict=True)
        ]
        fields["cu_q_lens"][0] = 0
        fields["cu_q_lens"][1:] = ends[-1]
        fields["cu_q_lens"][1 : num_seqs + 1] = ends
        tokens = fields["token_ids"]
        tokens[:] = 0
        indices: list[int] = []
        targets: list[int] = []
        drafts = fields["logit_draft"]
        firsts = fields["logit_first"]
        drafts[:] = -1
        firsts[:] = self._slots[: len(firsts)]
        for row, end in zip(rows, ends.tolist(), strict=True):
            first, slot = end - row.num_queries, len(indices)
            tokens[first:end] = row.token_ids or -1
            for index, target in logit_rows(row):
                indices.append(first + index)
                targets.append(target)
            if row.num_drafts:
                drafts[slot : slot + row.num_drafts] = row.token_ids[-row.num_drafts :]
                firsts[slot : len(indices)] = slot
        num_logits = len(indices)
        fields["num_logits"][...] = num_logits
        fields["logit_index"][:] = 0
        fields["logit_index"][:num_logits] = indices
        fields["logit_target"][:] = 0
        fields["logit_target"][:num_logits] = targets
        self._fill_page_updates(fields, plan)
        return self._buffers[self._turn]

    def fill_empty(self) -> np.ndarray:
        """Returns the packed fields of a step without rows."""
        fields = self._next()
        self._buffers[self._turn][:] = 0
        fields["rows"][:] = self._dummy_row
        self._fill_page_updates(fields, StepPlan())
        return self._buffers[self._turn]

    def _next(self) -> dict[str, np.ndarray]:
        self._turn = (self._turn + 1) % len(self._buffers)
        return self._views[self._turn]

    def _fill_page_updates(self, fields: dict[str, np.ndarray], plan: StepPlan) -> None:
        groups, rows, width = self._table_shape
        index, value = fields["page_index"], fields["page_value"]
        index[:] = groups * rows * width  # past the end: dropped
        if not plan.page_updates:
            return
        # A row that got pages and was then preempted is not in the step: the rung has no room for
        # its entries, and they are rewritten before anything reads them.
        planned = {row.row for row in plan.rows}
        updates = [update for update in plan.page_updates if update.row in planned]
        for slot, update in enumerate(updates):
            index[slot] = (update.group * rows + update.row) * width + update.index
            value[slot] = update.page


def logit_rows(row: PlannedRow) -> list[tuple[int, int]]:
    """(index in the row, token to score or -1 to sample) of every position that needs logits."""
    wanted = []
    if row.score_from is not None:
        sequence = row.sequence
        last = min(row.start + row.num_tokens, sequence.prompt_len - 1)
        wanted = [
            (position - row.start, sequence.token_ids[position + 1])
            for position in range(row.score_from, last)
        ]
    if row.num_sampled:
        last = row.num_queries - 1
        wanted += [(index, -1) for index in range(last - row.num_drafts, last + 1)]
    return wanted
