"""Every setting is in the start-up log and in /metrics, with the value in effect."""

import os
import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tiny_engine import CONTEXT, TEMPLATE, tiny_model

from jaxinfer import cpu, startup
from jaxinfer.async_engine import AsyncEngine
from jaxinfer.config import EngineConfig, ServerConfig
from jaxinfer.constraints import GrammarCompiler
from jaxinfer.effective_settings import one_line, shown
from jaxinfer.model_loading import PreparedModel
from jaxinfer.runner.model_runner import ModelRunner
from jaxinfer.server.metrics import Metrics
from jaxinfer.server.served_model import Models, ServedModel
from jaxinfer.testing import byte_tokenizer

# Where nothing is asked for. What a page takes: 2 layers, K and V, 2 heads of 16 float32.
PAGE_BYTES = 16 * 2 * 2 * 2 * 16 * 4
DECIDED = {
    "model": "tiny",
    "model_type": "llama",
    "dtype": "float32",
    "quant": "none",
    "quant_group_size": "none",
    "max_model_len": str(CONTEXT),
    "max_num_seqs": "32",
    "max_num_batched_tokens": "256",
    "max_prefill_chunk_tokens": "224",
    "decode_steps": "4",
    "max_queued_requests": "512",
    "page_size": "16",
    "num_pages": str(32 * CONTEXT // 16),
    "kv_cache_memory": str(32 * CONTEXT // 16 * PAGE_BYTES),
    "num_draft_tokens": "0",
    "tensor_parallel": "1",
    "num_threads": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0),
    "pipeline_depth": "1",
    "prefix_cache": "true",
    "speculation": "off",
    "deterministic": "false",
}
ASKED = {
    "model_type": "llama",
    "dtype": "float32",
    "kv_cache_dtype": "float32",
    "exact": True,
    "max_model_len": 64,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 24,
    "max_prefill_chunk_tokens": 8,
    "max_decode_steps_before_prefill": 4,
    "decode_steps": 2,
    "max_queued_requests": 5,
    "page_size": 8,
    "num_pages": 20,
    "prefix_cache": False,
    "speculation": "ngram",
    "num_draft_tokens": 6,
    "gpu_memory_utilization": 0.5,
    "num_threads": 2,
    "pipeline_depth": 0,
    "step_timeout": 7.5,
}


@pytest.fixture
def load(monkeypatch):
    """Returns `load_engine` for a tiny model that is there already."""
    checkpoint = SimpleNamespace(
        model_type="llama",
        generation_config={},
        hf_config={},
        # What the protocol has besides; nobody asks.
        **dict.fromkeys(("path", "tensor_infos", "tokenizer_source")),
        tensors=iter,
    )
    found = (Path("/somewhere/tiny"), checkpoint, byte_tokenizer(TEMPLATE))
    monkeypatch.setattr(startup, "open_model", lambda config: found)
    monkeypatch.setattr(startup, "prepare_model", lambda *_: PreparedModel(*tiny_model()))
    monkeypatch.setattr(startup, "set_compilation_cache", lambda directory: None)
    monkeypatch.setattr(ModelRunner, "compile", lambda *_, **__: None)  # nothing runs
    monkeypatch.setenv("PJRT_NPROC", "")  # restored afterwards
    monkeypatch.delenv("PJRT_NPROC")
    return lambda **asked: startup.load_engine(EngineConfig(**asked), progress=False)


def logged(text):
    """The settings in a start-up log."""
    [line] = re.findall(r" settings: (.*)", text)
    return dict(pair.split("=", 1) for pair in line.split(", "))


def scraped(loaded, config):
    """The settings in /metrics of a server around an engine."""
    engine = AsyncEngine.from_loaded(loaded)
    try:
        text = Metrics(Models([ServedModel(engine)]), shown(config)).render().decode()
    finally:
        engine.close()
    [family] = [
        family
        for family in text_string_to_metric_families(text)
        if family.name == "jaxinfer_config_info"
    ]
    [sample] = family.samples
    assert sample.value == 1
    assert sample.labels.pop("model_name") == loaded.model_name
    return sample.labels


@pytest.mark.parametrize("asked", [{}, ASKED], ids=["nothing asked for", "all asked for"])
def test_log_and_metrics_show_what_is_in_effect(load, caplog, asked):
    caplog.set_level("INFO", "jaxinfer")
    loaded = load(**asked)
    settings = logged(caplog.text)
    assert set(settings) == {item.name for item in fields(EngineConfig)}
    expected = {name: str(value).removesuffix(".0").lower() for name, value in asked.items()}
    expected |= {} if asked else DECIDED
    assert {name: settings[name] for name in expected} == expected
    server = ServerConfig(request_timeout=9.5, default_max_tokens=77)
    labels = scraped(loaded, server)
    assert labels == {**settings, **shown(server)}
    assert (labels["request_timeout"], labels["default_max_tokens"]) == ("9.5", "77")
    assert {item.name for item in fields(ServerConfig)} - set(labels) == {"api_key"}


def test_what_is_in_effect_is_what_the_engine_runs_with(load, caplog):
    caplog.set_level("INFO", "jaxinfer")
    engine = load(**ASKED).engine
    limits, runner = engine.scheduler.limits, engine.runner.config
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (3, 24)
    assert (limits.max_prefill_chunk_tokens, limits.max_decode_steps_before_prefill) == (8, 4)
    assert (limits.bulk_steps(1), limits.pipeline_depth, limits.num_draft_tokens) == (2, 0, 6)
    assert (runner.cache.page_size, runner.num_pages - 1, runner.max_model_len) == (8, 20, 64)
    assert engine.scheduler.cache is None
    assert engine.max_queued_requests == 5 + 3, "those that run are beside the queue"
    assert cpu.num_threads() == 2


def test_values_that_exclude_each_other_show_the_one_in_effect(load):
    settings = load(
        deterministic=True, max_prefill_chunk_tokens=40, max_num_seqs=2, max_model_len=64
    ).settings
    # Whole pages of 16.
    assert (settings["max_prefill_chunk_tokens"], settings["decode_steps"]) == ("32", "1")
    settings = load(decode_steps=8, max_decode_steps_before_prefill=4, max_num_seqs=2).settings
    # Of two dispatches, one of which is in flight when a request comes.
    assert settings["decode_steps"] == "2"


def test_no_secret_and_no_path_is_shown():
    config = ServerConfig(api_key=("hush",), served_model_name=("a", "b"))
    text = one_line(shown(config))
    assert "hush" not in text
    assert "served_model_name=a+b" in text
    engine = shown(EngineConfig(tokenizer_path="/home/me/tok", chat_template="/home/me/c.jinja"))
    assert (engine["tokenizer_path"], engine["chat_template"]) == ("tok", "c.jinja")
    with pytest.raises(KeyError, match="EngineConfig has no setting max_sequences"):
        shown(EngineConfig(), {"max_sequences": 3})


def test_grammars_are_made_ready_if_asked_for(load, monkeypatch):
    prepared = []
    monkeypatch.setattr(GrammarCompiler, "prepare", lambda self: prepared.append(self))
    load()
    assert not prepared
    load(prepare_grammars=True)
    assert len(prepared) == 1
