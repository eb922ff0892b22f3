"""Runs a pytest suite that is not ours, and compares what fails with what was agreed.

The agreement is a TOML file beside this one:

    suite = "name and version"
    files = ["run", "these"]
    [not_run]              # file, or file::test without parameters -> one reason
    [deviations]           # test, by the start of its id -> one reason, by the ruling in the notes
    [chance]               # test, without its parameters or with -> one reason

A failure that neither names is unexpected, and so is a deviation that no failure needs. Tests left
to chance ask for what a text happens to be that so small a model samples: the suites' servers have
a fixed seed, so that a run says the same as the last, but on another CPU it may be another text.
"""

from __future__ import annotations

import json
import subprocess
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent


@dataclass
class Agreement:
    """What is run of a suite, and what may fail."""

    suite: str
    files: list[str]
    not_run: dict[str, str] = field(default_factory=dict)
    deviations: dict[str, str] = field(default_factory=dict)
    chance: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, name: str) -> Agreement:
        """Reads the agreement of a suite."""
        return cls(**tomllib.loads((HERE / f"{name}.toml").read_text(encoding="utf-8")))

    def judged(self, test: str, outcome: str) -> tuple[str, str]:
        """Returns what a failure is: agreed, chance or unexpected, and why; others stay."""
        if outcome != "failed":
            return outcome, ""
        for name in (test, test.partition("[")[0]):
            if name in self.chance:
                return "chance", self.chance[name]
        fits = [start for start in self.deviations if test.startswith(start)]
        return ("agreed", self.deviations[max(fits, key=len)]) if fits else ("unexpected", "")


def run_pytest(
    python: str,
    agreement: Agreement,
    folder: Path,
    report: Path,
    env: Mapping[str, str],
    extra: Sequence[str] = (),
) -> dict[str, tuple[str, str]]:
    """Runs the agreed files in `folder`; returns {test: (passed, failed or skipped, message)}."""
    command = [
        python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short",
        f"--junit-xml={report}", "-o", "junit_family=xunit1", *extra, *agreement.files,
    ]  # fmt: skip
    for test in agreement.not_run:
        if "::" in test:
            command += ["--deselect", test]
        elif not any(one.startswith(test) for one in agreement.files):
            command += ["--ignore", test]
    subprocess.run(command, cwd=folder, env=dict(env), check=False)
    return read_report(report)


def read_report(report: Path) -> dict[str, tuple[str, str]]:
    """Returns the outcomes in a JUnit file, by file::test."""
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        where = case.get("file") or (case.get("classname") or "").replace(".", "/") + ".py"
        classes = (case.get("classname") or "").rsplit(".", 1)[-1]
        middle = f"{classes}::" if classes[:1].isupper() else ""
        name = f"{Path(where).name}::{middle}{case.get('name')}"
        outcome, message = "passed", ""
        for kind in ("failure", "error", "skipped"):
            found = case.find(kind)
            if found is not None:
                outcome = "skipped" if kind == "skipped" else "failed"
                message = (found.get("message") or "").replace("\n", " ")[:200]
        outcomes[name] = (outcome, message)
    return outcomes


def markdown(agreement: Agreement, outcomes: Mapping[str, tuple[str, str]]) -> str:
    """Returns a table of the tests, those that differ in parameters only in one row."""
    rows: dict[str, dict[str, int]] = {}
    reasons: dict[str, set[str]] = {}
    for test, (outcome, _) in sorted(outcomes.items()):
        name = test.partition("[")[0]
        shown, reason = agreement.judged(test, outcome)
        counts = rows.setdefault(name, {})
        counts[shown] = counts.get(shown, 0) + 1
        reasons.setdefault(name, set()).update([reason] if reason else [])
    lines = ["| test | result | deviation |", "| --- | --- | --- |"]
    for name, counts in rows.items():
        result = ", ".join(f"{count} {shown}" for shown, count in counts.items())
        why = "; ".join(sorted(reasons[name]))
        lines.append(f"| {name.replace('|', '/')} | {result} | {why} |")
    return "\n".join(lines) + "\n"


def judge(agreement: Agreement, outcomes: Mapping[str, tuple[str, str]], table: Path) -> int:
    """Prints every test with its outcome and reason, then one JSON line; returns the exit code.

    What `markdown` makes of them is written to `table`.
    """
    table.write_text(markdown(agreement, outcomes), encoding="utf-8")
    counts = {"passed": 0, "agreed": 0, "chance": 0, "skipped": 0, "unexpected": 0}
    needed = set()
    for test, (outcome, message) in sorted(outcomes.items()):
        shown, reason = agreement.judged(test, outcome)
        needed.add(reason)
        counts[shown] += 1
        print(f"{shown:10} {test}  {reason or message}")
    stale = [
        test
        for test, reason in agreement.deviations.items()
        if reason not in needed
        and any(name.startswith(test) and outcome == "passed"
                for name, (outcome, _) in outcomes.items())
    ]  # fmt: skip
    for test in stale:
        print(f"stale      {test}: it passes")
    print(json.dumps({"suite": agreement.suite, **counts, "stale": stale}))
    return int(not outcomes or counts["unexpected"] > 0 or bool(stale))
