r"""lm-eval's local-completions against this server, checked by an oracle in this process.

Three small tasks (multiple choice, generation, rolling log-likelihood) go over HTTP with 1 and 16
requests at once, with and without the prefix cache. Each log-likelihood must agree with `LLM.score`
of the same tokens to 1e-3, each choice and each generated text exactly. Everything is `--exact`.

    python -m venv V; V/bin/pip install "lm-eval[api]" transformers tokenizers
    python benchmarks/conformance/lm_eval_oracle.py --lm-eval V/bin/lm_eval --scratch FOLDER \
        --model FILE --tokenizer FOLDER
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import tokenizers

from jaxinfer.llm import LLM
from jaxinfer.load_test.spawn import spawned_server

NAME = "scored"
MAX_LENGTH = 512
TOLERANCE = 1e-3
PLACES = {
    "France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Egypt": "Cairo", "Spain": "Madrid",
    "Germany": "Berlin", "Greece": "Athens", "Norway": "Oslo", "Cuba": "Havana", "Peru": "Lima",
}  # fmt: skip
STARTS = ["1, 2, 3, 4,", "The sun rises in the", "Roses are red,", "A b c d e", "Once upon a time"]
TEXTS = [
    "A step of the engine takes many sequences at once; each has pages of keys and values. " * 4,
    "Straße, naïve café, 你好世界, Привет: letters that take more than a byte each. " * 3,
    "The quick brown fox jumps over the lazy dog. " * 12,
    "for i in range(10):\n    print(i)\n" * 6,
]
YAML = {
    "conf_choice": """task: conf_choice
output_type: multiple_choice
doc_to_text: "Q: What is the capital of {{country}}?\\nA:"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
""",
    "conf_text": """task: conf_text
output_type: generate_until
doc_to_text: "{{start}}"
doc_to_target: ""
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 24, do_sample: false, temperature: 0}
metric_list: [{metric: exact_match}]
""",
    "conf_rolling": """task: conf_rolling
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
""",
}


def write_tasks(folder: Path) -> None:
    """Writes the three tasks and their documents."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    cities = list(PLACES.values())
    choices = [
        {
            "country": country,
            "choices": [cities[(number + step) % len(cities)] for step in range(4)],
            "answer": 0,
        }
        for number, country in enumerate(PLACES)
    ]
    documents: dict[str, list[dict[str, Any]]] = {
        "conf_choice": choices,
        "conf_text": [{"start": start} for start in STARTS],
        "conf_rolling": [{"text": text} for text in TEXTS],
    }
    for name, rows in documents.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        source = ["dataset_path: json", "test_split: test"]
        source += [f"dataset_kwargs: {{data_files: {{test: {data}}}}}", ""]
        (folder / f"{name}.yaml").write_text(YAML[name] + "\n".join(source), encoding="utf-8")


@dataclass
class Oracle:
    """Says what lm-eval should have got, from the same tokens."""

    llm: LLM
    tokenizer: tokenizers.Tokenizer

    def encode(self, text: str) -> list[int]:
        """Returns token ids without special ones, as lm-eval sends them."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[float]:
        """Returns the log-likelihood of each continuation after its context."""
        scores = self.llm.score([context + rest for context, rest in pairs], progress=False)
        return [
            sum(entry.logprob for entry in one[len(context) :] if entry is not None)
            for one, (context, _) in zip(scores, pairs, strict=True)
        ]

    def pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Splits a text as lm-eval does: spaces before a continuation belong to it."""
        num_spaces = len(context) - len(context.rstrip())
        if num_spaces:
            context, continuation = (
                context[:-num_spaces],
                context[-num_spaces:] + continuation,
            )
        whole = self.encode(context + continuation)
        start = len(self.encode(context))
        return whole[:start], whole[start:]

    def generate(self, prompts: Sequence[str], stops: list[str]) -> list[str]:
        """Returns greedy texts."""
        ids = [self.encode(prompt) for prompt in prompts]
        outputs = self.llm.generate(ids, progress=False, temperature=0.0, max_tokens=24, stop=stops)
        return [output.outputs[0].text for output in outputs]


