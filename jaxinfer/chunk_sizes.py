"""How prompts are cut into chunks, as configured or as a platform and a model make it best."""

from __future__ import annotations

from jaxinfer.config import ConfigError, EngineConfig
from jaxinfer.nn.config import DecoderConfig
from jaxinfer.scheduler.pace import PrefillPace

_CPU_STEP_TOKENS, _CPU_ROW_TOKENS = 18, 9
"""Prompt tokens that take, beside decodes, up to twice as long as these alone.

With 24 and 12 gaps between tokens grew to 2.95 times the idle ones on a Xeon (the median of 21
runs) and to 3.3 on a Zen 4. Of SmolLM2-135M Q4_1 a prompt takes 0.25 to 0.6 ms a token; a decode
step 4 ms and 2 more for each row.
"""

_CPU_KEYS = 0.7
"""Products of attention that take as long as one of weights: shorter sums, and exponentials."""


def prefill_chunk(config: EngineConfig, budget: int) -> int:
    """Returns the most prompt tokens of a step that also decodes."""
    if config.max_prefill_chunk_tokens is not None:
        return min(config.max_prefill_chunk_tokens, budget)
    # Beside a full batch of decodes it must still fit the budget.
    return min(512, max(budget - config.max_num_seqs, 1))


def prefill_pace(config: EngineConfig, model: DecoderConfig, platform: str) -> PrefillPace | None:
    """Returns how fast prompts advance beside decodes; None for as many tokens always.

    On CPUs, where a chunk takes much longer than a decode step, unless a number of tokens was asked
    for. Other platforms are not measured.
    """
    if platform != "cpu" or config.deterministic or config.max_prefill_chunk_tokens is not None:
        return None
    queries = model.num_heads * model.head_dim
    heads = 2 * model.num_heads + 2 * model.num_kv_heads
    weights = model.hidden_size * (heads * model.head_dim + 3 * model.intermediate_size)
    # A key takes two products for each element of the queries: one to score, one to weigh.
    keys = _CPU_KEYS * weights / (2 * queries)
    return PrefillPace(_CPU_STEP_TOKENS, _CPU_ROW_TOKENS, keys, model.windows)


def chunk_tokens(config: EngineConfig, budget: int, page_size: int) -> int | None:
    """Returns the tokens of a chunk where prompts are always cut alike; None where they are not.

    Whole pages, as many as a step holds: the fewer chunks, the faster; the smaller ones are, the
    more of a cached prompt is found again.

    Raises:
      ConfigError: a step holds no page.
    """
    if not config.deterministic:
        return None
    name, most = "max_num_batched_tokens", budget
    if config.max_prefill_chunk_tokens is not None:
        name, most = "max_prefill_chunk_tokens", min(budget, config.max_prefill_chunk_tokens)
    if most < page_size:
        raise ConfigError(
            f"{name} ({most}) must be at least page_size ({page_size}) with deterministic: prompts "
            f"are cut into whole pages; raise it or lower page_size"
        )
    return most // page_size * page_size
