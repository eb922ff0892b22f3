"""`jaxinfer convert`: what is written reads back as what quantizing at load makes."""

import argparse
import json
import logging

import jax
import numpy as np
import pytest
from checkpoint.builders import STRING, safetensors_bytes, tiny_gguf
from checkpoint.tiny_directory import CONFIG, tiny_tensors, write_model

from jaxinfer import cli, convert
from jaxinfer.checkpoint import open_checkpoint
from jaxinfer.checkpoint.checkpoint import CheckpointError
from jaxinfer.checkpoint.safetensors_writer import Entry, SafetensorsWriter
from jaxinfer.config import ConfigError, EngineConfig
from jaxinfer.model_loading import load_model
from jaxinfer.quantization import SCHEMES, tensor_format
from jaxinfer.quantized_array import QuantizedArray
from jaxinfer.runner.loader import parameters
from jaxinfer.text.tokenizer import load_tokenizer

TARGETS = (*SCHEMES, "bitsandbytes-nf4")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("source") / "tiny")


def converted(source, output, name, group_size=None, **options):
    target = convert.parse_target(name, group_size)
    convert.convert(open_checkpoint(source), output, target, **options)
    return open_checkpoint(output)


def assert_same(found, expected):
    """The same QuantizedArray, bit for bit."""
    assert isinstance(found, QuantizedArray)
    for name in ("code", "group_size", "activations", "perm"):
        assert getattr(found, name) == getattr(expected, name), name
    for name in ("qvalue", "scale", "offset", "codebook"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert (ours is None) == (theirs is None), name
        if ours is not None:
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), name
            assert ours.tobytes() == theirs.tobytes(), name


class TestRoundTrip:
    @pytest.mark.parametrize("name", TARGETS)
    def test_what_is_read_back_is_what_quantizing_gives(self, source, tmp_path, name):
        target = convert.parse_target(name)
        tensors = dict(converted(source, tmp_path / "out", name).tensors())
        assert tensors.keys() == open_checkpoint(source).tensor_infos.keys()
        num_quantized = 0
        for key, original in open_checkpoint(source).tensors():
            fmt = tensor_format(key, original.shape, target.scheme)
            if fmt is None:
                assert tensors[key].dtype == original.dtype
                np.testing.assert_array_equal(tensors[key], original)
            else:
                num_quantized += 1
                assert_same(tensors[key], convert.quantized_array(original, fmt))
        four_bits = name in ("int4", "nf4", "Q4_0", "HQQ4")
        assert num_quantized == 7 + four_bits + (four_bits and name != "int4")

    @pytest.mark.parametrize("name", ["int4", "w8a8"])
    def test_our_own_format_holds_every_scheme(self, source, tmp_path, name):
        target = convert.parse_target(name, own_format=True)
        assert target.scheme == SCHEMES[name]
        convert.convert(open_checkpoint(source), tmp_path / "out", target)
        originals = dict(open_checkpoint(source).tensors())
        checkpoint = open_checkpoint(tmp_path / "out")
        for key, tensor in checkpoint.tensors():
            if (fmt := tensor_format(key, tensor.shape, target.scheme)) is not None:
                assert_same(tensor, convert.quantized_array(originals[key], fmt))
                assert checkpoint.tensor_infos[key].loaded_bytes == tensor.num_bytes

    def test_groups_of_one_s_own_choice(self, source, tmp_path):
        checkpoint = converted(source, tmp_path / "out", "int4", 32)
        infos = checkpoint.tensor_infos
        assert infos["model.layers.0.mlp.up_proj.weight"].group_size == 32
        assert infos["lm_head.weight"].group_size == 128

    def test_the_engine_holds_the_same_arrays(self, source, tmp_path):
        """Quantized at load from the source, or loaded from what was converted."""
        converted(source, tmp_path / "out", "HQQ4")
        models = [
            load_model(EngineConfig(quant=quant), open_checkpoint(path), progress=False)[0]
            for path, quant in ((source, "HQQ4"), (tmp_path / "out", None))
        ]
        at_load, stored = (dict(parameters(model)) for model in models)
        assert at_load.keys() == stored.keys()
        for path, param in at_load.items():
            leaves = [jax.tree.leaves(p.get_value()) for p in (param, stored[path])]
            for ours, theirs in zip(*leaves, strict=True):
                np.testing.assert_array_equal(ours, theirs, err_msg=path)


