"""Configurations: limits, TOML, and that both come from one table of fields."""

from dataclasses import fields
from pathlib import Path

import pytest

from jaxinfer.config import (
    ConfigError,
    EngineConfig,
    ServerConfig,
    override,
    parse_bytes,
    settings_of,
)
from jaxinfer.config_file import load_toml

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.toml"))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("512MB", 512 * 10**6),
        ("2GiB", 2 * 2**30),
        ("1.5 gib", 3 * 2**29),
        ("1K", 1000),
        (7, 7),
    ],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "1XB", "1e9", "0x10", "1.2.3"])
def test_sizes_that_are_none(text):
    with pytest.raises(ConfigError, match="not a size"):
        parse_bytes(text)


REFUSED = [
    (EngineConfig, {"dtype": "int3"}),
    (EngineConfig, {"dtype": "int8"}),
    (EngineConfig, {"kv_cache_dtype": "int4"}),
    (EngineConfig, {"kv_cache_dtype": "int8", "exact": True}),
    (EngineConfig, {"max_num_seqs": 0}),
    (EngineConfig, {"max_model_len": -1}),
    (EngineConfig, {"decode_steps": 0}),
    (EngineConfig, {"max_decode_steps_before_prefill": -1}),
    (EngineConfig, {"gpu_memory_utilization": 0.0}),
    (EngineConfig, {"gpu_memory_utilization": 1.1}),
    (EngineConfig, {"pipeline_depth": 2}),
    (EngineConfig, {"speculation": "draft"}),
    (EngineConfig, {"speculation": "ngram", "deterministic": True}),
    (EngineConfig, {"decode_steps": 4, "deterministic": True}),
    (EngineConfig, {"num_draft_tokens": 0}),
    (EngineConfig, {"num_threads": 0}),
    (EngineConfig, {"kv_cache_memory": 2**30, "num_pages": 8}),
    (EngineConfig, {"max_num_batched_tokens": 16, "max_num_seqs": 32}),
    (EngineConfig, {"max_prefill_chunk_tokens": 128, "max_num_batched_tokens": 64}),
    (EngineConfig, {"dtype": "bfloat16", "exact": True}),
    (EngineConfig, {"kv_cache_dtype": "float16", "exact": True}),
    (ServerConfig, {"port": 65536}),
    (ServerConfig, {"port": -1}),
    (ServerConfig, {"api_key": ("",)}),
    (ServerConfig, {"served_model_name": (" ",)}),
    (ServerConfig, {"request_timeout": 0.0}),
    (ServerConfig, {"shutdown_timeout": -1.0}),
    (EngineConfig, {"step_timeout": -1.0}),
    (EngineConfig, {"step_timeout": float("nan")}),
    (ServerConfig, {"default_max_tokens": 0}),
    (ServerConfig, {"seed": -1}),
    (ServerConfig, {"seed": 2**63}),
    (ServerConfig, {"max_body_bytes": 0}),
    (ServerConfig, {"max_n": 129}),
    (ServerConfig, {"generation_config": "maybe"}),
    (ServerConfig, {"log_level": "loud"}),
    (ServerConfig, {"log_format": "xml"}),
    (ServerConfig, {"metrics_port": 65536}),
    (ServerConfig, {"metrics_port": 8080}),
    (ServerConfig, {"ssl_keyfile": "key.pem"}),
    (ServerConfig, {"allowed_origins": ("example.org",)}),
    (ServerConfig, {"allowed_origins": ("https://example.org/path",)}),
    (EngineConfig, {"kv_cache_share": 0.0}),
    (EngineConfig, {"kv_cache_share": 1.5}),
    (EngineConfig, {"reserve_memory": -1}),
    (EngineConfig, {"max_queued_tokens": 0}),
]


@pytest.mark.parametrize(("config", "values"), REFUSED, ids=str)
def test_refusals_name_the_field(config, values):
    with pytest.raises(ConfigError) as caught:
        config(**values)
    assert str(caught.value).startswith(next(iter(values)))


