"""Builds the C++ kernels for CPUs where a compiler is found: `python -m kernels.native_build`.

`pip install` does the same through `BuildNative`, and goes on without them if that fails. Needs
only the standard library, and the headers in jaxlib.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Only where setuptools itself loads this, to build the project: engines shall not import it.
_BuildExt: Any = object
_CompileError: type[Exception] = RuntimeError
if "setuptools" in sys.modules:
    from setuptools import errors
    from setuptools.command import build_ext

    _BuildExt, _CompileError = build_ext.build_ext, errors.CompileError

MATMUL_FOLDER = Path(__file__).parent / "quantized_matmul"
ATTENTION_FOLDER = Path(__file__).parent / "paged_attention"
DECODER_FOLDER = Path(__file__).parent / "decoder_layers"
LOGITS_FOLDER = Path(__file__).parent / "logit_stats"
SAMPLER_FOLDER = Path(__file__).parent / "token_sampler"
ZEROS_FOLDER = Path(__file__).parent / "lazy_zeros"
SHARED_FOLDER = Path(__file__).parent / "cpp"
LIBRARY = Path(__file__).with_name("native_kernels.so")
"""Beside the module that loads it, under the same name on every platform."""

COMPILERS = ("c++", "g++", "clang++")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
# Beside those of the product: a folder's loops are a table that begins with this name.
_LOOPS = {
    ATTENTION_FOLDER: "attention",
    DECODER_FOLDER: "decoder",
    LOGITS_FOLDER: "logit",
    SAMPLER_FOLDER: "sampler",
}
_ROWS_FLAGS = {"portable": (), "avx2": _AVX2, "avx512": _AVX512}
# Loops for weights in blocks of rows, and for attention with bfloat16 products, where the compiler
# knows all of these.
_BLOCKS_FLAGS = {
    "avx512bf16": (*_AVX512, "-mavx512bf16", "-mavx512vnni"),
    "amx": (*_AVX512, "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16"),
}
# Two roundings stay two: fused multiply-adds are where the source says so.
_FLAGS = (
    *("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-DNDEBUG", "-pthread"),
    *("-ffp-contract=off", "-fno-math-errno", "-w"),
)


class BuildError(RuntimeError):
    """No library: says in one line why not."""


def build(library: Path = LIBRARY) -> None:
    """Compiles the library.

    Raises:
      BuildError: there is no compiler, no jaxlib, or the compiler fails.
    """
    compiler, include = find_compiler(), find_headers()
    with tempfile.TemporaryDirectory() as scratch:
        units = compile_units(compiler, Path(scratch), ["-isystem", str(include)])
        # Replaced at once, under its name: a running process keeps the one it has loaded.
        linked = Path(scratch) / library.name
        _run([*compiler, "-shared", "-pthread", *map(str, units), "-o", str(linked)])
        library.parent.mkdir(parents=True, exist_ok=True)
        beside = library.with_name(f"{library.name}.{os.getpid()}")
        shutil.move(linked, beside)
        beside.replace(library)


def instruction_sets() -> tuple[str, ...]:
    """Returns what the loops are compiled for on this machine's architecture."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return tuple(_ROWS_FLAGS) if is_x86 else ("portable",)


