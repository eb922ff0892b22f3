"""Every tensor accounted for, fused weights in their places, tied heads, and bounded buffers."""

import logging
import weakref

import ml_dtypes
import numpy as np
import pytest
from models.conftest import PagedModel, load_model, make_context
from models.oracle_cases import hf_config, tensor, token_ids

from jaxinfer.models import load_model_module
from jaxinfer.runner.loader import (
    WeightError,
    check_tensors,
    expected_shapes,
    init_random,
    load_weights,
    make_abstract_model,
)

TIED = hf_config("llama_plain")
UNTIED = hf_config("llama")


def make_checkpoint(config, **context):
    """Returns the abstract model, its module and {name: tensor} of a matching checkpoint."""
    module = load_model_module(config["model_type"])
    model = make_abstract_model(module, module.Config.from_hf(config), make_context(**context))
    shapes = expected_shapes(model, module)
    return model, module, {n: tensor(n, s, config["model_type"]) for n, s in shapes.items()}


def logits(model):
    ids = token_ids({"vocab_size": model.config.vocab_size})[:12]
    return PagedModel(model, num_seqs=1).step({0: ids}, num_tokens=16)[0]


def test_fused_rows_are_kv_head_major():
    model, module, tensors = make_checkpoint(TIED)
    load_weights(model, module, tensors.items())
    qkv = np.asarray(model.layers[1].attention.qkv.weight[...]).reshape(2, 4, 16, 64)
    q, k, v = (tensors[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv")
    np.testing.assert_array_equal(qkv[:, :2].reshape(64, 64), q)
    np.testing.assert_array_equal(qkv[:, 2].reshape(32, 64), k)
    np.testing.assert_array_equal(qkv[:, 3].reshape(32, 64), v)


def test_tensor_parallel_repeats_kv_heads_and_pads_with_zeros():
    config = TIED | {"num_key_value_heads": 1, "vocab_size": 99, "intermediate_size": 97}
    model, module, tensors = make_checkpoint(config, tensor_parallel=2)
    load_weights(model, module, tensors.items())
    layer = model.layers[0]
    qkv = np.asarray(layer.attention.qkv.weight[...]).reshape(2, 4, 16, 64)
    for head in range(2):
        np.testing.assert_array_equal(
            qkv[head, 2], tensors["model.layers.0.self_attn.k_proj.weight"]
        )
    gate_up = np.asarray(layer.mlp.gate_up.weight[...]).reshape(2, 2, 49, 64)
    up = tensors["model.layers.0.mlp.up_proj.weight"]
    np.testing.assert_array_equal(gate_up[:, 1].reshape(98, 64)[:97], up)
    assert not gate_up[1, :, 48].any()
    down = np.asarray(layer.mlp.down.weight[...])
    assert down.shape == (64, 98)
    assert not down[:, 97].any()
    embedding = model.embedding.weight[...]
    assert embedding.shape == (100, 64)
    assert {shard.data.shape for shard in embedding.addressable_shards} == {(50, 64)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"lacks model\.layers\.1\.mlp\.up"),
        (lambda t: t.pop("lm_head.weight"), r"lacks lm_head\.weight"),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_norm.weight": np.ones(32)}),
            r"has no model\.layers\.0\.self_attn\.q_norm\.weight",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.k_proj.weight": np.ones((64, 63))}),
            r"k_proj\.weight has shape \(64, 63\); config\.json asks for \(64, 64\)",
        ),
        (
            lambda t: [t.pop(n) for n in list(t) if "layers.1" in n],
            r"and \d+ more",
        ),
    ],
)
def test_wrong_checkpoints_are_refused_with_names(change, message):
    model, module, tensors = make_checkpoint(UNTIED)
    change(tensors)
    with pytest.raises(WeightError, match=message):
        load_weights(model, module, tensors.items())
    with pytest.raises(WeightError, match=message):
        check_tensors(model, module, {name: value.shape for name, value in tensors.items()})


