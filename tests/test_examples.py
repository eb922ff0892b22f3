"""The examples run as their docstrings say, on the default model."""

import importlib.util
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
START_S = 240

runs_a_model = [pytest.mark.slow, pytest.mark.real_model, pytest.mark.usefixtures("smollm2_path")]


@pytest.fixture(scope="module")
def environment():
    """For programs of this checkout, whether or not it is installed."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


@pytest.fixture
def run(environment):
    def run(script, *arguments):
        result = subprocess.run(
            [sys.executable, f"examples/{script}", *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run


@pytest.fixture(scope="module")
def batching():
    spec = importlib.util.spec_from_file_location("batching", ROOT / "examples/batching.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["batching"] = module  # dataclasses look their module up
    yield spec.loader.exec_module(module) or module
    del sys.modules["batching"]


def test_the_closing_line_compares_prompt_with_prompt(batching):
    speeds = zip((10, 30, 20), (3, 1, 2), strict=True)
    usages = [batching.Usage(prompt, completion + 1, 1.0, 1.0) for prompt, completion in speeds]
    line = batching.closing_line(usages)
    assert line == "Individual sequence stats: 30.00 prompt T/s, 3.00 completion T/s"


def test_no_time_means_no_speed(batching):
    usage = batching.Usage(5, 1, 0.0, 0.0)
    assert (usage.prompt_tok_per_s, usage.completion_tok_per_s) == (0.0, 0.0)


def test_ten_requests_is_the_default(batching):
    assert batching.N_REQUESTS == 10


class TestOnTheDefaultModel:
    pytestmark = runs_a_model

    def test_batching(self, run):
        lines = run("batching.py", "--n", "3", "--max-tokens", "6").splitlines()
        assert sum(line.startswith("--- ") for line in lines) == 3
        pattern = r"Individual sequence stats: ([\d.]+) prompt T/s, ([\d.]+) completion T/s"
        speeds = re.fullmatch(pattern, lines[-1]).groups()
        assert all(float(speed) > 0 for speed in speeds)

    def test_streaming(self, run):
        printed = run("streaming.py", "Say hello.", "--max-tokens", "5")
        text, closing = printed.rstrip("\n").rsplit("\n", 1)
        assert text.strip()
        assert re.fullmatch(r"\[(length|stop) after [1-5] tokens, [\d.]+ s\]", closing)

    def test_client(self, run, server_url):
        lines = run("client.py", "--base-url", f"{server_url}/v1", "--max-tokens", "5").splitlines()
        assert lines[0] == "model: tiny-name"
        assert any(re.fullmatch(r"usage: \d+ \+ [1-5] tokens", line) for line in lines)
        assert lines[-1].startswith("error: ")
        assert "temperature" in lines[-1]

    def test_the_readmes_curl(self, server_url):
        [line] = re.findall(r"\$ curl (.*?)\n```", README, flags=re.DOTALL)
        url, flag, header, data, body = shlex.split(line)
        assert (flag, data) == ("-H", "-d")
        request = urllib.request.Request(
            url.replace("http://127.0.0.1:8080", server_url),
            body.encode(),
            headers=dict([header.split(": ")]),
        )
        with urllib.request.urlopen(request, timeout=START_S) as reply:
            assert json.load(reply)["choices"][0]["message"]["content"].strip()

    def test_the_readmes_client(self, server_url, environment):
        [code] = re.findall(r"```python\n(import openai\n.*?)```", README, flags=re.DOTALL)
        code = code.replace("http://127.0.0.1:8080", server_url)
        assert server_url in code
        result = subprocess.run(
            [sys.executable, "-c", code.replace("stream=True", "stream=True, max_tokens=8")],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        assert result.stdout.strip()

    @pytest.mark.filterwarnings("default")  # those of Jupyter's own packages
    def test_the_notebook(self, environment, tmp_path, monkeypatch):
        nbclient = pytest.importorskip("nbclient")
        nbformat = pytest.importorskip("nbformat")
        # A kernel of this interpreter, whichever ones the user has registered.
        folder = tmp_path / "kernels" / "this-interpreter"
        folder.mkdir(parents=True)
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        spec = {"argv": command, "display_name": "this interpreter", "language": "python"}
        (folder / "kernel.json").write_text(json.dumps(spec))
        for name in ("JUPYTER_PATH", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
            monkeypatch.setenv(name, str(tmp_path))
        monkeypatch.setenv("PYTHONPATH", environment["PYTHONPATH"])

        notebook = nbformat.read(ROOT / "examples/quickstart.ipynb", as_version=4)
        nbclient.NotebookClient(
            notebook, kernel_name="this-interpreter", timeout=START_S, allow_errors=False
        ).execute()
        printed = [
            "".join(out.text for out in cell.outputs if out.get("name") == "stdout")
            for cell in notebook.cells
            if cell.cell_type == "code"
        ]
        assert printed[0].startswith("The capital of France is Paris")
        assert "1, 2, 3, 4, 5" in printed[0]
        assert all(text.strip() for text in printed)
        assert re.search(r"' Paris' -\d", printed[-1])


@pytest.fixture(scope="module")
def server_url(environment, tmp_path_factory):
    """A small `serve.py` in a process of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Otherwise the defaults: the other examples have left their programs in the cache.
    settings = ["--port", str(port), "--served-model-name", "tiny-name", "--shutdown-timeout", "1"]
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("wb") as out:
        server = subprocess.Popen(
            [sys.executable, "serve.py", *settings], cwd=ROOT, env=environment, stderr=out
        )
    try:
        _wait_until_ready(f"http://127.0.0.1:{port}/health", server, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        exit_code = server.wait(30)
    assert exit_code == 0, log.read_text()


def _wait_until_ready(url, server, log):
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        assert server.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except urllib.error.HTTPError as error:
            error.close()  # 503: loading
        except urllib.error.URLError:
            pass  # the socket is not open yet
        time.sleep(0.2)
    pytest.fail(f"not ready after {START_S} s:\n{log.read_text()}")
