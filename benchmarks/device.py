"""What this chip does with jaxinfer: kernels against the reference, bandwidth, 8B-shaped models.

`python benchmarks/device.py --output DIR` takes at most 8 minutes on one GPU or TPU, downloads
nothing, and needs only `pip install -e .`; with matplotlib it also draws a plot. The measuring
happens in a process of its own, which is started again behind a case that crashed or hung.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import device_report
from device_log import FAILED, RESTART_CODE, Log, OpenCase, Result

ROOT = Path(__file__).resolve().parent.parent
SECTIONS = ("bandwidth", "numerics", "attention", "matmul", "models")
"""In the order they run."""

DEADLINE_S = 420.0
START_LIMIT_S = 180.0
"""How long a worker may take until its first case begins, or between two."""

_POLL_S = 0.25
_MAX_STARTS = 12


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the sections and reports; returns 1 if anything failed, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="where device.json, .md and .png are written"
    )
    parser.add_argument(
        "--section",
        action="append",
        choices=SECTIONS,
        help="repeatable; default: all. bandwidth always runs",
    )
    parser.add_argument(
        "--deadline",
        type=float,
        default=DEADLINE_S,
        metavar="SECONDS",
        help="no case begins after it (default: %(default)g)",
    )
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: does the script work?")
    args = parser.parse_args(argv)
    wanted = {"bandwidth", *(args.section or SECTIONS)}

    with tempfile.TemporaryDirectory() as scratch:
        log = Log(Path(scratch) / "device.jsonl")
        log.append(
            "options",
            sections=[section for section in SECTIONS if section in wanted],
            deadline_s=args.deadline,
            began=time.time(),
            tiny=args.tiny,
        )
        sections = str(ROOT / "benchmarks" / "device_sections.py")
        supervise(log, [sys.executable, sections, str(log.path)])
        report = device_report.make_report(log)
    print(device_report.summary(report), flush=True)
    if args.output is not None:
        for line in device_report.write(report, args.output):
            print(line)
    return 1 if device_report.failures(report) else 0


def supervise(log: Log, command: Sequence[str]) -> None:
    """Runs workers until one ends well; a case that ended a worker is recorded as failed."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    environment.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    if log.first("options")["tiny"]:  # it is not about speed: compile fast
        flags = [environment.get("XLA_FLAGS", ""), "--xla_backend_optimization_level=0"]
        environment["XLA_FLAGS"] = " ".join(filter(None, flags))
    for _ in range(_MAX_STARTS):
        worker = subprocess.Popen(command, env=environment)
        try:
            reason = wait(worker, log)
        finally:
            worker.kill()
            worker.wait()
        if worker.returncode == 0:
            return
        if worker.returncode == RESTART_CODE:
            continue
        case = log.open_case() or OpenCase("worker", "outside of any case", 0.0)
        print(f"FAILED {case.section} {case.name}: {reason}", flush=True)
        log.end(Result(case.section, case.name, FAILED, error=reason))
        if case.section == "worker":
            return  # it would only happen again
    log.end(Result("worker", "starts", FAILED, error=f"gave up after {_MAX_STARTS} starts"))


def wait(worker: subprocess.Popen[bytes], log: Log) -> str:
    """Waits for a worker, and kills it where it hangs; returns why it ended."""
    since = time.time()
    last: OpenCase | None = None
    while True:
        try:
            code = worker.wait(_POLL_S)
        except subprocess.TimeoutExpired:
            case = log.open_case()
            if case != last:
                since, last = time.time(), case
            until = since + START_LIMIT_S if case is None else case.until
            if time.time() > until:
                return f"no end in sight after {time.time() - since:.0f} s: killed"
        else:
            return f"the process ended with exit code {code}"


if __name__ == "__main__":
    sys.exit(main())
