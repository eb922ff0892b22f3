"""What each instruction of a compiled program is for: matmul, attention, norm ...

Read from the stack of source positions that jax gives every instruction, so that it holds on every
platform, whatever the compiler made of the operations.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

KINDS = (
    *("decoder layers", "matmul", "attention", "kv write", "norm", "rotary", "activation"),
    *("embedding", "sampling", "other"),
)
"""Every kind. "decoder layers" is a kernel that runs all layers in one call."""

_RULES = tuple(
    (re.compile(pattern), kind)
    for pattern, kind in (
        (r"kernels/decoder_layers/", "decoder layers"),
        (r"kernels/paged_attention/.*:(.*\.)?_*write", "kv write"),
        (r"kernels/paged_attention/|nn/hadamard\.py", "attention"),
        (r"nn/embedding\.py", "embedding"),
        (r"kernels/quantized_matmul/|nn/linear\.py", "matmul"),
        (r"nn/norm\.py", "norm"),
        (r"nn/rotary\.py", "rotary"),
        (r"nn/attention\.py", "attention"),
        (r"nn/mlp\.py", "activation"),
        (r"runner/sampling\.py", "sampling"),
    )
)
"""The first that any frame of a stack matches, as "file:function", decides."""

_CONTAINERS = frozenset(("while", "conditional", "call"))
# Its name, then its type, which may be a long tuple, then opcode and operands.
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.-]+) = .*? ([a-z][\w-]*)\(([^)]*)")
_CALLED = re.compile(r" calls=%?([\w.-]+)")
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_NAME = re.compile(r"%([\w.-]+)")


@dataclass(frozen=True, slots=True)
class Instruction:
    """What a trace needs to know of an instruction.

    Attributes:
      kind: one of KINDS.
      is_container: it only runs others, which the trace shows too.
    """

    kind: str
    is_container: bool


def read_instructions(hlo: str) -> dict[str, Instruction]:
    """Returns every instruction of an optimized HLO module, by name.

    One without a position of its own is what most of the instructions it fuses are, else what the
    first of its operands is that has a kind.
    """
    kinds = _Stacks(hlo).kinds()
    found: dict[str, Instruction] = {}
    fused: dict[str, list[str]] = {}
    computation: list[str] = []
    for line in hlo.splitlines():
        if line.startswith(("%", "ENTRY")):
            name = line.removeprefix("ENTRY").split("(")[0].strip(" %")
            computation = fused.setdefault(name, [])
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        name, opcode, operands = match.groups()
        frame = _FRAME.search(line)
        kind = kinds.get(int(frame[1])) if frame else _kind_of_source(line)
        if kind is None and (called := _CALLED.search(line)):
            inside = fused.get(called[1], [])
            kind = max(dict.fromkeys(inside), key=inside.count, default=None)
        if kind is None:
            before = (found[name].kind for name in _NAME.findall(operands) if name in found)
            kind = next((kind for kind in before if kind != "other"), None)
        if kind is not None:
            computation.append(kind)
        found[name] = Instruction(kind or "other", opcode in _CONTAINERS)
    return found


def kind_of_stack(frames: list[str]) -> str:
    """Returns what a stack of "file:function" is for."""
    for pattern, kind in _RULES:
        if any(pattern.search(frame) for frame in frames):
            return kind
    return "other"


def _kind_of_source(line: str) -> str | None:
    """Of the one position that an instruction carries itself where there is no table of stacks."""
    source = re.search(r'source_file="([^"]+)"', line)
    return None if source is None else kind_of_stack([f"{source[1]}:"])


class _Stacks:
    """The tables of files, functions, positions and frames at the head of a module."""

    def __init__(self, hlo: str) -> None:
        self.files = _quoted(hlo, "FileNames")
        self.functions = _quoted(hlo, "FunctionNames")
        self.locations = _numbers(hlo, "FileLocations", "file_name_id", "function_name_id")
        self.frames = _numbers(hlo, "StackFrames", "file_location_id", "parent_frame_id")
        # Frame 1 has no parent: XLA prints that as 0 or, all parents being one too high, as 1.
        self.shift = self.frames.get(1, (0, 0))[1]

    def kinds(self) -> dict[int, str]:
        return {frame: kind_of_stack(self._stack(frame)) for frame in self.frames}

    def _stack(self, frame: int) -> list[str]:
        stack = []
        while frame in self.frames:
            location, parent = self.frames[frame]
            file, function = self.locations[location]
            stack.append(f"{self.files[file]}:{self.functions[function]}")
            frame = parent - self.shift
        return stack


def _section(hlo: str, title: str) -> list[str]:
    match = re.search(rf"^{title}\n((?:\d+ .*\n)*)", hlo, flags=re.MULTILINE)
    return [] if match is None else match[1].splitlines()


def _quoted(hlo: str, title: str) -> dict[int, str]:
    rows = (line.split(" ", 1) for line in _section(hlo, title))
    return {int(number): text.strip('"') for number, text in rows}


def _numbers(hlo: str, title: str, *names: str) -> dict[int, tuple[int, int]]:
    found = {}
    for line in _section(hlo, title):
        values = dict(re.findall(r"(\w+)=(\d+)", line))
        first, second = (int(values.get(name, 0)) for name in names)
        found[int(line.split(" ", 1)[0])] = (first, second)
    return found
