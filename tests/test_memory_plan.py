"""The memory plan: its sums, its refusals and the ways out it names, the command that prints it."""

import dataclasses
import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from checkpoint.builders import tiny_gguf
from tiny_engine import CONTEXT, MAX_NUM_SEQS, shared, tiny_model

from jaxinfer import cli, memory_plan, model_loading, program_memory
from jaxinfer.checkpoint.checkpoint import TensorInfo
from jaxinfer.config import ConfigError, EngineConfig
from jaxinfer.memory_plan import check_plan, make_plan, step_bytes
from jaxinfer.models import load_model_module
from jaxinfer.platforms import Platform
from jaxinfer.pool_size import GRAIN, make_cache_spec
from jaxinfer.quantized_array import abstract_array
from jaxinfer.runner.loader import expected_shapes, parameters
from jaxinfer.testing import LLAMA_8B

GIB = 2**30
LLAMA = load_model_module("llama").Config.from_hf(LLAMA_8B | {"num_hidden_layers": 32})


def llama_tensors():
    """Every tensor of Llama-3.1-8B, in bfloat16."""
    shapes = {"model.embed_tokens.weight": (128256, 4096), "lm_head.weight": (128256, 4096)}
    for i in range(32):
        layer = f"model.layers.{i}."
        shapes |= {
            f"{layer}self_attn.q_proj.weight": (4096, 4096),
            f"{layer}self_attn.k_proj.weight": (1024, 4096),
            f"{layer}self_attn.v_proj.weight": (1024, 4096),
            f"{layer}self_attn.o_proj.weight": (4096, 4096),
            f"{layer}mlp.gate_proj.weight": (14336, 4096),
            f"{layer}mlp.up_proj.weight": (14336, 4096),
            f"{layer}mlp.down_proj.weight": (4096, 14336),
            f"{layer}input_layernorm.weight": (4096,),
            f"{layer}post_attention_layernorm.weight": (4096,),
        }
    return {
        name: TensorInfo(name, shape, "BF16", 2 * int(np.prod(shape)))
        for name, shape in shapes.items()
    }


INFOS = llama_tensors()

GROWTH = """
import gc, sys
sys.path[:0] = [".", ".."]
from pathlib import Path
from test_memory_plan import TestAgainstWhatThereIs, tiny_model, tiny_tensors
from jaxinfer.memory_plan import make_plan
from jaxinfer.config import EngineConfig
from jaxinfer.runner import host_memory
from jaxinfer.startup import _make_runner
from jaxinfer.runner.compile_watch import CompileWatch

def held():
    gc.collect()
    host_memory.trim()
    [line] = [x for x in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in x]
    return int(line.split()[1]) * 1024

host_memory.limit_arenas()
model, _ = tiny_model()
config = EngineConfig(exact=True, max_num_seqs={max_num_seqs}, num_pages=32 * 128)
runner = _make_runner(config, model, 1, 258, CompileWatch())
before = held()
runner.compile()
growth = held() - before
where = TestAgainstWhatThereIs.cpu(2**34)
print(growth, make_plan(config, model.config, tiny_tensors(model), where).program_bytes)
"""


def tiny_tensors(model):
    shapes = expected_shapes(model, load_model_module("llama"))
    return {
        name: TensorInfo(name, shape, "F32", 4 * int(np.prod(shape)))
        for name, shape in shapes.items()
    }


def a_gpu(free, num_devices=1):
    import ml_dtypes

    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    return Platform("gpu", num_devices, free, bfloat16, bfloat16)


def plan_llama(config, where):
    return make_plan(config, LLAMA, INFOS, where)


def refusal(config, where):
    with pytest.raises(ConfigError) as caught:
        check_plan(plan_llama(config, where), config, LLAMA, INFOS, where)
    return str(caught.value)


