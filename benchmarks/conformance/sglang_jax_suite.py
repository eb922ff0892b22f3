r"""sglang-jax's OpenAI tests, from its own sources, against one server of ours.

`stubs/sgl_jax` stands in for the package they import; nothing of theirs is copied here.

    python -m venv V; V/bin/pip install pytest pytest-timeout openai requests numpy
    python benchmarks/conformance/sglang_jax_suite.py --python V/bin/python \
        --tests SGLANG_JAX/test/srt/openai_server --scratch FOLDER [--model FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from agreed import HERE, Agreement, judge, run_pytest

from jaxinfer.load_test.spawn import spawned_server

# The suite's servers have a context of 1,000 tokens.
FLAGS = ("--max-model-len", "1000", "--max-num-seqs", "16", "--seed", "0")


def served_name(url: str) -> str:
    """Returns the name of the server's model."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as reply:
        return str(json.load(reply)["data"][0]["id"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="of an environment with the suite's needs")
    parser.add_argument("--tests", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--model", help="for `serve.py` (default: its own)")
    args = parser.parse_args()
    args.scratch.mkdir(parents=True, exist_ok=True)
    model = ["--model", args.model] if args.model else []
    with (
        (args.scratch / "sglang_jax_server.log").open("wb") as log,
        spawned_server([*model, *FLAGS], log=log) as url,
    ):
        env = {
            **os.environ,
            "PYTHONPATH": str(HERE / "stubs"),
            "CONFORMANCE_URL": url,
            "CONFORMANCE_MODEL": served_name(url),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        agreement = Agreement.load("sglang_jax_suite")
        report = args.scratch / "sglang_jax.xml"
        extra = ["--timeout", "300"]
        outcomes = run_pytest(args.python, agreement, args.tests, report, env, extra)
    return judge(agreement, outcomes, args.scratch / "sglang_jax.md")


if __name__ == "__main__":
    sys.exit(main())