def compile_units(
    compiler: Sequence[str], scratch: Path, flags: Sequence[str], handlers: bool = True
) -> list[Path]:
    """Compiles the loops for every instruction set, and maybe the handlers, to object files."""
    commands: dict[str, list[str]] = {}
    if handlers:
        commands["sets"] = [str(SHARED_FOLDER / "instruction_sets.cc")]
        folders = (MATMUL_FOLDER, ZEROS_FOLDER, *_LOOPS)
        commands |= {folder.name: [str(folder / "cpu.cc")] for folder in folders}
    for name in instruction_sets():
        set_flags = _ROWS_FLAGS[name]
        define = f"-DMULTIPLY_ROWS=multiply_rows_{name}"
        commands[f"rows_{name}"] = [str(MATMUL_FOLDER / "cpu_rows.cc"), define, *set_flags]
        for folder, prefix in _LOOPS.items():
            define = f"-DLOOPS={prefix}_loops_{name}"
            commands[f"{prefix}_{name}"] = [str(folder / "cpu_rows.cc"), define, *set_flags]
    if has_blocks(compiler):
        flags = [*flags, "-DJAXINFER_HAS_BLOCKS"]
        commands["blocks_float"] = [str(MATMUL_FOLDER / "cpu_blocks_float.cc"), *_AVX512]
        integers = str(MATMUL_FOLDER / "cpu_blocks_integers.cc")
        commands["blocks_integers"] = [integers, *_AVX512, "-mavx512vnni"]
        bytes_ = str(MATMUL_FOLDER / "cpu_blocks_bytes.cc")
        commands["blocks_bytes"] = [bytes_, *_AVX512, "-mavx512vnni"]
        bfloat16 = {
            "block": MATMUL_FOLDER / "cpu_blocks.cc",
            "attention": ATTENTION_FOLDER / "cpu_bfloat16.cc",
        }
        for name, set_flags in _BLOCKS_FLAGS.items():
            for prefix, source in bfloat16.items():
                define = f"-DLOOPS={prefix}_loops_{name}"
                commands[f"{prefix}_{name}"] = [str(source), define, *set_flags]

    def compile_unit(name: str) -> Path:
        unit = scratch / f"{name}.o"
        _run([*compiler, *_FLAGS, *flags, "-c", *commands[name], "-o", str(unit)])
        return unit

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_unit, commands))


def has_blocks(compiler: Sequence[str]) -> bool:
    """Whether this machine's architecture and the compiler have bfloat16 products and tiles."""
    if "avx512" not in instruction_sets():
        return False
    flags = dict.fromkeys(flag for flags in _BLOCKS_FLAGS.values() for flag in flags)
    try:
        _run([*compiler, *flags, "-fsyntax-only", "-x", "c++", os.devnull])
    except BuildError:
        return False
    return True


def find_compiler() -> list[str]:
    """Returns the command of `CXX`, or of the first compiler on the path.

    Raises:
      BuildError: there is none.
    """
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in COMPILERS:
        if path := shutil.which(name):
            return [path]
    raise BuildError(f"no C++ compiler: none of {', '.join(COMPILERS)} is on the path")


def find_headers() -> Path:
    """Returns jaxlib's include folder, without importing jaxlib.

    Raises:
      BuildError: jaxlib is not installed, or has no headers.
    """
    spec = find_spec("jaxlib")
    if spec is None or spec.origin is None:
        raise BuildError("jaxlib, whose headers are needed, is not installed")
    include = Path(spec.origin).parent / "include"
    if not (include / "xla/ffi/api/ffi.h").is_file():
        raise BuildError(f"jaxlib has no headers in {include}")
    return include


def _run(command: Sequence[str]) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from error
    if result.returncode:
        errors = [line for line in result.stderr.splitlines() if "error" in line]
        message = (errors or result.stderr.splitlines() or [f"exit status {result.returncode}"])[0]
        raise BuildError(f"{shlex.join(command)} failed: {message}")


class BuildNative(_BuildExt):
    """setuptools' `build_ext` for the one extension of the project, which Python never imports."""

    def build_extension(self, ext: Any) -> None:
        """Builds the library where setuptools wants it; an error is a warning: `optional`."""
        try:
            build(Path(self.get_ext_fullpath(ext.name)))
        except BuildError as error:
            raise _CompileError(f"{error}. CPUs will use XLA, which is slower") from error

    def get_ext_filename(self, fullname: str) -> str:
        """Returns a path without Python's version: any Python loads the library."""
        return f"{fullname.replace('.', os.sep)}.so"


def main() -> int:
    """Builds the library in place, for a checkout that is not installed."""
    try:
        build()
    except BuildError as error:
        print(f"the native kernels are not built: {error}", file=sys.stderr)
        return 1
    print(LIBRARY)
    return 0


if __name__ == "__main__":
    sys.exit(main())