def test_every_field_is_a_flag():
    for config in (EngineConfig, ServerConfig):
        assert [s.name for s in settings_of(config)] == [f.name for f in fields(config)]
    names = [s.name for c in (EngineConfig, ServerConfig) for s in settings_of(c)]
    assert len(names) == len(set(names))


def test_dtypes_have_one_name():
    assert EngineConfig(dtype="fp16").dtype == "float16"
    assert EngineConfig(kv_cache_dtype="bf16").kv_cache_dtype == "bfloat16"
    assert EngineConfig(kv_cache_dtype="int8").kv_cache_dtype == "int8"


def test_keys_are_never_shown():
    assert "secret" not in repr(ServerConfig(api_key=("secret",)))


def test_override_takes_what_is_its_own():
    values = {"port": 1, "model": "m", "other": 5}
    assert override(ServerConfig(), values).port == 1
    assert override(EngineConfig(), values).model == "m"


def write(tmp_path, text):
    path = tmp_path / "config.toml"
    path.write_text(text)
    return path


def test_the_schema_of_three_tables(tmp_path):
    engine, server = load_toml(
        write(
            tmp_path,
            """
            [model]
            path = "models/mistral"
            model_type = "mistral"
            tokenizer_path = "models/tokenizer"
            [server]
            host = "0.0.0.0"
            port = 8080
            parallelism = 4
            [acceleration]
            dtype = "fp16"
            use_flash_attn = true
            """,
        )
    )
    assert (engine.model, engine.model_type) == ("models/mistral", "mistral")
    assert engine.tokenizer_path == "models/tokenizer"
    assert (engine.tensor_parallel, engine.allow_fewer_devices) == (4, True)
    assert (engine.dtype, engine.attention) == ("float16", None)
    assert (server.host, server.port) == ("0.0.0.0", 8080)
    text = "[acceleration]\nuse_flash_attn = false"
    assert load_toml(write(tmp_path, text))[0].attention == "reference"


def test_flags_are_keys_in_either_spelling(tmp_path):
    text = '[engine]\nmax-num-seqs = 4\nkv_cache_memory = "1MiB"\n[server]\nrequest-timeout = 5'
    engine, server = load_toml(write(tmp_path, text))
    assert (engine.max_num_seqs, engine.kv_cache_memory) == (4, 2**20)
    assert server.request_timeout == 5.0
    text = "[engine]\nmemory_fraction = 0.5\nmax-batch-size = 4"
    engine, _ = load_toml(write(tmp_path, text))
    assert (engine.gpu_memory_utilization, engine.max_num_seqs) == (0.5, 4)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("[server]\nprot = 1", ["'prot' in [server]", "'port'"]),
        ("[engine]\nmax_num_sequences = 1", ["'max_num_sequences'", "'max_num_seqs'"]),
        ("[model]\npaht = 'x'", ["'paht'", "'path'"]),
        ("[modle]\npath = 'x'", ["[modle]", "'model'"]),
        ("port = 1", ["'port' stands outside a table"]),
        ("[server]\nport = '8080'", ["'port' in [server]", "must be int"]),
        ("[server]\nport = true", ["must be int"]),
        ("[engine]\nexact = 1", ["must be bool"]),
        ("[engine]\nmax_num_seqs = 0", ["max_num_seqs must be at least 1"]),
        ("[acceleration]\nuse_flash_attn = 1", ["use_flash_attn", "must be"]),
        ("[engine]\nkv_cache_memory = 'lots'", ["kv_cache_memory", "not a size"]),
        ("[server\n", ["cannot be read"]),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path, text, names):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_toml(path)
    for name in ["config.toml", *names]:
        assert name in str(caught.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml.*cannot be read"):
        load_toml(tmp_path / "none.toml")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_configurations_in_the_repository_load(path):
    engine, server = load_toml(path)
    assert (engine, server) != (EngineConfig(), ServerConfig())


def test_there_are_configurations_to_load():
    assert len(CONFIGS) >= 5
