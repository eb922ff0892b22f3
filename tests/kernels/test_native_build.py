"""Building the C++ kernels: without a compiler, and with sanitizers in it."""

from __future__ import annotations

import ctypes
import platform
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from kernels import native, native_build

HERE = Path(__file__).parent
DRIVERS = (
    *("native_sanitize", "native_sanitize_attention", "native_sanitize_decoder"),
    "native_sanitize_sampler",
)
SANITIZERS = {
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-fsanitize=thread"],
}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PATH": "", "CXX": ""}, "no C\\+\\+ compiler: none of c\\+\\+"),
        ({"CXX": "missing-compiler -m64"}, "missing-compiler cannot be run"),
        ({"CXX": f"{sys.executable} -m json.tool"}, "json.tool .* failed: .*error"),
    ],
)
def test_a_build_that_fails_says_why_in_one_line(monkeypatch, tmp_path, variables, message):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(native_build.BuildError, match=message) as raised:
        native_build.build(tmp_path / "library.so")
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_it_needs_no_package_of_the_project():
    # setuptools loads the file by itself, in an environment that has no jax.
    code = "import sys; sys.path[:0] = ['kernels']; import native_build; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not {"jax", "numpy", "kernels", "setuptools"} & set(result.stdout.split())


@pytest.mark.slow
def test_a_compiler_without_tiles_builds_the_other_loops(monkeypatch, tmp_path):
    try:
        compiler = native_build.find_compiler()
    except native_build.BuildError as error:
        pytest.skip(str(error))
    if not native_build.has_blocks(compiler):
        pytest.skip(f"{compiler[0]} is such a compiler")
    old = tmp_path / "old-compiler"
    refusal = 'case "$*" in *-mamx*) echo "error: unknown option" >&2; exit 1;; esac'
    old.write_text(f'#!/bin/sh\n{refusal}\nexec {shlex.join(compiler)} "$@" -O0\n')
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    library = tmp_path / "library.so"
    native_build.build(library)
    ask = ctypes.CDLL(str(library)).jaxinfer_instruction_sets
    ask.restype = ctypes.c_char_p
    assert not {"amx", "avx512bf16"} & set(ask().decode().split())


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_random_calls_pass_sanitizers(tmp_path, sanitizer):
    try:
        compiler = native_build.find_compiler()
    except native_build.BuildError as error:
        pytest.skip(str(error))
    flags = [*SANITIZERS[sanitizer], "-O0"]  # to compile sooner
    probe = tmp_path / "probe.cc"
    probe.write_text("int main() { return 0; }")
    command = [*compiler, *flags, str(probe), "-o", str(tmp_path / "probe")]
    works = subprocess.run(command, capture_output=True, check=False).returncode == 0
    if not works or subprocess.run([tmp_path / "probe"], check=False).returncode:
        pytest.skip(f"{compiler[0]} has no {sanitizer} sanitizer here")
    units = native_build.compile_units(compiler, tmp_path, flags, handlers=False)
    for name in DRIVERS:
        driver = tmp_path / name
        source = _driver_flags(name)
        if native_build.has_blocks(compiler):
            source.append("-DJAXINFER_HAS_BLOCKS")
        command = [*compiler, *flags, *source, *map(str, units), "-o", str(driver)]
        subprocess.run(command, check=True)
        sets = _runnable_sets()
        arguments = ["200", *sets] if sanitizer == "address" else ["20", "threads", *sets]
        result = subprocess.run(
            [driver, "1", *arguments], capture_output=True, text=True, timeout=300, check=False
        )
        assert (result.returncode, result.stdout) == (0, "ok\n"), f"{name}: {result.stderr[-3000:]}"


def _driver_flags(name: str) -> list[str]:
    warnings = ["-Wall", "-Wextra", "-Werror"]
    source = [str(HERE / f"{name}.cc"), "-I", str(native_build.MATMUL_FOLDER)]
    return [*warnings, "-pthread", "-std=c++17", *source]


def _runnable_sets() -> tuple[str, ...]:
    """Those of this machine as far as the library, if it is built, can tell."""
    is_built = native.unavailable() is None
    return native.runnable_instruction_sets() if is_built else ("portable",)


@pytest.fixture
def arm_compiler(monkeypatch):
    """Clang for 64-bit Arm, on what the build then takes for such a machine."""
    if find_spec("ziglang") is None:
        pytest.skip("ziglang is not installed: pip install -r tests/requirements-aot.txt")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    return [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-musl"]


@pytest.mark.aot
@pytest.mark.slow
def test_all_sources_compile_for_arm_and_their_loops_to_its_vectors(arm_compiler, tmp_path):
    flags = ["-isystem", str(native_build.find_headers())]
    units = native_build.compile_units(arm_compiler, tmp_path, flags)
    folders = native_build.SHARED_FOLDER.parent.glob("*/cpu.cc")
    assert {folder.parent.name for folder in folders} <= {unit.stem for unit in units}
    for unit in units:
        code = unit.read_bytes()
        assert (code[:4], code[18]) == (b"\x7fELF", 183), f"{unit.name} is not for 64-bit Arm"
        words = np.frombuffer(code[: len(code) // 4 * 4], np.uint32)
        has_loops = unit.stem.endswith("_portable")
        assert np.any(words & 0xFFE0FC00 == 0x4E20CC00) or not has_loops, f"{unit.name}: no FMLA"
        assert np.any(words & 0xFFE0FC00 == 0x4E000000) or unit.stem != "rows_portable", "no TBL"


@pytest.mark.aot
@pytest.mark.slow
def test_random_calls_pass_on_an_emulated_arm(arm_compiler, tmp_path):
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if emulator is None:
        pytest.skip("qemu-aarch64 is not on the path: apt install qemu-user")
    units = native_build.compile_units(arm_compiler, tmp_path, [], handlers=False)
    for name in DRIVERS:
        driver = tmp_path / name
        command = [*arm_compiler, *_driver_flags(name), *map(str, units), "-static", "-o", driver]
        subprocess.run(command, check=True)
        command = [emulator, driver, "1", "200", "portable"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert (result.returncode, result.stdout) == (0, "ok\n"), f"{name}: {result.stderr[-3000:]}"


def test_the_library_is_beside_the_module_that_loads_it():
    assert native_build.LIBRARY.parent == Path(native.__file__).parent
