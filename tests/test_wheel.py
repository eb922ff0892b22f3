"""The wheel holds everything the package needs, and works without the checkout."""

import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from kernels import native_build

ROOT = Path(__file__).parents[1]
PATTERNS = (
    *("*.py", "py.typed", "*.jinja", "*.json", "*.txt", "*.cc", "*.h"),
    *("*.html", "*.css", "*.js", "*.svg"),
)
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "jaxinfer", "kernels")
MIN_SETUPTOOLS = 77  # for the licence's SPDX name; as in [build-system]

pytestmark = pytest.mark.slow


def run(*command, cwd, **environment):
    env = {**os.environ, **environment}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def _build_options():
    """Without isolation if this environment can build; otherwise pip fetches setuptools."""
    try:
        if int(metadata.version("setuptools").split(".")[0]) >= MIN_SETUPTOOLS:
            return ["--no-build-isolation"]
    except metadata.PackageNotFoundError:
        pass
    return []


def _has_compiler():
    try:
        return bool(native_build.find_compiler())
    except native_build.BuildError:
        return False


def _hasty_compiler(path):
    """The compiler, told to optimize nothing: it is done in a third of the time."""
    if not _has_compiler():
        return {}
    path.write_text(f'#!/bin/sh\nexec {shlex.join(native_build.find_compiler())} "$@" -O0\n')
    path.chmod(0o755)
    return {"CXX": str(path)}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:  # a copy: building leaves folders behind
        if (ROOT / name).is_dir():
            built = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(ROOT / name, source / name, ignore=built)
        else:
            shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    options = _build_options()
    command = [*pip, "wheel", "--no-deps", *options, "--wheel-dir", str(folder), str(source)]
    result = run(*command, cwd=folder, **_hasty_compiler(folder / "compiler"))
    if result.returncode and not options and "No matching distribution" in result.stderr:
        pytest.skip(f"setuptools >= {MIN_SETUPTOOLS} is neither installed nor reachable")
    assert result.returncode == 0, result.stderr
    [path] = folder.glob("jaxinfer-*.whl")
    return path


def test_the_wheel_holds_the_packages(wheel):
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    expected = {
        str(path.relative_to(ROOT))
        for package in ("jaxinfer", "kernels")
        for pattern in PATTERNS
        for path in (ROOT / package).rglob(pattern)
    }
    assert "jaxinfer/text/templates/chatml.jinja" in expected
    assert "jaxinfer/data/evaluation.txt" in expected
    assert {"jaxinfer/py.typed", "kernels/py.typed"} <= expected
    assert expected - held == set()
    info = f"jaxinfer-{wheel.name.split('-')[1]}.dist-info"
    assert f"{info}/licenses/LICENSE" in held
    packages = {name.split("/")[0] for name in held}
    assert packages == {"jaxinfer", "kernels", info}, "nothing else becomes importable"
    library = str(native_build.LIBRARY.relative_to(ROOT))
    assert (library in held) == _has_compiler()
    assert not wheel.name.endswith("-any.whl"), "a library is for one platform"


def test_it_works_without_the_checkout(wheel, tmp_path):
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    install = [*pip, "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    installed = run(*install, cwd=tmp_path)
    assert installed.returncode == 0, installed.stderr
    code = (
        f"import sys; sys.path.insert(0, {str(target)!r})\n"
        "import jaxinfer, kernels, jaxinfer.llm, kernels.paged_attention\n"
        "from jaxinfer.text import chat_template\n"
        "from kernels.quantized_matmul import cpu\n"
        f"assert cpu.is_available() == {_has_compiler()}, cpu.unavailable()\n"
        "print(jaxinfer.__file__, kernels.__file__)\n"
    )
    result = run(sys.executable, "-I", "-c", code, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert all(path.startswith(str(target)) for path in result.stdout.split())
    version = run(sys.executable, "-I", "-c", code + "from jaxinfer.cli import main; main()",
                  cwd=tmp_path)  # fmt: skip
    assert version.returncode == 2, "no command: usage"
    assert "usage: jaxinfer" in version.stderr
