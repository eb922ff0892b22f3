"""The traced bodies of the programs: one decode step, several in a loop, and the ragged step.

Everything with a data-dependent size arrives as a count inside a fixed shape; nothing here pads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32

from jaxinfer.runner.row_state import MAX_OUTPUT_COUNT, RowState
from jaxinfer.runner.sampling import Sampled, sample
from jaxinfer.runner.step_layout import StepLayout
from kernels.paged_attention import AttentionMetadata
from kernels.token_sampler import TokenMasks
from kernels.token_sampler import rows as columns
from kernels.token_sampler.rows import Leaf

Params = tuple[Array, ...]

NOT_EMITTED, NOT_FINITE = -1, -2
"""What stands for a token in the output where there is none."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceState:
    """Everything a step changes on the device; donated to each step and returned by it.

    Attributes:
      kv: one cache per layer.
      rows: sampling state per row.
      page_table: physical page of each logical page, per KV group and row.
    """

    kv: tuple[Leaf, ...]  # each a KVCache
    rows: RowState
    page_table: Leaf  # int32 [C, R, M]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutput:
    """What the host reads of a step: per logit row (ragged) or per step and row (decode).

    Attributes:
      token: the id that was sampled or scored; NOT_FINITE where the logits were not, and
        NOT_EMITTED where there was nothing to sample. One array: each read costs the host 50 us.
      logprob, top_ids, top_logprobs, rank: as `Sampled` has them.
      hidden: per row of a ragged step, the final hidden state of its last token, zeros unless some
        row wants it; None where the host is not to read it.
    """

    token: Leaf  # int32
    logprob: Leaf  # float32
    top_ids: Leaf  # int32
    top_logprobs: Leaf  # float32
    rank: Leaf  # int32
    hidden: Leaf | None = None  # float32 [R - 1, D]

    @classmethod
    def of(cls, sampled: Sampled, emitted: Bool[Array, " Q"]) -> StepOutput:
        """Marks the tokens that are none."""
        token = jnp.where(sampled.finite, sampled.token, NOT_FINITE)
        token = jnp.where(emitted, token, NOT_EMITTED)
        return cls(token, sampled.logprob, sampled.top_ids, sampled.top_logprobs, sampled.rank)


