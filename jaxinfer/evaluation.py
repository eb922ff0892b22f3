"""How well a model predicts a text, and how far it is from its own `--exact` run.

Everything goes the engine's way: prompts in chunks through the paged cache of the configured dtype.
Only the head's logits are used differently, and never exist for more than a block of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Float32, Int32
from tqdm import tqdm

from jaxinfer.nn.decoder import CausalLM
from jaxinfer.runner.kv_cache import CacheSpec
from jaxinfer.runner.loader import parameter_bytes
from kernels.paged_attention import AttentionMetadata, KVCache, kv_partition

_LOGIT_ROWS = 64
"""Rows whose logits exist at once: of two models with 262k ids, 134 MB, and a few copies."""

_TAYLOR_RADIUS = 0.5


@dataclass(frozen=True, slots=True)
class Window:
    """A piece of a text that is read without what came before it.

    Attributes:
      token_ids: what the model reads, and behind it the last token to predict.
      num_scored: how many of the last of them are predicted.
    """

    token_ids: tuple[int, ...]
    num_scored: int


def make_windows(
    token_ids: Sequence[int], length: int, stride: int, bos: int | None
) -> list[Window]:
    """Cuts a text into overlapping windows that together predict each of its tokens once.

    All windows but the first predict at most `stride` tokens, after at least `length - stride`
    others. Without a `bos`, nothing comes before the first token of the text: it is not predicted.

    Args:
      token_ids: of the text alone.
      length: tokens in a window, `bos` included.
      stride: tokens by which windows move on.
      bos: put at the start of every window; never predicted.

    Raises:
      ValueError: there is nothing to predict, or the sizes do not fit each other.
    """
    prefix = () if bos is None else (bos,)
    room = length - len(prefix)
    # The first token of a window is always given.
    if not 1 <= stride < length:
        raise ValueError(
            f"stride is {stride} and window {length}: choose a window of at least 2 tokens and a "
            f"stride of 1 to {max(1, length - 1)}"
        )
    if len(prefix) + len(token_ids) < 2:
        raise ValueError(f"the text has {len(token_ids)} tokens: there is nothing to predict")
    windows = []
    done = 0 if prefix else 1
    end = min(room, len(token_ids))
    while done < len(token_ids):
        begin = max(0, end - room)
        windows.append(Window((*prefix, *token_ids[begin:end]), end - done))
        done, end = end, min(end + stride, len(token_ids))
    return windows


def targets_of(windows: Sequence[Window]) -> np.ndarray:
    """Returns the predicted tokens of all windows in order, int32."""
    ids = [token_id for one in windows for token_id in one.token_ids[-one.num_scored :]]
    return np.array(ids, np.int32)


class Reader:
    """One model reading windows of text through a paged cache of one sequence.

    Args:
      model: filled; what `keep_head` does to it cannot be undone.
      cache: how keys and values are held.
      num_groups: KV groups of the model.
      length: tokens of the longest window.
      chunk: tokens in a step.
    """

    def __init__(
        self, model: CausalLM, cache: CacheSpec, num_groups: int, length: int, chunk: int
    ) -> None:
        self.model = model
        self.cache = cache
        self.weight_bytes = parameter_bytes(model)
        self._num_groups = num_groups
        self._num_pages = -(-length // cache.page_size)
        self._chunk = max(2, min(chunk, length - 1))

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of cache that a token of context takes in all layers."""
        return self.cache.page_bytes / self.cache.page_size

    def hidden(self, windows: Sequence[Window], title: str, progress: bool) -> np.ndarray:
        """Returns the hidden states `[N, D]`, in the activation dtype, that predict `targets_of`.

        They are small: what the head makes of them is not.
        """
        merge, leaves = _split(self.model)
        context = self.model.context
        replicated = context.sharding()
        heads = jax.tree.map(
            lambda spec: NamedSharding(context.mesh, spec),
            kv_partition(self._layer, "tensor"),
        )
        shardings = (heads,) * self.cache.num_layers

        @partial(jax.jit, donate_argnums=3, out_shardings=(replicated, shardings))
        def step(
            leaves: Any,
            token_ids: Int32[Array, " T"],
            positions: Int32[Array, " T"],
            kv: tuple[KVCache, ...],
            metadata: AttentionMetadata,
        ) -> tuple[Float[Array, "T D"], tuple[KVCache, ...]]:
            return merge(leaves)(token_ids, positions, kv, metadata)

        kv = jax.jit(self._empty_cache, out_shardings=shardings)()
        rows = []
        total = sum(len(window.token_ids) - 1 for window in windows)
        with tqdm(total=total, desc=title, unit="tok", disable=not progress) as bar:
            for window in windows:
                first = len(window.token_ids) - 1 - window.num_scored
                for start, token_ids, positions, metadata in self._steps(window):
                    hidden, kv = step(leaves, token_ids, positions, kv, metadata)
                    count = int(metadata.cu_q_lens[-1])
                    rows.append(np.asarray(hidden)[max(first - start, 0) : count])
                    bar.update(count)
        return np.concatenate(rows)

    def keep_head(self) -> None:
        """Frees the layers' weights, so that another model can be loaded: logits need the head."""
        self.model.layers = nnx.List([])

    def _steps(
        self, window: Window
    ) -> Iterator[tuple[int, np.ndarray, np.ndarray, AttentionMetadata]]:
        """Yields (first position, padded token ids, positions, metadata) of each chunk."""
        inputs = np.array(window.token_ids[:-1], np.int32)
        # Page 0 is trash. Groups do not share layers, so they may share page numbers.
        pages = np.arange(1, self._num_pages + 1, dtype=np.int32)
        table = np.broadcast_to(pages, (self._num_groups, 1, self._num_pages))
        for start in range(0, len(inputs), self._chunk):
            part = inputs[start : start + self._chunk]
            padding = (0, self._chunk - len(part))
            position = np.arange(start, start + len(part), dtype=np.int32)
            slots = np.pad(position + self.cache.page_size, padding)
            metadata = AttentionMetadata(
                num_decodes=np.int32(0),
                num_seqs=np.int32(1),
                kv_lens=np.array([start + len(part)], np.int32),
                cu_q_lens=np.array([0, len(part)], np.int32),
                slot_mapping=np.broadcast_to(slots, (self._num_groups, self._chunk)),
                page_table=table,
                is_decode=False,
            )
            yield start, np.pad(part, padding), np.pad(position, padding), metadata

    @property
    def _layer(self) -> Any:
        return self.cache.layer(1 + self._num_pages)

    def _empty_cache(self) -> tuple[KVCache, ...]:
        one = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self._layer)
        return (one,) * self.cache.num_layers


