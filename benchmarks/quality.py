"""Quality and memory of each way of holding weights and keys: the README's table.

    python benchmarks/quality.py MODEL [MODEL ...] [--rows NAME,NAME] [--output FILE.json]

Each row is `jaxinfer eval kl` in a process of its own, so that one that fails loses no other.
Prints a markdown table; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ROWS = {
    "exact": "--exact",
    "default": "",
    "bfloat16": "--dtype bfloat16 --kv-cache-dtype bfloat16",
    "int8": "--quant int8",
    "int4-g32": "--quant int4 --quant-group-size 32",
    "int4-g128": "--quant int4 --quant-group-size 128",
    "nf4": "--quant nf4",
    "HQQ4": "--quant HQQ4",
    "w8a8": "--quant w8a8",
    "int8-kv": "--kv-cache-dtype int8",
}
HEADER = (
    "| model | flags | mean KL, nats | same top-1 | perplexity | weights, MB | KV, bytes a token |",
    "|---|---|---|---|---|---|---|",
)


def measure(model: str, flags: str, timeout: float) -> dict[str, Any]:
    """Returns what `jaxinfer eval kl` says, or {"error": its last words}."""
    command = [sys.executable, "-m", "jaxinfer", "eval", "kl", "--json", "--model", model]
    began = time.perf_counter()
    try:
        result = subprocess.run(
            [*command, *flags.split()],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {timeout:.0f} s"}
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
        return {"error": lines[-1], "seconds": round(time.perf_counter() - began, 1)}
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def table_line(model: str, flags: str, found: dict[str, Any]) -> str:
    shown = f"`{flags}`" if flags else "(default)"
    name = Path(model).name.removesuffix(".gguf")
    if "error" in found:
        return f"| {name} | {shown} | failed: {found['error'].replace('|', '/')} | | | | |"
    candidate = found["candidate"]
    cells = (
        name,
        shown,
        f"{found['kl_mean']:.5f}",
        f"{100 * found['top1_agreement']:.1f} %",
        f"{candidate['perplexity']:.2f}",
        f"{candidate['weight_mb']:.0f}",
        f"{candidate['kv_bytes_per_token']:.0f}",
    )
    return f"| {' | '.join(cells)} |"


def machine() -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    processor = names[0] if names else platform.processor()
    return {"cpu": processor, "cores": os.cpu_count(), "system": platform.platform()}


def main() -> None:
    """Measures every row of every model; exits with 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "models", nargs="+", metavar="MODEL", help="hub id, directory or .gguf file"
    )
    parser.add_argument(
        "--rows",
        type=lambda text: text.split(","),
        default=list(ROWS),
        metavar="NAME,...",
        help=f"which of {', '.join(ROWS)} (default: all)",
    )
    parser.add_argument("--timeout", type=float, default=1800, help="seconds a row may take")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where the JSON is written too")
    args = parser.parse_args()
    if unknown := set(args.rows) - set(ROWS):
        parser.error(f"unknown rows: {', '.join(sorted(unknown))}")
    report: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "rows": [],
    }
    print("\n".join(HEADER), flush=True)
    for model in args.models:
        for row in args.rows:
            found = measure(model, ROWS[row], args.timeout)
            print(table_line(model, ROWS[row], found), flush=True)
            report["rows"].append({"model": Path(model).name, "row": row, **found})
            if args.output is not None:  # after each row: they take minutes
                args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report))
    sys.exit(any("error" in row for row in report["rows"]))


if __name__ == "__main__":
    main()
