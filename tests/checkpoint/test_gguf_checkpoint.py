"""What a good GGUF file turns into: configuration, names, layouts, values."""

from __future__ import annotations

import logging
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoint.builders import (
    BOOL,
    F32,
    I32,
    STRING,
    U32,
    interleave_halves,
    tiny_gguf,
)

from jaxinfer.checkpoint import open_checkpoint
from jaxinfer.quantized_array import QuantizedArray

ORACLE = Path(__file__).with_name("oracle.npz")
LAYER_NAMES = {
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
}
QK_NORMS = {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
FEEDFORWARD_NORMS = {"pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"}


def opened(builder, tmp_path):
    return open_checkpoint(builder.write(tmp_path / "model.gguf"))


def layer_names(checkpoint):
    prefix = "model.layers.0."
    names = checkpoint.tensor_infos
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


@pytest.mark.parametrize(
    ("architecture", "model_type", "extra"),
    [
        ("llama", "llama", set()),
        ("qwen2", "qwen2", {f"self_attn.{name}_proj.bias" for name in "qkv"}),
        ("qwen3", "qwen3", QK_NORMS),
        ("gemma3", "gemma3_text", QK_NORMS | FEEDFORWARD_NORMS),
    ],
)
def test_names(architecture, model_type, extra, tmp_path):
    checkpoint = opened(tiny_gguf(architecture), tmp_path)
    assert checkpoint.model_type == checkpoint.hf_config["model_type"] == model_type
    assert layer_names(checkpoint) == LAYER_NAMES | extra
    assert {name for name in checkpoint.tensor_infos if "layers" not in name} == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
    }
    assert [name for name, _ in checkpoint.tensors()] == list(checkpoint.tensor_infos)


def test_config(tmp_path):
    checkpoint = opened(tiny_gguf(), tmp_path)
    assert checkpoint.hf_config == {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "vocab_size": 96,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": 2,
    }
    info = checkpoint.tensor_infos["model.layers.0.mlp.down_proj.weight"]
    assert (info.shape, info.dtype, info.num_bytes) == ((64, 96), "F32", 4 * 64 * 96)


def test_defaults_of_keys_left_out(tmp_path):
    builder = tiny_gguf()
    for key in ("rope.freq_base", "attention.key_length", "attention.head_count_kv"):
        del builder.keys[f"llama.{key}"]
    config = opened(builder, tmp_path).hf_config
    assert (config["rope_theta"], config["head_dim"], config["num_key_value_heads"]) == (1e4, 16, 4)


def test_no_output_tensor_means_tied(tmp_path):
    checkpoint = opened(tiny_gguf(is_tied=True), tmp_path)
    assert checkpoint.hf_config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in checkpoint.tensor_infos


def test_biases_set_their_flags(tmp_path):
    builder = tiny_gguf()
    for name in ("attn_q.bias", "ffn_gate.bias"):
        builder.tensor(f"blk.0.{name}", np.zeros(64))
    config = opened(builder, tmp_path).hf_config
    assert config["attention_bias"] is True
    assert config["mlp_bias"] is True


def test_window_makes_a_mistral(tmp_path):
    checkpoint = opened(tiny_gguf().put("llama.attention.sliding_window", U32, 4096), tmp_path)
    assert checkpoint.model_type == "mistral"
    assert checkpoint.hf_config["sliding_window"] == 4096


def test_linear_rope_scaling(tmp_path):
    builder = tiny_gguf("gemma3").put("gemma3.rope.scaling.type", STRING, "linear")
    builder.put("gemma3.rope.scaling.factor", F32, 8.0)
    assert opened(builder, tmp_path).hf_config["rope_scaling"] == {
        "rope_type": "linear",
        "factor": 8.0,
    }


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_scaling_is_recovered(factor, tmp_path):
    builder = tiny_gguf().put("llama.rope.freq_base", F32, 500000.0)
    for key in ("attention.key_length", "attention.value_length"):
        builder.put(f"llama.{key}", U32, 64)
    builder.tensor("rope_freqs.weight", np.load(ORACLE)[f"llama3_factors_{factor:.0f}"])
    checkpoint = opened(builder, tmp_path)
    assert checkpoint.hf_config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert not any("rope" in name for name in checkpoint.tensor_infos)


def test_rope_factors_of_one_change_nothing(tmp_path):
    builder = tiny_gguf().tensor("rope_freqs.weight", np.ones(8))
    assert opened(builder, tmp_path).hf_config["rope_scaling"] is None


