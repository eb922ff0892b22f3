"""Tries grammars in a process of its own, which may take its time, its stack or its memory.

llguidance limits most of what a grammar costs, but not all: a schema of 900 bytes compiles for
minutes, chains of references overflow the stack, and neither can be stopped inside this process.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from jaxinfer.constraints import trial
from jaxinfer.request import QueueFullError

TIME_LIMIT_S = 5.0
"""A schema of 200 tools takes 0.2 s, and twice that beside a model on two cores."""

WAIT_LIMIT_S = 10.0
"""How long a grammar waits for those before it."""


class Trials:
    """One process that compiles one grammar at a time, started when it is first needed.

    It is ended with this object, and with the process that it is for. Any thread may use it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._vocabulary: dict[str, Any] | None = None  # what the process knows
        self._end: weakref.finalize[Any, Any] | None = None

    def run(self, text: str, is_lark: bool, vocabulary: dict[str, Any]) -> str:
        """Returns the grammar as llguidance reads it; it compiles, and something may begin.

        Args:
          text: what llguidance reads, or if `is_lark` perhaps GBNF.
          vocabulary: its size, the texts of its special tokens by id, and an end-of-sequence id;
            the same object every time.

        Raises:
          ValueError: it does not compile, or not within the limits.
          QueueFullError: those before it take too long.
        """
        if not self._lock.acquire(timeout=WAIT_LIMIT_S):
            raise QueueFullError("grammars that take long are being compiled; try again later")
        try:
            answer = self._ask(text, is_lark, vocabulary)
        finally:
            self._lock.release()
        if answer["error"] is not None:
            raise ValueError(answer["error"])
        return str(answer["text"])

    def close(self) -> None:
        """Ends the process; the next grammar starts another."""
        if self._end is not None:
            self._end()
        self._process = self._vocabulary = self._end = None

    def _ask(self, text: str, is_lark: bool, vocabulary: dict[str, Any]) -> dict[str, Any]:
        deadline = time.monotonic() + TIME_LIMIT_S
        is_new = self._process is None
        while True:
            process = self._running()
            is_known = self._vocabulary is vocabulary
            self._vocabulary = vocabulary
            message = {
                "text": text,
                "is_lark": is_lark,
                "vocabulary": None if is_known else vocabulary,
            }
            answer = _exchange(process, message, deadline)
            if answer is not None:
                return answer
            self.close()
            if is_new or time.monotonic() >= deadline:
                raise ValueError(
                    f"it does not compile within {TIME_LIMIT_S:g} s, "
                    f"{trial.MEMORY_BYTES >> 20} MiB of memory and {trial.STACK_BYTES >> 20} MiB "
                    "of stack; make it smaller, or nest it less"
                )
            is_new = True  # that one may have been short of memory because of those before

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            import llguidance

            packages = Path(llguidance.__file__).parent.parent
            self._process = subprocess.Popen(
                [sys.executable, "-P", trial.__file__, str(packages)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # an interrupt at the terminal is not for it
                bufsize=0,
            )
            self._end = weakref.finalize(self, _end, self._process)
        return self._process


def _exchange(
    process: subprocess.Popen[bytes], message: dict[str, Any], deadline: float
) -> dict[str, Any] | None:
    """Returns the answer to a message, or None where there is none by then."""
    assert process.stdin is not None
    assert process.stdout is not None
    unsent = memoryview(json.dumps(message).encode() + b"\n")
    answer = b""
    try:
        while unsent:  # it has nothing else to do than to read this
            unsent = unsent[os.write(process.stdin.fileno(), unsent) :]
        while not answer.endswith(b"\n"):
            left = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([process.stdout], [], [], left)
            part = os.read(process.stdout.fileno(), 1 << 16) if ready else b""
            if not part:
                return None
            answer += part
    except OSError:
        return None
    found: dict[str, Any] = json.loads(answer)
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
