"""Ten chat requests in parallel on the asyncio API: the engine forms the batches.

python examples/batching.py [--n 10] [--model MODEL] [--max-tokens 64]
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer import EngineConfig, SamplingParams
from jaxinfer.async_engine import AsyncEngine, EngineRequest

N_REQUESTS = 10
MESSAGES = [
    {"role": "system", "content": "You are a concise assistant."},
    {"role": "user", "content": "Explain in two sentences what a binary search does."},
]


@dataclass(frozen=True)
class Usage:
    """Tokens and seconds of one sequence, as its client sees them.

    The prompt lasts until the first token arrives, waiting included; the completion from there to
    the last one.
    """

    prompt_tokens: int
    completion_tokens: int
    prompt_s: float
    completion_s: float

    @property
    def prompt_tok_per_s(self) -> float:
        return self.prompt_tokens / self.prompt_s if self.prompt_s > 0 else 0.0

    @property
    def completion_tok_per_s(self) -> float:
        # The first token ends the prompt's time, so it is not part of the completion's.
        later_tokens = max(self.completion_tokens - 1, 0)
        return later_tokens / self.completion_s if self.completion_s > 0 else 0.0


async def ask(engine: AsyncEngine, name: str, params: SamplingParams) -> tuple[str, Usage]:
    """One request from submission to its last token; `gather` starts it, not the call."""
    text = engine.chat_template.render(MESSAGES)
    prompt = tuple(engine.tokenizer.encode(text, add_special_tokens=False))
    began = time.perf_counter()
    first = last = None
    answer, num_tokens = "", 0
    async for delta in engine.generate(EngineRequest(name, prompt, params)):
        if delta.finish_reason == "error":
            raise RuntimeError(f"{name}: {delta.error}")
        if delta.token_ids:
            last = time.perf_counter()
            first = last if first is None else first
            num_tokens += len(delta.token_ids)
        answer += delta.text
    first = time.perf_counter() if first is None else first
    last = first if last is None else last
    return answer, Usage(len(prompt), num_tokens, first - began, last - first)


def closing_line(usages: Sequence[Usage]) -> str:
    """The best speeds of any single sequence; prompt is compared with prompt."""
    prompt = max(usage.prompt_tok_per_s for usage in usages)
    completion = max(usage.completion_tok_per_s for usage in usages)
    return f"Individual sequence stats: {prompt:.2f} prompt T/s, {completion:.2f} completion T/s"


async def run(n: int, model: str | None, max_tokens: int) -> None:
    engine = AsyncEngine(EngineConfig(model=model))
    await engine.start()
    try:
        began = time.perf_counter()
        params = SamplingParams(max_tokens=max_tokens, temperature=0.7)
        results = await asyncio.gather(
            *(ask(engine, f"request-{index}", params) for index in range(n))
        )
        seconds = time.perf_counter() - began
    finally:
        await engine.shutdown()
    for index, (answer, usage) in enumerate(results):
        print(f"--- {index}: {usage.completion_tokens} tokens\n{answer.strip()}")
    num_tokens = sum(usage.completion_tokens for _, usage in results)
    print(f"\n{n} requests, {num_tokens} tokens in {seconds:.2f} s: {num_tokens / seconds:.1f} T/s")
    print(closing_line([usage for _, usage in results]))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Chat requests in parallel.")
    parser.add_argument("--n", type=int, default=N_REQUESTS, help="requests sent together")
    parser.add_argument("--model", help="hub id, directory or .gguf file (default: SmolLM2-135M)")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of each answer")
    args = parser.parse_args(arguments)
    if args.n < 1:
        parser.error(f"--n must be at least 1, got {args.n}")
    asyncio.run(run(args.n, args.model, args.max_tokens))


if __name__ == "__main__":
    main()
