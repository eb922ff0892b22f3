"""Logits equal transformers' for every family and variant: whole, in chunks, and token by token."""

import json
from pathlib import Path

import numpy as np
import pytest
from engine.builders import assemble
from models.conftest import PagedModel, load_model, make_context
from models.oracle_cases import CASES, hf_config, token_ids

from jaxinfer.models import load_model_module
from jaxinfer.request import EMBEDDING, EngineRequest

# float32 sums over at most 128 terms of order 1, through 3 layers and a head.
TOLERANCE = 1e-4


def read_oracle(case):
    """The case's `config.json`, its logits, and the last hidden state of its last token."""
    with np.load(Path(__file__).parent / "oracle" / f"{case}.npz") as saved:
        return json.loads(str(saved["config"])), saved["logits"], saved["hidden"]


@pytest.mark.parametrize("case", CASES)
def test_prefill_chunks_and_decode_equal_transformers(case):
    config, expected, _ = read_oracle(case)
    assert config == hf_config(case), "the case changed: run make_oracle.py again"
    ids = token_ids(config)
    model = PagedModel(load_model(config, make_context()), num_seqs=3)
    whole = model.step({0: ids}, num_tokens=48)[0]
    np.testing.assert_allclose(whole, expected, atol=TOLERANCE, rtol=0)

    # Sequence 1 in chunks that cross pages and windows, sequence 2 decoding along with them.
    decoded = [model.step({2: ids[:5]}, num_tokens=48)[2]]
    chunks = []
    for start in range(0, 40, 13):
        position = model.kv_lens[2]
        rows = model.step({1: ids[start : start + 13], 2: ids[position : position + 1]}, 48)
        chunks.append(rows[1])
        decoded.append(rows[2])
    while model.kv_lens[2] < len(ids):
        position = model.kv_lens[2]
        decoded.append(model.step({2: ids[position : position + 1]})[2])
    np.testing.assert_allclose(np.concatenate(chunks), expected, atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(np.concatenate(decoded), expected, atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(np.concatenate(decoded), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", ["llama", "gemma3_text"])
def test_embeddings_are_transformers_last_hidden_states(case):
    """Through the engine, in chunks."""
    config, _, expected = read_oracle(case)
    model = load_model(config, make_context())
    groups = load_model_module(config["model_type"]).kv_groups(model.config)
    engine = assemble(model, groups, exact=True, max_num_seqs=2, max_num_batched_tokens=16)
    engine.add(EngineRequest("r", tuple(token_ids(config)), EMBEDDING, embeds=True))
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    (delta,) = deltas
    np.testing.assert_allclose(delta.hidden, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.oracle
@pytest.mark.filterwarnings("default")  # torch's and transformers' own deprecations
@pytest.mark.parametrize("case", CASES)
def test_committed_values_are_what_transformers_gives(case):
    pytest.importorskip("torch", reason="needs the [oracle] extra")
    pytest.importorskip("transformers", reason="needs the [oracle] extra")
    from models.make_oracle import oracle_outputs

    config, *expected = read_oracle(case)
    for mine, theirs in zip(expected, oracle_outputs(config), strict=True):
        np.testing.assert_allclose(theirs, mine, atol=1e-5, rtol=0)