def test_a_tensor_that_comes_twice_is_refused():
    model, module, tensors = make_checkpoint(UNTIED)
    with pytest.raises(WeightError, match=r"model\.norm\.weight is in the checkpoint twice"):
        load_weights(model, module, [*tensors.items(), ("model.norm.weight", np.ones(64))])


def test_biases_the_config_does_not_ask_for_are_refused():
    _, _, tensors = make_checkpoint(UNTIED)
    model, module, _ = make_checkpoint(UNTIED | {"attention_bias": False})
    with pytest.raises(WeightError, match=r"has no model\.layers\.0\.self_attn\.k_proj\.bias"):
        load_weights(model, module, tensors.items())


def test_ignored_tensors_are_not_surplus():
    model, module, tensors = make_checkpoint(TIED)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8)
    check_tensors(model, module, {name: value.shape for name, value in tensors.items()})
    load_weights(model, module, tensors.items())


@pytest.mark.parametrize("tie", [True, False, None])
@pytest.mark.parametrize("head", ["equal", "different", "absent"])
def test_tied_and_untied_heads(tie, head, caplog):
    config = {key: value for key, value in TIED.items() if key != "tie_word_embeddings"}
    config |= {} if tie is None else {"tie_word_embeddings": tie}
    model, module, tensors = make_checkpoint(config)
    embedding = tensors["model.embed_tokens.weight"]
    used = embedding[::-1] if head == "different" else embedding
    tensors.pop("lm_head.weight", None)
    if head != "absent":
        tensors = {"lm_head.weight": used} | tensors
    if head == "absent" and not tie:  # absent from a Llama config.json means untied
        with pytest.raises(WeightError, match=r"lacks lm_head\.weight"):
            load_weights(model, module, tensors.items())
        return
    with caplog.at_level(logging.WARNING):
        load_weights(model, module, tensors.items())
    assert ("ties the head" in caplog.text) == (tie is True and head == "different")
    np.testing.assert_array_equal(model.head.weight[...], embedding if tie else used)
    assert (model.head.weight is model.embedding.weight) == (tie is True)


def test_weights_are_converted_and_norms_stay_float32():
    config = hf_config("gemma3_text")
    model, module, tensors = make_checkpoint(config, dtype=ml_dtypes.bfloat16)
    tensors = {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors.items()}
    load_weights(model, module, tensors.items())
    assert model.layers[0].mlp.down.weight.dtype == ml_dtypes.bfloat16
    stored = tensors["model.norm.weight"].astype(np.float32)
    np.testing.assert_array_equal(model.norm.weight[...], 1 + stored)


def test_no_tensor_is_kept_after_it_was_placed():
    model, module, tensors = make_checkpoint(TIED)
    alive = []

    def stream():
        seen = []
        for name, value in tensors.items():
            copy = value.copy()
            seen.append(weakref.ref(copy))
            yield name, copy
            del copy
            alive.append(sum(ref() is not None for ref in seen))

    load_weights(model, module, stream())
    assert max(alive) == 1


def test_random_weights_do_not_depend_on_the_mesh():
    config = TIED | {"num_key_value_heads": 1}
    one, _, _ = make_checkpoint(config)
    two, _, _ = make_checkpoint(config, tensor_parallel=2)
    init_random(one, seed=3)
    init_random(two, seed=3)
    np.testing.assert_allclose(logits(one), logits(two), atol=1e-5)
    other, _, _ = make_checkpoint(config)
    init_random(other, seed=4)
    assert np.abs(logits(one) - logits(other)).max() > 0.1


def test_loading_gives_what_the_parity_tests_load():
    model, module, tensors = make_checkpoint(UNTIED)
    load_weights(model, module, reversed(tensors.items()))
    np.testing.assert_array_equal(logits(model), logits(load_model(UNTIED, make_context())))
