"""How many decode steps go into one dispatch, and at which multiples prompts may be cut."""

import pytest

from jaxinfer.chunk_sizes import chunk_tokens
from jaxinfer.config import ConfigError, EngineConfig
from jaxinfer.pool_size import decode_steps


@pytest.mark.parametrize(
    ("platform", "megabytes", "options", "expected"),
    [
        ("cpu", 97, {}, (4, 2)),
        ("cpu", 280, {}, (2, 2)),
        ("cpu", 700, {}, (1, 2)),
        ("gpu", 97, {}, (1, 2)),
        ("cpu", 97, {"max_decode_steps_before_prefill": 3}, (3, 2)),
        ("cpu", 97, {"max_decode_steps_before_prefill": 0}, (1, 2)),
        ("cpu", 97, {"decode_steps": 1}, (1, 32)),
        ("tpu", 9000, {"decode_steps": 8}, (8, 32)),
        ("cpu", 97, {"deterministic": True}, (1, 32)),
    ],
)
def test_small_models_decode_several_steps_at_once_on_cpus(platform, megabytes, options, expected):
    config = EngineConfig(max_num_seqs=32, **options)
    assert decode_steps(config, platform, megabytes * 10**6) == expected


def test_deterministic_chunks_are_whole_pages_within_a_step():
    def chunk(budget, page_size, **options):
        return chunk_tokens(EngineConfig(deterministic=True, **options), budget, page_size)

    assert chunk(256, 16) == 256
    assert chunk(100, 16) == 96
    assert chunk(256, 16, max_prefill_chunk_tokens=40) == 32
    assert chunk(16, 16) == 16
    assert chunk_tokens(EngineConfig(max_prefill_chunk_tokens=40), 256, 16) is None
    for budget, options, name in (
        (15, {}, "max_num_batched_tokens"),
        (256, {"max_prefill_chunk_tokens": 15}, "max_prefill_chunk_tokens"),
    ):
        with pytest.raises(ConfigError, match=rf"{name} \(15\) must be at least page_size \(16\)"):
            chunk(budget, 16, **options)
