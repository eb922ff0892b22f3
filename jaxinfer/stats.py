"""What an engine counts.

A leaf: imports nothing of ours and no jax.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts since the engine started, and what it holds now.

    Attributes:
      prompt_tokens: of each completion whose prompt is done, those found in the prefix cache too.
    """

    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int
    num_preemptions: int
    prompt_tokens: int
    generation_tokens: int
    num_compilations_after_warmup: int
    steps: int
    finished: dict[str, int]
    failed_steps: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
