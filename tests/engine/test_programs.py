"""What XLA made of the step programs: state updated in place, no cache copied, few temporaries."""

import dataclasses
import functools
import re

import jax
import pytest
from engine.builders import assemble, compiled_runner, tiny_model

SMOLLM2_WIDTH = {
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
}


@functools.cache
def wide_runner():
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 16}
    return assemble(*tiny_model(**SMOLLM2_WIDTH), exact=True, page_size=16, **limits).runner


RUNNERS = {
    "llama": compiled_runner,
    "gemma3_text": functools.partial(compiled_runner, "gemma3_text"),
    "SmolLM2's width": wide_runner,
}


@pytest.fixture(params=RUNNERS)
def runner(request):
    return RUNNERS[request.param]()


def programs(runner):
    return [(name, rung, runner.hlo(name, rung)) for name, rung in runner._executables]


def test_no_program_copies_a_cache(runner):
    config = runner.config
    shape = ",".join(map(str, config.cache.layer(config.num_pages).shape))
    copy = re.compile(rf"= \w+\[{shape}\]\S* copy")
    seen = 0
    for name, rung, hlo in programs(runner):
        assert f"[{shape}]" in hlo, "the cache's shape is not in the program: the test is blind"
        assert not copy.findall(hlo), f"{name}[{rung}] copies a cache array"
        seen += 1
    assert seen == runner.num_programs - 1


def test_temporaries_are_small(runner):
    analysis = runner.memory_analysis()
    assert len(analysis) == runner.num_programs - 1
    for name, num_bytes in analysis.items():
        assert num_bytes < 64 * 2**20, f"{name} needs {num_bytes / 2**20:.0f} MiB"


def test_all_state_is_updated_in_place(runner):
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(runner._state))
    num_leaves = len(jax.tree.leaves(runner._state))
    for (name, rung), executable in runner._executables.items():
        assert executable.memory_analysis().alias_size_in_bytes >= state_bytes, (name, rung)
        header = executable.as_text().splitlines()[0]
        assert header.count("may-alias") + header.count("must-alias") == num_leaves, (name, rung)
    # What came from the host may be the host's own memory, which the first step leaves to it.
    runner.run_empty(*next(iter(runner._executables)))
    before = [leaf.unsafe_buffer_pointer() for leaf in runner._state.kv]
    counts = runner._state.rows.counts.unsafe_buffer_pointer()
    for kind, rung in runner._executables:
        runner.run_empty(kind, rung)
    assert [leaf.unsafe_buffer_pointer() for leaf in runner._state.kv] == before
    assert runner._state.rows.counts.unsafe_buffer_pointer() == counts


def test_no_full_vocabulary_leaves_the_device(runner):
    """A step returns O(rows × top) numbers, whatever the vocabulary is, and a state per row."""
    vocab_size = runner.vocab_size
    for (name, rung), executable in runner._executables.items():
        output = executable.out_info[0]
        if output.hidden is not None:
            assert output.hidden.shape[0] == runner.config.max_num_seqs
            output = dataclasses.replace(output, hidden=None)
        for leaf in jax.tree.leaves(output):
            assert vocab_size not in leaf.shape, (name, rung)
        rows = max(rung * (5 if name == "decode_k" else 1), 8)
        assert sum(leaf.size for leaf in jax.tree.leaves(output)) <= rows * (2 * 20 + 4)