def run_lm_eval(
    cli: str, url: str, tasks: Path, out: Path, tokenizer: str, concurrent: int
) -> Path:
    """Runs the tasks over HTTP; returns the folder with the samples."""
    shutil.rmtree(out, ignore_errors=True)
    settings = {
        "model": NAME,
        "base_url": f"{url}/v1/completions",
        "tokenizer": tokenizer,
        "tokenizer_backend": "huggingface",
        "num_concurrent": concurrent,
        "max_retries": 1,
        "max_length": MAX_LENGTH,
    }
    command = [
        cli, "--model", "local-completions",
        "--model_args", ",".join(f"{name}={value}" for name, value in settings.items()),
        "--tasks", ",".join(YAML), "--include_path", str(tasks), "--log_samples",
        "--output_path", str(out),
    ]  # fmt: skip
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    env["HF_HOME"] = str(out.parent / "hf")
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(result.stderr[-2000:])
    return out


def samples(folder: Path, task: str) -> list[dict[str, Any]]:
    """Returns the samples lm-eval wrote of a task, in order."""
    [path] = folder.rglob(f"samples_{task}_*.jsonl")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return sorted(rows, key=lambda row: row["doc_id"])


def arguments(row: dict[str, Any]) -> list[list[Any]]:
    """Returns the arguments of a sample's requests."""
    given = row["arguments"]
    values = given.values() if isinstance(given, dict) else given
    return [list(one.values()) if isinstance(one, dict) else list(one) for one in values]


def compare(oracle: Oracle, folder: Path) -> dict[str, float]:
    """Returns the largest gap of log-likelihoods, and how many answers differ."""
    gaps, choices_differ, num_scores = [0.0], 0, 0
    for row in samples(folder, "conf_choice"):
        pairs = [oracle.pair(context, rest) for context, rest in arguments(row)]
        expected = oracle.score(pairs)
        got = [float(one[0]) for one in row["filtered_resps"]]
        gaps += [abs(a - b) for a, b in zip(expected, got, strict=True)]
        num_scores += len(got)
        best = max(range(len(expected)), key=expected.__getitem__)
        choices_differ += (best == int(row["target"])) != bool(row["acc"])
    start = oracle.llm.tokenizer.special_tokens.get("bos_token")
    prefix = oracle.tokenizer.token_to_id(str(start))
    for row in samples(folder, "conf_rolling"):
        [[text]] = arguments(row)
        [expected] = oracle.score([([prefix], oracle.encode(text))])
        got = row["filtered_resps"]
        while isinstance(got, list):
            got = got[0]
        gaps.append(abs(expected - float(got)))
        num_scores += 1
    rows = samples(folder, "conf_text")
    stops = ["\n\n", str(oracle.llm.tokenizer.special_tokens.get("eos_token"))]
    expected_texts = oracle.generate([arguments(row)[0][0] for row in rows], stops)
    texts = [row["resps"][0][0] for row in rows]
    texts_differ = sum(a != b for a, b in zip(expected_texts, texts, strict=True))
    return {
        "scores": num_scores,
        "largest_gap": max(gaps),
        "choices_differ": choices_differ,
        "texts_differ": texts_differ,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lm-eval", required=True, help="the command")
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokenizer", required=True, help="folder with its tokenizer.json")
    args = parser.parse_args()
    tasks = args.scratch / "tasks"
    write_tasks(tasks)
    folders = {}
    for cache in ("on", "off"):
        flags = ["--model", args.model, "--exact", "--served-model-name", NAME]
        flags += ["--max-model-len", str(MAX_LENGTH + 64), "--max-num-seqs", "16"]
        flags += [] if cache == "on" else ["--no-prefix-cache"]
        log_path = args.scratch / "lm_eval_server.log"
        with log_path.open("wb") as log, spawned_server(flags, log=log) as url:
            for concurrent in (1, 16):
                out = args.scratch / f"lm_eval_{cache}_{concurrent}"
                folders[f"prefix cache {cache}, {concurrent} at once"] = run_lm_eval(
                    args.lm_eval, url, tasks, out, args.tokenizer, concurrent
                )
    backend = tokenizers.Tokenizer.from_file(str(Path(args.tokenizer) / "tokenizer.json"))
    results = {}
    with LLM(args.model, exact=True, max_model_len=MAX_LENGTH + 64, max_num_seqs=16) as llm:
        oracle = Oracle(llm, backend)
        for name, folder in folders.items():
            results[name] = compare(oracle, folder)
            print(f"{name}: {results[name]}", flush=True)
    print(json.dumps(results))
    return int(
        any(
            found["largest_gap"] > TOLERANCE or found["choices_differ"] or found["texts_differ"]
            for found in results.values()
        )
    )


if __name__ == "__main__":
    sys.exit(main())
