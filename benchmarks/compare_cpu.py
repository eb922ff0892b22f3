r"""jaxinfer beside other engines on this machine's CPU, in alternation: the README's comparison.

    python benchmarks/compare_cpu.py MODEL.gguf [MODEL.gguf ...] --directory HF_DIRECTORY \
        --peer llama.cpp=PYTHON --peer vllm=PYTHON [--rounds 3] [--json FILE] [--plot FILE.png]

Each engine runs in a process of its own, a peer in the Python where it is installed; one that is
not is left out. For each concurrency C, C distinct prompts of 64 ids get 64 greedy tokens each:
gen[C] is C·64 tokens by the seconds of all of it. Prefill is 512 by the seconds of one prompt of so
many tokens that gets one. A round runs every engine twice: with one sequence, where the peak memory
is read, and with the other concurrencies; vLLM, whose memory is the same, once. Each run takes the
best of three, the table the best of all. The first model is measured at every concurrency, the
others with one sequence. `--directory` holds the first model for engines that read no GGUF. Prints
a markdown table for each; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from compare_cpu_peers import DISTRIBUTIONS, IN_ONE_PROCESS, NEEDS_DIRECTORY, ONE_AT_A_TIME
from quality import machine

ROOT = Path(__file__).resolve().parent.parent
OURS = "jaxinfer"
RUNNER = Path(__file__).with_name("compare_cpu_peers.py")

Measurement = dict[str, Any]


def parse_peer(text: str) -> tuple[str, str]:
    """Splits ENGINE=PYTHON."""
    name, _, python = text.partition("=")
    if name not in DISTRIBUTIONS or not python:
        names = ", ".join(DISTRIBUTIONS)
        raise argparse.ArgumentTypeError(f"{text!r} is not ENGINE=PYTHON with one of {names}")
    return name, python


def parse_levels(text: str) -> list[int]:
    levels = sorted({int(level) for level in text.split(",")})
    if levels[0] < 1:
        raise argparse.ArgumentTypeError(f"concurrencies must be at least 1 (got {levels[0]})")
    return levels


def installed(peers: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the peers that are there, and why each other one is left out."""
    there, absent = {}, {}
    for name, distribution in DISTRIBUTIONS.items():
        if name not in peers:
            absent[name] = f"no --peer {name}=PYTHON was given"
            continue
        code = f"from importlib.metadata import version; version({distribution!r})"
        try:
            subprocess.run([peers[name], "-c", code], check=True, capture_output=True)
            there[name] = peers[name]
        except (OSError, subprocess.CalledProcessError):
            absent[name] = f"{peers[name]} has no {distribution}"
    return there, absent


def command_of(name: str, python: str, model: str, levels: list[int], flags: str) -> list[str]:
    """Returns what measures an engine at some concurrencies and prints JSON last."""
    concurrency = ["--concurrency", ",".join(map(str, levels))]
    if name == OURS:
        bench = [python, "-m", "jaxinfer", "bench", "--json", "--model", model]
        return [*bench, *concurrency, *flags.split()]
    return [python, str(RUNNER), name, model, *concurrency]


def run_once(command: list[str], timeout: float) -> Measurement:
    """Returns the JSON object a command prints last, or {"error": its last words}."""
    try:
        result = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {timeout:.0f} s"}
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    if result.returncode < 0:
        return {"error": f"died of signal {-result.returncode}"}
    if result.returncode > 0 or not lines:
        words = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
        return {"error": words[-1]}
    found: Measurement = json.loads(lines[-1])
    return found


def best_of(runs: list[Measurement]) -> Measurement:
    """Combines an engine's runs: most tokens per second, least memory, of one sequence if it ran.

    An engine that fails in one run has failed.
    """
    for run in runs:
        if "error" in run:
            return {"error": run["error"], "runs": runs}
    gen: dict[str, float] = {}
    for run in runs:
        for level, speed in run["gen"].items():
            gen[level] = max(speed, gen.get(level, 0.0))
    alone = [run for run in runs if list(run["gen"]) == ["1"]]
    return {
        "gen": {level: gen[level] for level in sorted(gen, key=int)},
        "prefill": max(run["prefill"] for run in runs),
        "rss_mb": min(run["rss_mb"] for run in alone or runs),
        "version": _version(runs[0]),
        "runs": runs,
    }


def _version(run: Measurement) -> str:
    versions = run.get("versions")
    return run["version"] if versions is None else f"{versions[OURS]}, jax {versions['jax']}"


def quantities(found: Measurement) -> dict[str, float]:
    """Returns what is compared of one engine: speeds by name, and "rss_mb"."""
    if "error" in found:
        return {}
    named = {f"gen[{level}]": speed for level, speed in found["gen"].items()}
    return {**named, "prefill": found["prefill"], "rss_mb": found["rss_mb"]}


