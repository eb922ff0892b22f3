"""Models whose matrices stay quantized: the same results as their dequantized weights give."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.conftest import PagedModel, make_context
from models.oracle_cases import hf_config, tensor, token_ids

from jaxinfer.models import load_model_module
from jaxinfer.nn.linear import Linear
from jaxinfer.nn.weights import Part, RowLayout
from jaxinfer.quantization import SCHEMES, fit_format, width_multiple
from jaxinfer.runner.loader import (
    expected_shapes,
    init_random,
    load_weights,
    make_abstract_model,
)
from jaxinfer.runner.placement import put_weight
from kernels.quantized_matmul import FORMATS, QTensor, dequantize


def quantized(context, name):
    return dataclasses.replace(context, quant=SCHEMES[name])


def load(config, context):
    module = load_model_module(config["model_type"])
    model = make_abstract_model(module, module.Config.from_hf(config), context)
    shapes = expected_shapes(model, module)
    values = ((name, tensor(name, shape, "llama")) for name, shape in shapes.items())
    load_weights(model, module, values)
    return model


def dequantized_copy(model, config, context):
    """The same model with float32 matrices that hold what the codes stand for."""
    module = load_model_module(config["model_type"])
    copy = make_abstract_model(module, module.Config.from_hf(config), context)
    init_random(copy, 0)
    for layer, other in zip(model.layers, copy.layers, strict=True):
        for block in ("attention", "mlp"):
            for name, linear in vars(getattr(layer, block)).items():
                if isinstance(linear, Linear):
                    target = getattr(getattr(other, block), name)
                    weight = dequantize(linear.weight.get_value())
                    if target.weight.get_value().shape != weight.shape:
                        weight = unpad(weight, block, name, config["intermediate_size"])
                    target.weight.set_value(weight)
                    if linear.bias is not None:
                        bias = linear.bias.get_value()
                        if target.bias.get_value().shape != bias.shape:
                            bias = unpad(bias[:, None], block, name, config["intermediate_size"])
                            bias = bias[:, 0]
                        target.bias.set_value(bias)
        for name in ("input_norm", "post_attention_norm"):
            getattr(other, name).weight.set_value(getattr(layer, name).weight.get_value())
    copy.norm.weight.set_value(model.norm.weight.get_value())
    copy.embedding.weight.set_value(model.embedding.weight.get_value())
    if not model.config.tie_word_embeddings:
        head = model.head.weight.get_value()
        copy.head.weight.set_value(dequantize(head) if isinstance(head, QTensor) else head)
    return copy


def unpad(weight, block, name, features):
    """The MLP's padding rows and columns are zeros: without them."""
    assert (block, name) in {("mlp", "gate_up"), ("mlp", "down")}
    if name == "down":
        assert not np.asarray(weight[:, features:]).any()
        return weight[:, :features]
    halves = weight.reshape(2, -1, weight.shape[1])
    assert not np.asarray(halves[:, features:]).any()
    return halves[:, :features].reshape(2 * features, -1)


@pytest.mark.parametrize("name", ["int8", "nf4"])
def test_a_quantized_model_is_its_dequantized_weights(name):
    config, context = hf_config("llama"), make_context()
    model = load(config, quantized(context, name))
    assert isinstance(model.layers[0].attention.qkv.weight.get_value(), QTensor)
    copy = dequantized_copy(model, config, context)
    ids = token_ids(config)[:21]
    result, wanted = (PagedModel(m, num_seqs=1).step({0: ids}, 24)[0] for m in (model, copy))
    np.testing.assert_allclose(result, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["int4", "fp8", "w8a8", "Q8_0", "HQQ4"])
def test_quantizing_changes_the_model_a_little(name):
    config, context = hf_config("llama"), make_context()
    ids = token_ids(config)[:21]
    exact, rounded = (
        PagedModel(load(config, c), num_seqs=1).step({0: ids}, 24)[0]
        for c in (context, quantized(context, name))
    )
    difference = np.abs(rounded - exact).max()
    assert 0 < difference < 0.5 * np.abs(exact).max()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_two_devices_equal_one(name):
    config = hf_config("llama")
    ids = token_ids(config)[:21]
    # Widths whose halves hold whole groups: groups hold the same weights on one device and on two.
    config = config | {"intermediate_size": 256, "head_dim": 64}
    one, two = (
        PagedModel(load(config, quantized(make_context(devices), name)), num_seqs=1).step(
            {0: ids}, 24
        )[0]
        for devices in (1, 2)
    )
    np.testing.assert_allclose(two, one, atol=2e-4, rtol=0)


@pytest.mark.parametrize("sharding", ["column", "row", None])
@pytest.mark.parametrize("name", FORMATS)
def test_a_split_matrix_gives_the_whole_result(name, sharding):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((3, 256)), jnp.float32)
    weight = rng.standard_normal((32, 256)).astype(np.float32)
    results = []
    for devices in (1, 2):
        context = make_context(devices)
        layout = RowLayout(2, 16, (Part(32),))
        linear = Linear(256, layout, context, sharding=sharding, fmt=FORMATS[name])
        put_weight(linear.weight, weight, context)
        results.append(np.asarray(jax.jit(linear)(x)))
    bound = 0.02 if name == "w8a8" and sharding == "row" else 1e-4  # x's rows rounded by halves
    np.testing.assert_allclose(results[1], results[0], atol=bound * np.abs(results[0]).max())


def test_groups_shrink_to_fit_and_impossible_widths_are_refused():
    assert fit_format(FORMATS["int4"], 576, 1, "gpu").group_size == 64
    assert fit_format(FORMATS["int4"], 4096, 4, "gpu").group_size == 128
    assert fit_format(FORMATS["int8"], 97, 1, "gpu").group_size is None
    with pytest.raises(ValueError, match="97 input features"):
        fit_format(FORMATS["int4"], 97, 1, "cpu")
    with pytest.raises(ValueError, match="multiple of 64"):
        fit_format(FORMATS["int4-g32"], 96, 1, "gpu")
    with pytest.raises(ValueError, match="2 devices"):
        fit_format(FORMATS["int8"], 97, 2, "cpu")
    assert [width_multiple(f) for f in (None, FORMATS["int8"], FORMATS["int4"])] == [1, 128, 128]


@pytest.mark.parametrize(("name", "code"), [("int4", "int8"), ("int8", None)])
def test_embeddings_and_tied_heads_are_a_tier_higher(name, code):
    config = hf_config("llama") | {"tie_word_embeddings": True}
    model = load(config, quantized(make_context(), name))
    assert model.head.weight is model.embedding.weight
    value = model.embedding.weight.get_value()
    if code is None:
        assert value.dtype == jnp.float32
    else:
        assert value.code == code
