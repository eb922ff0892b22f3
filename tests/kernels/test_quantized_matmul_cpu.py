"""The C++ loops against the reference, on every instruction set that this machine runs."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import quantized_matmul_checks as checks
from native_matmul_cases import FORMATS, product, random_weight, random_x, weight_by_hand

from kernels import native, quantized_matmul
from kernels.quantized_matmul import LAYOUTS, QTensor, cpu
from kernels.quantized_matmul.format import CPU_BLOCKS
from kernels.quantized_matmul.specs import SPECS, make_inputs

pytestmark = [
    pytest.mark.skipif(not cpu.is_available(), reason=str(cpu.unavailable())),
    pytest.mark.usefixtures("quick_compilation"),
]

SETS = native.runnable_instruction_sets() if cpu.is_available() else ()


@pytest.mark.parametrize("name", SPECS)
def test_it_matches_the_reference(name):
    checks.check_against_reference(SPECS[name], "cpu", "cpu")


@pytest.mark.parametrize("name", ["int4-decode-64", "w8a8-decode-16"])
def test_bfloat16_is_rounded_once(name):
    checks.check_rounding(SPECS[name], "cpu", "cpu")


@pytest.mark.parametrize("name", ["uint4-g32-decode-8", "int8-decode-1"])
def test_rows_are_independent(name):
    checks.check_rows_are_independent(SPECS[name], "cpu", "cpu")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("instruction_set", SETS)
def test_weights_are_exactly_what_their_format_says(instruction_set, name):
    w = random_weight(FORMATS[name], 37, 256)
    weight = product(np.eye(256, dtype=np.float32), w, instruction_set).T
    np.testing.assert_array_equal(weight, weight_by_hand(w))


@pytest.mark.parametrize("instruction_set", SETS)
def test_every_fp8_code_is_decoded(instruction_set):
    codes = np.arange(256, dtype=np.uint8).reshape(16, 16).view(ml_dtypes.float8_e4m3fn)
    scale = np.full((16, 1), 2, np.float32)
    w = QTensor(jnp.asarray(codes), scale, code="fp8", group_size=16, layout=LAYOUTS["cpu"])
    wanted = codes.astype(np.float32) * 2
    has_nan = np.isnan(wanted).any(1)
    assert has_nan.sum() == 2
    weight = product(np.eye(16, dtype=np.float32), w, instruction_set).T
    np.testing.assert_array_equal(weight[~has_nan], wanted[~has_nan])
    assert np.isnan(weight[has_nan]).all(), "0 * NaN"


@pytest.mark.parametrize("name", ["int8-offset", "int4-g16"])
@pytest.mark.parametrize("instruction_set", SETS)
def test_a_tokens_bits_do_not_depend_on_the_batch(instruction_set, name):
    # More columns than a block, rows and tokens that fill no tile, more tokens than a block.
    w = random_weight(FORMATS[name], 45, 1408)
    x = random_x(103, 1408)
    whole = product(x, w, instruction_set)
    for tokens in (1, 2, 3, 5, 6, 8, 97):
        part = product(x[103 - tokens :], w, instruction_set)
        np.testing.assert_array_equal(part, whole[103 - tokens :], err_msg=f"{tokens} tokens")


@pytest.mark.parametrize("name", ["int8-offset", "int4-g16", "fp8", "nf4"])
@pytest.mark.parametrize("instruction_set", SETS[1:])
def test_instruction_sets_agree(instruction_set, name):
    w, x = random_weight(FORMATS[name], 21, 1152), random_x(11, 1152)
    best, other = product(x, w), product(x, w, instruction_set)
    if instruction_set == "avx2":
        np.testing.assert_array_equal(other, best)
    np.testing.assert_allclose(other, best, rtol=1e-4, atol=1e-3)  # no fused multiply-add


@pytest.mark.parametrize(("tokens", "rows"), [(1, 33), (9, 101)])
def test_many_columns_in_one_group(tokens, rows):
    w, x = random_weight(FORMATS["int4-row"], rows, 14336), random_x(tokens, 14336)
    wanted = np.asarray(x, np.float64) @ weight_by_hand(w).astype(np.float64).T
    np.testing.assert_allclose(product(x, w), wanted, rtol=1e-5, atol=2e-3)


@pytest.mark.parametrize("rows", [17, 1000])
def test_threads_share_the_rows(rows):
    w, x = random_weight(FORMATS["int4-g32"], rows, 640), random_x(2, 640)
    call = jax.jit(lambda x, w: cpu.matmul(x, w, jnp.float32))
    alone = np.asarray(call(x, w))
    np.testing.assert_allclose(alone, x @ weight_by_hand(w).T, rtol=1e-4, atol=1e-3)
    with ThreadPoolExecutor(6) as pool:  # more callers than XLA has threads
        for result in pool.map(lambda _: np.asarray(call(x, w)), range(24)):
            np.testing.assert_array_equal(result, alone)


@pytest.mark.parametrize("name", ["int8", "int4-g32"])
@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_first_tokens_have_the_bits_they_have_among_all(dtype, in_blocks, name):
    w = random_weight(FORMATS[name], 1024, 640)
    if in_blocks:
        if cpu.best_layout(w) != CPU_BLOCKS:
            pytest.skip("this machine keeps rows")
        w = quantized_matmul.prepare(w, CPU_BLOCKS)
    call = jax.jit(lambda x, w, count: cpu.matmul_first(x, w, count))
    for tokens in (2, 16, 40):  # integers, tiles, panels
        x = random_x(tokens, 640).astype(dtype)
        whole = np.asarray(cpu.matmul(x, w))
        for count in (-1, 0, 1, tokens - 1, tokens, tokens + 5):
            some = np.asarray(call(x, w, jnp.int32(count)))
            first = min(max(count, 0), tokens)
            np.testing.assert_array_equal(some[:first], whole[:first], err_msg=f"{count}")
            assert not some[first:].any()


def test_other_implementations_compute_all_tokens():
    x, w = make_inputs(SPECS["int4-g32-decode-8"])
    whole = quantized_matmul.matmul(x, w, platform="cpu", implementation="xla")
    some = quantized_matmul.matmul(
        x, w, platform="cpu", implementation="xla", num_tokens=jnp.int32(3)
    )
    np.testing.assert_array_equal(some[:3], whole[:3])


def test_nothing_is_asked_of_no_tokens():
    w = random_weight(FORMATS["int8"], 8, 64)
    assert product(jnp.zeros((0, 64)), w).shape == (0, 8)


def test_it_is_what_cpus_choose():
    x, w = make_inputs(SPECS["int4-g32-decode-8"])
    assert str(quantized_matmul.choose(x, w, platform="cpu")) == "cpu"


def test_other_layouts_and_ragged_columns_are_refused():
    x, w = make_inputs(SPECS["int4-decode-1"], platform="gpu")
    with pytest.raises(NotImplementedError, match="prepare\\(w, 'cpu'\\) first"):
        cpu.supports(x, w)
    w = random_weight(FORMATS["int8"], 8, 100)
    with pytest.raises(NotImplementedError, match=r"100 columns.*multiples of 16"):
        cpu.supports(jnp.zeros((1, 100)), w)
    assert quantized_matmul.choose(jnp.zeros((1, 100)), w, platform="cpu").name == "xla"
    with pytest.raises(NotImplementedError, match="x is int32"):
        cpu.supports(jnp.zeros((1, 64), jnp.int32), random_weight(FORMATS["int8"], 8, 64))


def _call(x, w: QTensor, code=None, num_out=None, row_block=1, num_tokens=None) -> None:
    none = jnp.zeros((0,))
    out = jax.ShapeDtypeStruct((x.shape[0], num_out or w.qvalue.shape[0]), jnp.float32)
    call = jax.ffi.ffi_call("jaxinfer_quantized_matmul_v5", out)
    offset = none if w.offset is None else w.offset
    codebook = none if w.codebook is None else w.codebook
    attributes = {"code": code or w.code, "row_block": np.int64(row_block)}
    count = jnp.int32(x.shape[0]) if num_tokens is None else num_tokens
    jax.block_until_ready(call(x, w.qvalue, w.scale, offset, codebook, count, **attributes))


BAD_CALLS = {
    "num_tokens is \\[1\\] of type": lambda x, w: _call(x, w, num_tokens=jnp.ones(1, jnp.int32)),
    "x is \\[1, 64\\] of type": lambda x, w: _call(x.astype(jnp.float16), w),
    "code 'int3'": lambda x, w: _call(x, w, code="int3"),
    "code 'int8' does not go with": lambda x, w: _call(x, w, code="int8"),
    "x has 48 columns": lambda x, w: _call(x[:, :48], w),
    "do not fit 32 columns": lambda x, w: _call(x[:, :32], w),
    "scale .* does not fit codes": lambda x, w: _call(x, dataclasses.replace(w, scale=w.scale[1:])),
    "scale \\[8, 2\\] .* does not fit codes": lambda x, w: _call(
        x, dataclasses.replace(w, scale=w.scale.astype(jnp.int32))
    ),
    "groups of 8 columns": lambda x, w: _call(x, dataclasses.replace(w, scale=jnp.ones((8, 8)))),
    "offset .* does not fit scale": lambda x, w: _call(
        x, dataclasses.replace(w, offset=w.scale[:, :1])
    ),
    "codebook is \\[8\\]": lambda x, w: _call(
        x, dataclasses.replace(w, codebook=jnp.ones(8)), code="uint4"
    ),
    "does not go with .* and a codebook": lambda x, w: _call(
        x, dataclasses.replace(w, codebook=jnp.ones(16))
    ),
    "in blocks of 16": lambda x, w: _call(x, w, row_block=16),
    "the result is": lambda x, w: _call(x, w, num_out=9),
}


@pytest.mark.parametrize("message", BAD_CALLS)
def test_the_handler_refuses_what_its_loops_cannot_take(message):
    assert cpu.is_available()
    w = random_weight(FORMATS["int4-g32"], 8, 64)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        BAD_CALLS[message](random_x(1, 64), w)


def test_an_instruction_set_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setenv("JAXINFER_CPU_ISA", "avx1024")
    with pytest.raises(ValueError, match="JAXINFER_CPU_ISA=avx1024: this machine runs"):
        cpu.matmul(random_x(1, 64), random_weight(FORMATS["int8"], 8, 64))


def test_a_library_that_cannot_be_used_says_why(monkeypatch, tmp_path):
    x, w = random_x(1, 64), random_weight(FORMATS["int8"], 8, 64)
    unavailable = native.unavailable.__wrapped__
    with monkeypatch.context() as patch:
        patch.setattr(native, "ffi_version", lambda: 0)
        assert "built for version 0." in unavailable()
    assert "does not fit" in unavailable("a_handler_of_another_version")
    for content, reason in [(None, "is not built"), (b"no library", "does not fit")]:
        path = Path(tmp_path) / f"{reason}.so"
        if content:
            path.write_bytes(content)
        with monkeypatch.context() as patch:
            patch.setattr(native, "LIBRARY", path)
            patch.setattr(native, "unavailable", unavailable)
            with pytest.raises(NotImplementedError, match=f"{reason}.*kernels.native_build"):
                cpu.supports(x, w)
            assert quantized_matmul.choose(x, w, platform="cpu").name == "xla"
