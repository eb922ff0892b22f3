"""Start-up: what is decided where nothing is said, and how a model is loaded."""

import json
import os
from dataclasses import replace

import jax
import numpy as np
import pytest
from command import run
from tiny_engine import CONTEXT, MAX_NUM_SEQS, VOCAB_SIZE, shared, tiny_model

from jaxinfer import model_loading, platforms, pool_size, startup, startup_log
from jaxinfer.checkpoint.checkpoint import TensorInfo
from jaxinfer.config import ConfigError, EngineConfig
from jaxinfer.quantized_array import abstract_array
from jaxinfer.runner import kv_cache
from jaxinfer.runner.compile_watch import CompileWatch
from jaxinfer.startup import assemble_engine
from jaxinfer.testing import byte_tokenizer
from kernels import native, paged_attention


class TestPoolSize:
    def test_the_cpu_pool_does_not_follow_every_byte_of_free_memory(self, monkeypatch):
        sizes = set()
        for free in (1_500_000_000, 1_700_000_000, 2_000_000_000):
            monkeypatch.setattr(kv_cache, "available_memory", lambda free=free: free)
            sizes.add(kv_cache.cpu_pool_bytes())
        assert sizes == {2**28}
        monkeypatch.setattr(kv_cache, "available_memory", lambda: 2**40)
        assert kv_cache.cpu_pool_bytes() == kv_cache.CPU_POOL_BYTES
        monkeypatch.setattr(kv_cache, "available_memory", lambda: 0)
        assert kv_cache.cpu_pool_bytes() <= 1

    def test_memory_is_told_where_free_pages_are_not(self, monkeypatch):
        monkeypatch.setattr(kv_cache, "_has_proc", lambda: False)
        monkeypatch.setattr(kv_cache, "_number", lambda path: None)
        names = {k: v for k, v in os.sysconf_names.items() if k != "SC_AVPHYS_PAGES"}
        monkeypatch.setattr(os, "sysconf_names", names)
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        assert total // 2 - 10**6 <= kv_cache.available_memory() <= total // 2

    def test_a_control_groups_limit_counts(self, monkeypatch):
        values = {"memory.max": 1000, "memory.current": 400}
        monkeypatch.setattr(kv_cache, "_number", lambda path: values[path.name])
        assert kv_cache.available_memory() == 600

    @pytest.fixture
    def runner(self):
        return shared().engine.runner.config

    def test_a_pool_that_is_too_small(self, runner):
        model, _ = tiny_model()
        small = EngineConfig(num_pages=4, max_model_len=CONTEXT)
        with pytest.raises(ConfigError, match=f"max_model_len is {CONTEXT} .* holds 16"):
            pool_size.with_pool(small, runner, model, CompileWatch())
        lowered = pool_size.with_pool(EngineConfig(num_pages=4), runner, model, CompileWatch())
        assert (lowered.max_model_len, lowered.num_pages) == (16, 5)

    def test_weights_that_come_later_are_left_room(self, runner, monkeypatch):
        model, _ = tiny_model()
        config = EngineConfig(max_num_seqs=10**6)
        monkeypatch.setattr(pool_size, "available_memory", lambda: 10**6)
        monkeypatch.setattr(pool_size, "_pools", set())
        filled = pool_size.with_pool(config, runner, model, CompileWatch())
        assert (filled.num_pages - 1) * runner.cache.page_bytes <= 10**6 // 4
        monkeypatch.setattr(pool_size, "bytes_to_load", lambda _: 600_000)
        abstract = pool_size.with_pool(config, runner, model, CompileWatch())
        assert filled.num_pages - 1 == 2 * (abstract.num_pages - 1)

    def test_the_widest_program_alone_is_asked_for_its_temporaries(self, runner):
        model, _ = tiny_model()
        watch = CompileWatch()
        assert pool_size.temporary_bytes(runner, model, watch) > 0
        # It and the row reset.
        assert watch.num_compiles <= 2

    def test_on_an_accelerator_temporaries_are_left_room(self):
        grain = pool_size.GRAIN
        stats = {"bytes_limit": 10 * grain, "bytes_in_use": grain}
        assert pool_size.bytes_left(stats, 0.5, 0) == 4 * grain
        # A few bytes more or less in use change nothing.
        assert pool_size.bytes_left(stats, 0.5, 1) == 3 * grain
        assert pool_size.bytes_left(stats, 0.5, grain) == 3 * grain
        assert pool_size.bytes_left(stats, 0.5, 9 * grain) == 0


def test_a_context_beyond_the_model_is_refused_naming_both():
    model, groups = tiny_model()
    config = EngineConfig(max_model_len=CONTEXT + 1)
    with pytest.raises(ConfigError, match=f"{CONTEXT + 1}, but the model was made for {CONTEXT}"):
        assemble_engine(config, model, groups, byte_tokenizer(), frozenset())


def test_implementations_by_name():
    table = paged_attention.IMPLEMENTATIONS
    model_loading._check_implementation("attention", "reference", table, "cpu")
    with pytest.raises(ConfigError, match="'flash' is not available on cpu; choose one of cpu"):
        model_loading._check_implementation("attention", "flash", table, "cpu")
    with pytest.raises(ConfigError, match="'metal'"):
        model_loading._check_implementation("attention", None, table, "metal")


