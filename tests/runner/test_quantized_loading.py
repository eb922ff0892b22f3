"""Checkpoints that are quantized: nothing is rounded again, whatever is fused, split or padded."""

import dataclasses

import jax
import ml_dtypes
import numpy as np
import pytest
from models.conftest import PagedModel, make_context
from models.oracle_cases import hf_config, tensor, token_ids

from jaxinfer.models import load_model_module
from jaxinfer.nn.matrix import MixedMatrix
from jaxinfer.quantization import SCHEMES
from jaxinfer.quantized_array import NIBBLE_CHUNK, QuantizedArray, abstract_array, pack_codes
from jaxinfer.runner import placement
from jaxinfer.runner.loader import (
    WeightError,
    abstract_weights,
    bytes_to_load,
    expected_shapes,
    load_weights,
    make_abstract_model,
    parameters,
)
from jaxinfer.runner.placement import PendingParameter
from kernels.quantized_matmul import LAYOUTS, QTensor, cpu, dequantize, prepare
from kernels.quantized_matmul.format import NF4, Layout
from kernels.quantized_matmul.partition import local_part

CONFIG = hf_config("llama") | {
    "intermediate_size": 128,
    "attention_bias": False,
    "mlp_bias": False,
    "vocab_size": 100,
}


def q4_1(weight):
    """Codes of 0 to 15 with an offset, groups of 32, halves."""
    groups = weight.reshape(len(weight), -1, 32)
    offset = groups.min(-1).astype(np.float16)
    scale = ((groups.max(-1) - offset) / 15).astype(np.float16)
    codes = np.clip(np.rint((groups - offset[..., None]) / scale[..., None]), 0, 15)
    packed = pack_codes(codes.reshape(weight.shape).astype(np.uint8))
    return QuantizedArray(packed, scale, offset, code="uint4", group_size=32)


def q6_k(weight):
    """Codes of 8 bits, groups of 16, float32 scales."""
    groups = weight.reshape(len(weight), -1, 16)
    scale = np.abs(groups).max(-1) / np.float32(31)
    codes = np.rint(groups / scale[..., None]).astype(np.int8).reshape(weight.shape)
    return QuantizedArray(codes, scale, group_size=16)


def act_order(weight):
    """As q6_k, of permuted columns."""
    perm = np.random.default_rng(3).permutation(weight.shape[1]).astype(np.int32)
    return dataclasses.replace(q6_k(np.ascontiguousarray(weight[:, perm])), perm=perm)


def whole_row(weight):
    """One scale a row."""
    scale = np.abs(weight).max(1, keepdims=True) / np.float32(127)
    codes = np.rint(weight / scale).astype(np.int8)
    return QuantizedArray(codes, scale, group_size=weight.shape[1])


def nf4(weight):
    """Codes that stand for the values of a table."""
    codes = np.random.default_rng(4).integers(0, 16, weight.shape, np.uint8)
    scale = np.abs(weight.reshape(len(weight), -1, 32)).max(-1)
    table = np.array(NF4, np.float32)
    return QuantizedArray(pack_codes(codes), scale, codebook=table, code="uint4", group_size=32)


def make_tensors(config, formats):
    """The checkpoint's tensors; those whose name ends as one of `formats` quantized."""
    module = load_model_module("llama")
    model = make_abstract_model(module, module.Config.from_hf(config), make_context())
    tensors = {}
    for name, shape in expected_shapes(model, module).items():
        value = tensor(name, shape, "llama")
        chosen = [make for end, make in formats.items() if name.endswith(f"{end}.weight")]
        tensors[name] = chosen[0](value) if chosen else value
    return tensors


def load(config, tensors, **context):
    module = load_model_module("llama")
    whole = dataclasses.replace(make_context(context.pop("tensor_parallel", 1)), **context)
    model = make_abstract_model(module, module.Config.from_hf(config), whole)
    load_weights(model, module, tensors.items())
    return model


def as_floats(tensors):
    return {
        name: value.dequantize() if isinstance(value, QuantizedArray) else value
        for name, value in tensors.items()
    }


def logits(model):
    return PagedModel(model, num_seqs=1).step({0: token_ids(CONFIG)[:9]}, 16)[0]


MIXED = {"q_proj": q4_1, "k_proj": q4_1, "v_proj": q6_k, "gate_proj": q4_1, "down_proj": q6_k}
ALL = MIXED | {"up_proj": q4_1, "o_proj": q4_1, "embed_tokens": q4_1}


