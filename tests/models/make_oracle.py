"""Writes oracle/<case>.npz: transformers' logits and its last hidden state for every case.

Run with the `[oracle]` extra installed: PYTHONPATH=.:tests python tests/models/make_oracle.py
"""

import json
from functools import partial
from pathlib import Path

import numpy as np
import torch
import transformers
from models.oracle_cases import CASES, hf_config, tensor, token_ids
from transformers.models.gemma3 import modeling_gemma3

ORACLE_DIR = Path(__file__).parent / "oracle"


def oracle_outputs(config):
    """Returns what transformers' model of this `config.json` computes, in float32.

    That is logits [T, V], and the hidden state [D] of the last token after the final norm.
    """
    # A copy: transformers writes into nested dictionaries.
    config = json.loads(json.dumps(config))
    hf = transformers.AutoConfig.for_model(**config)
    hf._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(hf, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = tensor(name, tuple(parameter.shape), config["model_type"])
            parameter.copy_(torch.from_numpy(values))
    eager = modeling_gemma3.eager_attention_forward
    try:
        # transformers reads Gemma 3's attn_logit_softcapping and then does not pass it on.
        cap = config.get("attn_logit_softcapping")
        modeling_gemma3.eager_attention_forward = partial(eager, softcap=cap)
        with torch.no_grad():
            output = model(torch.tensor([token_ids(config)]), output_hidden_states=True)
            return output.logits[0].numpy(), output.hidden_states[-1][0, -1].numpy()
    finally:
        modeling_gemma3.eager_attention_forward = eager


def main():
    """Writes every case's file."""
    ORACLE_DIR.mkdir(exist_ok=True)
    for case in CASES:
        config = hf_config(case)
        logits, hidden = oracle_outputs(config)
        path = ORACLE_DIR / f"{case}.npz"
        np.savez(path, logits=logits, hidden=hidden, config=json.dumps(config))
        print(f"{case}: logits within {np.abs(logits).max():.2f}")


if __name__ == "__main__":
    main()