class TestDirectory:
    def test_it_is_complete(self, source, tmp_path):
        out = tmp_path / "out"
        checkpoint = converted(source, out, "nf4")
        config = json.loads((out / "config.json").read_text())
        quantization = config.pop("quantization_config")
        assert quantization == {"quant_method": "jaxinfer", "version": 1, "activations": "float"}
        assert config == CONFIG | {"architectures": ["LlamaForCausalLM"]}
        assert checkpoint.generation_config == {"temperature": 0.5}
        assert sorted(path.name for path in out.iterdir()) == [
            *("chat_template.jinja", "config.json", "generation_config.json"),
            *("model.safetensors", "tokenizer.json", "tokenizer_config.json"),
        ]
        assert not list(tmp_path.glob(".out*"))

    def test_floats_of_another_type(self, source, tmp_path):
        checkpoint = converted(source, tmp_path / "out", None, dtype="float32")
        assert {info.dtype for info in checkpoint.tensor_infos.values()} == {"F32"}
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert config["torch_dtype"] == "float32"
        assert "quantization_config" not in config
        originals = dict(open_checkpoint(source).tensors())
        for name, tensor in checkpoint.tensors():
            np.testing.assert_array_equal(tensor, originals[name].astype(np.float32))

    def test_shards(self, source, tmp_path):
        out = tmp_path / "out"
        whole = dict(converted(source, tmp_path / "whole", "int4").tensors())
        shards = dict(converted(source, out, "int4", shard_bytes=40_000).tensors())
        index = json.loads((out / "model.safetensors.index.json").read_text())
        files = sorted(out.glob("*.safetensors"))
        assert [file.name for file in files] == sorted(set(index["weight_map"].values()))
        assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
        assert len(files) > 2
        for name, tensor in whole.items():
            if isinstance(tensor, QuantizedArray):
                assert_same(shards[name], tensor)
            else:
                np.testing.assert_array_equal(shards[name], tensor)

    def test_a_head_tied_to_the_embedding_is_written_once(self, tmp_path):
        source = tmp_path / "tied"
        write_model(source, CONFIG | {"tie_word_embeddings": True})
        both = tiny_tensors()
        (source / "model.safetensors").write_bytes(safetensors_bytes(both))
        infos = converted(source, tmp_path / "out", None).tensor_infos
        assert set(both) - set(infos) == {"lm_head.weight"}

    def test_a_second_rounding_is_said(self, source, tmp_path, caplog):
        converted(source, tmp_path / "first", "Q8_0")
        assert not caplog.messages
        with caplog.at_level(logging.WARNING):
            converted(tmp_path / "first", tmp_path / "second", "int4")
        [message] = caplog.messages
        assert "rounded twice" in message
        config = json.loads((tmp_path / "second" / "config.json").read_text())
        assert config["quantization_config"]["quant_method"] == "compressed-tensors"

    def test_dequantizing(self, source, tmp_path):
        quantized = dict(converted(source, tmp_path / "first", "Q4_0").tensors())
        floats = dict(converted(tmp_path / "first", tmp_path / "second", None).tensors())
        name = "model.layers.0.mlp.up_proj.weight"
        np.testing.assert_array_equal(floats[name], quantized[name].dequantize())


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    builder = tiny_gguf("llama").put("tokenizer.ggml.model", STRING, "gpt2")
    builder.put_array("tokenizer.ggml.merges", STRING, [])
    builder.put("tokenizer.chat_template", STRING, "{{ messages }}")
    return builder.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


class TestGguf:
    def test_a_directory_with_the_same_model(self, gguf, tmp_path):
        original = open_checkpoint(gguf)
        checkpoint = converted(gguf, tmp_path / "out", None)
        assert checkpoint.hf_config == original.hf_config | {
            "architectures": ["LlamaForCausalLM"],
            "torch_dtype": "float32",
        }
        assert checkpoint.generation_config == original.generation_config
        tensors = dict(original.tensors())
        for name, tensor in checkpoint.tensors():
            np.testing.assert_array_equal(tensor, tensors.pop(name))
        assert not tensors

    def test_the_same_tokenizer(self, gguf, tmp_path):
        converted(gguf, tmp_path / "out", None)
        ours = load_tokenizer(tmp_path / "out")
        theirs = load_tokenizer(open_checkpoint(gguf).tokenizer_source)
        assert ours.vocab_size == theirs.vocab_size
        assert ours.special_tokens == theirs.special_tokens
        assert ours.chat_template == theirs.chat_template == "{{ messages }}"
        assert ours.encode("<5><17>") == theirs.encode("<5><17>")
        assert [ours.token_bytes(i) for i in range(96)] == [
            theirs.token_bytes(i) for i in range(96)
        ]

    @pytest.mark.real_model
    @pytest.mark.slow
    def test_the_tokenizer_of_a_real_model(self, smollm2_path, tmp_path):
        original = open_checkpoint(smollm2_path)
        (tmp_path / "out").mkdir()
        convert._write_tokenizer(original, tmp_path / "out")
        ours, theirs = load_tokenizer(tmp_path / "out"), load_tokenizer(original.tokenizer_source)
        for text in ("Hello, world!", "  naïve 日本 \n\t 12345 <|im_start|>user"):
            assert ours.encode(text) == theirs.encode(text)
            assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
        assert ours.chat_template == theirs.chat_template


