"""Two devices give the logits of one, whatever the KV heads; impossible splits are refused."""

import jax.numpy as jnp
import numpy as np
import pytest
from models.conftest import PagedModel, load_model, make_context
from models.oracle_cases import hf_config, token_ids

from jaxinfer.models import load_model_module
from jaxinfer.runner.loader import make_abstract_model


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(hf_config("llama"), id="4/2 heads, odd intermediate and vocabulary sizes"),
        pytest.param(hf_config("llama_rope_parameters"), id="4/1 heads"),
        pytest.param(hf_config("gemma3_text"), id="4/1 heads, tied, soft-capped"),
    ],
)
def test_two_devices_equal_one(config):
    ids = token_ids(config)
    models = [
        PagedModel(load_model(config, make_context(tensor_parallel)), num_seqs=1)
        for tensor_parallel in (1, 2)
    ]
    for chunk, num_tokens in ((ids[:21], 24), (ids[21:22], None)):
        one, two = (model.step({0: chunk}, num_tokens)[0] for model in models)
        np.testing.assert_allclose(two, one, atol=1e-5, rtol=0)
    shards = models[1].kv[0].addressable_shards
    assert {shard.data.shape[2] for shard in shards} == {1}


def test_a_quantized_cache_is_split_with_its_scales():
    config = hf_config("llama")
    ids = token_ids(config)
    exact, one, two = (
        PagedModel(load_model(config, make_context(tensor_parallel)), 1, kv_dtype=kv_dtype)
        for tensor_parallel, kv_dtype in ((1, np.float32), (1, np.int8), (2, np.int8))
    )
    for chunk, num_tokens in ((ids[:21], 24), (ids[21:22], None)):
        expected, *actual = (model.step({0: chunk}, num_tokens)[0] for model in (exact, one, two))
        # Keys and values of 8 bits; over two devices a few may be rounded the other way.
        for logits in actual:
            assert np.sqrt(np.mean((logits - expected) ** 2)) < 0.02 * np.std(expected)
    assert {shard.data.shape[1] for shard in two.kv[0].scales.addressable_shards} == {1}
    assert {shard.data.shape[2] for shard in two.kv[0].values.addressable_shards} == {1}


def test_logits_are_on_every_device():
    model = load_model(hf_config("llama"), make_context(tensor_parallel=2))
    logits = model.logits(jnp.ones((2, 64), jnp.float32))
    assert logits.shape == (2, 99)
    assert logits.is_fully_replicated


def test_a_split_that_does_not_divide_the_heads_is_refused():
    module = load_model_module("llama")
    config = module.Config.from_hf(
        hf_config("llama") | {"num_attention_heads": 9, "num_key_value_heads": 3}
    )
    with pytest.raises(
        ValueError, match=r"tensor_parallel=2 .*num_heads=9: use one of \[1, 3, 9\]"
    ):
        make_abstract_model(module, config, make_context(tensor_parallel=2))
