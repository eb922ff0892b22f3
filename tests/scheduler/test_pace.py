"""A step with part of a prompt takes only so much longer than its decodes alone."""

from types import SimpleNamespace

import pytest
from scheduler.builders import PretendDevice, make_scheduler, make_sequence

from jaxinfer.chunk_sizes import prefill_chunk, prefill_pace
from jaxinfer.config import EngineConfig
from jaxinfer.scheduler.pace import LEAST_TOKENS, PrefillPace
from jaxinfer.scheduler.sequence import SequenceStatus

PACE = PrefillPace(tokens=20, tokens_per_decode=10, keys=100, windows=(None, 50))


def test_later_tokens_take_longer_up_to_the_window():
    assert PACE.of_token(0) == 1
    assert PACE.of_token(40) == pytest.approx(1 + 40 / 100)
    assert PACE.of_token(150) == pytest.approx(1 + (150 + 50) / 2 / 100)


def test_more_decodes_leave_more_time():
    assert PACE.of_step(1) == 30
    assert PACE.of_step(4) == 60


def computed(prompt):
    is_over = prompt.status is SequenceStatus.FINISHED
    return prompt.prompt_len if is_over else prompt.num_computed


def chunks(pace, num_streams, prompt_len, more=0):
    """Tokens of each prompt in each step until the first has been computed beside streams."""
    scheduler = make_scheduler(
        max_num_batched_tokens=256,
        max_prefill_chunk_tokens=128,
        max_num_seqs=num_streams + 1 + more,
        num_pages=400,
        prefill_pace=pace,
    )
    device = PretendDevice(scheduler)
    for index in range(num_streams):
        scheduler.add(make_sequence(f"s{index}", prompt_len=1, max_tokens=120))
    device.step()
    prompts = [make_sequence(f"p{i}", prompt_len=prompt_len, max_tokens=1) for i in range(1 + more)]
    for prompt in prompts:
        scheduler.add(prompt)
    found = []
    while prompts[0].status is not SequenceStatus.FINISHED:
        before = [computed(prompt) for prompt in prompts]
        device.step()
        after = [computed(prompt) for prompt in prompts]
        found.append([b - a for a, b in zip(before, after, strict=True)])
    return found


def test_chunks_shrink_as_a_prompt_grows():
    sizes = [size for (size,) in chunks(PACE, 4, 400)]
    assert sizes[0] == 60
    assert sizes[:-1] == sorted(sizes[:-1], reverse=True)
    position = 0
    for size in sizes:
        assert size <= max(LEAST_TOKENS, PACE.of_step(4) / PACE.of_token(position))
        position += size
    assert position >= 400


def test_every_step_advances_the_first_prompt():
    slow = PrefillPace(tokens=1, tokens_per_decode=0, keys=10, windows=(None,))
    assert chunks(slow, 2, 5 * LEAST_TOKENS) == [[LEAST_TOKENS]] * 5


def test_prompts_share_the_time_of_a_step():
    first, second = chunks(PACE, 4, 40, more=1)[0]
    assert (first, second) == (40, 20)


def test_alone_a_prompt_takes_the_whole_budget():
    assert chunks(PACE, 0, 600)[0] == [256]


def test_cpus_have_a_pace_unless_a_number_was_asked_for():
    model = SimpleNamespace(
        hidden_size=576,
        intermediate_size=1536,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        windows=(None,) * 30,
    )
    pace = prefill_pace(EngineConfig(), model, "cpu")
    assert 1_500 < pace.keys < 3_000
    assert prefill_pace(EngineConfig(), model, "tpu") is None
    asked = EngineConfig(max_prefill_chunk_tokens=64)
    assert prefill_pace(asked, model, "cpu") is None
    assert prefill_chunk(asked, 256) == 64
    assert prefill_chunk(EngineConfig(max_num_seqs=32), 256) == 224