class TestRefusals:
    def run(self, *flags):
        return cli.main(["convert", *map(str, flags)])

    def test_an_output_that_exists(self, source, tmp_path, capsys):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "file").touch()
        assert self.run("--input", source, "--output", tmp_path / "out") == 2
        assert "not an empty directory" in capsys.readouterr().err
        assert self.run("--input", source, "--output", tmp_path / "no" / "out") == 2
        assert "parent" in capsys.readouterr().err

    def test_an_empty_directory_will_do(self, source, tmp_path, capsys):
        (tmp_path / "out").mkdir()
        assert self.run("--input", source, "--output", tmp_path / "out", "--quantize", "FP8") == 0
        assert "MB of weights" in capsys.readouterr().out
        assert (tmp_path / "out" / "model.safetensors").exists()

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (["--quantize", "int3"], ["'int3'", "HQQ4"]),
            (["--quantize", "auto"], ["auto"]),
            (["--quantize", "Q8_0", "--quant-group-size", "64"], ["groups of 32"]),
            (["--quant-group-size", "64"], ["quantize"]),
            (["--quantize", "bitsandbytes-nf4", "--own-format"], ["nf4"]),
        ],
    )
    def test_flags(self, source, tmp_path, capsys, flags, words):
        assert self.run("--input", source, "--output", tmp_path / "out", *flags) == 2
        error = capsys.readouterr().err
        assert all(word in error for word in words)
        assert not (tmp_path / "out").exists()

    def test_a_width_that_does_not_fit_leaves_nothing_behind(self, tmp_path):
        write_model(tmp_path / "odd", CONFIG | {"intermediate_size": 250})
        for name in ("int4", "int8"):
            with pytest.raises(ValueError, match=r"down_proj.* 250 "):
                converted(tmp_path / "odd", tmp_path / "out", name)
        write_model(tmp_path / "narrow", CONFIG | {"intermediate_size": 224})
        with pytest.raises(ValueError, match="blocks of 32"):
            converted(tmp_path / "narrow", tmp_path / "out", "bitsandbytes-nf4")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["narrow", "odd"]

    def test_a_failure_on_the_way_leaves_nothing_behind(self, source, tmp_path, monkeypatch):
        def fail(*_):
            raise CheckpointError("damaged")

        monkeypatch.setattr(convert, "quantize_on_host", fail)
        with pytest.raises(CheckpointError, match="damaged"):
            converted(source, tmp_path / "out", "int8")
        assert not list(tmp_path.iterdir())

    def test_a_disk_that_is_full(self, source, tmp_path, monkeypatch):
        usage = argparse.Namespace(free=1000)
        monkeypatch.setattr(convert.shutil, "disk_usage", lambda path: usage)
        with pytest.raises(ConfigError, match="do not fit"):
            converted(source, tmp_path / "out", None)


class TestWriter:
    ENTRIES = ([Entry("a", "U8", (3,)), Entry("b", "F32", (2,))], [Entry("c", "F16", (1, 2))])

    def test_wide_types_come_first(self, tmp_path):
        writer = SafetensorsWriter(tmp_path, self.ENTRIES)
        writer.write("c", np.array([[1, 2]], np.float16))
        writer.write("a", np.array([1, 2, 3], np.uint8))
        writer.write("b", np.array([0.5, 1.5], np.float32))
        writer.finish()
        assert writer.num_bytes == 15
        raw = (tmp_path / "model.safetensors").read_bytes()
        assert raw.endswith(b"\0\0\0\x3f\0\0\xc0\x3f" + b"\0\x3c\0\x40" + b"\1\2\3")
        assert int.from_bytes(raw[:8], "little") % 8 == 0

    def test_what_was_not_announced(self, tmp_path):
        writer = SafetensorsWriter(tmp_path, self.ENTRIES)
        with pytest.raises(ValueError, match="not expected"):
            writer.write("d", np.zeros(1))
        with pytest.raises(ValueError, match="the header says"):
            writer.write("a", np.zeros(4, np.uint8))
        with pytest.raises(ValueError, match="never came: b, c"):
            writer.finish()


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["int8", "int4", "w8a8", "fp8"])
def test_transformers_loads_the_same_weights(source, tmp_path, name):
    torch = pytest.importorskip("torch")
    pytest.importorskip("compressed_tensors")
    transformers = pytest.importorskip("transformers")
    from compressed_tensors.compressors import ModelCompressor

    tensors = dict(converted(source, tmp_path / "out", name).tensors())
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ModelCompressor.from_pretrained_model(model).decompress_model(model)
    found = {key: value.detach().numpy() for key, value in model.state_dict().items()}
    for key, tensor in tensors.items():
        floats = tensor.dequantize() if isinstance(tensor, QuantizedArray) else tensor
        np.testing.assert_array_equal(found[key], floats.astype(np.float32), err_msg=key)
