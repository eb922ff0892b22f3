"""Where each field of a step lies in the one int32 array that is uploaded for it.

The same layout is filled on the host and taken apart inside the compiled program.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Array, Int32


@dataclass(frozen=True)
class StepLayout:
    """Named int32 fields, one after the other.

    Attributes:
      fields: (name, shape) in order; a scalar has the shape ().
    """

    fields: tuple[tuple[str, tuple[int, ...]], ...]

    @cached_property
    def spans(self) -> dict[str, tuple[int, int, tuple[int, ...]]]:
        """Start, end and shape of each field."""
        spans = {}
        start = 0
        for name, shape in self.fields:
            end = start + int(np.prod(shape, dtype=np.int64))
            spans[name] = (start, end, shape)
            start = end
        return spans

    @cached_property
    def size(self) -> int:
        """Length of the packed array."""
        return max(end for _, end, _ in self.spans.values())

    def views(self, packed: np.ndarray) -> dict[str, np.ndarray]:
        """Writable host views of every field."""
        return {
            name: packed[start:end].reshape(shape)
            for name, (start, end, shape) in self.spans.items()
        }

    def unpack(self, packed: Int32[Array, " size"]) -> dict[str, Int32[Array, "..."]]:
        """The fields inside a traced function."""
        return {
            name: packed[start:end].reshape(shape)
            for name, (start, end, shape) in self.spans.items()
        }


def decode_layout(num_rows: int, num_groups: int, page_size: int, num_steps: int) -> StepLayout:
    """Fields of a decode step of `num_rows` padded rows, up to `num_steps` tokens each."""
    max_updates = num_groups * num_rows * (-(-num_steps // page_size) + 1)
    return StepLayout(
        (
            ("num_seqs", ()),
            ("num_steps", ()),
            ("wants_top", ()),
            ("has_masks", ()),
            ("rows", (num_rows,)),
            ("kv_lens", (num_rows,)),
            ("limits", (num_rows,)),
            ("page_index", (max_updates,)),
            ("page_value", (max_updates,)),
        )
    )


def ragged_layout(
    num_tokens: int, num_rows: int, num_groups: int, page_size: int, logit_block: int
) -> StepLayout:
    """Fields of a ragged step of `num_tokens` padded tokens in at most `num_rows` rows."""
    num_logits = -(-num_tokens // logit_block) * logit_block
    max_updates = num_groups * (-(-num_tokens // page_size) + 2 * min(num_rows, num_tokens))
    return StepLayout(
        (
            ("num_decodes", ()),
            ("num_seqs", ()),
            ("num_logits", ()),
            ("wants_top", ()),
            ("wants_hidden", ()),
            ("has_masks", ()),
            ("rows", (num_rows,)),
            ("kv_lens", (num_rows,)),
            ("cu_q_lens", (num_rows + 1,)),
            ("token_ids", (num_tokens,)),
            ("logit_index", (num_logits,)),
            ("logit_target", (num_logits,)),
            ("logit_draft", (num_logits,)),
            ("logit_first", (num_logits,)),
            ("page_index", (max_updates,)),
            ("page_value", (max_updates,)),
        )
    )
