"""schemathesis against the document the server itself publishes, with three seeds.

Gate: no server error, no reply that the document does not allow, and no request accepted that the
document forbids. The model should be tiny: thousands of requests are made.

    python3.12 -m venv V; V/bin/pip install schemathesis openapi-spec-validator
    V/bin/python benchmarks/conformance/fuzz.py --url http://127.0.0.1:8080 --scratch FOLDER
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

CHECKS = (
    "not_a_server_error",
    "negative_data_rejection",
    "status_code_conformance",
    "response_schema_conformance",
    "content_type_conformance",
)
# They would take the model away from the other requests.
LEFT_OUT = r"/models/(load|unload)"


def run(cli: str, url: str, seed: int, max_examples: int, report: Path) -> int:
    """Runs schemathesis once; returns its exit code."""
    command = [
        cli, "run", f"{url}/openapi.json", "--url", url, "--checks", ",".join(CHECKS),
        "--phases", "examples,coverage,fuzzing", "--max-examples", str(max_examples),
        "--continue-on-failure", "--request-timeout", "60", "--seed", str(seed),
        "--exclude-path-regex", LEFT_OUT, "--no-color", "--warnings", "off", "--workers", "4",
    ]  # fmt: skip
    with report.open("wb") as out:
        # It keeps caches where it runs.
        done = subprocess.run(
            command, stdout=out, stderr=subprocess.STDOUT, cwd=report.parent, check=False
        )
    return done.returncode


def summary(report: Path) -> dict[str, str]:
    """Returns the numbers schemathesis ends with."""
    text = report.read_text(encoding="utf-8", errors="replace")
    return {
        "cases": ", ".join(re.findall(r"^\s*(\d+ generated.*)$", text, re.MULTILINE)),
        "operations": ", ".join(re.findall(r"^\s*(?:Tested|Selected): +(\d+.*)$", text, re.M)),
        "failures": ", ".join(re.findall(r"^\s*❌ (.*: \d+)$", text, re.MULTILINE)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--seeds", default="7,8,9")
    parser.add_argument("--max-examples", type=int, default=200)
    args = parser.parse_args()
    from openapi_spec_validator import OpenAPIV31SpecValidator

    with urllib.request.urlopen(f"{args.url}/openapi.json", timeout=30) as reply:
        document = json.load(reply)
    faults = [str(error.message) for error in OpenAPIV31SpecValidator(document).iter_errors()]
    print(f"the document: {len(document['paths'])} paths, {faults or 'valid OpenAPI 3.1'}")
    cli = str(Path(sys.executable).with_name("schemathesis"))
    args.scratch = args.scratch.resolve()
    args.scratch.mkdir(parents=True, exist_ok=True)
    results = {}
    for seed in args.seeds.split(","):
        report = args.scratch / f"schemathesis_{seed}.txt"
        code = run(cli, args.url, int(seed), args.max_examples, report)
        results[seed] = {"exit_code": code, **summary(report)}
        print(f"seed {seed}: {results[seed]}; {report}", flush=True)
    with urllib.request.urlopen(f"{args.url}/health", timeout=30) as reply:
        well = reply.status == 200
    print(json.dumps({"valid": not faults, "well": well, "seeds": results}))
    return int(bool(faults) or not well or any(r["exit_code"] for r in results.values()))


if __name__ == "__main__":
    sys.exit(main())
