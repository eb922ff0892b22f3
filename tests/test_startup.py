"""Start-up: what is refused, how fast and in what words; what is decided where nothing is said."""

import gc
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from checkpoint.builders import STRING, tiny_gguf
from tiny_engine import CONTEXT, MAX_NUM_SEQS, VOCAB_SIZE, shared, tiny_model

import jaxinfer
from jaxinfer import (
    _kernels_package,
    async_engine,
    cli,
    model_loading,
    platforms,
    pool_size,
    startup,
)
from jaxinfer._kernels_package import check_kernels_package
from jaxinfer.async_engine import AsyncEngine
from jaxinfer.checkpoint.checkpoint import TensorInfo
from jaxinfer.collection import paused_collection
from jaxinfer.config import ConfigError, EngineConfig
from jaxinfer.quantized_array import abstract_array
from jaxinfer.runner import kv_cache
from jaxinfer.runner.compile_watch import CompileWatch
from jaxinfer.startup import assemble_engine
from jaxinfer.testing import byte_tokenizer
from kernels import native, paged_attention

ROOT = Path(__file__).parents[1]
FAST_S = 10
"""Importing jax takes one or two seconds of it; nothing of a model may be loaded first."""


def run(*arguments, **environment):
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def refusal(*flags, **environment):
    """Starts `serve.py`, which must refuse quickly and in one sentence; returns it."""
    began = time.monotonic()
    result = run("serve.py", "--port", "0", *flags, **environment)
    assert time.monotonic() - began < FAST_S
    assert result.returncode in (1, 2), result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    shown = ("INFO jaxinfer: listening", "Loading weights: ")
    lines = [
        line for line in result.stderr.splitlines() if line and not any(map(line.count, shown))
    ]
    [sentence] = lines
    assert sentence.startswith("jaxinfer serve: ")
    return sentence


