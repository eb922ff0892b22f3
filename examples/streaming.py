"""Prints an answer while it is generated, and what it cost.

python examples/streaming.py ["your question"] [--model MODEL] [--max-tokens 128]
"""

from __future__ import annotations

import argparse
import time

from jaxinfer import LLM


def main() -> None:
    parser = argparse.ArgumentParser(description="Print an answer while it is generated.")
    parser.add_argument("question", nargs="?", default="What is the tallest mountain on Earth?")
    parser.add_argument("--model", help="hub id, directory or .gguf file (default: SmolLM2-135M)")
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()

    with LLM(args.model) as llm:
        text = llm.engine.chat_template.render([{"role": "user", "content": args.question}])
        prompt = llm.tokenizer.encode(text, add_special_tokens=False)
        num_tokens, began = 0, time.perf_counter()
        for delta in llm.stream(prompt, max_tokens=args.max_tokens):
            print(delta.text, end="", flush=True)
            num_tokens += len(delta.token_ids)
            if delta.finish_reason is not None:
                seconds = time.perf_counter() - began
                print(f"\n[{delta.finish_reason} after {num_tokens} tokens, {seconds:.2f} s]")


if __name__ == "__main__":
    main()