def test_gemma3_layers(tmp_path):
    builder = tiny_gguf("gemma3")
    builder.put("gemma3.attention.sliding_window_pattern", U32, 2)
    config = opened(builder, tmp_path).hf_config
    assert config["layer_types"] == ["sliding_attention", "full_attention"]
    assert config["sliding_window"] == 8
    assert config["rope_local_base_freq"] == 10000.0
    assert config["query_pre_attn_scalar"] == 16
    assert config["hidden_activation"] == "gelu_pytorch_tanh"


def test_gemma3_27b_scales_queries_by_hidden_size(tmp_path):
    builder = tiny_gguf("gemma3").put("gemma3.block_count", U32, 62)
    for key, value in {"embedding_length": 5376, "attention.head_count": 32}.items():
        builder.put(f"gemma3.{key}", U32, value)
    for layer in range(2, 62):
        builder.tensor(f"blk.{layer}.attn_norm.weight", np.ones(64))
    assert opened(builder, tmp_path).hf_config["query_pre_attn_scalar"] == 168


def test_llama_q_and_k_get_their_halves_back(tmp_path):
    rng = np.random.default_rng(1)
    original = {
        "q_proj.weight": rng.standard_normal((64, 64), np.float32),
        "k_proj.weight": rng.standard_normal((32, 64), np.float32),
        "q_proj.bias": rng.standard_normal(64, np.float32),
        "k_proj.bias": rng.standard_normal(32, np.float32),
    }
    builder = tiny_gguf()
    for name, array in original.items():
        kind, suffix = name[0], name.partition(".")[2]
        builder.tensor(
            f"blk.1.attn_{kind}.{suffix}", interleave_halves(array, {"q": 4, "k": 2}[kind])
        )
    read = dict(opened(builder, tmp_path).tensors())
    for name, array in original.items():
        np.testing.assert_array_equal(read[f"model.layers.1.self_attn.{name}"], array)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "gemma3"])
def test_other_q_and_k_stay(architecture, tmp_path):
    builder = tiny_gguf(architecture)
    read = dict(opened(builder, tmp_path).tensors())
    stored = np.frombuffer(builder.tensors["blk.1.attn_q.weight"][2], np.float32)
    np.testing.assert_array_equal(read["model.layers.1.self_attn.q_proj.weight"].ravel(), stored)


def test_gemma3_norms_lose_the_one(tmp_path):
    builder = tiny_gguf("gemma3")
    read = dict(opened(builder, tmp_path).tensors())
    norms = {name for name in read if name.endswith("norm.weight")}
    assert len(norms) == 13
    stored = np.frombuffer(builder.tensors["blk.1.attn_k_norm.weight"][2], np.float32)
    np.testing.assert_array_equal(read["model.layers.1.self_attn.k_norm.weight"], stored - 1)
    assert all(abs(read[name].mean()) < 0.5 for name in norms)


def test_float_types_keep_their_dtype(tmp_path):
    values = np.linspace(-2, 2, 64, dtype=np.float32)
    half, brain = values.astype(np.float16), values.astype(ml_dtypes.bfloat16)
    builder = tiny_gguf()
    builder.raw_tensor("blk.0.attn_norm.weight", (64,), 1, half.tobytes())
    builder.raw_tensor("blk.0.ffn_norm.weight", (64,), 30, brain.tobytes())
    checkpoint = opened(builder, tmp_path)
    read = dict(checkpoint.tensors())
    assert read["model.layers.0.input_layernorm.weight"].tobytes() == half.tobytes()
    found = read["model.layers.0.post_attention_layernorm.weight"]
    assert found.dtype == ml_dtypes.bfloat16
    assert found.tobytes() == brain.tobytes()
    assert checkpoint.tensor_infos["model.layers.0.input_layernorm.weight"].dtype == "F16"


def test_metadata_values_are_plain(tmp_path):
    builder = tiny_gguf().put("tokenizer.ggml.add_bos_token", BOOL, True)
    builder.put_array("tokenizer.ggml.scores", F32, [0.5, -1.0]).put("general.name", STRING, "é")
    builder.put_array("general.tags", STRING, []).put_array("x.flags", BOOL, [True, False])
    builder.put_array("x.none", I32, [])
    source = opened(builder, tmp_path).tokenizer_source
    assert source["tokenizer.ggml.add_bos_token"] is True
    assert source["tokenizer.ggml.scores"] == [0.5, -1.0]
    assert source["tokenizer.ggml.tokens"][:2] == ["<0>", "<1>"]
    assert source["x.flags"] == [True, False]
    assert (source["general.name"], source["general.tags"], source["x.none"]) == ("é", [], [])


