"""Whatever file lies in jaxinfer/models works: found by name, loadable, and equal to itself."""

import jax
import ml_dtypes
import numpy as np
import pytest
from models.conftest import PagedModel, load_model, make_context
from models.oracle_cases import token_ids

from jaxinfer import models
from jaxinfer.models import load_model_module, model_types
from jaxinfer.nn.attention import Attention
from jaxinfer.runner.loader import expected_shapes, init_random, make_abstract_model

LLAMA_3_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "attention_bias": False,
    "mlp_bias": False,
}

families = pytest.mark.parametrize("model_type", model_types())


def abstract(module, hf_config, context=None):
    config = module.Config.from_hf(hf_config)
    return make_abstract_model(module, config, context or make_context())


def test_the_families_of_this_release_are_found():
    assert {"gemma3_text", "llama", "mistral", "qwen2", "qwen3"} <= set(model_types())


@pytest.mark.parametrize("name", ["gpt2", "_huggingface", "../llama", ""])
def test_an_unknown_family_is_refused_with_the_known_ones(name):
    with pytest.raises(ValueError, match=r"not supported; supported: .*llama, mistral"):
        load_model_module(name)


def test_a_broken_family_file_shows_its_own_error(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("import a_module_that_is_not_there")
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(tmp_path)])
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        load_model_module("broken")


@families
def test_weight_map_and_parameters_cover_each_other(model_type):
    module = load_model_module(model_type)
    tied = module.TINY_HF_CONFIG | {"tie_word_embeddings": False}
    shapes = expected_shapes(abstract(module, tied), module)
    layer_names = [
        name.replace("{i}", "0") for weight in module.WEIGHT_MAP.values() for name in weight.names
    ]
    assert len(set(layer_names)) == len(layer_names)
    assert set(layer_names) == {name for name in shapes if "layers." not in name or ".0." in name}


@families
def test_every_key_of_the_tiny_config_is_required_or_optional_on_purpose(model_type):
    module = load_model_module(model_type)
    optional = {
        "model_type",
        "head_dim",
        "num_key_value_heads",
        "rope_theta",
        "rope_scaling",
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
        "use_sliding_window",
        "attn_logit_softcapping",
        "final_logit_softcapping",
    }
    for key in module.TINY_HF_CONFIG.keys() - optional:
        config = {name: value for name, value in module.TINY_HF_CONFIG.items() if name != key}
        with pytest.raises(ValueError, match=f"'{key}' is missing"):
            module.Config.from_hf(config)


@families
def test_kv_groups_partition_the_layers(model_type):
    module = load_model_module(model_type)
    config = module.Config.from_hf(module.TINY_HF_CONFIG)
    groups = module.kv_groups(config)
    assert sorted(i for group in groups for i in group.layers) == list(range(config.num_layers))
    assert len({group.window for group in groups}) == len(groups)
    for group in groups:
        assert {config.windows[i] for i in group.layers} == {group.window}


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [(name, ml_dtypes.bfloat16) for name in model_types()] + [("llama", np.float16)],
)
def test_narrow_dtypes_stay_near_float32(model_type, dtype):
    config = load_model_module(model_type).TINY_HF_CONFIG
    ids = token_ids(config)
    wide = PagedModel(load_model(config, make_context()), 1).step({0: ids}, 48)[0]
    paged = PagedModel(load_model(config, make_context(dtype=dtype)), 1, kv_dtype=dtype)
    narrow = np.concatenate([paged.step({0: ids[:39]}, 48)[0], paged.step({0: ids[39:]})[0]])
    assert narrow.dtype == np.float32
    # A few roundings to 8 (bfloat16) or 11 bits in each layer.
    bound = 0.1 if dtype == ml_dtypes.bfloat16 else 0.02
    assert np.sqrt(np.mean((narrow - wide) ** 2)) < bound * np.std(wide)


@families
def test_padding_changes_nothing(model_type):
    config = load_model_module(model_type).TINY_HF_CONFIG
    model = load_model(config, make_context())
    ids = token_ids(config)[:10]
    tight = PagedModel(model, num_seqs=1, num_padding_rows=0).step({0: ids}, num_tokens=10)[0]
    loose = PagedModel(model, num_seqs=2, num_padding_rows=3).step({1: ids}, num_tokens=30)[1]
    np.testing.assert_allclose(loose, tight, atol=1e-5, rtol=0)


@families
def test_random_weights_give_finite_logits_of_the_vocabulary(model_type):
    module = load_model_module(model_type)
    model = abstract(module, module.TINY_HF_CONFIG)
    init_random(model, seed=0)
    logits = PagedModel(model, num_seqs=1).step({0: [1, 2, 3]})[0]
    assert logits.shape == (3, model.config.vocab_size)
    assert np.isfinite(logits).all()


def test_a_full_size_model_is_built_without_memory():
    module = load_model_module("llama")
    context = make_context(2, ml_dtypes.bfloat16)
    model = abstract(module, module.TINY_HF_CONFIG | LLAMA_3_8B, context)
    leaves = jax.tree.leaves(model)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert sum(leaf.size for leaf in leaves) == 8_030_261_248
    assert model.layers[0].attention.qkv.weight.shape == (8 * (4 + 2) * 128, 4096)
    assert len(expected_shapes(model, module)) == 291


def test_equal_layers_are_traced_once(monkeypatch):
    config = load_model_module("gemma3_text").TINY_HF_CONFIG | {"num_hidden_layers": 8}
    model = PagedModel(load_model(config, make_context()), num_seqs=1)
    traced = []
    original = Attention.__call__

    def counted(self, *inputs):
        traced.append(self.window)
        return original(self, *inputs)

    monkeypatch.setattr(Attention, "__call__", counted)
    model.step({0: [1, 2]}, num_tokens=29)  # a size no other test has traced these layers with
    assert traced == [8, None]
