"""What a run's log says: tables, a model of all layers from a few, targets, and files. No jax."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from device_log import FAILED, OK, Log, Result
from device_targets import NOT_MEASURED, TARGETS

COPY_CASE = "copy and read"
_NAME_WIDTH = 46


@dataclass(frozen=True)
class Report:
    """Everything a run found.

    Attributes:
      header: what it was measured with.
      options: what was asked for.
      results: the cases in order, those computed from others last.
      targets: (target, "met" / "missed" / "not measured here", what was measured).
      live_bytes: arrays alive on the device after each section.
    """

    header: dict[str, Any]
    options: dict[str, Any]
    results: list[Result]
    targets: list[tuple[str, str, str]] = field(default_factory=list)
    live_bytes: dict[str, int] = field(default_factory=dict)

    def values(self, section: str, name: str) -> dict[str, Any]:
        """Returns what a case measured; empty unless it ended well."""
        for result in self.results:
            if (result.section, result.name, result.status) == (section, name, OK):
                return result.values
        return {}

    def of_section(self, section: str) -> dict[str, dict[str, Any]]:
        """Returns the values of a section's cases that ended well, by name."""
        return {
            each.name: each.values
            for each in self.results
            if each.section == section and each.status == OK
        }


def make_report(log: Log) -> Report:
    """Reads a log, and adds what follows from what it holds."""
    live_bytes = {each["section"]: each["live_bytes"] for each in log.events("section end")}
    report = Report(log.first("header"), log.first("options"), log.results(), [], live_bytes)
    report.results.extend(_all_layers(report))
    for text, judge in TARGETS:
        verdict = (NOT_MEASURED, "tiny shapes") if report.options["tiny"] else judge(report)
        report.targets.append((text, *verdict))
    return report


def failures(report: Report) -> list[Result]:
    """Returns the cases that failed; a run without any result failed as a whole."""
    failed = [result for result in report.results if result.status == FAILED]
    return failed or ([] if report.results else [Result("worker", "results", FAILED)])


def _all_layers(report: Report) -> list[Result]:
    """The models' cases at two numbers of layers, extrapolated to the real number.

    Time and bytes are lines in the number of layers; what is left at zero layers is embedding,
    head, sampling and the start of a step. The host works while the device does.
    """
    models, results = report.of_section("models"), []
    copy = report.values("bandwidth", COPY_CASE).get("copy_gb_per_s")
    for many in models.values():
        few = models.get(many.get("extrapolate_with", ""))
        if few is None or copy is None:
            continue
        layers, lower, full = many["layers"], few["layers"], many["full"]

        def line(
            key: str, few: dict[str, Any] = few, many: dict[str, Any] = many
        ) -> tuple[float, float]:
            slope = (many[key] - few[key]) / (many["layers"] - few["layers"])
            return slope, many[key] + (many["full"] - many["layers"]) * slope

        per_layer_ms, device_ms = line("device_ms")
        values: dict[str, Any] = {
            "layers": full,
            "device_ms": device_ms,
            "per_layer_ms": per_layer_ms,
        }
        values["rest_ms"] = many["device_ms"] - layers * per_layer_ms
        step_ms = device_ms
        if "host_us" in many:
            values["host_us"] = many["host_us"]
            step_ms = max(device_ms, many["host_us"] / 1e3)
        values["tok_per_s"] = many["tokens"] / step_ms * 1e3
        if "num_bytes" in many:
            values["gb_per_step"] = line("num_bytes")[1] / 1e9
            values["of_copy"] = values["gb_per_step"] / step_ms * 1e3 / copy
        if "tflop" in many:
            values["tflop_per_s"] = line("tflop")[1] / step_ms * 1e3
        label = f"{many['case']} at {full} layers, from {lower} and {layers}"
        results.append(Result("all layers", label, OK, values | {"case": many["case"]}))
    return results


# Text.

_HIDDEN = {"num_bytes", "tokens", "extrapolate_with", "full", "case", "tflop"}


