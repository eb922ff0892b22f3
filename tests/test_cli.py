"""The command line: flags, their aliases, files, exit codes; and that --help needs no jax."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxinfer import cli
from jaxinfer.config import EngineConfig, ServerConfig

ROOT = Path(__file__).parent.parent


@pytest.fixture
def configs(monkeypatch):
    """Returns a function from `serve` flags to (exit code, EngineConfig, ServerConfig)."""
    monkeypatch.delenv("JAXINFER_API_KEY", raising=False)

    def read(*flags):
        seen = []

        def run(args):
            seen.extend(cli.configs_from(args))
            return 0

        monkeypatch.setattr(cli, "_serve", run)
        return cli.main(["serve", *flags]), *(seen or (None, None))

    return read


def test_no_flags_are_the_defaults(configs):
    assert configs() == (0, EngineConfig(), ServerConfig())


def test_every_kind_of_flag(configs):
    _, engine, server = configs(
        *("--model", "m", "--exact", "--max-num-seqs", "4", "--kv-cache-memory", "2GiB"),
        *("--gpu-memory-utilization", "0.5", "--served-model-name", "a"),
        *("--served-model-name", "b", "--no-prefix-cache", "--request-timeout", "1"),
    )
    assert (engine.model, engine.exact, engine.max_num_seqs) == ("m", True, 4)
    assert (engine.kv_cache_memory, engine.gpu_memory_utilization) == (2**31, 0.5)
    assert not engine.prefix_cache
    assert (server.served_model_name, server.request_timeout) == (("a", "b"), 1.0)


def test_aliases(configs):
    _, engine, server = configs(
        *("-m", "m", "-p", "1", "--max-total-tokens", "64", "--max-batch-size", "2"),
        *("--max-cache-size", "1MiB", "-c", "mistral"),
    )
    assert (engine.model, server.port, engine.max_model_len) == ("m", 1, 64)
    assert (engine.max_num_seqs, engine.kv_cache_memory) == (2, 2**20)
    assert engine.chat_template == "mistral"
    _, engine, server = configs("--memory-fraction", "0.5", "--n-gpu-layers", "9", "--metrics-port")
    assert (engine.gpu_memory_utilization, engine.gpu_layers) == (0.5, 9)
    assert server.metrics_port == 8081
    assert configs("--metrics-port", "9000")[2].metrics_port == 9000


@pytest.mark.parametrize("flag", ["-c", "--config"])
def test_flags_override_the_file(configs, flag, tmp_path):
    path = tmp_path / "x.toml"
    path.write_text("[server]\nport = 1\nhost = '0.0.0.0'\n[engine]\nexact = true")
    _, engine, server = configs("--no-exact", "--port", "2", flag, str(path))
    assert (server.port, server.host, engine.exact) == (2, "0.0.0.0", False)


def test_keys_come_from_flags_or_the_environment(configs, monkeypatch):
    monkeypatch.setenv("JAXINFER_API_KEY", "env")
    assert configs()[2].api_key == ("env",)
    assert configs("--api-key", "a", "--api-key", "b")[2].api_key == ("a", "b")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-num-seqs", "0"], "max_num_seqs must be at least 1 (got 0)"),
        (["--api-key", ""], "api_key must not be empty"),
        (["--config", "none.toml"], "none.toml"),
        (["--metrics-port", "8080"], "metrics_port must be another than port"),
        (["--allowed-origins", "example.org"], "allowed_origins must be scheme://host[:port]"),
    ],
)
def test_refused_settings_are_exit_2_and_one_sentence(configs, capsys, flags, message):
    assert configs(*flags)[0] == 2
    error = capsys.readouterr().err
    assert error.startswith("jaxinfer serve: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "flags", [["--no-such-flag"], ["--port", "x"], ["--kv-cache-memory", "lots"], ["--por", "1"]]
)
def test_bad_flags_are_exit_2(configs, capsys, flags):
    with pytest.raises(SystemExit) as caught:
        configs(*flags)
    assert caught.value.code == 2
    assert flags[-1] in capsys.readouterr().err


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_help_and_version_do_not_import_jax():
    for arguments in (["serve", "--help"], ["--version"], ["--help"]):
        code = (
            "import sys, jaxinfer.cli\n"
            f"try: jaxinfer.cli.main({arguments})\n"
            "except SystemExit as error: assert not error.code\n"
            "assert 'jax' not in sys.modules and 'aiohttp' not in sys.modules"
        )
        result = run("-c", code)
        assert result.returncode == 0, result.stderr
        assert "jaxinfer" in result.stdout


def test_serve_py_is_the_serve_command():
    result = run("serve.py", "--port", "99999")
    assert (result.returncode, result.stdout) == (2, "")
    assert "port must be 0 to 65535" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", [1, 3])
def test_num_threads_sets_the_size_of_xlas_pool(num_threads):
    if not Path("/proc/self/task").exists():
        pytest.skip("counts threads in /proc, which only Linux has")
    code = (
        "from pathlib import Path\n"
        "from jaxinfer import cli, config\n"
        f"cli.prepare_process(config.EngineConfig(num_threads={num_threads}))\n"
        "import jax\n"
        "jax.numpy.ones(4).block_until_ready()\n"
        "names = [task.read_text() for task in Path('/proc/self/task').glob('*/comm')]\n"
        "print(sum('XLAEigen' in name for name in names))"
    )
    result = run("-c", code, XLA_FLAGS="")
    assert result.stdout.strip() == str(num_threads), result.stderr


@pytest.mark.slow
def test_doctor_names_versions_and_devices():
    result = run("-m", "jaxinfer", "doctor")
    assert result.returncode == 0, result.stderr
    for word in ("python", "jaxlib", "flax", "device", "cpu", "models"):
        assert word in result.stdout
