"""Quantized checkpoints that the libraries themselves wrote, read by us: the same numbers."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoint.builders import write_quantized

from jaxinfer.checkpoint import open_checkpoint
from jaxinfer.quantized_array import QuantizedArray

# The libraries warn about themselves, and transformers draws progress bars.
pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

REASON = "not installed: pip install '.[oracle]'"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The directory of a tiny float32 Llama with random weights."""
    torch = pytest.importorskip("torch", reason=REASON)
    transformers = pytest.importorskip("transformers", reason=REASON)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=64,
        tie_word_embeddings=False,
    )
    path = tmp_path_factory.mktemp("tiny")
    transformers.LlamaForCausalLM(config).to(torch.float32).save_pretrained(path)
    return path


def load(path, **more):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(path, device_map="cpu", **more)


def quantized(path, count=7):
    """The quantized matrices of a directory by name, of which there must be `count`."""
    found = {
        name: weight
        for name, weight in open_checkpoint(path).tensors()
        if isinstance(weight, QuantizedArray)
    }
    assert len(found) == count
    return found


def bf16(array):
    return array.astype(ml_dtypes.bfloat16).astype(np.float32)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_4bit(tiny, tmp_path, kind, nested):
    """The same float32 numbers, bit by bit."""
    torch = pytest.importorskip("torch", reason=REASON)
    bnb = pytest.importorskip("bitsandbytes", reason=REASON)
    transformers = pytest.importorskip("transformers", reason=REASON)
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=nested
    )
    model = load(tiny, quantization_config=config, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    for name, weight in quantized(tmp_path).items():
        parameter = model.get_parameter(name)
        expected = bnb.functional.dequantize_4bit(parameter.data, parameter.quant_state)
        np.testing.assert_array_equal(weight.dequantize(), expected.numpy())


def test_bitsandbytes_8bit(tiny, tmp_path):
    """Within two units in the last place: they scale by SCB, then by 1/127; we by SCB/127."""
    torch = pytest.importorskip("torch", reason=REASON)
    bnb = pytest.importorskip("bitsandbytes", reason=REASON)
    transformers = pytest.importorskip("transformers", reason=REASON)
    config = transformers.BitsAndBytesConfig(load_in_8bit=True)
    model = load(tiny, quantization_config=config, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    for name, weight in quantized(tmp_path).items():
        parameter = model.get_parameter(name)
        expected = bnb.functional.int8_vectorwise_dequant(parameter.data, parameter.SCB)
        np.testing.assert_array_max_ulp(weight.dequantize(), expected.numpy(), maxulp=2)


def args(**more):
    return {"num_bits": 4, "type": "int", "symmetric": True} | more


TOKEN = args(num_bits=8, strategy="token", dynamic=True)
SCHEMES = {
    "w4a16": (args(strategy="group", group_size=32), None),
    "w4a16 asymmetric": (args(strategy="group", group_size=128, symmetric=False), None),
    "w4a16 channel": (args(strategy="channel", symmetric=False), None),
    "w8a16": (args(num_bits=8, strategy="group", group_size=64), None),
    "w8a16 asymmetric": (args(num_bits=8, strategy="channel", symmetric=False), None),
    "w8a8": (args(num_bits=8, strategy="channel"), TOKEN),
    "fp8": (args(num_bits=8, type="float", strategy="channel"), TOKEN | {"type": "float"}),
    "fp8 tensor": (args(num_bits=8, type="float", strategy="tensor"), TOKEN | {"type": "float"}),
    "fp8 block": (
        args(num_bits=8, type="float", strategy="block", block_structure=[128, 128]),
        TOKEN | {"type": "float", "strategy": "group", "group_size": 128},
    ),
}


@pytest.mark.parametrize("case", SCHEMES)
def test_compressed_tensors(tiny, tmp_path, case):
    """Our numbers, rounded to the scales' bfloat16 as theirs are, are the same bit by bit."""
    torch = pytest.importorskip("torch", reason=REASON)
    library = pytest.importorskip("compressed_tensors", reason=REASON)
    quantization = pytest.importorskip("compressed_tensors.quantization")
    weights, activations = SCHEMES[case]
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    config = quantization.QuantizationConfig(config_groups={"group_0": group}, ignore=["lm_head"])
    model = load(tiny, dtype=torch.bfloat16)
    quantization.apply_quantization_config(model, config)
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            scale = module.weight_scale.data
            scale.copy_(0.003 + 0.01 * torch.rand(scale.shape, generator=generator))
            if hasattr(module, "weight_zero_point") and not weights["symmetric"]:
                zero = module.weight_zero_point.data
                zero.copy_(torch.randint(-4, 4, zero.shape, generator=generator))
    compressor = library.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path)
    compressor.update_config(tmp_path)
    matrices = quantized(tmp_path)
    compressor.decompress_model(model)
    for name, weight in matrices.items():
        expected = model.get_parameter(name).detach().to(torch.float32).numpy()
        np.testing.assert_array_equal(bf16(weight.dequantize()), expected)
        assert weight.activations == ("int8" if case == "w8a8" else "float")


def test_fp8_blocks_as_transformers_reads_them(tiny, tmp_path):
    """transformers multiplies in float32 as we do, then rounds to the model's bfloat16."""
    transformers = pytest.importorskip("transformers", reason=REASON)
    rng = np.random.default_rng(2)
    tensors = {}
    for name, array in open_checkpoint(tiny).tensors():
        if name.endswith("_proj.weight"):
            tensors[name] = (array * 100).astype(ml_dtypes.float8_e4m3fn)
            blocks = (array.shape[0] // 64, array.shape[1] // 64)
            tensors[f"{name}_scale_inv"] = rng.uniform(0.005, 0.02, blocks).astype(np.float32)
        else:
            tensors[name] = array
    config = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    write_quantized(tmp_path, config, tensors)
    text = json.loads((tiny / "config.json").read_text()) | {"quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(text | {"dtype": "bfloat16"}))
    model = load(tmp_path, quantization_config=transformers.FineGrainedFP8Config(dequantize=True))
    for name, weight in quantized(tmp_path).items():
        expected = model.get_parameter(name).detach().float().numpy()
        np.testing.assert_array_equal(bf16(weight.dequantize()), expected)


def test_awq_as_autoawq_unpacks_it(tmp_path):
    """Its one file about packing needs only torch; the rest of the package is not imported."""
    torch = pytest.importorskip("torch", reason=REASON)
    package = importlib.util.find_spec("awq")
    if package is None or package.origin is None:
        pytest.skip("autoawq is not installed: pip install --no-deps autoawq")
    file = Path(package.origin).parent / "utils" / "packing_utils.py"
    spec = importlib.util.spec_from_file_location("awq_packing_utils", file)
    packing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(packing)
    rng = np.random.default_rng(3)
    tensors = {
        "a.qweight": rng.integers(-(2**31), 2**31, (128, 8), np.int32),
        "a.qzeros": rng.integers(-(2**31), 2**31, (4, 8), np.int32),
        "a.scales": rng.uniform(0.001, 0.02, (4, 64)).astype(np.float16),
    }
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    weight = quantized(write_quantized(tmp_path, config, tensors), 1)["a.weight"].dequantize()
    parts = (torch.from_numpy(array) for array in tensors.values())
    expected = packing.dequantize_gemm(*parts, 4, 32)
    np.testing.assert_array_equal(weight.astype(np.float16), expected.T.numpy())
