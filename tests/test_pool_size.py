"""How many decode steps go into one dispatch, and at which multiples prompts may be cut."""

import os
import time
from types import SimpleNamespace

import pytest
from tiny_engine import build, shared, tiny_model

from jaxinfer import cli, platforms, pool_size
from jaxinfer.chunk_sizes import chunk_tokens
from jaxinfer.config import XLA_FRACTION, ConfigError, EngineConfig
from jaxinfer.pool_size import GRAIN, bytes_left, decode_steps, leaving_room, usable_part
from jaxinfer.runner.compile_watch import CompileWatch


@pytest.mark.parametrize(
    ("platform", "megabytes", "options", "expected"),
    [
        ("cpu", 97, {}, (4, 2)),
        ("cpu", 280, {}, (2, 2)),
        ("cpu", 700, {}, (1, 2)),
        ("gpu", 97, {}, (1, 2)),
        ("cpu", 97, {"max_decode_steps_before_prefill": 3}, (3, 2)),
        ("cpu", 97, {"max_decode_steps_before_prefill": 0}, (1, 2)),
        ("cpu", 97, {"decode_steps": 1}, (1, 32)),
        ("tpu", 9000, {"decode_steps": 8}, (8, 32)),
        ("cpu", 97, {"deterministic": True}, (1, 32)),
    ],
)
def test_small_models_decode_several_steps_at_once_on_cpus(platform, megabytes, options, expected):
    config = EngineConfig(max_num_seqs=32, **options)
    assert decode_steps(config, platform, megabytes * 10**6) == expected


def test_deterministic_chunks_are_whole_pages_within_a_step():
    def chunk(budget, page_size, **options):
        return chunk_tokens(EngineConfig(deterministic=True, **options), budget, page_size)

    assert chunk(256, 16) == 256
    assert chunk(100, 16) == 96
    assert chunk(256, 16, max_prefill_chunk_tokens=40) == 32
    assert chunk(16, 16) == 16
    assert chunk_tokens(EngineConfig(max_prefill_chunk_tokens=40), 256, 16) is None
    for budget, options, name in (
        (15, {}, "max_num_batched_tokens"),
        (256, {"max_prefill_chunk_tokens": 15}, "max_prefill_chunk_tokens"),
    ):
        with pytest.raises(ConfigError, match=rf"{name} \(15\) must be at least page_size \(16\)"):
            chunk(budget, 16, **options)


@pytest.mark.parametrize(
    ("platform", "utilization", "taken", "of_all"),
    [
        ("gpu", 0.9, "0.9", 0.81),  # a tenth of what XLA has taken stays free
        ("gpu", 0.5, "0.5", 0.45),
        ("gpu", 0.95, "0.95", 0.9025),
        ("gpu", 0.9, None, 0.675),  # jax was there first, as in a notebook
        ("gpu", 0.5, None, 0.5),
        ("gpu", 0.5, "0.9", 0.5),
        ("tpu", 0.9, "0.5", 0.9),  # a TPU's limit is its memory
    ],
)
def test_the_share_of_a_devices_memory(platform, utilization, taken, of_all, monkeypatch):
    monkeypatch.delenv(XLA_FRACTION, raising=False)
    if taken is not None:
        monkeypatch.setenv(XLA_FRACTION, taken)
    limit = 1.0 if platform == "tpu" else float(taken or 0.75)
    assert limit * usable_part(utilization, platform) == pytest.approx(of_all)


def test_a_command_says_how_much_xla_takes(monkeypatch):
    monkeypatch.setenv(XLA_FRACTION, "")
    monkeypatch.delenv(XLA_FRACTION)
    cli.prepare_process(EngineConfig(gpu_memory_utilization=0.6))
    assert os.environ[XLA_FRACTION] == "0.6"
    cli.prepare_process(EngineConfig(gpu_memory_utilization=0.7))
    assert os.environ[XLA_FRACTION] == "0.6", "what is set counts"


class TestSeveralModels:
    """What a pool leaves for the models that share the memory with its own."""

    @pytest.fixture
    def models(self, tmp_path):
        """Configurations of a file of 1,000 bytes and of a directory with 300 + 400."""
        (tmp_path / "a.gguf").write_bytes(bytes(1000))
        folder = tmp_path / "b"
        folder.mkdir()
        for name, size in (("1.safetensors", 300), ("2.safetensors", 400), ("tokenizer.json", 99)):
            (folder / name).write_bytes(bytes(size))
        return [EngineConfig(model=str(tmp_path / "a.gguf")), EngineConfig(model=str(folder))]

    def test_the_weights_of_the_others_and_a_part_like_theirs(self, models):
        config = leaving_room(EngineConfig(), models)
        assert (config.reserve_memory, config.kv_cache_share) == (1700, 1 / 3)
        assert leaving_room(EngineConfig(), []) == EngineConfig()

    def test_what_is_given_counts(self, models):
        for given in (EngineConfig(reserve_memory=5), EngineConfig(kv_cache_share=0.9)):
            assert leaving_room(given, models) == given

    def test_a_model_that_is_not_there_takes_nothing(self, models, caplog):
        nowhere = EngineConfig(model="./nowhere.gguf")
        config = leaving_room(EngineConfig(), [models[0], nowhere])
        assert (config.reserve_memory, config.kv_cache_share) == (1000, 1 / 3)
        assert "./nowhere.gguf" in caplog.text

    def test_on_an_accelerator_pools_one_after_the_other_all_fit(self):
        """Three models of 2, 4 and 6 grains on a device of 100, of which 90 may be used."""
        limit, used, weights = 100 * GRAIN, 0, [2 * GRAIN, 4 * GRAIN, 6 * GRAIN]
        pools = []
        for number, size in enumerate(weights):
            used += size
            stats = {"bytes_limit": limit, "bytes_in_use": used}
            pools.append(
                bytes_left(stats, 0.9, sum(weights[number + 1 :]), 1 / (len(weights) - number))
            )
            used += pools[-1]
        assert pools == [26 * GRAIN] * 3
        assert used == 90 * GRAIN

    def test_on_a_cpu_what_is_reserved_or_promised_is_not_free(self, monkeypatch):
        model, _ = tiny_model()
        runner = shared().engine.runner.config
        monkeypatch.setattr(pool_size, "available_memory", lambda: 2**20)

        def pages(**settings):
            config = EngineConfig(max_num_seqs=10**6, **settings)
            return pool_size.with_pool(config, runner, model, CompileWatch()).num_pages - 1

        monkeypatch.setattr(pool_size, "_pools", set())
        alone = pages()
        assert pages(reserve_memory=2**19) == pages(kv_cache_share=0.5) == alone // 2
        other = SimpleNamespace(
            config=SimpleNamespace(num_pages=2, cache=SimpleNamespace(page_bytes=2**18))
        )
        monkeypatch.setattr(pool_size, "_pools", [other])
        assert pages() == alone // 2
        monkeypatch.setattr(platforms, "available_memory", lambda: 10**9)
        cpu = [SimpleNamespace(platform="cpu")]
        assert platforms.free_bytes(cpu, 0.9) == 10**9 - 2**19

    def test_a_pool_is_promised_while_its_engine_lives(self):
        before = pool_size.promised_bytes()
        loaded = build()
        config = loaded.engine.runner.config
        taken = config.num_pages * config.cache.page_bytes
        assert pool_size.promised_bytes() == before + taken
        del loaded
        # A thread may still be moving its memory to huge pages.
        for _ in range(100):
            if pool_size.promised_bytes() == before:
                return
            time.sleep(0.05)
        raise AssertionError("nobody uses it, and it is still there")
