"""Many steps take no more memory than the first ones."""

import itertools
import subprocess
import sys

import pytest

# In a process of its own: what other tests have left in theirs comes and goes.
SOAK = """
import sys
from jaxinfer import LLM, SamplingParams

def resident_bytes():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096

params = SamplingParams(temperature=0.8, seed=1, max_tokens=250, ignore_eos=True)
with LLM(sys.argv[1], max_num_seqs=2, max_model_len=512) as llm:
    prompts = [[1, 2, 3 + i] for i in range(2)]

    def steps(count):
        for _ in range(count // params.max_tokens):
            llm.generate(prompts, params, progress=False)

    sizes = []
    for _ in range(4):
        steps(500)
        sizes.append(resident_bytes())
    print(*sizes)
"""


@pytest.mark.slow
@pytest.mark.real_model
def test_two_thousand_steps_leave_memory_flat(smollm2_path):
    command = [sys.executable, "-c", SOAK, str(smollm2_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    sizes = [int(word) for word in result.stdout.splitlines()[-1].split()]
    # What leaks does so in all of the 500 steps; the allocator takes a few MB more now and then.
    growths = [after - before for before, after in itertools.pairwise(sizes)]
    assert min(growths) < 125_000, growths