def test_quantization_is_slower_only_without_the_native_kernel(caplog, monkeypatch):
    mesh = model_loading.make_mesh(1)
    config = EngineConfig(quant="INT8")
    for reason in (None, "the library is not built"):
        monkeypatch.setattr(platforms.native_matmul, "unavailable", lambda reason=reason: reason)
        assert model_loading._with_quant(config, {}, mesh, 10**9).quant == "int8"
        assert ("slower" in caplog.text) == (reason is not None)
    with pytest.raises(ConfigError, match="does not tell its memory"):
        model_loading._with_quant(EngineConfig(quant="auto"), {}, mesh, None)


def test_the_tiny_engine_has_the_ladder_it_logs(caplog):
    caplog.set_level("INFO", "jaxinfer")
    engine = shared().engine
    for has_cache in (True, False):
        startup_log.log_setup(
            engine.runner,
            engine.scheduler.limits,
            tiny_model()[0],
            engine.runner.watch,
            has_cache,
        )
        assert f"; prefix cache {'on' if has_cache else 'off'}; context" in caplog.text
    assert "ladder: decode (2, 4), tokens (32,); 5 programs" in caplog.text
    assert f"KV pool: {MAX_NUM_SEQS * CONTEXT} tokens" in caplog.text
    assert "paged_attention: " in caplog.text


def test_pages_are_salted_by_what_changes_them():
    engine, model = shared().engine, tiny_model()[0]
    cache = engine.runner.config.cache
    salt = startup._cache_salt(EngineConfig(), model, cache)
    assert salt == startup._cache_salt(EngineConfig(max_num_seqs=2), model, cache)
    others = [
        startup._cache_salt(EngineConfig(**setting), model, cache)
        for setting in ({"model": "m"}, {"revision": "r"}, {"quant": "int8"})
    ]
    others.append(startup._cache_salt(EngineConfig(), model, replace(cache, page_size=8)))
    others.append(startup._cache_salt(EngineConfig(), tiny_model("qwen3")[0], cache))
    assert len({salt, *others}) == 6


@pytest.mark.slow
@pytest.mark.real_model
class TestOnTheRealModel:
    def bench(self, path, cache, *flags):
        lengths = ("--concurrency", "1,2", "--prompt-len", "4", "--gen-len", "3")
        return run(
            *("-m", "jaxinfer", "bench", "--model", str(path), *lengths, "--prefill-len", "6"),
            *flags,
            XLA_FLAGS="",
            JAX_COMPILATION_CACHE_DIR=str(cache),
        )

    def test_bench_prints_one_json_line_and_uses_the_cache(self, smollm2_path, tmp_path):
        result = self.bench(smollm2_path, tmp_path, "--json")
        assert result.returncode == 0, result.stderr
        [line] = result.stdout.splitlines()
        report = json.loads(line)
        assert set(report["gen"]) == {"1", "2"}
        assert all(speed > 0 for speed in (*report["gen"].values(), report["prefill"]))
        assert report["ttft_ms"] > 0
        # Nothing was in the cache: compiling counts. Half of it are Python and jax.
        assert 100 < report["rss_mb"] < 600
        assert report["compiles_after_warmup"] == 0
        assert report["versions"]["jax"] == jax.__version__
        compiled = {path.name for path in tmp_path.iterdir()}
        assert compiled
        # The second start compiles nothing, and without --json says more.
        result = self.bench(smollm2_path, tmp_path)
        assert json.loads(result.stdout.splitlines()[-1])["compiles_after_warmup"] == 0
        assert result.stdout.startswith("gen[1]")
        assert {path.name for path in tmp_path.iterdir()} == compiled

    def test_a_model_without_a_template_says_so_and_serves(self, gemma3_path, caplog, monkeypatch):
        """gemma-3-270m is a base model."""
        prepared = model_loading.PreparedModel(*tiny_model())
        monkeypatch.setattr(startup, "prepare_model", lambda *_: prepared)
        monkeypatch.setattr(startup, "assemble_engine", lambda *_: shared().engine)
        monkeypatch.setattr(startup, "set_compilation_cache", lambda directory: None)
        loaded = startup.load_engine(EngineConfig(model=str(gemma3_path)))
        assert loaded.model_name == "gemma-3-270m-Q4_K_M"
        assert "chats will be refused: the model has no chat template: pass --chat-" in caplog.text
        assert loaded.tokenizer.vocab_size > VOCAB_SIZE


def test_without_the_native_kernel_quantized_weights_become_float32(monkeypatch, caplog):
    codes = abstract_array((1000, 512), "uint4", 32, np.dtype(np.float16), has_offset=True)
    name = "model.layers.0.mlp.up_proj.weight"
    infos = {name: TensorInfo(name, (1000, 512), "Q4_1", 1, codes)}
    mesh, config = model_loading.make_mesh(1), EngineConfig()

    def context():
        where = model_loading._platform(config, infos, mesh, 10**9)
        return model_loading._context(config, mesh, where, infos)

    kept = context()
    reason = "the C++ library is not built"
    monkeypatch.setattr(platforms.native_matmul, "unavailable", lambda: reason)
    floats = context()
    assert (kept.keeps_quantized, floats.keeps_quantized) == (native.LIBRARY.is_file(), False)
    assert floats.weight_dtype == "float32"
    assert f"{reason}: the quantized weights become float32, which costs 2 MB more" in caplog.text
