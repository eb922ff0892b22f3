r"""The model-independent part of llama.cpp's own server suite, from a source distribution of it.

Each test starts a server through `llama_server_shim.py`. Nothing of the suite is copied here.

    pip download --no-binary :all: --no-deps llama-cpp-python==0.3.36 && tar xf llama_cpp_python-*
    python -m venv V; V/bin/pip install pytest pytest-timeout requests wget filelock openai \
        prometheus-client numpy aiohttp
    python benchmarks/conformance/llama_cpp_suite.py --python V/bin/python \
        --tests llama_cpp_python-0.3.36/vendor/llama.cpp/tools/server/tests --scratch FOLDER
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import tiny_checkpoint
from agreed import HERE, Agreement, judge, run_pytest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="of an environment with the suite's needs")
    parser.add_argument("--tests", type=Path, required=True, help="its folder tools/server/tests")
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("-k", help="only these tests, as pytest's -k")
    args = parser.parse_args()
    args.scratch.mkdir(parents=True, exist_ok=True)
    shim = args.scratch / "llama-server"
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{HERE / "llama_server_shim.py"}" "$@"\n')
    shim.chmod(0o755)
    model = tiny_checkpoint.write(args.scratch / "tiny")
    env = {
        **os.environ,
        "LLAMA_SERVER_BIN_PATH": str(shim),
        "JAXINFER_SHIM_MODEL": str(model),
        "PORT": "8137",
        "LLAMA_CACHE": str(args.scratch / "cache"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    agreement = Agreement.load("llama_cpp_suite")
    extra = ["--timeout", "180", *(["-k", args.k] if args.k else [])]
    report = args.scratch / "llama_cpp.xml"
    outcomes = run_pytest(args.python, agreement, args.tests, report, env, extra)
    return judge(agreement, outcomes, args.scratch / "llama_cpp.md")


if __name__ == "__main__":
    sys.exit(main())
