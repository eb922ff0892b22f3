"""models.json: several models, their names and settings; what is refused, and by which name."""

import json

import pytest

from jaxinfer import cli
from jaxinfer.config import ConfigError, EngineConfig
from jaxinfer.config_file import ModelEntry, load_models

HUB = {"name": "mistral", "path": "mistralai/Mistral-7B-Instruct-v0.3"}


def write(tmp_path, content):
    path = tmp_path / "models.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.fixture
def local(tmp_path):
    (tmp_path / "codellama").mkdir()
    return {"name": "code", "path": str(tmp_path / "codellama")}


def test_the_documented_form(tmp_path, local):
    models = [{**HUB, "chat_template": "mistral"}, {**local, "chat_template": "llama"}]
    first, second = load_models(write(tmp_path, {"models": models}), EngineConfig())
    assert first == ModelEntry(
        EngineConfig(model=HUB["path"], chat_template="mistral"), ("mistral",), True
    )
    assert (second.names, second.config.model) == (("code",), local["path"])
    assert second.config.chat_template == "llama"


def test_a_model_has_any_setting_and_more_names(tmp_path):
    model = {
        **HUB,
        "served_model_name": ["gpt-4", "mistral"],
        "load": False,
        "max-model-len": 512,
        "max_total_tokens": 256,
        "kv_cache_memory": "1MiB",
        "exact": True,
        "chat_template": None,
    }
    base = EngineConfig(max_num_seqs=5, max_model_len=99, chat_template="llama")
    [entry] = load_models(write(tmp_path, {"models": [model]}), base)
    assert entry.names == ("mistral", "gpt-4")
    assert not entry.loads_at_start
    config = entry.config
    assert (config.max_model_len, config.kv_cache_memory, config.exact) == (256, 2**20, True)
    assert (config.max_num_seqs, config.chat_template) == (5, "llama")


@pytest.mark.parametrize(
    ("document", "names"),
    [
        ("{", ["cannot be read"]),
        ("[]", ['{"models": [']),
        ({"model": []}, ['{"models": [']),
        ({"models": {}}, ['{"models": [']),
        ({"models": []}, ["models is empty"]),
        ({"models": [HUB], "port": 1}, ["unknown key 'port'", "'models'"]),
        ({"models": ["x"]}, ["models[0]", "must be an object"]),
        ({"models": [{"path": "a/b"}]}, ["models[0]", "'name' must be a text (got None)"]),
        ({"models": [{"name": "a"}]}, ["models[0]", "'path' must be a text (got None)"]),
        ({"models": [{**HUB, "name": " "}]}, ["'name' must be a text"]),
        ({"models": [{**HUB, "path": 3}]}, ["'path' must be a text (got 3)"]),
        ({"models": [HUB, HUB]}, ["two models are called 'mistral'"]),
        (
            {"models": [HUB, {**HUB, "name": "b", "served_model_name": "mistral"}]},
            ["two models are called 'mistral'"],
        ),
        ({"models": [{**HUB, "path": "./nowhere"}]}, ["models[0]", "'./nowhere'", "no such file"]),
        (
            {"models": [{**HUB, "chat_templat": "x"}]},
            ["unknown key 'chat_templat'", "chat_template"],
        ),
        ({"models": [{**HUB, "model": "x"}]}, ["unknown key 'model'"]),
        ({"models": [{**HUB, "port": 1}]}, ["unknown key 'port'"]),
        ({"models": [{**HUB, "max_num_seqs": "4"}]}, ["models[0]", "max_num_seqs must be int"]),
        ({"models": [{**HUB, "max_num_seqs": 0}]}, ["models[0]", "max_num_seqs must be at least"]),
        ({"models": [{**HUB, "num_threads": 2}]}, ["'num_threads' is the same for all models"]),
        ({"models": [{**HUB, "load": "no"}]}, ["'load' must be true or false (got 'no')"]),
        ({"models": [{**HUB, "served_model_name": 3}]}, ["served_model_name must be str"]),
        ('{"models": [{"name": "a", "path": "a/b", "name": "c"}]}', ["'name' is there twice"]),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path, document, names):
    with pytest.raises(ConfigError) as caught:
        load_models(write(tmp_path, document), EngineConfig())
    for name in ["models.json", *names]:
        assert name in str(caught.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"config_path '.*none\.json' cannot be read"):
        load_models(tmp_path / "none.json", EngineConfig())


@pytest.fixture
def serve(monkeypatch):
    """Returns a function from flags to (exit code, the models to serve, the server's settings)."""
    monkeypatch.delenv("JAXINFER_API_KEY", raising=False)

    def run(*flags):
        seen = []

        def record(args):
            engine, server = cli.configs_from(args)
            seen.extend((cli.models_from(args, engine, server), server))
            return 0

        monkeypatch.setattr(cli, "_serve", record)
        return cli.main(["serve", *flags]), *(seen or (None, None))

    return run


class TestFlags:
    def test_the_documented_command(self, serve, tmp_path, local):
        path = write(tmp_path, {"models": [HUB, local]})
        code, entries, server = serve("--config-path", str(path), "--port", "8080")
        assert (code, server.port) == (0, 8080)
        assert [entry.names for entry in entries] == [("mistral",), ("code",)]

    def test_one_model_is_one_without_a_file(self, serve):
        _, entries, _ = serve("-m", "a/b", "--served-model-name", "x")
        assert entries == (ModelEntry(EngineConfig(model="a/b"), ("x",)),)

    def test_flags_are_for_all_models_and_names_for_the_first(self, serve, tmp_path, local):
        path = write(tmp_path, {"models": [{**HUB, "max_num_seqs": 2}, local]})
        flags = ("--max-num-seqs", "7", "--served-model-name", "gpt-4", "--num-threads", "2")
        _, entries, _ = serve("--config-path", str(path), *flags)
        assert [entry.config.max_num_seqs for entry in entries] == [2, 7]
        assert [entry.names for entry in entries] == [("mistral", "gpt-4"), ("code",)]
        assert {entry.config.num_threads for entry in entries} == {2}

    def test_a_toml_file_may_set_the_rest(self, serve, tmp_path, local):
        toml = tmp_path / "server.toml"
        toml.write_text("[server]\nport = 8000\n[engine]\nexact = true")
        path = write(tmp_path, {"models": [local]})
        _, [entry], server = serve("-c", str(toml), "--config-path", str(path))
        assert (entry.config.exact, server.port) == (True, 8000)

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (["-m", "a/b"], "and so does model 'a/b'"),
            (["--served-model-name", "code"], "served_model_name 'code' is another model's"),
        ],
    )
    def test_what_contradicts_the_file_is_exit_2(
        self, serve, tmp_path, local, capsys, flags, message
    ):
        path = write(tmp_path, {"models": [HUB, local]})
        assert serve("--config-path", str(path), *flags)[0] == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
