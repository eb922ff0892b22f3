"""The operations in a trace of jax's profiler, and their time by kind."""

from __future__ import annotations

import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from jaxinfer.hlo_kinds import Instruction

_END = "end: "
_UNKNOWN = Instruction("other", is_container=False)
_RUNNING, _FINISHING, _CONTAINING = range(3)


@dataclass(frozen=True, slots=True)
class Operation:
    """One run of an instruction, in nanoseconds of the trace's clock.

    Attributes:
      name: of the instruction.
      start, returned: while the thread that started it was in it.
      end: when its result was there: later where threads of XLA went on with it.
    """

    name: str
    start: float
    returned: float
    end: float


@dataclass(slots=True)
class KindTimes:
    """What a trace's operations took.

    Attributes:
      busy_ns: time in which any operation ran.
      kind_ns: that time by kind; operations that run at once share it, so the sum is `busy_ns`.
      counts: operations by kind.
    """

    busy_ns: float = 0.0
    kind_ns: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    counts: Counter[str] = field(default_factory=Counter)


def trace(run: Callable[[], None]) -> list[Operation]:
    """Runs a function under jax's profiler and returns the operations that ran meanwhile."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 1  # on a CPU the operations are events of the host
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        [path] = Path(folder).rglob("*.xplane.pb")
        with warnings.catch_warnings():
            # From Python 3.12 jaxlib's event types warn when first used; as an error that aborts.
            warnings.simplefilter("ignore", DeprecationWarning)
            return list(operations(jax.profiler.ProfileData.from_file(str(path)).planes))


def operations(planes: Iterable[Any]) -> Iterator[Operation]:
    """Yields the operations of a trace's planes, whichever platform wrote them.

    On CPUs and GPUs an event that is an operation says so in its statistics; on TPUs it is an event
    of the line "XLA Ops", named by the whole instruction. On CPUs a second event says when it was
    over; one number links the two.
    """
    for plane in planes:
        events = []
        ends = {}
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if event.name.startswith(_END):
                    ends[event.name.removeprefix(_END), stats.get("_c")] = event.start_ns
                elif (name := stats.get("hlo_op")) is not None:
                    events.append((str(name), event, stats.get("_p")))
                elif line.name == "XLA Ops":
                    events.append((event.name.split(" = ")[0].strip("%"), event, None))
        for name, event, number in events:
            returned = event.start_ns + event.duration_ns
            end = ends.get((event.name, number), returned)
            yield Operation(name, event.start_ns, returned, max(end, returned))


def sum_by_kind(
    operations: Iterable[Operation], instructions: Mapping[str, Instruction]
) -> KindTimes:
    """Sums operations by kind.

    A moment belongs to the operations some thread is in; where there is none, to those that are not
    over; then to loops and branches, which contain others.
    """
    times = KindTimes()
    changes: list[tuple[float, int, int, str]] = []
    for operation in operations:
        instruction = instructions.get(operation.name, _UNKNOWN)
        kind = instruction.kind
        if instruction.is_container:
            spans = [(operation.start, operation.end, _CONTAINING)]
        else:
            times.counts[kind] += 1
            spans = [
                (operation.start, operation.returned, _RUNNING),
                (operation.returned, operation.end, _FINISHING),
            ]
        for start, end, rank in spans:
            changes += ((start, 1, rank, kind), (end, -1, rank, kind))
    active: tuple[Counter[str], ...] = (Counter(), Counter(), Counter())
    before = 0.0
    for now, change, rank, kind in sorted(changes):
        running = next((kinds for kinds in active if kinds.total()), Counter())
        if total := running.total():
            times.busy_ns += now - before
            for name, count in running.items():
                times.kind_ns[name] += (now - before) * count / total
        active[rank][kind] += change
        before = now
    return times