@dataclass(frozen=True)
class ModelPrograms:
    """The programs of one model.

    Attributes:
      merge: rebuilds the model from its leaves, inside a trace.
      page_size: tokens per KV page.
      logit_block: rows the head is computed for at once in a ragged step.
      vocab_size: ids that can be sampled; the model's padding rows above it are cut off.
    """

    merge: Callable[[Params], Any]
    page_size: int
    logit_block: int
    vocab_size: int

    def decode(
        self,
        layout: StepLayout,
        params: Params,
        state: DeviceState,
        packed: Int32[Array, " size"],
        masks: UInt32[Array, "B W"],
    ) -> tuple[StepOutput, DeviceState]:
        """One token for each row; `masks` are of those that the step has, see `TokenMasks`."""
        fields = layout.unpack(packed)
        state = _with_page_updates(state, fields)
        index = jnp.arange(masks.shape[0], dtype=jnp.int32)
        of_rows = TokenMasks(masks, index, fields["has_masks"] != 0)
        output, state = self._decode_once(fields, params, state, jnp.int32(0), of_rows)
        return jax.tree.map(lambda leaf: leaf[None], output), state

    def decode_bulk(
        self,
        layout: StepLayout,
        max_steps: int,
        params: Params,
        state: DeviceState,
        packed: Int32[Array, " size"],
    ) -> tuple[StepOutput, DeviceState]:
        """Up to `max_steps` tokens for each row, each fed back on the device."""
        fields = layout.unpack(packed)
        state = _with_page_updates(state, fields)
        # Traced once, for its shapes and for the loop.
        decode_once = jax.jit(self._decode_once)
        shapes = jax.eval_shape(decode_once, fields, params, state, jnp.int32(0))[0]
        outputs = jax.tree.map(lambda leaf: jnp.zeros((max_steps, *leaf.shape), leaf.dtype), shapes)

        def body(
            step: Int32[Array, ""], carry: tuple[StepOutput, DeviceState]
        ) -> tuple[StepOutput, DeviceState]:
            outputs, state = carry
            output, state = decode_once(fields, params, state, step)
            outputs = jax.tree.map(lambda all_, one: all_.at[step].set(one), outputs, output)
            return outputs, state

        return lax.fori_loop(0, fields["num_steps"], body, (outputs, state))

    def _decode_once(
        self,
        fields: dict[str, Int32[Array, "..."]],
        params: Params,
        state: DeviceState,
        step: Int32[Array, ""],
        masks: TokenMasks | None = None,
    ) -> tuple[StepOutput, DeviceState]:
        rows = fields["rows"]
        index = jnp.arange(rows.shape[0], dtype=jnp.int32)
        is_row = index < fields["num_seqs"]
        active = is_row & state.rows.alive[rows] & (step < fields["limits"])
        kv_lens = jnp.where(is_row, fields["kv_lens"] + step, 0)
        positions = jnp.maximum(kv_lens - 1, 0)
        page_table = state.page_table[:, rows]
        metadata = AttentionMetadata(
            num_decodes=fields["num_seqs"],
            num_seqs=fields["num_seqs"],
            kv_lens=kv_lens,
            cu_q_lens=jnp.minimum(
                jnp.arange(rows.shape[0] + 1, dtype=jnp.int32), fields["num_seqs"]
            ),
            slot_mapping=self._slots(page_table, index, positions, active),
            page_table=page_table,
            is_decode=True,
        )
        model = self.merge(params)
        hidden, kv = model(state.rows.last_token[rows], positions, state.kv, metadata)
        no_target = jnp.full(rows.shape, -1, jnp.int32)
        sampled = sample(
            model.logits(hidden, fields["num_seqs"])[:, : self.vocab_size],
            state.rows,
            rows,
            positions + 1,
            no_target,
            fields["wants_top"] != 0,
            model.context.platform,
            masks,
        )
        row_state = _after_sampling(state.rows, rows, sampled.token, positions + 1, active)
        return StepOutput.of(sampled, active), replace(state, kv=kv, rows=row_state)

    def ragged(
        self,
        layout: StepLayout,
        params: Params,
        state: DeviceState,
        packed: Int32[Array, " size"],
        masks: UInt32[Array, "B W"],
    ) -> tuple[StepOutput, DeviceState]:
        """Chunks of prompts, with running decodes riding along, one token each.

        A row may also bring drafts behind its last token and a logit row for each of them: they
        are sampled as if decoded one by one, and count while each sample is the draft.
        """
        fields = layout.unpack(packed)
        state = _with_page_updates(state, fields)
        rows, cu_q_lens = fields["rows"], fields["cu_q_lens"]
        token = jnp.arange(fields["token_ids"].shape[0], dtype=jnp.int32)
        # Row of each token: how many rows end at or before it.
        row_of = jnp.sum((cu_q_lens[1:, None] <= token[None, :]).astype(jnp.int32), axis=0)
        row_of = jnp.minimum(row_of, rows.shape[0] - 1)
        row_index = jnp.arange(rows.shape[0], dtype=jnp.int32)
        is_prefill = row_index >= fields["num_decodes"]
        live_row = (row_index < fields["num_seqs"]) & (is_prefill | state.rows.alive[rows])
        active = live_row[row_of] & (token < cu_q_lens[-1])
        starts = fields["kv_lens"] - (cu_q_lens[1:] - cu_q_lens[:-1])
        positions = jnp.where(active, starts[row_of] + token - cu_q_lens[row_of], 0)
        page_table = state.page_table[:, rows]
        metadata = AttentionMetadata(
            num_decodes=fields["num_decodes"],
            num_seqs=fields["num_seqs"],
            kv_lens=fields["kv_lens"],
            cu_q_lens=cu_q_lens,
            slot_mapping=self._slots(page_table, row_of, positions, active),
            page_table=page_table,
            is_decode=False,
        )
        last = state.rows.last_token[rows][row_of]
        token_ids = jnp.where(fields["token_ids"] < 0, last, fields["token_ids"])
        model = self.merge(params)
        hidden, kv = model(token_ids, positions, state.kv, metadata)

        dummy = state.rows.alive.shape[0] - 1
        slot = jnp.arange(fields["logit_index"].shape[0], dtype=jnp.int32)
        is_logit = slot < fields["num_logits"]
        planned_row = row_of[fields["logit_index"]]
        logit_row = jnp.where(is_logit, rows[planned_row], dummy)
        lengths = positions[fields["logit_index"]] + 1
        emitted = is_logit & live_row[planned_row]
        of_rows = TokenMasks(masks, planned_row, fields["has_masks"] != 0)
        sampled = self._logit_rows(model, hidden, fields, state.rows, logit_row, lengths, of_rows)
        ends = _ends_row(state.rows, logit_row, sampled.token, lengths)
        accepts = (sampled.token == fields["logit_draft"]) & sampled.finite & ~ends
        # Exclusive sums: a slot counts if every one from its row's first on accepted its draft.
        accepted = jnp.cumsum(accepts.astype(jnp.int32)) - accepts.astype(jnp.int32)
        first = fields["logit_first"]
        emitted &= accepted - accepted[first] == slot - first
        row_state = _after_sampling(
            state.rows,
            jnp.where(fields["logit_target"] < 0, logit_row, dummy),
            sampled.token,
            lengths,
            emitted & (fields["logit_target"] < 0),
            is_last=~accepts,
        )
        output = replace(
            StepOutput.of(sampled, emitted),
            hidden=_last_hidden(hidden, cu_q_lens, fields["wants_hidden"] != 0),
        )
        return output, replace(state, kv=kv, rows=row_state)

    def _logit_rows(
        self,
        model: Any,
        hidden: Array,
        fields: dict[str, Int32[Array, "..."]],
        state: RowState,
        logit_row: Int32[Array, " Q"],
        lengths: Int32[Array, " Q"],
        masks: TokenMasks,
    ) -> Sampled:
        """Samples or scores the gathered rows in blocks, so that no [T, V] array ever exists."""
        block = self.logit_block

        @jax.jit  # traced once, for its shapes and for the loop
        def one(start: Int32[Array, ""]) -> Sampled:
            def cut(x: Int32[Array, " Q"]) -> Int32[Array, " block"]:
                return lax.dynamic_slice_in_dim(x, start, block)

            logits = model.logits(hidden[cut(fields["logit_index"])], fields["num_logits"] - start)
            return sample(
                logits[:, : self.vocab_size],
                state,
                cut(logit_row),
                cut(lengths),
                cut(fields["logit_target"]),
                fields["wants_top"] != 0,
                model.context.platform,
                replace(masks, rows=cut(masks.rows)),
            )

        shapes = jax.eval_shape(one, jnp.int32(0))
        empty = jax.tree.map(
            lambda leaf: jnp.zeros((logit_row.shape[0], *leaf.shape[1:]), leaf.dtype), shapes
        )

        def body(index: Int32[Array, ""], results: Sampled) -> Sampled:
            start = index * block
            return jax.tree.map(
                lambda all_, part: lax.dynamic_update_slice_in_dim(all_, part, start, 0),
                results,
                one(start),
            )

        return lax.fori_loop(0, (fields["num_logits"] + block - 1) // block, body, empty)

    def _slots(
        self,
        page_table: Int32[Array, "C B M"],
        row_of: Int32[Array, " T"],
        positions: Int32[Array, " T"],
        active: Bool[Array, " T"],
    ) -> Int32[Array, "C T"]:
        """Cache slot of each token; padding and dead rows write to the trash page."""
        pages = page_table[:, row_of, positions // self.page_size]
        slots = pages * self.page_size + (positions % self.page_size)[None, :]
        return jnp.where(active[None, :], slots, 0)


def _last_hidden(
    hidden: Float[Array, "T D"], cu_q_lens: Int32[Array, " B1"], is_wanted: Bool[Array, ""]
) -> Float32[Array, "B D"]:
    """The hidden state of each row's last token, where it is wanted."""
    last = jnp.maximum(cu_q_lens[1:] - 1, 0)
    shape = (last.shape[0], hidden.shape[1])
    return lax.cond(
        is_wanted,
        lambda hidden: hidden[last].astype(jnp.float32),
        lambda _: jnp.zeros(shape, jnp.float32),
        hidden,
    )


def _with_page_updates(state: DeviceState, fields: dict[str, Int32[Array, "..."]]) -> DeviceState:
    """Writes the changed entries; unused updates carry an index past the end and are dropped."""
    flat = state.page_table.reshape(-1)
    flat = flat.at[fields["page_index"]].set(fields["page_value"], mode="drop")
    return replace(state, page_table=flat.reshape(state.page_table.shape))


def _after_sampling(
    state: RowState,
    rows: Int32[Array, " Q"],
    token: Int32[Array, " Q"],
    length: Int32[Array, " Q"],
    sampled: Bool[Array, " Q"],
    is_last: Bool[Array, " Q"] | None = None,
) -> RowState:
    """Remembers the sampled tokens; a stop id kills its row. Others change nothing.

    Of a row with several, the one that `is_last` is continued from.
    """
    dummy = state.alive.shape[0] - 1
    rows = jnp.where(sampled, rows, dummy)
    ends = _ends_row(state, rows, token, length)
    lasts = rows if is_last is None else jnp.where(is_last, rows, dummy)

    def counted(counts: Array) -> Array:
        room = counts[rows, token] < MAX_OUTPUT_COUNT
        step = jnp.where(room & sampled, jnp.int16(2), jnp.int16(0))
        return counts.at[rows, token].add(step)

    has_penalties = jnp.any(state.integers[rows, columns.HAS_PENALTIES] != 0)
    return replace(
        state,
        last_token=state.last_token.at[lasts].set(token),
        alive=state.alive.at[lasts].set((lasts != dummy) & ~ends),
        counts=lax.cond(has_penalties, counted, lambda counts: counts, state.counts),
    )


def _ends_row(
    state: RowState,
    rows: Int32[Array, " Q"],
    token: Int32[Array, " Q"],
    length: Int32[Array, " Q"],
) -> Bool[Array, " Q"]:
    """Whether each token is a stop id of its row that may end it at this length."""
    is_stop = jnp.any(state.stop_ids[rows] == token[:, None], axis=1)
    return is_stop & (length >= state.integers[rows, columns.MIN_LENGTH])
