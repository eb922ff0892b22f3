"""Which format a weight gets: by name, by width, and by what memory allows."""

import dataclasses
import logging

import jax
import numpy as np
import pytest

from jaxinfer import quantization
from jaxinfer.checkpoint.checkpoint import TensorInfo
from jaxinfer.config import ConfigError, EngineConfig
from jaxinfer.platforms import Platform
from jaxinfer.quant_choice import decide_quant
from jaxinfer.quantization import (
    AUTO_CANDIDATES,
    SCHEMES,
    choose_scheme,
    fit_format,
    make_scheme,
    quantize_on_host,
    scheme_name,
    tensor_format,
    weight_bytes,
)
from jaxinfer.quantized_array import abstract_array
from kernels.quantized_matmul import FORMATS, prepare, quantize

LAYER = "model.layers.0.self_attn.q_proj.weight"
SIZES = {None: 8 * 10**9, "int8": 4 * 10**9, "int4": 2 * 10**9}
PLAIN = TensorInfo(LAYER, (256, 1024), "F32", 4 * 256 * 1024)
CODES = abstract_array((256, 1024), "uint4", 32, np.dtype(np.float16), has_offset=True)
STORED = TensorInfo(LAYER, (256, 1024), "Q4_1", CODES.num_bytes, CODES)


class TestNames:
    def test_case_does_not_matter(self):
        for name in SCHEMES:
            assert scheme_name(name.upper()) == scheme_name(name.lower()) == name
        assert scheme_name("Auto") == "auto"

    def test_numbers_of_bits_are_names_too(self):
        assert (scheme_name("8"), scheme_name("Q4")) == ("int8", "int4")

    def test_an_unknown_name_lists_the_known(self):
        with pytest.raises(ValueError, match=r"'int3' is unknown.*int8.*HQQ4.*auto"):
            make_scheme("int3")
        with pytest.raises(ValueError, match="choice"):
            make_scheme("auto")

    @pytest.mark.parametrize("name", SCHEMES)
    def test_embedding_and_head_are_a_tier_higher(self, name):
        scheme = SCHEMES[name]
        assert scheme.embedding == scheme.head
        if scheme.linear.code.endswith("int4"):
            assert scheme.head.code == "int8"
        else:
            assert scheme.head is None

    def test_group_sizes(self):
        for name in ("int8", "int4", "nf4", "HQQ8", "HQQ4"):
            scheme = make_scheme(name, 32)
            assert scheme.linear.group_size == 32
            assert scheme == dataclasses.replace(SCHEMES[name], linear=scheme.linear)

    @pytest.mark.parametrize(
        ("name", "words"),
        [("Q8_0", "groups of 32"), ("q4_0", "groups of 32"), ("w8a8", "row"), ("fp8", "row")],
    )
    def test_fixed_groups_are_not_changed(self, name, words):
        with pytest.raises(ValueError, match=f"quant_group_size 64.*{words}"):
            make_scheme(name, 64)


class TestFormats:
    def test_by_name(self):
        scheme = SCHEMES["int4"]
        assert tensor_format(LAYER, (64, 128), scheme) == scheme.linear
        assert tensor_format("lm_head.weight", (96, 128), scheme) == scheme.head
        assert tensor_format("model.embed_tokens.weight", (96, 128), scheme) == scheme.embedding
        for name, shape in {
            "model.norm.weight": (64,),
            "model.layers.0.self_attn.q_proj.bias": (64,),
            "model.layers.0.mlp.gate.weight": (8, 64),
        }.items():
            assert tensor_format(name, shape, scheme) is None

    def test_by_width(self):
        assert tensor_format(LAYER, (64, 576), SCHEMES["int4"]).group_size == 64
        with pytest.raises(ValueError, match=rf"{LAYER}.* 97 "):
            tensor_format(LAYER, (64, 97), SCHEMES["int4"])

    def test_ggml_s_groups_do_not_shrink(self):
        fmt = SCHEMES["Q8_0"].linear
        assert fit_format(fmt, 96, 1, "cpu") == fmt
        with pytest.raises(ValueError, match="multiple of 32"):
            fit_format(fmt, 48, 1, "cpu")

    @pytest.mark.parametrize("name", SCHEMES)
    def test_bytes_are_those_of_the_arrays(self, name):
        scheme = SCHEMES[name]
        w = jax.eval_shape(
            lambda: quantize(jax.numpy.zeros((24, 256), jax.numpy.float32), scheme.linear)
        )
        codebook = 0 if w.codebook is None else 64
        assert weight_bytes({LAYER: (24, 256)}, scheme, 2) == w.num_bytes - codebook
        assert weight_bytes({"model.norm.weight": (24,)}, scheme, 2) == 48
        assert weight_bytes({LAYER: (24, 256)}, None, 4) == 24 * 256 * 4

    @pytest.mark.parametrize("name", ["int4", "HQQ4"])
    def test_in_blocks_or_whole(self, name, monkeypatch):
        """Blocks of 16 rows: two, and a part of one."""
        monkeypatch.setattr(quantization, "_BLOCK_WEIGHTS", 4100)
        fmt = SCHEMES[name].linear
        weight = np.random.default_rng(3).standard_normal((40, 256)).astype(np.float16)
        blocks = quantize_on_host(weight, fmt)
        whole = jax.jit(lambda weight: prepare(quantize(weight, fmt), "cpu"))(weight)
        assert jax.tree.structure(blocks) == jax.tree.structure(whole)
        for found, expected in zip(jax.tree.leaves(blocks), jax.tree.leaves(whole), strict=True):
            assert isinstance(found, np.ndarray)
            np.testing.assert_array_equal(found, expected)