def _split(model: CausalLM) -> tuple[Callable[[Any], Any], tuple[jax.Array, ...]]:
    """Returns what makes the model of its leaves inside a trace, and the leaves."""
    graphdef, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    return lambda leaves: nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves)), tuple(leaves)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Divergence:
    """How a candidate's prediction of each token differs from the reference's, over all ids.

    Attributes:
      reference_nll, nll: negative log-likelihood of the token that came, in nats.
      kl: `sum p log(p / q)` in nats, p the reference's distribution and q the candidate's.
      is_same_top: whether both hold the same id to be the most likely.
    """

    reference_nll: Any  # float32 [N]
    nll: Any  # float32 [N]
    kl: Any  # float32 [N]
    is_same_top: Any  # bool [N]


def likelihood(
    model: CausalLM, hidden: np.ndarray, targets: np.ndarray, progress: bool
) -> np.ndarray:
    """Returns the negative log-likelihood of each target, float32 `[N]`.

    Raises:
      ValueError: a logit is not finite.
    """
    merge, leaves = _split(model)

    @jax.jit
    def score(
        leaves: Any, hidden: Float[Array, "R D"], targets: Int32[Array, " R"]
    ) -> Float32[Array, " R"]:
        return nll_of(log_softmax(merge(leaves).logits(hidden)), targets)

    nll = _in_blocks(score, (leaves,), (hidden, targets), progress)
    _require_finite(nll, "the model")
    return nll