@pytest.mark.parametrize(
    ("formats", "changes", "devices"),
    [
        (ALL, {"tie_word_embeddings": True}, 1),
        (ALL, {"num_key_value_heads": 1}, 2),  # a KV head repeated, MLP padded, rows split
        ({"q_proj": act_order, "down_proj": act_order, "up_proj": whole_row}, {}, 1),
    ],
)
def test_a_quantized_checkpoint_is_its_dequantized_weights(formats, changes, devices):
    config = CONFIG | changes
    tensors = make_tensors(config, formats)
    exact = logits(load(config, as_floats(tensors)))
    model = load(config, tensors, tensor_parallel=devices, stored_group_size=32)
    np.testing.assert_allclose(logits(model), exact, atol=2e-5 * np.abs(exact).max(), rtol=0)


def expected(config, tensors, **context):
    """The abstract model of a checkpoint with these tensors."""
    module = load_model_module("llama")
    whole = dataclasses.replace(make_context(context.pop("tensor_parallel", 1)), **context)
    model = make_abstract_model(module, module.Config.from_hf(config), whole)
    codes = {n: abstract(t) if isinstance(t, QuantizedArray) else None for n, t in tensors.items()}
    abstract_weights(model, module, codes)
    return model


def abstract(weight):
    """What is known of a matrix before it is read; no values but a codebook's."""
    return abstract_array(
        weight.shape,
        weight.code,
        weight.group_size,
        weight.scale.dtype,
        has_offset=weight.offset is not None,
        codebook=weight.codebook,
        has_perm=weight.perm is not None,
        activations=weight.activations,
    )


def structs(model):
    """Dtype, shape and sharding of every array, and all static fields."""
    values = {path: param.get_value() for path, param in parameters(model)}
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), values
    )


LOADED = {
    "all kinds": (ALL, {"tie_word_embeddings": True}, {}),
    "split": (ALL, {"num_key_value_heads": 1}, {"tensor_parallel": 2}),
    "padded": (ALL, {"vocab_size": 99, "intermediate_size": 96}, {"tensor_parallel": 2}),
    "some floats": ({"k_proj": q4_1, "gate_proj": whole_row}, {}, {}),
    "bfloat16": ({"k_proj": q4_1}, {}, {"weight_dtype": np.dtype(ml_dtypes.bfloat16)}),
    "act-order": ({"down_proj": act_order, "o_proj": act_order}, {}, {}),
    "layers unlike": ({"0.mlp.down_proj": q4_1, "1.mlp.down_proj": nf4}, {}, {}),
    "nf4": ({"up_proj": nf4, "gate_proj": nf4}, {}, {}),
    "gpu": (ALL, {}, {"platform": "gpu"}),
    "tpu": (ALL, {}, {"platform": "tpu"}),
    "rounded at load": (ALL, {}, {"quant": SCHEMES["int8"]}),
    "as floats": (ALL, {}, {"keeps_quantized": False}),
}


@pytest.mark.parametrize("name", LOADED)
def test_what_will_be_loaded_is_known_before(name):
    formats, changes, context = LOADED[name]
    context = {"stored_group_size": 32} | context
    config = CONFIG | changes
    tensors = make_tensors(config, formats)
    model = expected(config, tensors, **context)
    before = structs(model)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(before))
    num_bytes = bytes_to_load(model)
    # The same model is filled, as an engine does that was compiled for it.
    load_weights(model, load_model_module("llama"), tensors.items())
    after = structs(model)
    assert jax.tree.structure(after) == jax.tree.structure(before)
    assert jax.tree.leaves(after) == jax.tree.leaves(before)
    assert bytes_to_load(model) == 0
    leaves = jax.tree.leaves([param.get_value() for _, param in parameters(model)])
    shards = [shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards]
    assert num_bytes == sum(shards)


def test_splits_are_refused_before_anything_is_read():
    tensors = make_tensors(CONFIG, {"o_proj": whole_row, "down_proj": act_order})
    with pytest.raises(WeightError, match=r"mlp\.down.*act-order.*2 devices"):
        expected(CONFIG, tensors, tensor_parallel=2)


def test_neighbours_of_one_format_become_one_matrix():
    model = load(CONFIG, make_tensors(CONFIG, ALL))
    layer = model.layers[0]
    qkv, gate_up = (m.weight.get_value() for m in (layer.attention.qkv, layer.mlp.gate_up))
    assert isinstance(qkv, MixedMatrix)
    assert [piece.code for piece in qkv.pieces] == ["uint4", "int8"]
    assert isinstance(gate_up, QTensor)
    assert gate_up.scale.dtype == np.float16
    assert gate_up.layout == cpu.best_layout(gate_up)
    table = model.embedding.weight.get_value()
    assert isinstance(table, QTensor)
    assert table.num_bytes == 100 * 64 // 2 + 2 * 2 * 100 * 64 // 32


