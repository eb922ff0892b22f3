"""The `model` argument, resolved to a local path: a directory, a GGUF file, or a hub repository."""

from __future__ import annotations

import re
from pathlib import Path

from jaxinfer.checkpoint.checkpoint import CheckpointError
from jaxinfer.checkpoint.default_model import fetch_default_model

ALLOWED_FILES = [
    "*.safetensors",
    "model.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.*",
    "additional_chat_templates/*.jinja",
]
IGNORED_FILES = ["*/*.safetensors", "*/*.json", "consolidated*.safetensors"]
"""Other copies of the same weights: sub-folders, and mistral's own layout."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def resolve_model(model: str | None, revision: str | None = None) -> Path:
    """Returns the local directory or GGUF file that `model` means, fetching it where needed.

    Args:
      model: a directory, a `.gguf` file, a hub id `owner/name`, or None for the default model.
      revision: a branch, tag or commit; for hub ids only.

    Raises:
      CheckpointError: there is no such model, or it cannot be fetched; one sentence with a way out.
    """
    if model is not None and not is_local(model):
        return _download(model, revision)
    if revision is not None:
        raise CheckpointError(f"revision {revision!r} applies to a hub id, and {model!r} is none")
    if model is None:
        return fetch_default_model()
    path = Path(model).expanduser()
    if path.is_dir() or path.suffix == ".gguf":
        return path
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path}: give the directory that also holds its config.json")
    raise CheckpointError(
        f"{path}: not a model: only directories with safetensors and .gguf files are read "
        "(pickled .bin and .pt weights never are)"
    )


def is_local(model: str) -> bool:
    """Tells a path from a hub id.

    Raises:
      CheckpointError: it is neither: nothing is there, and no hub id looks like it.
    """
    try:
        if model and Path(model).expanduser().exists():
            return True
    except (OSError, ValueError, RuntimeError):  # too long, a NUL byte, an unknown ~user
        pass
    if _HUB_ID.fullmatch(model) and not model.endswith((".gguf", ".safetensors")):
        return False
    raise CheckpointError(
        f"model {model!r}: there is no such file or directory, and it is no hub id (owner/name)"
    )


def _download(repo_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    what = f"model {repo_id!r}"
    try:
        return Path(
            snapshot_download(
                repo_id,
                revision=revision,
                allow_patterns=ALLOWED_FILES,
                ignore_patterns=IGNORED_FILES,
            )
        )
    except GatedRepoError as error:
        raise CheckpointError(
            f"{what}: access is restricted: accept its terms on the hub and set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{what}: neither a local path nor a hub repository you may read (private ones need "
            "HF_TOKEN)"
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"{what}: has no revision {revision!r}") from error
    except HFValidationError as error:
        raise CheckpointError(f"{what}: not a valid hub id ({error})") from error
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{what}: no such local path, not in the hub's cache, and the hub cannot be reached "
            "(offline or HF_HUB_OFFLINE): connect, or give a local path"
        ) from error
    except Exception as error:  # what the HTTP library raises depends on the hub client's version
        raise CheckpointError(f"{what}: cannot be fetched from the hub ({error})") from error
