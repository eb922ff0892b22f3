"""int8 keys and values on the real models: how far scores move from a float32 cache's."""

import numpy as np
import pytest
from models.conftest import PagedModel
from test_golden import GOLDEN, MODELS

from jaxinfer.checkpoint import open_checkpoint
from jaxinfer.config import EngineConfig
from jaxinfer.model_loading import load_model

MAX_KL = 0.002  # nats per token: measured 0.0003 and 0.0006
MAX_NLL_ERROR = 0.5  # of the worst prompt token: measured 0.19 and 0.15
MEAN_NLL_ERROR = 0.04  # measured 0.016 and 0.021

pytestmark = [pytest.mark.real_model, pytest.mark.slow]


def log_softmax(logits):
    logits = logits.astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("name", MODELS)
def test_int8_keys_and_values_stay_close(request, name):
    checkpoint = open_checkpoint(request.getfixturevalue(f"{name}_path"))
    model, _ = load_model(EngineConfig(exact=True), checkpoint, progress=False)
    prompts = [prompt["ids"] for prompt in GOLDEN[MODELS[name]]["prompts"]]
    rows = dict(enumerate(prompts))
    exact, coded = (
        PagedModel(model, num_seqs=len(prompts), kv_dtype=dtype).step(rows)
        for dtype in (np.float32, np.int8)
    )
    divergences, errors = [], []
    for i, prompt in enumerate(GOLDEN[MODELS[name]]["prompts"]):
        ours, theirs = log_softmax(coded[i]), log_softmax(exact[i])
        divergences.append(np.sum(np.exp(theirs) * (theirs - ours), axis=-1))
        nll = -ours[np.arange(len(prompts[i]) - 1), prompts[i][1:]]
        errors.append(np.abs(nll - np.asarray(prompt["prompt_nll"])))
    divergence, error = np.concatenate(divergences), np.concatenate(errors)
    assert 0 < divergence.mean() <= MAX_KL
    assert error.max() <= MAX_NLL_ERROR
    assert error.mean() <= MEAN_NLL_ERROR