@pytest.fixture
def directory(tmp_path):
    """A directory whose index names two shards, of which one is there."""
    path = tmp_path / "sharded"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 8}))
    weight_map = {"model.a.weight": "model-1.safetensors", "model.b.weight": "model-2.safetensors"}
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (path / "model.safetensors.index.json").write_text(index)
    (path / "model-1.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return path


class TestRefusalsOfServe:
    pytestmark = pytest.mark.slow

    def test_a_file_that_was_cut(self, tmp_path):
        whole = tiny_gguf().build()
        path = tmp_path / "cut.gguf"
        path.write_bytes(whole[: len(whole) // 2])
        assert "cut.gguf" in refusal("--model", str(path))

    def test_a_shard_that_is_absent(self, directory):
        assert "model-2.safetensors" in refusal("--model", str(directory))

    def test_an_architecture_nobody_knows(self, tmp_path):
        builder = tiny_gguf().put("general.architecture", STRING, "mamba")
        sentence = refusal("--model", str(builder.write(tmp_path / "m.gguf")))
        assert "mamba" in sentence
        assert "llama" in sentence

    def test_a_model_that_is_nowhere(self):
        assert "nosuch" in refusal("--model", "nosuch")
        assert "no/such" in refusal("--model", "no/such")

    def test_pickles(self, tmp_path):
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        (tmp_path / "pytorch_model.bin").write_bytes(b"")
        assert "pickled weights" in refusal("--model", str(tmp_path))

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (["--attention", "flash"], ["'flash'", "xla", "reference"]),
            (["--matmul", "cutlass"], ["'cutlass'", "xla"]),
            (["--quant", "int3"], ["'int3'", "int8", "int4"]),
            (["--max-model-len", "99999"], ["99999", "8192"]),
            (["--tensor-parallel", "3"], ["3", "1 cpu"]),
            (["--model-type", "qwen3"], ["'qwen3'", "'llama'"]),
            (["--kv-cache-memory", "1MiB", "--max-model-len", "2048"], ["2048", "kv_cache_memory"]),
            (["--num-pages", "8", "--max-model-len", "512"], ["512", "128"]),
            (["--chat-template", "nosuch"], ["nosuch"]),
            (["--tokenizer-path", "/no/such"], ["/no/such"]),
        ],
    )
    @pytest.mark.real_model
    def test_flags_that_do_not_fit_the_model(self, smollm2_path, flags, words):
        sentence = refusal("--model", str(smollm2_path), *flags, XLA_FLAGS="")
        for word in words:
            assert word in sentence

    @pytest.mark.real_model
    def test_nine_heads_on_two_devices(self, smollm2_path):
        two = "--xla_force_host_platform_device_count=2"
        flags = ("--model", str(smollm2_path), "--tensor-parallel", "2")
        sentence = refusal(*flags, XLA_FLAGS=two)
        assert re.search(r"\b9\b", sentence)
        assert re.search(r"\b2\b", sentence)

    def test_a_port_in_use(self):
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            sock.listen()
            port = sock.getsockname()[1]
            result = run("serve.py", "--port", str(port))
        assert result.returncode == 2
        assert f"{port}: the port is in use" in result.stderr
        assert len(result.stderr.splitlines()) == 1

    def test_bench_refuses_as_serve_does(self):
        result = run("-m", "jaxinfer", "bench", "--model", "nosuch", "--json")
        assert (result.returncode, result.stdout) == (1, "")
        assert result.stderr.startswith("jaxinfer bench: ")
        assert "nosuch" in result.stderr
        assert "Traceback" not in result.stderr


class TestKernelsPackage:
    def test_ours_is_accepted(self):
        check_kernels_package()

    @pytest.fixture
    def site(self, tmp_path, monkeypatch):
        """A folder from which `kernels` comes, as far as anyone can tell."""
        package = tmp_path / "site" / "kernels"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        spec = SimpleNamespace(origin=str(package / "__init__.py"))
        fake = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: spec))
        monkeypatch.setattr(_kernels_package, "importlib", fake)
        return package

    def test_a_foreign_package_is_refused(self, site):
        with pytest.raises(ImportError, match="pip uninstall kernels") as caught:
            check_kernels_package()
        assert str(site) in str(caught.value)

    def test_files_of_both_are_refused(self, site):
        (site / "dispatch.py").touch()
        check_kernels_package()
        (site.parent / "kernels-0.9.0.dist-info").mkdir()
        with pytest.raises(ImportError, match="another distribution named `kernels`"):
            check_kernels_package()

    def test_the_command_says_it_in_one_sentence(self, site, capsys):
        assert cli.main(["serve"]) == 1
        error = capsys.readouterr().err
        assert error.startswith("jaxinfer: another distribution")
        assert error.count("\n") == 1

    def test_the_library_checks_before_it_imports(self, site, monkeypatch):
        monkeypatch.delitem(vars(jaxinfer), "LLM", raising=False)
        with pytest.raises(ImportError, match="another distribution"):
            jaxinfer.LLM  # noqa: B018
        assert jaxinfer.SamplingParams

    def test_a_missing_one(self, monkeypatch):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ImportError, match="missing"):
            check_kernels_package()


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
        startup._log_setup(
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


def test_the_package_is_found_where_it_is_copied(tmp_path):
    """Both packages side by side, as a wheel installs them."""
    for name in ("jaxinfer", "kernels"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    code = "from jaxinfer._kernels_package import check_kernels_package as c; c()"
    assert run("-c", code, PYTHONPATH=str(tmp_path)).returncode == 0
    (tmp_path / "kernels-1.0.dist-info").mkdir()
    result = subprocess.run(
        [sys.executable, "-m", "jaxinfer", "doctor"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stdout) == (1, "")
    assert "pip uninstall kernels" in result.stderr


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


@pytest.mark.parametrize("was_enabled", [True, False])
def test_nothing_is_collected_while_loading_and_then_what_was_before(was_enabled):
    before = gc.isenabled()
    try:
        (gc.enable if was_enabled else gc.disable)()
        assert paused_collection()(gc.isenabled)() is False
        assert gc.isenabled() == was_enabled
        with pytest.raises(ValueError, match="invalid literal"):
            paused_collection()(int)("not a number")
        assert gc.isenabled() == was_enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_what_loading_made_is_collected_once(monkeypatch):
    seen = []

    def load(_):
        return [[] for _ in range(100_000)]

    def on_collection(phase, info):
        if phase == "start":
            seen.append(info["generation"])

    monkeypatch.setattr(async_engine, "load_engine", load)
    monkeypatch.setattr(AsyncEngine, "_start", lambda *_: seen.append("ready"))
    gc.callbacks.append(on_collection)
    try:
        AsyncEngine(EngineConfig()).load()
    finally:
        gc.callbacks.remove(on_collection)
        frozen = gc.get_freeze_count()
        gc.unfreeze()
    assert seen[:2] == [2, "ready"]
    assert frozen > 100_000