class TestAuto:
    @pytest.mark.parametrize(
        ("free_gb", "chosen", "words"),
        [
            (11, None, "not quantized: 8.00 GB"),
            (10, "int8", "int8: 4.00 GB"),
            (5, "int4", "int4: 2.00 GB"),
            (2, "int4", "do not fit"),
        ],
    )
    def test_the_widest_that_leaves_room(self, free_gb, chosen, words):
        name, reason = choose_scheme("gpu", free_gb * 10**9, SIZES)
        assert name == chosen
        assert words in reason
        assert f"{free_gb}.00 GB are free on gpu, 25% of it for the KV cache" in reason

    def test_where_codes_do_not_stay_codes(self):
        name, reason = choose_scheme("cpu", 10**9, SIZES, "the library is not built")
        assert name is None
        assert reason.endswith("the library is not built")

    @staticmethod
    def decide(caplog, *infos, free_bytes=10**6, **settings):
        where = Platform("cpu", 2, free_bytes, np.dtype("float32"), np.dtype("float32"))
        caplog.set_level(logging.INFO, "jaxinfer")
        return decide_quant(EngineConfig(**settings), {info.name: info for info in infos}, where)

    def test_by_the_checkpoint_s_own_sizes(self, caplog):
        config = self.decide(caplog, PLAIN, quant="auto", quant_group_size=64)
        assert (config.quant, config.quant_group_size) == ("int8", 64)
        [line] = caplog.messages
        assert line.startswith("quant auto: int8: 0.00 GB")
        config = self.decide(caplog, PLAIN, quant="AUTO", quant_group_size=64, free_bytes=10**9)
        assert (config.quant, config.quant_group_size) == (None, None)

    def test_what_is_quantized_stays(self, caplog):
        assert self.decide(caplog, STORED, quant="auto").quant is None
        [line] = caplog.messages
        assert "quantized already (Q4_1)" in line

    def test_rounding_twice_is_said(self, caplog):
        assert self.decide(caplog, STORED, quant="hqq4").quant == "HQQ4"
        [record] = caplog.records
        assert record.levelno == logging.WARNING
        assert "rounded twice" in record.getMessage()

    def test_without_quant_nothing_is_said(self, caplog):
        assert self.decide(caplog, STORED).quant is None
        assert self.decide(caplog, PLAIN, quant="Int8").quant == "int8"
        assert not caplog.messages

    def test_refusals(self, caplog):
        with pytest.raises(ConfigError, match="int3"):
            self.decide(caplog, PLAIN, quant="int3")
        with pytest.raises(ConfigError, match="groups of 32"):
            self.decide(caplog, PLAIN, quant="Q8_0", quant_group_size=64)
        for settings in ({"quant_group_size": 64}, {"quant": "int4", "quant_group_size": 48}):
            with pytest.raises(ConfigError, match="quant_group_size"):
                EngineConfig(**settings)


def test_candidates_are_the_widest_first():
    assert AUTO_CANDIDATES == (None, "int8", "int4")
    assert set(AUTO_CANDIDATES[1:]) <= set(SCHEMES)
    assert FORMATS["int8-g128"] == SCHEMES["int8"].linear
