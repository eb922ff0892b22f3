"""The kinds of requests that schedules are made of, and what each chooses from given logits."""

import functools

import numpy as np
from engine.builders import EOS, tiny_model
from models.conftest import PagedModel
from token_sampler_reference import uniform

from jaxinfer.grammar import Grammar
from jaxinfer.sampling_params import SamplingParams

LONGEST = 64
"""Tokens of a sequence that `PagedModel` holds."""

LETTERS = "abcdefghijklmQ "
WORDS = ("apple", "apply", "bee", "beetle leg")
FEW_LETTERS = {"logit_bias": dict.fromkeys((65, 66, 67), 40.0)}
PRINTABLE = {"logit_bias": dict.fromkeys(range(32, 127), 60.0)}
KINDS = {
    "greedy": {"temperature": 0.0, "max_tokens": 14, "logprobs": 2},
    "repeats itself": {"temperature": 0.0, "max_tokens": 20, "logprobs": 0, **FEW_LETTERS},
    "seeded": {"seed": 3, "top_k": 40, "max_tokens": 14, "logprobs": 0},
    "seeded letters": {"seed": 9, "max_tokens": 20, "logprobs": 0, **FEW_LETTERS},
    "penalties": {
        "seed": -5,
        "temperature": 0.8,
        "repetition_penalty": 1.02,
        "presence_penalty": 0.9,
        "frequency_penalty": 0.5,
        "logit_bias": {3: -9.0, **dict.fromkeys(range(65, 75), 30.0)},
        "max_tokens": 14,
        "logprobs": 0,
    },
    "siblings": {"seed": 2**63 - 2, "temperature": 1.1, "n": 3, "max_tokens": 10, "logprobs": 0},
    "ends": {"seed": 8, "logit_bias": {EOS: 3.5}, "min_tokens": 2, "max_tokens": 14},
    "stop ids": {"seed": 6, "stop_token_ids": list(range(60, 72)), "max_tokens": 14},
    "stop strings": {"seed": 4, "stop": ["a", "bc", *"KLMNO"], "max_tokens": 14, **PRINTABLE},
    "scored": {"temperature": 0.0, "max_tokens": 6, "logprobs": 1, "prompt_logprobs": 1},
    "scored only": {"max_tokens": 0, "prompt_logprobs": 0},
    "letters of a grammar": {
        "grammar": Grammar("regex", f"[{LETTERS}]{{60}}"),
        "seed": 12,
        "max_tokens": 14,
        "logprobs": 0,
    },
    "words of a grammar": {
        "grammar": Grammar("choice", WORDS),
        "temperature": 0.0,
        "max_tokens": 14,
        "logprobs": 0,
    },
}


def params_of(kind):
    ends = kind == "ends" or "grammar" in KINDS[kind]
    return SamplingParams(**{"ignore_eos": not ends, **KINDS[kind]})


@functools.cache
def full_forward(model_type):
    paged = PagedModel(tiny_model(model_type)[0], num_seqs=1)

    def logits(token_ids):
        paged.kv_lens[0] = 0
        return paged.step({0: list(token_ids)}, num_tokens=LONGEST)[0].astype(np.float64)

    return logits


def _allowed(grammar, text):
    """The bytes, or the end, that may follow a text, by either grammar of `KINDS`."""
    if grammar.kind == "regex":
        return LETTERS.encode()
    words = [word.encode() for word in WORDS]
    return {[*word, EOS][len(text)] for word in words if word.startswith(text)}


def choice_of(logits, params, prompt, ids):
    """The token after `ids` that a setting of `KINDS` chooses, and by how much it is that one."""
    x = logits.copy()
    for token, bias in params.logit_bias.items():
        x[token] += bias
    times = np.bincount(ids, minlength=len(x)) if ids else np.zeros(len(x))
    seen = sorted({*prompt, *ids})
    factor = params.repetition_penalty
    x[seen] = np.where(x[seen] > 0, x[seen] / factor, x[seen] * factor)
    x -= params.frequency_penalty * times + params.presence_penalty * (times > 0)
    if len(ids) < params.min_tokens:
        x[EOS] = -np.inf
    if params.grammar is not None:
        allowed = list(_allowed(params.grammar, bytes(ids)))
        kept = x[allowed]
        x[:] = -np.inf
        x[allowed] = kept
    best = np.sort(x)[::-1]
    if params.is_greedy:
        return int(np.argmax(x)), best[0] - best[1]
    weights = np.exp((x - best[0]) / params.temperature)
    margin = 1.0
    if params.top_k:
        weights[x < best[params.top_k - 1]] = 0.0
        margin = best[params.top_k - 1] - best[params.top_k]
    cdf = np.cumsum(weights) / weights.sum()
    u = uniform(params.seed, len(prompt) + len(ids))
    return int(np.argmax(cdf > u)), min(margin, np.abs(cdf - u).min())
