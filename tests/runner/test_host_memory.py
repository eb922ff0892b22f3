"""Freed memory goes back to the system, and so does code that nobody needs again."""

import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxinfer.runner import host_memory

linux_only = pytest.mark.skipif(
    host_memory._function("malloc_trim") is None or not Path("/proc/self/status").exists(),
    reason="needs Linux with glibc",
)

COUNT_HEAPS = """
import ctypes, os, sys, threading
from jaxinfer.runner import host_memory

if sys.argv[1] == "limited":
    os.cpu_count = lambda: 2
    host_memory.limit_arenas()
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
inside = threading.Barrier(8)

def allocate():
    inside.wait()
    library.malloc(ctypes.c_size_t(100_000))
    inside.wait()

threads = [threading.Thread(target=allocate) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
library.fopen.restype = ctypes.c_void_p
file = ctypes.c_void_p(library.fopen(sys.argv[2].encode(), b"w"))
library.malloc_info(0, file)
library.fclose(file)
"""


def resident(kind):
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = (line for line in lines if line.startswith(f"{kind}:"))
    return int(line.split()[1]) * 1024


@linux_only
@pytest.mark.parametrize("limit", ["limited", "MALLOC_ARENA_MAX", "default"])
def test_threads_share_heaps(limit, tmp_path, monkeypatch):
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    if limit == "MALLOC_ARENA_MAX":
        monkeypatch.setenv(limit, "2")
    report = tmp_path / "heaps.xml"
    # `limit_arenas` leaves the environment's choice as it is.
    mode = "default" if limit == "default" else "limited"
    command = [sys.executable, "-c", COUNT_HEAPS, mode, str(report)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], timeout=60)
    heaps = report.read_text().count("<heap nr=")
    assert {"limited": heaps == 1, "MALLOC_ARENA_MAX": heaps == 2, "default": heaps > 2}[limit]


@linux_only
def test_a_compilers_code_is_unmapped_and_comes_back():
    def compiled(size):
        return jax.jit(lambda x: x @ x + size)(np.eye(size, dtype=np.float32))

    compiled(3)
    before = resident("RssFile")
    host_memory.forget_compiler()
    assert resident("RssFile") < before - 20e6
    np.testing.assert_array_equal(compiled(4), np.eye(4) + 4)


@linux_only
def test_freed_memory_is_returned():
    # Pieces below the size that is mapped by itself, the last of which stays.
    pieces = [bytes(100_000) for _ in range(1000)]
    last = pieces.pop()
    held = resident("RssAnon")
    del pieces
    host_memory.trim()
    assert resident("RssAnon") < held - 50e6
    assert len(last) == 100_000


def test_other_systems_have_none_of_it(monkeypatch):
    monkeypatch.setattr(host_memory, "_function", lambda name: None)
    host_memory.limit_arenas()
    host_memory.forget_compiler()
    host_memory.trim()
    host_memory.use_huge_pages([(1 << 30, 1)])
    monkeypatch.undo()
    host_memory._function.cache_clear()
    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda name: object())
    assert host_memory._function("mallopt") is None
    host_memory._function.cache_clear()


def huge_pages_of(array):
    """KiB of huge pages in the mappings that hold an array."""
    found, inside = 0, False
    first, last = array.ctypes.data, array.ctypes.data + array.nbytes
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = (int(address, 16) for address in match.groups())
            inside = begin < last and end > first
        elif inside and line.startswith("AnonHugePages:"):
            found += int(line.split()[1])
    return found


@linux_only
def test_buffers_get_huge_pages_and_keep_their_numbers():
    array = np.arange(3 << 20, dtype=np.int32)
    moved = host_memory.use_huge_pages([(array.ctypes.data, array.nbytes), (0, 0)])
    np.testing.assert_array_equal(array, np.arange(3 << 20))
    if not moved:
        pytest.skip("this kernel moves no memory to huge pages")
    assert huge_pages_of(array) >= 5 * 2048, "those that lie in it as a whole"