class TestTheSums:
    def test_8b_on_one_device(self):
        plan = plan_llama(EngineConfig(max_model_len=8192), a_gpu(72 * GIB))
        assert plan.fits
        assert plan.weight_bytes == pytest.approx(16.06e9, rel=1e-3)
        assert plan.page_bytes / plan.page_size == 131072  # 32 layers, 8 heads, K and V, 128, bf16
        assert plan.pool_tokens == 32 * 8192
        assert plan.total_bytes <= plan.free_bytes

    def test_a_pool_takes_what_is_left(self):
        plan = plan_llama(EngineConfig(), a_gpu(40 * GIB))
        assert 0 <= plan.free_bytes - plan.total_bytes < GRAIN
        assert plan.max_model_len == 131072
        assert plan.fits

    def test_without_a_wish_the_context_is_what_fits(self):
        plan = plan_llama(EngineConfig(), a_gpu(20 * GIB))
        assert plan.fits
        assert 16_000 < plan.max_model_len == plan.pool_tokens < 40_000

    def test_four_devices_share(self):
        one, four = (plan_llama(EngineConfig(), a_gpu(40 * GIB, n)) for n in (1, 4))
        assert four.weight_bytes == pytest.approx(one.weight_bytes / 4, rel=1e-3)
        assert four.page_bytes * 4 == one.page_bytes
        assert four.step_bytes < one.step_bytes
        # 8 KV heads on 16 devices are held twice.
        sixteen = plan_llama(EngineConfig(), a_gpu(40 * GIB, 16))
        assert sixteen.page_bytes * 8 == one.page_bytes
        assert "on each of 16 devices" in sixteen.table()

    def test_int8_keys_and_values_take_half_and_their_scales(self):
        config = EngineConfig(kv_cache_dtype="int8")
        assert plan_llama(config, a_gpu(40 * GIB)).page_bytes / 16 == 65536 + 32 * 8 * 2 * 4

    def test_pages_are_the_caches_own(self):
        for platform, dtype in (("tpu", "bfloat16"), ("tpu", "int8"), ("cpu", "bfloat16")):
            config = EngineConfig(kv_cache_dtype=dtype)
            where = dataclasses.replace(a_gpu(40 * GIB, 2), name=platform)
            spec = make_cache_spec(config, LLAMA, platform, 2)
            plan = plan_llama(config, where)
            assert plan.page_bytes * (1 if platform == "cpu" else 2) == spec.page_bytes
            assert plan.kv_dtype == dtype

    def test_quantized_matrices_of_the_file(self):
        name = "model.layers.0.mlp.up_proj.weight"
        codes = abstract_array((14336, 4096), "int4", 32, np.dtype(np.float16))
        stored = INFOS | {name: dataclasses.replace(INFOS[name], codes=codes)}
        where = a_gpu(40 * GIB)
        plain, kept, floats = (
            make_plan(EngineConfig(), LLAMA, infos, place).weight_bytes
            for infos, place in (
                (INFOS, where),
                (stored, where),
                (stored, dataclasses.replace(where, keeps_quantized=False)),
            )
        )
        assert plain - kept == 14336 * 4096 * 2 - 14336 * 4096 * (16 + 2) // 32
        assert floats == plain

    def test_a_tied_head_is_not_loaded(self):
        tied = dataclasses.replace(LLAMA, tie_word_embeddings=True)
        where = a_gpu(40 * GIB)
        both = [make_plan(EngineConfig(), m, INFOS, where).weight_bytes for m in (LLAMA, tied)]
        assert both[0] - both[1] == 128256 * 4096 * 2


