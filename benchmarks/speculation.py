"""Tokens a second with n-gram speculation and without, in alternation, on texts of several kinds.

Prompts from a text to be repeated to a story at temperature 1; the best of each kind of run counts.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass

from jaxinfer.config import EngineConfig
from jaxinfer.machine import versions
from jaxinfer.request import EngineRequest
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.startup import LoadedEngine, load_engine

TEXT = """The lighthouse keeper climbed the stairs each evening at six, carrying a lamp and a \
notebook. In the notebook he wrote the names of every ship that passed, the direction of the wind, \
and the colour of the water. On the third of March he counted fourteen ships, most of them bound \
for the northern harbours with timber and salt. The wind came from the west, and the water was the \
grey of old slate. He wrote this down, closed the book, and lit the lamp."""

CASES = {
    "copy": (f"Repeat the following text word for word.\n\n{TEXT}", 0.0),
    "summary": (f"Summarize the following text.\n\n{TEXT}", 0.0),
    "question": (f"{TEXT}\n\nWhat did the keeper write in his notebook?", 0.0),
    "story": ("Write a long story about a dragon.", 0.0),
    "story at temperature 1": ("Write a long story about a dragon.", 1.0),
}


@dataclass(frozen=True, slots=True)
class Run:
    """What some sequences generated together, after the first token of the first of them."""

    token_ids: tuple[tuple[int, ...], ...]
    tokens_per_s: float
    drafted: int
    accepted: int
    steps: int


def generate(loaded: LoadedEngine, case: str, rows: int, max_tokens: int, speculation: bool) -> Run:
    """Generates for `rows` sequences at once, which differ by their seeds."""
    engine, (text, temperature) = loaded.engine, CASES[case]
    messages = [{"role": "user", "content": text}]
    prompt = loaded.chat_template.render(messages, add_generation_prompt=True)
    ids = tuple(loaded.tokenizer.encode(prompt, add_special_tokens=False))
    before = engine.stats()
    outputs: list[list[int]] = [[] for _ in range(rows)]
    for row in range(rows):
        params = SamplingParams(
            temperature=temperature, seed=row, max_tokens=max_tokens, speculation=speculation
        )
        engine.add(EngineRequest(str(row), ids, params))
    began, head = None, 0
    while engine.has_work:
        for delta in engine.step():
            outputs[int(delta.request_id)] += delta.token_ids
        if began is None and (head := sum(map(len, outputs))):
            began = time.perf_counter()
    assert began is not None, "no token came"
    seconds = time.perf_counter() - began
    after = engine.stats()
    return Run(
        tuple(map(tuple, outputs)),
        (sum(map(len, outputs)) - head) / seconds,
        after.num_draft_tokens - before.num_draft_tokens,
        after.num_accepted_tokens - before.num_accepted_tokens,
        after.steps - before.steps,
    )


def main() -> None:
    """Prints a line for each kind of text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="hub id, directory or .gguf file")
    parser.add_argument("--rows", type=int, default=1, help="sequences at once (default: 1)")
    parser.add_argument("--max-tokens", type=int, default=200, help="per sequence (default: 200)")
    parser.add_argument("--num-draft-tokens", type=int, default=EngineConfig.num_draft_tokens)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each kind (default: 3)")
    parser.add_argument("--exact", action="store_true", help="float32: the text must be the same")
    parser.add_argument("--case", action="append", choices=CASES, help="default: all")
    args = parser.parse_args()
    config = EngineConfig(
        model=args.model,
        exact=args.exact,
        max_num_seqs=args.rows,
        max_model_len=1024,
        prefix_cache=False,  # what is found there was rounded otherwise than what is not
        speculation="ngram",
        num_draft_tokens=args.num_draft_tokens,
    )
    loaded, results = load_engine(config, progress=False), {}
    generate(loaded, "copy", args.rows, 8, True)
    for case in args.case or CASES:
        runs = [
            generate(loaded, case, args.rows, args.max_tokens, speculation)
            for _ in range(args.repeats)
            for speculation in (False, True)
        ]
        off, on = (max(runs[i::2], key=lambda run: run.tokens_per_s) for i in (0, 1))
        results[case] = {
            "tokens": sum(map(len, off.token_ids)),
            "off_tok_s": round(off.tokens_per_s, 1),
            "on_tok_s": round(on.tokens_per_s, 1),
            "speedup": round(on.tokens_per_s / off.tokens_per_s, 2),
            "drafted": on.drafted,
            "accepted": on.accepted,
            "steps": [off.steps, on.steps],
            "same_text": len({run.token_ids for run in runs}) == 1,
        }
        print(f"{case}: {results[case]}", flush=True)
    compiled = loaded.engine.stats().num_compilations_after_warmup
    facts = {"model": loaded.model_name, "rows": args.rows, "device": loaded.device_kind}
    print(json.dumps({**facts, "cases": results, "compilations": compiled, "versions": versions()}))


if __name__ == "__main__":
    main()