def test_host_tensors_are_laid_out_as_the_native_kernel_reads_them():
    assert LAYOUTS["cpu"] == Layout(nibble_chunk=NIBBLE_CHUNK)
    model = load(CONFIG, make_tensors(CONFIG, ALL))
    for _, param in parameters(model):
        for leaf in jax.tree.leaves(param.get_value(), is_leaf=lambda x: isinstance(x, QTensor)):
            assert not isinstance(leaf, QTensor) or leaf.layout == cpu.best_layout(leaf)


@pytest.mark.parametrize(
    ("make", "five_bits"), [(q4_1, False), (q6_k, False), (q6_k, True)], ids=["4", "8", "5"]
)
def test_codes_are_laid_out_for_this_cpu_a_few_rows_at_a_time(make, five_bits, monkeypatch):
    layout = dataclasses.replace(LAYOUTS["cpu"], row_block=16, five_bits=five_bits)
    weight = make(tensor("w", (80, 64), "llama"))
    if five_bits:
        weight.qvalue[:] //= 2
    whole = QTensor(
        weight.qvalue,
        weight.scale,
        weight.offset,
        code=weight.code,
        group_size=weight.group_size,
        fits_five_bits=five_bits,
        layout=LAYOUTS["cpu"],
    )
    expected = jax.tree.map(np.array, prepare(whole, layout))
    monkeypatch.setattr(placement.cpu, "best_layout", lambda w: layout)
    monkeypatch.setattr(placement, "_WEIGHTS_AT_ONCE", 32 * 64)
    weight.scale.flags.writeable = False  # as a view of a file
    found = placement._in_best_layout(whole)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert all(array.ctypes.data % 64 == 0 for array in jax.tree.leaves(found))


def test_pieces_of_a_filled_model_are_replaced_when_it_is_loaded_again():
    tensors = make_tensors(CONFIG, ALL)
    module = load_model_module("llama")
    model = load(CONFIG, tensors)
    load_weights(model, module, as_floats(tensors).items())
    assert isinstance(model.layers[0].attention.qkv.weight.get_value(), jax.Array)


def test_where_nothing_multiplies_codes_they_become_floats():
    tensors = make_tensors(CONFIG, ALL)
    model = load(CONFIG, tensors, keeps_quantized=False)
    weight = model.layers[0].mlp.down.weight.get_value()
    np.testing.assert_array_equal(
        weight, tensors["model.layers.0.mlp.down_proj.weight"].dequantize()
    )


def test_splits_that_would_cut_a_group_are_refused():
    formats = {"o_proj": whole_row, "down_proj": lambda w: act_order(w)}
    with pytest.raises(WeightError, match=r"down_proj.*act-order.*2 devices"):
        load(CONFIG, make_tensors(CONFIG, formats), tensor_parallel=2)
    config = CONFIG | {"intermediate_size": 96}
    with pytest.raises(WeightError, match=r"down_proj.*96 columns.*cannot be"):
        load(config, make_tensors(config, {"down_proj": q4_1}), tensor_parallel=2)


def test_padding_stays_zero_in_every_format():
    context = dataclasses.replace(make_context(2), stored_group_size=32)
    module = load_model_module("llama")
    config = CONFIG | {"intermediate_size": 96, "vocab_size": 99}
    model = make_abstract_model(module, module.Config.from_hf(config), context)
    for param, shape in (
        (model.layers[0].mlp.down.weight, (64, 96)),
        (model.embedding.weight, (99, 64)),
    ):
        pending = PendingParameter(param, context)
        weight = tensor("w", shape, "llama")
        pending.place(0, q4_1(weight))
        pending.finish()
        whole = np.asarray(dequantize(local_part(param.get_value())))
        rows, columns = shape
        np.testing.assert_array_equal(whole[:rows, :columns], q4_1(weight).dequantize())
        assert not whole[rows:].any()
        assert not whole[:, columns:].any()


def test_biases_that_the_model_has_not_must_be_zero():
    tensors = make_tensors(CONFIG, {})
    name = "model.layers.0.self_attn.o_proj.bias"
    load(CONFIG, tensors | {name: np.zeros(64, np.float16)})
    with pytest.raises(WeightError, match=r"has no .*o_proj\.bias"):
        load(CONFIG, tensors | {name: np.ones(64, np.float16)})
