"""What a model argument means: a path, a hub id, or a sentence saying why it is neither."""

from __future__ import annotations

import json

import huggingface_hub
import numpy as np
import pytest
from checkpoint.builders import safetensors_bytes, tiny_gguf
from huggingface_hub import errors

from jaxinfer.checkpoint import CheckpointError, open_checkpoint, resolve_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def asked(monkeypatch):
    """Replaces the hub: records each request; raises what `asked.append` put there."""
    calls = []

    def snapshot_download(repo_id, **options):
        calls.append((repo_id, options))
        return "/cache/snapshot"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def refuse_with(monkeypatch, error):
    def snapshot_download(repo_id, **options):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)


def test_directory(tmp_path, asked):
    assert resolve_model(str(tmp_path)) == tmp_path
    assert not asked


def test_gguf_file(tmp_path, asked):
    path = tiny_gguf().write(tmp_path / "m.gguf")
    assert resolve_model(str(path)) == path
    assert not asked


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m").mkdir()
    assert resolve_model("~/m") == tmp_path / "m"


def test_relative_directory_wins_over_a_hub_id(tmp_path, monkeypatch, asked):
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert str(resolve_model("owner/name")) == "owner/name"
    assert not asked


def test_hub_id_with_revision(asked):
    assert str(resolve_model("owner/na.me-1", revision="v2")) == "/cache/snapshot"
    (repo_id, options) = asked[0]
    assert (repo_id, options["revision"]) == ("owner/na.me-1", "v2")
    assert "*.safetensors" in options["allow_patterns"]
    assert not any(
        pattern.endswith((".bin", ".pt", ".py")) for pattern in options["allow_patterns"]
    )


@pytest.mark.parametrize(
    "model",
    [
        "name",
        "./a/b",
        "/no/such/dir",
        "a/b/c",
        "a/b.gguf",
        "https://hub/a/b",
        "",
        "a\0b",
        "~none/b",
    ],
)
def test_neither_path_nor_hub_id(model, asked):
    with pytest.raises(CheckpointError, match="no such file or directory, and it is no hub id"):
        resolve_model(model)
    assert not asked


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.safetensors", "give the directory"),
        ("pytorch_model.bin", "pickled .bin and .pt weights never are"),
        ("notes.txt", "not a model"),
    ],
)
def test_files_of_other_kinds(name, message, tmp_path):
    (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=message):
        resolve_model(str(tmp_path / name))


@pytest.mark.parametrize("model", [None, "local"])
def test_revision_without_a_hub_id(model, tmp_path):
    with pytest.raises(CheckpointError, match="'v2' applies to a hub id"):
        resolve_model(model and str(tmp_path), revision="v2")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (errors.GatedRepoError, "accept its terms"),
        (errors.RepositoryNotFoundError, "neither a local path nor a hub repository"),
        (errors.RevisionNotFoundError, "has no revision 'v9'"),
        (errors.LocalEntryNotFoundError, "HF_HUB_OFFLINE"),
        (errors.HFValidationError, "not a valid hub id"),
        (OSError, "cannot be fetched"),
        (RuntimeError, "cannot be fetched"),
    ],
)
def test_hub_errors_are_one_sentence(kind, message, monkeypatch):
    refuse_with(monkeypatch, kind.__new__(kind))
    with pytest.raises(CheckpointError, match=message) as caught:
        resolve_model("owner/name", revision="v9")
    assert "'owner/name'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_offline_hub_cache(tmp_path, monkeypatch):
    """With HF_HUB_OFFLINE a cached snapshot is used, links and all, and nothing else is tried."""
    repository = tmp_path / "models--owner--name"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    files = {
        "config.json": json.dumps({"model_type": "llama"}).encode(),
        "model.safetensors": safetensors_bytes({"model.norm.weight": np.ones(4, np.float32)}),
    }
    for name, raw in files.items():
        (repository / "blobs" / name).write_bytes(raw)
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    checkpoint = open_checkpoint(resolve_model("owner/name"))
    assert list(checkpoint.tensor_infos) == ["model.norm.weight"]
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE"):
        resolve_model("owner/another")
