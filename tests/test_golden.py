"""Two real models against transformers in float32: ids, scores, greedy text, chat renderings.

`golden/greedy.json` was made by transformers from the same GGUF files. With `--exact` everything
must agree; the default dtypes are judged by their divergence from it.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from models.conftest import PagedModel

from jaxinfer.checkpoint import open_checkpoint
from jaxinfer.config import EngineConfig
from jaxinfer.llm import LLM
from jaxinfer.model_loading import load_model

GOLDEN = json.loads((Path(__file__).parent / "golden" / "greedy.json").read_text())
MODELS = {"smollm2": "smollm2-135m-instruct-q4_1", "gemma3": "gemma-3-270m-q4_k_m"}
MAX_ERROR = 2e-3  # nats
MIN_GAP = 1e-2  # logits closer than this may be taken in either order
MAX_KL = 0.01  # nats per token, default dtypes against --exact

pytestmark = [pytest.mark.real_model, pytest.mark.slow]


@pytest.fixture(scope="module", params=MODELS)
def case(request):
    """(exact engine, golden record) of one model; small buckets keep compilation short."""
    path = request.getfixturevalue(f"{request.param}_path")
    with LLM(
        str(path), exact=True, max_model_len=128, max_num_seqs=2, max_num_batched_tokens=64
    ) as llm:
        yield llm, GOLDEN[MODELS[request.param]]


def generate(llm, ids, greedy, **sampling):
    [output] = llm.generate(
        [ids],
        temperature=0.0,
        max_tokens=len(greedy),
        skip_special_tokens=False,
        progress=False,
        **sampling,
    )
    return output


def assert_greedy(choice, expected):
    """Equal ids up to the first place where the two best tokens are closer than MIN_GAP."""
    for ours, theirs, entry in zip(choice.token_ids, expected, choice.logprobs, strict=False):
        if ours != theirs:
            (_, best), (_, second) = entry.top
            assert best - second < MIN_GAP
            return
    assert choice.token_ids == expected


def test_token_ids(case):
    llm, golden = case
    for prompt in golden["prompts"]:
        assert llm.tokenizer.encode(prompt["prompt"]) == prompt["ids"]


def test_next_token_logprobs_and_prompt_nll(case):
    llm, golden = case
    for prompt in golden["prompts"]:
        output = generate(llm, prompt["ids"], [0], logprobs=20, prompt_logprobs=0)
        top = dict(output.outputs[0].logprobs[0].top)
        ours = [top[token_id] for token_id in prompt["top_ids"]]
        assert ours == pytest.approx(prompt["top_logprobs"], abs=MAX_ERROR)
        nll = [-entry.logprob for entry in output.prompt_logprobs[1:]]
        assert nll == pytest.approx(prompt["prompt_nll"], abs=MAX_ERROR)


def test_greedy_continuations(case):
    llm, golden = case
    for prompt in golden["prompts"]:
        [choice] = generate(llm, prompt["ids"], prompt["greedy"], logprobs=2).outputs
        assert_greedy(choice, prompt["greedy"])
        # The golden text holds the text of the end-of-sequence token, ours never does.
        if choice.finish_reason == "length" and choice.token_ids == prompt["greedy"]:
            assert choice.text == prompt["text"]


def test_chat(case):
    llm, golden = case
    for chat in golden.get("chat", []):
        rendered = llm.engine.chat_template.render(chat["messages"])
        assert rendered == chat["rendered"]
        assert llm.tokenizer.encode(rendered, add_special_tokens=False) == chat["ids"]
        [choice] = generate(llm, chat["ids"], chat["greedy"], logprobs=2).outputs
        assert_greedy(choice, chat["greedy"])


@pytest.mark.parametrize("name", MODELS)
def test_default_dtypes_stay_close_to_exact(request, name):
    checkpoint = open_checkpoint(request.getfixturevalue(f"{name}_path"))
    prompts = [prompt["ids"] for prompt in GOLDEN[MODELS[name]]["prompts"]]
    exact, default = (
        all_logprobs(load_model(config, checkpoint, progress=False)[0], prompts)
        for config in (EngineConfig(exact=True), EngineConfig())
    )
    divergence = np.sum(np.exp(exact) * (exact - default), axis=-1)
    assert divergence.mean() <= MAX_KL
    assert divergence.min() >= -1e-5, "a divergence is never negative"


def all_logprobs(model, prompts):
    """Log-probabilities of the whole vocabulary at every position, [tokens, V]."""
    by_prompt = PagedModel(model, num_seqs=len(prompts)).step(dict(enumerate(prompts)))
    logits = np.concatenate([by_prompt[i] for i in range(len(prompts))]).astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