def divergence(
    reference: tuple[CausalLM, np.ndarray],
    candidate: tuple[CausalLM, np.ndarray],
    targets: np.ndarray,
    progress: bool,
) -> Divergence:
    """Compares two models, each given with its hidden states `[N, D]`, on what they predict.

    Raises:
      ValueError: a logit is not finite.
    """
    merge_reference, reference_leaves = _split(reference[0])
    merge, leaves = _split(candidate[0])

    @jax.jit
    def compare(
        leaves: tuple[Any, Any],
        reference_hidden: Float[Array, "R D"],
        hidden: Float[Array, "R D"],
        targets: Int32[Array, " R"],
    ) -> Divergence:
        log_p = log_softmax(merge_reference(leaves[0]).logits(reference_hidden))
        log_q = log_softmax(merge(leaves[1]).logits(hidden))
        return Divergence(
            nll_of(log_p, targets),
            nll_of(log_q, targets),
            kl_of(log_p, log_q),
            same_top(log_p, log_q),
        )

    arrays = (reference[1], candidate[1], targets)
    found: Divergence = _in_blocks(compare, ((reference_leaves, leaves),), arrays, progress)
    _require_finite(found.reference_nll, "the exact run")
    _require_finite(found.nll, "the candidate")
    return found


def log_softmax(logits: Float32[Array, "R V"]) -> Float32[Array, "R V"]:
    """Returns log-probabilities."""
    return jax.nn.log_softmax(logits, axis=-1)


def nll_of(log_p: Float32[Array, "R V"], targets: Int32[Array, " R"]) -> Float32[Array, " R"]:
    """Returns the negative log-likelihood of one id a row."""
    return -jnp.take_along_axis(log_p, targets[:, None], axis=1)[:, 0]


def same_top(log_p: Float32[Array, "R V"], log_q: Float32[Array, "R V"]) -> Bool[Array, " R"]:
    """Returns whether the most likely ids are equal; of equally likely ones the lowest counts."""
    return jnp.argmax(log_p, axis=-1) == jnp.argmax(log_q, axis=-1)


def kl_of(log_p: Float32[Array, "R V"], log_q: Float32[Array, "R V"]) -> Float32[Array, " R"]:
    """Returns `sum p log(p / q)` of each row; never negative, and 0 where they are equal.

    With d = log q - log p this sums `p (e^d - 1 - d)`. The added `q - p` sums to zero; with it
    no term is negative, and an error of the normalisation, which shifts all d alike, counts only
    squared: float32 is enough for divergences of 1e-6.
    """
    p, q, d = jnp.exp(log_p), jnp.exp(log_q), log_q - log_p
    near = p * (jnp.expm1(d) - d)
    far = q - p - p * d  # e^d may overflow where p is next to nothing
    return jnp.sum(jnp.where(jnp.abs(d) < _TAYLOR_RADIUS, near, far), axis=-1)


def _in_blocks(
    program: Callable[..., Any],
    first: tuple[Any, ...],
    arrays: tuple[np.ndarray, ...],
    progress: bool,
) -> Any:
    """Returns what `program(*first, *rows)` gives for blocks of rows of the arrays, joined."""
    count = len(arrays[0])
    results = []
    for start in tqdm(
        range(0, count, _LOGIT_ROWS), desc="Logits", unit="block", disable=not progress
    ):
        blocks = [array[start : start + _LOGIT_ROWS] for array in arrays]
        missing = _LOGIT_ROWS - len(blocks[0])
        blocks = [np.pad(one, [(0, missing)] + [(0, 0)] * (one.ndim - 1)) for one in blocks]
        results.append(jax.device_get(program(*first, *blocks)))
    return jax.tree.map(lambda *parts: np.concatenate(parts)[:count], *results)


def _require_finite(nll: np.ndarray, whose: str) -> None:
    bad = np.flatnonzero(~np.isfinite(nll))
    if len(bad):
        raise ValueError(
            f"{whose} gives logits that are not finite for {len(bad)} of {len(nll)} tokens, the "
            f"first of them predicted token {bad[0]}: try --dtype float32 or another --quant"
        )
