"""How many decode steps go into one dispatch."""

import pytest

from jaxinfer.config import EngineConfig
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
    ],
)
def test_small_models_decode_several_steps_at_once_on_cpus(platform, megabytes, options, expected):
    config = EngineConfig(max_num_seqs=32, **options)
    assert decode_steps(config, platform, megabytes * 10**6) == expected
