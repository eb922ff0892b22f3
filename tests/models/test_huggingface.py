"""Config keys: both spellings of the same rope, nulls, wrong types, and what is refused by name."""

import pytest
from models.oracle_cases import NEW_STYLE_GEMMA_ROPE, hf_config

from jaxinfer.models import gemma3_text, llama, mistral, qwen2, qwen3
from jaxinfer.nn.rotary import LinearScaling, Llama3Scaling

LLAMA3 = llama.TINY_HF_CONFIG["rope_scaling"]


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


def test_old_and_new_rope_spellings_agree():
    old = llama.Config.from_hf(llama.TINY_HF_CONFIG)
    new_style = without(llama.TINY_HF_CONFIG, "rope_theta", "rope_scaling")
    new = llama.Config.from_hf(new_style | {"rope_parameters": {"rope_theta": 10000.0, **LLAMA3}})
    assert new == old
    assert old.rotaries[0].scaling == Llama3Scaling(8.0, 1.0, 4.0, 64)


def test_gemma_ropes_by_layer_type():
    config = gemma3_text.Config.from_hf(hf_config("gemma3_text_rope_parameters"))
    assert config.windows == (None, 8, 8)
    assert [rotary.theta for rotary in config.rotaries] == [9000.0, 500.0, 500.0]
    assert config.rotaries[0].scaling == LinearScaling(2.0)
    assert config.rotaries[1].scaling is None
    with pytest.raises(ValueError, match="'full_attention' is missing"):
        gemma3_text.Config.from_hf(
            hf_config("gemma3_text_rope_parameters")
            | {"rope_parameters": without(NEW_STYLE_GEMMA_ROPE, "full_attention")}
        )


def test_gemma_scales_only_the_global_layers():
    config = gemma3_text.Config.from_hf(gemma3_text.TINY_HF_CONFIG)
    assert config.windows == (8, 8, None)
    assert [r.theta for r in config.rotaries] == [10000.0, 10000.0, 1000000.0]
    assert [r.scaling for r in config.rotaries] == [None, None, LinearScaling(8.0)]


def test_the_private_spelling_of_gemmas_pattern():
    tiny = without(gemma3_text.TINY_HF_CONFIG, "sliding_window_pattern")
    config = gemma3_text.Config.from_hf(tiny | {"_sliding_window_pattern": 2})
    assert config.windows == (8, None, 8)


def test_head_dim_is_derived_only_where_that_works():
    tiny = llama.TINY_HF_CONFIG
    assert llama.Config.from_hf(tiny | {"head_dim": None}).head_dim == 16
    assert llama.Config.from_hf(without(tiny, "head_dim")).head_dim == 16
    with pytest.raises(ValueError, match=r"head_dim is missing, and hidden_size 64 .* 3"):
        llama.Config.from_hf(tiny | {"head_dim": None, "num_attention_heads": 3})
    with pytest.raises(ValueError, match="'head_dim' is missing"):
        qwen3.Config.from_hf(without(qwen3.TINY_HF_CONFIG, "head_dim"))


def test_keys_that_early_llama_files_lack():
    absent = ("num_key_value_heads", "rope_theta", "rope_scaling", "attention_bias", "mlp_bias")
    config = llama.Config.from_hf(without(llama.TINY_HF_CONFIG, *absent))
    assert config.num_kv_heads == config.num_heads
    assert config.rotaries[0].theta == 10000.0
    assert (config.qkv_bias, config.out_bias, config.mlp_bias) == (False, False, False)


@pytest.mark.parametrize(
    ("model_type", "tied"),
    [(llama, False), (mistral, False), (qwen2, False), (qwen3, False), (gemma3_text, True)],
)
def test_tying_where_the_config_does_not_say(model_type, tied):
    config = without(model_type.TINY_HF_CONFIG, "tie_word_embeddings")
    assert model_type.Config.from_hf(config).tie_word_embeddings is tied


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        ({}, (None, 8, 8)),
        ({"max_window_layers": 0}, (8, 8, 8)),
        ({"max_window_layers": 28}, (None, None, None)),
        ({"use_sliding_window": False}, (None, None, None)),
        ({"use_sliding_window": None, "sliding_window": None}, (None, None, None)),
        ({"layer_types": ["sliding_attention"] + ["full_attention"] * 2}, (8, None, None)),
    ],
)
def test_qwen_windows(change, windows):
    assert qwen2.Config.from_hf(qwen2.TINY_HF_CONFIG | change).windows == windows


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        (llama, {"hidden_act": "relu"}, "hidden_act 'relu' is not supported; supported: silu"),
        (llama, {"rope_scaling": LLAMA3 | {"rope_type": "yarn"}}, "rope_type 'yarn' is not"),
        (llama, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        (llama, {"rope_scaling": without(LLAMA3, "factor")}, "'factor' is missing"),
        (llama, {"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        (llama, {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        (llama, {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        (llama, {"num_hidden_layers": "2"}, "num_hidden_layers is '2', expected int"),
        (llama, {"num_hidden_layers": True}, "num_hidden_layers is True"),
        (llama, {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        (llama, {"attention_bias": 1}, "attention_bias is 1, expected bool"),
        (llama, {"num_key_value_heads": 3}, "num_heads=4 is not a multiple of num_kv_heads=3"),
        (qwen2, {"max_window_layers": -1}, "max_window_layers is -1"),
        (qwen2, {"layer_types": ["full_attention"]}, "layer_types is .* expected 3"),
        (qwen2, {"layer_types": ["chunked_attention"] * 3}, "layer_types is"),
        (gemma3_text, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)
def test_what_is_refused_names_its_key(family, change, message):
    with pytest.raises(ValueError, match=message):
        family.Config.from_hf(family.TINY_HF_CONFIG | change)