def test_version_2_and_another_alignment(tmp_path):
    builder = tiny_gguf().put("general.alignment", U32, 64)
    builder.version, builder.alignment = 2, 64
    usual = dict(open_checkpoint(tiny_gguf().write(tmp_path / "usual.gguf")).tensors())
    for name, array in opened(builder, tmp_path).tensors():
        np.testing.assert_array_equal(array, usual[name])


def test_end_of_reply_tokens(tmp_path):
    builder = tiny_gguf().put("tokenizer.ggml.eot_token_id", U32, 7)
    tokens = [f"<{i}>" for i in range(96)]
    tokens[5], tokens[6] = "<end_of_turn>", "<|im_end|>"
    builder.put_array("tokenizer.ggml.tokens", STRING, tokens)
    kinds = [1] * 96
    kinds[5] = 3
    builder.put_array("tokenizer.ggml.token_type", I32, kinds)
    assert opened(builder, tmp_path).generation_config == {"eos_token_id": [2, 7, 5]}


def test_no_end_token_at_all(tmp_path):
    builder = tiny_gguf()
    del builder.keys["tokenizer.ggml.eos_token_id"]
    assert opened(builder, tmp_path).generation_config == {}


def test_unknown_keys_are_named_in_a_warning(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "jaxinfer"):
        opened(tiny_gguf().put("llama.novelty", U32, 1), tmp_path)
    assert "llama.novelty" in caplog.text


def test_progress_counts_the_file_s_bytes(tmp_path, capsys):
    for _ in opened(tiny_gguf(), tmp_path).tensors(progress=True):
        pass
    assert "Loading weights: 100%" in capsys.readouterr().err


def test_not_a_file(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        open_checkpoint(tmp_path / "absent.gguf")
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(ValueError, match="empty"):
        open_checkpoint(tmp_path / "empty.gguf")


def test_rows_of_smollm2(smollm2_path):
    checkpoint = open_checkpoint(smollm2_path)
    config = checkpoint.hf_config
    assert checkpoint.model_type == "llama"
    assert (config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]) == (
        576,
        30,
        49152,
    )
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (9, 3)
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-5, 100000.0)
    assert (config["head_dim"], config["intermediate_size"]) == (64, 1536)
    assert config["tie_word_embeddings"] is True
    assert checkpoint.generation_config["eos_token_id"][0] == 2
    assert layer_names(checkpoint) == LAYER_NAMES
    assert len(checkpoint.tensor_infos) == 2 + 30 * len(LAYER_NAMES)


def test_rows_of_gemma3(gemma3_path):
    checkpoint = open_checkpoint(gemma3_path)
    config = checkpoint.hf_config
    assert checkpoint.model_type == "gemma3_text"
    assert (config["hidden_size"], config["head_dim"], config["sliding_window"]) == (640, 256, 512)
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1e6, 1e4)
    assert config["query_pre_attn_scalar"] == 256
    assert [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"] == [
        5,
        11,
        17,
    ]
    assert layer_names(checkpoint) == LAYER_NAMES | QK_NORMS | FEEDFORWARD_NORMS
    assert len(checkpoint.tensor_infos) == 2 + 18 * 13
    assert len(checkpoint.tokenizer_source["tokenizer.ggml.tokens"]) == 262144


@pytest.mark.oracle
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_equals_transformers_reading_of_a_tiny_file(architecture, tmp_path):
    is_tied = architecture == "gemma3"
    builder = tiny_gguf(architecture, is_tied=is_tied).put("general.name", STRING, "tiny")
    assert_equals_transformers(builder.write(tmp_path / "model.gguf"))


@pytest.mark.oracle
@pytest.mark.real_model
@pytest.mark.parametrize("model", ["smollm2_path", "gemma3_path"])
def test_equals_transformers_reading_of_a_real_file(model, request):
    assert_equals_transformers(request.getfixturevalue(model))


def assert_equals_transformers(path):
    """The same names and values; its config is made of ours, so that ours is tried as well."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    checkpoint = open_checkpoint(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        config=transformers.AutoConfig.for_model(**checkpoint.hf_config),
    )
    expected = model.state_dict()
    if checkpoint.hf_config["tie_word_embeddings"]:
        del expected["lm_head.weight"]
    assert checkpoint.tensor_infos.keys() == expected.keys()
    for name, array in checkpoint.tensors():
        found = array.dequantize() if isinstance(array, QuantizedArray) else array
        np.testing.assert_array_equal(found, expected[name].numpy(), err_msg=name)