def ratios(engines: dict[str, Measurement]) -> dict[str, float]:
    """Returns ours divided by the best peer's: for speeds the most, for memory the least."""
    ours = quantities(engines[OURS])
    peers = [quantities(found) for name, found in engines.items() if name != OURS]
    shares = {}
    for name, value in ours.items():
        others = [peer[name] for peer in peers if name in peer]
        if others:
            shares[name] = round(value / (min if name == "rss_mb" else max)(others), 3)
    return shares


def table(model: str, engines: dict[str, Measurement]) -> Iterator[str]:
    """Yields the lines of a model's table; engines that failed, and ratios we lose, stay in it."""
    names = list(dict.fromkeys(name for found in engines.values() for name in quantities(found)))
    # After every gen[C], whoever has them.
    names.sort(key=lambda name: (name == "rss_mb", name == "prefill", len(name), name))
    heads = {"prefill": "prefill, tok/s", "rss_mb": "peak RSS, MB"}
    shown = [heads.get(name, f"{name}, tok/s") for name in names]
    yield f"| {Path(model).name.removesuffix('.gguf')} | {' | '.join(shown)} |"
    yield "|---" * (len(names) + 1) + "|"
    for engine, found in engines.items():
        if "error" in found:
            words = found["error"].replace("|", "/")
            yield f"| {engine} | failed: {words} |{' |' * (len(names) - 1)}"
            continue
        values = quantities(found)
        cells = [f"{values[name]:,.0f}" if name in values else "" for name in names]
        weights = f", {NEEDS_DIRECTORY[engine]}" if engine in NEEDS_DIRECTORY else ""
        yield f"| {engine} {found['version']}{weights} | {' | '.join(cells)} |"
    shares = ratios(engines)
    cells = [f"{shares[name]:.2f}" if name in shares else "" for name in names]
    yield f"| {OURS} / best other | {' | '.join(cells)} |"


def contestants(
    models: list[str], directory: str | None, peers: dict[str, str], levels: list[int]
) -> Iterator[tuple[str, str, str, str, list[int]]]:
    """Yields (model, engine, its Python, what it loads, concurrencies) of a round's runs."""
    for model in models:
        wanted = levels if model == models[0] else [1]
        for name, python in {OURS: sys.executable, **peers}.items():
            loads: str | None = model
            if name in NEEDS_DIRECTORY:
                loads = directory if model == models[0] else None
            if loads is None:
                continue
            alone, together = [[1]] if 1 in wanted else [], [n for n in wanted if n > 1]
            if name in IN_ONE_PROCESS:
                parts = [wanted]
            elif name in ONE_AT_A_TIME or not together:
                parts = alone
            else:
                parts = [*alone, together]
            for part in parts:
                yield model, name, python, loads, part


def main() -> None:
    """Measures every engine in every round; exits with 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="MODEL.gguf")
    parser.add_argument(
        "--peer",
        type=parse_peer,
        action="append",
        default=[],
        metavar="ENGINE=PYTHON",
        help=f"one of {', '.join(DISTRIBUTIONS)}, and the Python it is installed in",
    )
    parser.add_argument("--directory", help="the first model for vllm and transformers")
    parser.add_argument("--concurrency", type=parse_levels, default=[1, 8, 32], metavar="N,N,...")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--flags", default="", help="more flags for `jaxinfer bench`")
    parser.add_argument("--timeout", type=float, default=900, help="seconds a run may take")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the JSON is written too")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="bars; needs matplotlib")
    args = parser.parse_args()
    if args.plot is not None:
        import compare_cpu_plot  # before the measuring: it may be missing
    models = [str(Path(model).resolve()) for model in args.models]
    peers, absent = installed(dict(args.peer))
    if args.directory is None:
        absent |= {name: "no --directory was given" for name in NEEDS_DIRECTORY if name in peers}
    for name, reason in absent.items():
        print(f"left out: {name}: {reason}", file=sys.stderr)
    runs: dict[str, dict[str, list[Measurement]]] = {model: {} for model in models}
    for _ in range(args.rounds):
        for model, name, python, loads, levels in contestants(
            models, args.directory, peers, args.concurrency
        ):
            command = command_of(name, python, loads, levels, args.flags)
            found = run_once(command, args.timeout)
            print(f"{name} {levels}: {json.dumps(found)}", file=sys.stderr, flush=True)
            runs[model].setdefault(name, []).append(found)
    report: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "rounds": args.rounds,
        "absent": absent,
        "models": {},
    }
    print(f"{report['machine']['cpu']}, {report['machine']['cores']} cores, {report['date'][:10]}")
    for model, by_engine in runs.items():
        engines = {name: best_of(found) for name, found in by_engine.items()}
        report["models"][Path(model).name] = {"engines": engines, "ratios": ratios(engines)}
        print("", *table(model, engines), sep="\n", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if args.plot is not None:
        compare_cpu_plot.draw(report, args.plot)
    print(json.dumps(report))
    found = [one for each in report["models"].values() for one in each["engines"].values()]
    sys.exit(any("error" in one for one in found))


if __name__ == "__main__":
    main()
