"""Thousands of steps take no more memory than the first ones."""

import pytest

from jaxinfer import LLM, SamplingParams


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.slow
@pytest.mark.real_model
def test_two_thousand_steps_leave_memory_flat(smollm2_path):
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=250, ignore_eos=True)
    with LLM(str(smollm2_path), max_num_seqs=2, max_model_len=512) as llm:
        prompts = [[1, 2, 3 + i] for i in range(2)]

        def steps(count: int) -> None:
            for _ in range(count // params.max_tokens):
                llm.generate(prompts, params, progress=False)

        steps(1000)
        before = resident_bytes()
        steps(2000)
        assert resident_bytes() - before < 4e6