class TestRefusals:
    def test_names_the_context_and_the_quantization_that_fit(self):
        config, where = EngineConfig(max_model_len=65536), a_gpu(20 * GIB)
        sentence = refusal(config, where)
        assert "16,061 MB of weights" in sentence
        assert f"but {20 * GIB / 1e6:,.0f} MB are free" in sentence
        tokens = int(sentence.split("--max-model-len ")[1].split()[0])
        quant = sentence.split("--quant ")[1].split()[0]
        shorter = dataclasses.replace(config, max_model_len=tokens)
        smaller = dataclasses.replace(config, quant=quant)
        for change in (shorter, smaller):
            plan = plan_llama(change, where)
            assert plan.fits
            check_plan(plan, change, LLAMA, INFOS, where)
        # They are the largest that do.
        longer = dataclasses.replace(config, max_model_len=tokens + GRAIN // 131072 + 16)
        assert not plan_llama(longer, where).fits
        sizes = {
            name: plan_llama(dataclasses.replace(config, quant=name), where)
            for name in memory_plan.PROPOSED_SCHEMES
        }
        fitting = [plan.weight_bytes for plan in sizes.values() if plan.fits]
        assert sizes[quant].weight_bytes == max(fitting)

    def test_only_a_quantization_fits(self):
        sentence = refusal(EngineConfig(max_model_len=8192), a_gpu(14 * GIB))
        assert "--max-model-len" not in sentence
        assert "what would fit: --quant HQQ8" in sentence

    def test_nothing_fits(self):
        sentence = refusal(EngineConfig(max_model_len=8192), a_gpu(2 * GIB))
        assert "no shorter context fits, and even --quant int4 with 32 tokens needs" in sentence
        assert "--tensor-parallel" in sentence

    def test_no_wish_is_refused_too_if_two_pages_do_not_fit(self):
        assert "--quant" in refusal(EngineConfig(), a_gpu(14 * GIB))

    def test_a_pool_that_is_too_large(self):
        config = EngineConfig(max_model_len=4096, kv_cache_memory=30 * GIB)
        sentence = refusal(config, a_gpu(30 * GIB))
        size = int(sentence.split("--kv-cache-memory ")[1].split()[0])
        assert plan_llama(dataclasses.replace(config, kv_cache_memory=size), a_gpu(30 * GIB)).fits

    def test_a_pool_that_is_too_small(self):
        config = EngineConfig(max_model_len=4096, kv_cache_memory=2**20)
        sentence = refusal(config, a_gpu(30 * GIB))
        assert "max_model_len is 4096 tokens, but the KV pool holds 0" in sentence
        assert "raise kv_cache_memory" in sentence

    def test_devices_that_do_not_divide_the_heads(self):
        with pytest.raises(ValueError, match="num_heads=32"):
            plan_llama(EngineConfig(), a_gpu(80 * GIB, 3))


class TestAgainstWhatThereIs:
    """A tiny engine that other tests compile too: true temporaries, weights and pool."""

    CONFIG = EngineConfig(
        exact=True,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=32,
        page_size=4,
        num_pages=MAX_NUM_SEQS * CONTEXT // 4,
    )

    @staticmethod
    def cpu(free):
        float32 = np.dtype(np.float32)
        return Platform("cpu", 1, free, float32, float32)

    def test_temporaries(self):
        estimate = step_bytes(self.CONFIG, tiny_model()[0].config, self.cpu(GIB))
        widest = max(shared().engine.runner.memory_analysis().values())
        # Beside those of a real model, which grow with its sizes, there are always some.
        assert estimate / 3 < widest < estimate * 3 + 2**19

    @pytest.mark.slow
    @pytest.mark.parametrize("max_num_seqs", [1, 8, 32])
    def test_programs(self, max_num_seqs, tmp_path):
        if not sys.platform.startswith("linux"):
            pytest.skip("only Linux tells what a process holds")
        code = GROWTH.format(max_num_seqs=max_num_seqs)
        run = partial(subprocess.run, check=True, capture_output=True, text=True)
        result = run([sys.executable, "-c", code], cwd=Path(__file__).parent)
        growth, estimate = map(int, result.stdout.split())
        assert growth <= estimate <= 1.5 * growth

    def test_programs_grow_with_layers_that_are_not_fused(self, monkeypatch):
        monkeypatch.setattr(program_memory.fused_layers, "unavailable", lambda: None)
        where = self.cpu(64 * GIB)

        def programs(**flags):
            return make_plan(EngineConfig(**flags), LLAMA, INFOS, where).program_bytes

        fused = programs(quant="int8")
        assert fused < programs(quant="w8a8")
        assert fused < programs(quant="int8", kv_cache_dtype="int8")
        assert programs(quant="int8", attention="xla") > 2 * programs(quant="w8a8")
        monkeypatch.setattr(program_memory.fused_layers, "unavailable", lambda: "not built")
        assert programs(quant="int8") == programs(attention="xla")

    def test_weights_and_pages(self):
        model, _ = tiny_model()
        infos = tiny_tensors(model)
        plan = make_plan(self.CONFIG, model.config, infos, self.cpu(GIB))
        assert plan.weight_bytes == sum(p.get_value().nbytes for _, p in parameters(model))
        runner = shared().engine.runner
        assert plan.page_bytes == runner.config.cache.page_bytes
        assert plan.pool_tokens == (runner.config.num_pages - 1) * 4
        assert plan.max_model_len == runner.config.max_model_len

    def test_start_up_prints_it_or_refuses(self, caplog):
        caplog.set_level("INFO", "jaxinfer")
        model, _ = tiny_model()
        infos = tiny_tensors(model)
        config = EngineConfig(exact=True)
        model_loading._check_memory(config, model.config, infos, self.cpu(GIB))
        assert "memory plan:\n  weights " in caplog.text
        with pytest.raises(ConfigError, match=r"does not fit: .* but 1 MB are free"):
            model_loading._check_memory(config, model.config, infos, self.cpu(10**6))
        model_loading._check_memory(config, model.config, infos, None)
        assert "nothing is planned" in caplog.text


class TestTheCommand:
    @pytest.fixture
    def model(self, tmp_path):
        return str(tiny_gguf().write(tmp_path / "tiny.gguf"))

    def test_prints_a_table(self, model, capsys):
        flags = ["--platform", "cpu", "--device-memory", "2GiB"]
        assert cli.main(["plan", model, *flags]) == 0
        lines = capsys.readouterr().out.splitlines()
        names = [line.split()[0] for line in lines]
        assert names == ["weights", "KV", "workspace", "programs", "total", "free", "context"]
        assert len({line.index(" MB") for line in lines[:-1]}) == 1, "sizes are aligned"

    def test_json_and_a_refusal(self, model, capsys):
        flags = ["--platform", "gpu", "--device-memory", "1MiB", "--json"]
        assert cli.main(["plan", "--model", model, *flags]) == 1
        report = json.loads(capsys.readouterr().out)
        assert report["fits"] is False
        assert "does not fit" in report["problem"]
        assert report["platform"] == "gpu"
        assert report["free_bytes"] == int(2**20 * 0.9)

    def test_auto_says_what_it_chose(self, model, caplog):
        flags = ["--platform", "gpu", "--device-memory", "8GiB", "--quant", "auto"]
        assert cli.main(["plan", model, *flags]) == 0
        assert "quant auto: " in caplog.text

    def test_devices_that_are_not_here(self, model, capsys):
        assert cli.main(["plan", model, "--platform", "tpu"]) == 2
        assert "--device-memory" in capsys.readouterr().err

    def test_a_model_that_is_nowhere(self, capsys):
        assert cli.main(["plan", "no/such"]) == 1
        assert capsys.readouterr().err.startswith("jaxinfer plan: ")

    @pytest.mark.slow
    @pytest.mark.real_model
    def test_a_real_model_at_once(self, smollm2_path, capsys):
        began = time.monotonic()
        assert cli.main(["plan", str(smollm2_path), "--json", "--platform", "cpu"]) == 0
        assert time.monotonic() - began < 5
        report = json.loads(capsys.readouterr().out)
        assert report["kv_bytes_per_token"] in (30 * 3 * 2 * 64 * 2, 30 * 3 * 2 * 64 * 4)
        assert report["weight_bytes"] < 110e6 or report["weight_bytes"] > 500e6