def columns_of(results: Sequence[Result]) -> list[str]:
    """Returns the names of the values some results have, in order, without those for programs."""
    keys = dict.fromkeys(key for each in results for key in each.values)
    return [key for key in keys if key not in _HIDDEN]


def line_of(result: Result | None, columns: Sequence[str]) -> str:
    """Returns a result as one line under these columns, or their heading for None."""
    if result is None:
        return " " * _NAME_WIDTH + "".join(f"{name:>15}" for name in columns)
    line = f"{result.name:{_NAME_WIDTH}}"
    if result.status != OK:
        return (
            f"{line} {result.status}{': ' * bool(result.error)}{result.error.partition(chr(10))[0]}"
        )
    return (line + "".join(f"{_text(key, result.values.get(key)):>15}" for key in columns)).rstrip()


def _text(key: str, value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    if key.startswith("of_"):
        return f"{value:.1%}"
    if "error" in key or key == "bound":
        return f"{value:.1e}"
    if key.endswith("ms"):
        return f"{value:.4f}" if value < 1 else f"{value:.3f}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def summary(report: Report) -> str:
    """Returns the end of the printed output: all layers, targets, and what went wrong."""
    lines = []
    derived = [each for each in report.results if each.section == "all layers"]
    if derived:
        lines += ["", "=== all layers (extrapolated)", line_of(None, columns_of(derived))]
        lines += [line_of(each, columns_of(derived)) for each in derived]
    lines += ["", f"=== targets (of an H200; this is {report.header.get('device', 'unknown')})"]
    lines += [
        f"{verdict:18}{text}{': ' * bool(found)}{found}" for text, verdict, found in report.targets
    ]
    counts = Counter(each.status for each in report.results)
    lines += ["", "cases: " + ", ".join(f"{count} {status}" for status, count in counts.items())]
    lines += [f"FAILED {each.section} {each.name}: {each.error}" for each in failures(report)]
    return "\n".join(lines)


def write(report: Report, folder: Path) -> list[str]:
    """Writes device.json, device.md and, where matplotlib is, device.png; says what it wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "header": report.header,
        "options": report.options,
        "results": [vars(result) for result in report.results],
        "targets": [
            dict(zip(("target", "verdict", "found"), each, strict=True)) for each in report.targets
        ],
        "live_bytes": report.live_bytes,
    }
    (folder / "device.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    (folder / "device.md").write_text(markdown(report), encoding="utf-8")
    written = [f"wrote {folder / name}" for name in ("device.json", "device.md")]
    try:
        from device_plot import draw
    except ImportError as error:
        return [*written, f"no plot: {error}; pip install matplotlib"]
    draw(report, folder / "device.png")
    return [*written, f"wrote {folder / 'device.png'}"]


def markdown(report: Report) -> str:
    """Returns the tables to commit."""
    parts = [f"# {report.header.get('device', 'unknown device')}\n"]
    facts = {**report.header, "options": json.dumps(report.options)}
    parts.append("\n".join(f"- {name}: {value}" for name, value in facts.items()) + "\n")
    rows = [[text, verdict, found] for text, verdict, found in report.targets]
    parts.append("## Targets of an H200\n\n" + _table(["target", "", "measured"], rows))
    for section in dict.fromkeys(each.section for each in report.results):
        results = [each for each in report.results if each.section == section]
        measured = [each for each in results if each.status == OK and columns_of([each])]
        columns = columns_of(measured)
        rows = [
            [each.name, *(_text(key, each.values.get(key)) for key in columns)] for each in measured
        ]
        parts.append(f"## {section.capitalize()}\n\n" + _table(["", *columns], rows))
        others = [each for each in results if each.status != OK]
        if others:
            lines = [
                f"- {each.name}: {each.status}. {each.error.partition(chr(10))[0]}"
                for each in others
            ]
            parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, [":--", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines) + "\n"
