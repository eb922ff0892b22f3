"""Every family's layers in one call: the same logits as its own modules give."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from models.conftest import PagedModel, load_model, make_context
from models.oracle_cases import token_ids

from jaxinfer.models import load_model_module, model_types
from jaxinfer.nn.attention import Attention
from jaxinfer.quantization import SCHEMES
from kernels.decoder_layers import cpu

pytestmark = pytest.mark.skipif(not cpu.is_available(), reason=str(cpu.unavailable()))

families = pytest.mark.parametrize("model_type", model_types())


def tiny_config(model_type):
    """The family's tiny config, with widths that the C++ products take."""
    return load_model_module(model_type).TINY_HF_CONFIG | {"intermediate_size": 128}


def context_of(scheme="int8", **changes):
    return dataclasses.replace(make_context(), quant=scheme and SCHEMES[scheme], **changes)


def run_steps(paged, ids):
    """Prompts in chunks, a decode beside one, a decode step: the logits of all tokens."""
    logits = []
    for chunks in (
        {0: ids[:9], 1: ids[:4]},
        {0: ids[9:10], 1: ids[4:15]},
        {0: ids[:1], 1: ids[:1]},
    ):
        step = paged.step(chunks, 24)
        logits += [step[seq] for seq in chunks]
    return np.concatenate(logits)


def count_modules(monkeypatch):
    """A list that grows by one for each attention module that is traced."""
    traced = []
    original = Attention.__call__

    def counting(self, *inputs):
        traced.append(self)
        return original(self, *inputs)

    monkeypatch.setattr(Attention, "__call__", counting)
    return traced


@pytest.mark.parametrize(
    ("model_type", "scheme"), [*((name, "int8") for name in model_types()), ("llama", "HQQ4")]
)
def test_the_fused_call_gives_the_modules_logits(monkeypatch, model_type, scheme):
    config = tiny_config(model_type)
    ids = token_ids(config)
    traced = count_modules(monkeypatch)
    fused = run_steps(PagedModel(load_model(config, context_of(scheme)), 2), ids)
    assert traced == []  # else both were the same
    modules = load_model(config, context_of(scheme, attention="xla"))
    separate = run_steps(PagedModel(modules, 2), ids)
    assert traced
    # The same float32 sums in other orders, of at most 128 terms, in 3 layers.
    tolerance = 1e-5 * np.abs(separate).max()
    np.testing.assert_allclose(fused, separate, rtol=0, atol=tolerance)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_bfloat16_weights_round_both_ways_alike(model_type):
    """What is multiplied is rounded to 8 bits in the modules; in the call it may be."""
    config = tiny_config(model_type)
    ids = token_ids(config)
    narrow = {"weight_dtype": np.dtype(ml_dtypes.bfloat16), "precision": None}
    fused, separate = (
        run_steps(PagedModel(load_model(config, context_of(**narrow, attention=name)), 2), ids)
        for name in (None, "xla")
    )
    difference = np.sqrt(np.mean((fused - separate) ** 2))
    assert difference < 0.02 * np.std(separate)


def choose(model, x_dtype=jnp.float32):
    x = jax.ShapeDtypeStruct((8, model.config.hidden_size), x_dtype)
    return model.choose_fused(x, PagedModel(model, 1).kv)


@families
def test_a_quantized_model_is_fused_on_cpus(model_type):
    choice, weights = choose(load_model(tiny_config(model_type), context_of()))
    assert choice.module is cpu
    assert len(weights) == load_model_module(model_type).TINY_HF_CONFIG["num_hidden_layers"]


REFUSED = {
    "a matrix is not quantized": {"scheme": None},
    "rounded activations": {"scheme": "w8a8"},
    "--attention xla": {"attention": "xla"},
    "--matmul reference": {"matmul": "reference"},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_not_fused_says_why(reason):
    model = load_model(tiny_config("llama"), context_of(**REFUSED[reason]))
    with pytest.raises(NotImplementedError, match=reason):
        choose(model)


def test_layers_over_devices_are_not_fused():
    context = dataclasses.replace(make_context(2), quant=SCHEMES["int8"])
    with pytest.raises(NotImplementedError, match="layers are split over devices"):
        choose(load_model(tiny_config("llama"), context))


def test_narrow_activations_are_not_fused():
    with pytest.raises(NotImplementedError, match="x is bfloat16"):
        choose(load_model(tiny_config("llama"), context_of()), jnp.bfloat16)
