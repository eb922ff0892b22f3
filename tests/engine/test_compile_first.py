"""On a CPU programs are compiled before there are weights: what is loaded must be what was said."""

import dataclasses

import jax
import numpy as np
import pytest
from checkpoint.builders import tiny_gguf
from engine.builders import EOS, PAGE_SIZE

from jaxinfer.checkpoint import open_checkpoint
from jaxinfer.config import EngineConfig
from jaxinfer.model_loading import load_model, prepare_model
from jaxinfer.request import EngineRequest
from jaxinfer.runner.compile_watch import CompileWatch
from jaxinfer.runner.loader import bytes_to_load
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.startup import _make_runner, assemble_engine
from jaxinfer.testing import byte_tokenizer

CONFIG = EngineConfig(
    exact=True, max_num_seqs=2, max_num_batched_tokens=16, page_size=PAGE_SIZE, num_pages=80
)


@pytest.fixture
def checkpoint(tmp_path):
    """A llama whose q, k and v are quantized."""
    rng = np.random.default_rng(0)
    builder = tiny_gguf()
    for name, rows in {"q": 64, "k": 32, "v": 32}.items():
        codes = rng.integers(-128, 128, (rows, 2, 32)).astype(np.int8)
        scales = np.full((rows, 2, 1), 0.01, np.float16)
        blocks = np.concatenate([scales.view(np.uint8), codes.view(np.uint8)], axis=-1)
        builder.raw_tensor(f"blk.1.attn_{name}.weight", (64, rows), 8, blocks.tobytes())
    return open_checkpoint(builder.write(tmp_path / "tiny.gguf"))


def tokens(engine):
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    engine.add(EngineRequest("r", tuple(range(5, 25)), params))
    found = []
    while engine.has_work:
        found += [token for delta in engine.step() for token in delta.token_ids]
    return found


def assemble(model, groups, fill=None):
    return assemble_engine(CONFIG, model, groups, byte_tokenizer(), frozenset({EOS}), fill=fill)


def test_programs_are_compiled_before_weights_are_loaded(checkpoint):
    prepared = prepare_model(CONFIG, checkpoint, progress=False)
    assert bytes_to_load(prepared.model) > 0
    events = []
    on_event = lambda event, _, **__: events.append(event)
    jax.monitoring.register_event_duration_secs_listener(on_event)

    def fill():
        assert any("backend_compile" in event for event in events)
        events.clear()
        prepared.fill()

    engine = assemble(prepared.model, prepared.groups, fill)
    # Only the zeros of a fresh KV pool are a program of their own.
    assert sum("backend_compile" in event for event in events) <= 1
    events.clear()
    found = tokens(engine)
    assert events == []
    assert len(found) == 8
    assert engine.stats().num_compilations_after_warmup == 0
    assert found == tokens(assemble(*load_model(CONFIG, checkpoint, progress=False)))


@pytest.mark.parametrize("change", ["dtype", "group_size", "static"])
def test_weights_that_are_not_what_was_said_are_an_error_of_ours(checkpoint, change):
    name = "model.layers.1.self_attn.v_proj.weight"
    info = checkpoint.tensor_infos[name]
    codes = {
        "dtype": {"scale": info.codes.scale.astype(np.float32)},
        "group_size": {"scale": np.zeros((32, 4), np.float16), "group_size": 16},
        "static": {"activations": "int8"},
    }[change]
    said = dataclasses.replace(info, codes=dataclasses.replace(info.codes, **codes))
    if change == "static":
        # Of all three, so that they stay one matrix.
        for other in ("q", "k"):
            key = name.replace("v_proj", f"{other}_proj")
            its = checkpoint.tensor_infos[key]
            its_codes = dataclasses.replace(its.codes, **codes)
            checkpoint.tensor_infos[key] = dataclasses.replace(its, codes=its_codes)
    checkpoint.tensor_infos[name] = said
    prepared = prepare_model(CONFIG, checkpoint, progress=False)
    model, num_groups = prepared.model, len(prepared.groups)
    runner = _make_runner(CONFIG, model, num_groups, model.config.vocab_size, CompileWatch())
    prepared.fill()
    with pytest.raises(RuntimeError, match=r"(?s)loaded as .* programs were compiled for .*report"):
        runner.take_weights(model)


def test_weights_whose_format_only_their_data_tells_come_first(checkpoint):
    name = "model.layers.1.self_attn.v_proj.weight"
    info = dataclasses.replace(checkpoint.tensor_infos[name], is_certain=False)
    checkpoint.tensor_infos[name] = info
    prepared = prepare_model(CONFIG, checkpoint, progress=False)
    assert prepared.fill is None
    assert bytes_to_load(prepared.model) == 0
