"""Weights in blocks of rows: the layout, and the C++ loops that multiply by them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from native_matmul_cases import (
    FIVE_BITS,
    FORMATS,
    product,
    random_five_bits,
    random_weight,
    random_x,
    weight_by_hand,
)

from kernels import native
from kernels.quantized_matmul import LAYOUTS, QTensor, cpu, dequantize, prepare, reference
from kernels.quantized_matmul.format import CPU_BLOCKS, CPU_FIVE_BITS, take_rows

pytestmark = pytest.mark.usefixtures("quick_compilation")

SETS = native.runnable_instruction_sets() if cpu.is_available() else ()
EXACT_SETS = [name for name in SETS if name in ("amx", "avx512bf16", "avx512")]
ROUNDING_SETS = [name for name in SETS if name in ("amx", "avx512bf16")]
BLOCK_FORMATS = [name for name in FORMATS if not name.startswith("fp8")]

needs_avx512 = pytest.mark.skipif(not EXACT_SETS, reason="this machine has no AVX-512")


def in_blocks(name: str, rows: int, columns: int) -> tuple[QTensor, QTensor]:
    """Returns a weight as readers lay it out, and in blocks."""
    if name in FIVE_BITS:
        w = random_five_bits(FIVE_BITS[name], rows, columns)
        return w, prepare(w, CPU_FIVE_BITS)
    w = random_weight(FORMATS[name], rows, columns)
    return w, prepare(w, CPU_BLOCKS)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_the_layout_says_where_everything_is(name):
    w, blocked = in_blocks(name, 48, 128)
    assert [blocked.qvalue.shape, blocked.scale.shape] == [w.qvalue.shape, w.scale.shape]
    np.testing.assert_array_equal(dequantize(blocked), weight_by_hand(w))
    back = prepare(blocked, LAYOUTS["cpu"])
    for field in ("qvalue", "scale", "offset"):
        mine, theirs = getattr(back, field), getattr(w, field)
        assert mine is theirs or np.array_equal(mine, theirs), field
    assert back.layout == w.layout
    # Row 17's second dword of codes and second group, by hand.
    row = np.asarray(w.qvalue).view(np.uint8)[17, 4:8]
    block = np.asarray(blocked.qvalue).view(np.uint8).reshape(3, -1)[1]
    np.testing.assert_array_equal(block[(16 + 1) * 4 :][:4], row[[0, 2, 1, 3]])
    if w.scale.shape[1] > 1:
        scales = np.asarray(blocked.scale, np.float32).reshape(3, -1)[1]
        assert scales[16 + 1] == np.float32(w.scale[17, 1])


@pytest.mark.parametrize("name", FIVE_BITS)
def test_five_bits_are_where_the_layout_says(name):
    w, blocked = in_blocks(name, 48, 128)
    assert blocked.qvalue.shape == (48, 80)
    assert blocked.qvalue.dtype == np.uint8
    assert (blocked.shape, w.num_bytes - blocked.num_bytes) == (w.shape, 48 * 128 * 3 // 8)
    np.testing.assert_array_equal(dequantize(blocked), weight_by_hand(w))
    back = prepare(blocked, LAYOUTS["cpu"])
    assert back.layout == w.layout
    np.testing.assert_array_equal(back.qvalue, w.qvalue)
    # Row 17's codes 37 and 53, of its second chunk: neighbours 16 apart share a byte.
    chunk = np.asarray(blocked.qvalue).reshape(3, 4, 320)[1, 1]
    codes = np.asarray(w.qvalue, np.int32)[17] + (0 if w.offset is not None else 16)
    byte = 64 + 4 * 1 + 2  # register 1, row 1 of the block, column 1 of four: the middles exchanged
    assert chunk[byte] == codes[37] % 16 + codes[53] % 16 * 16
    assert [chunk[256 + 6] >> 1 & 1, chunk[256 + 6] >> 5 & 1] == [codes[37] // 16, codes[53] // 16]


@pytest.mark.parametrize(
    ("name", "layout"), [("uint4-g128", CPU_BLOCKS), ("five-bits-offset", CPU_FIVE_BITS)]
)
def test_numpy_stays_numpy(name, layout):
    w, _ = in_blocks(name, 32, 128)
    arrays = {name: np.asarray(getattr(w, name)) for name in ("qvalue", "scale", "offset")}
    blocked = prepare(dataclasses.replace(w, **arrays), layout)
    assert all(type(getattr(blocked, name)) is np.ndarray for name in arrays)


@pytest.mark.parametrize("name", ["int8-g16", "uint4-g16", "nf4", *FIVE_BITS])
def test_rows_are_taken(name):
    w, blocked = in_blocks(name, 64, 192)
    ids = jnp.asarray([5, 63, 0, 17, 17, 70, -2], jnp.int32)
    taken = jax.jit(take_rows, static_argnums=2)(blocked, ids, jnp.float32)
    np.testing.assert_array_equal(taken, weight_by_hand(w)[[5, 63, 0, 17, 17, 63, 0]])


@pytest.mark.parametrize(
    ("name", "rows", "columns"), [("int8", 40, 64), ("int8-g16", 32, 48), ("fp8", 32, 64)]
)
def test_what_has_no_blocks_is_refused(name, rows, columns):
    w = random_weight(FORMATS[name], rows, columns)
    with pytest.raises(ValueError, match=rf"\({rows}, {columns}\) of .* has no layout in blocks"):
        prepare(w, CPU_BLOCKS)
    if cpu.is_available():
        assert cpu.best_layout(w) == LAYOUTS["cpu"]


def test_codes_that_need_not_fit_five_bits_are_refused():
    with pytest.raises(ValueError, match="int8 codes that need not fit five bits"):
        prepare(random_weight(FORMATS["int8"], 32, 64), CPU_FIVE_BITS)


@needs_avx512
def test_a_machine_chooses_by_its_products(monkeypatch):
    w = random_weight(FORMATS["int4-g32"], 32, 64)
    monkeypatch.setenv("JAXINFER_CPU_ISA", "avx512")
    assert cpu.best_layout(w) == LAYOUTS["cpu"]
    monkeypatch.setenv("JAXINFER_CPU_ISA", "avx2")
    with pytest.raises(NotImplementedError, match="blocks of rows need AVX-512"):
        cpu.supports(random_x(1, 64), prepare(w, CPU_BLOCKS))
    if ROUNDING_SETS:
        monkeypatch.delenv("JAXINFER_CPU_ISA")
        assert cpu.best_layout(w) == CPU_BLOCKS
        assert cpu.best_layout(in_blocks("five-bits", 32, 64)[0]) == CPU_FIVE_BITS


@needs_avx512
@pytest.mark.parametrize("name", [*BLOCK_FORMATS, *FIVE_BITS])
@pytest.mark.parametrize("instruction_set", EXACT_SETS)
def test_float32_tokens_meet_exact_weights(instruction_set, name):
    w, blocked = in_blocks(name, 48, 256)
    weight = product(np.eye(256, dtype=np.float32), blocked, instruction_set).T
    np.testing.assert_array_equal(weight, weight_by_hand(w))


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 7, 16, 21, 32, 40, 77, 150])
@pytest.mark.parametrize("name", [*BLOCK_FORMATS, *FIVE_BITS])
@pytest.mark.parametrize("instruction_set", ROUNDING_SETS)
def test_bfloat16_tokens_match_the_reference(instruction_set, name, tokens):
    # 448 columns: groups of 128 are left out, as they do not divide it.
    columns = 448 if "g128" not in name else 384
    w, blocked = in_blocks(name, 80, columns)
    x = random_x(tokens, columns).astype(jnp.bfloat16)
    wanted = np.asarray(reference.matmul(x.astype(jnp.float32), w, jnp.float32))
    given = product(x, blocked, instruction_set)
    # Tokens are rounded to integers of fifteen bits or, where they are many and no tiles are there,
    # of eight; or weights are, of many: half a unit of eight bits each.
    weight = np.abs(weight_by_hand(w)).astype(np.float64)
    size = np.abs(np.asarray(x, np.float64)) @ weight.T
    takes_bytes = instruction_set == "avx512bf16" and tokens > 16 and name != "nf4"
    most = 127 if takes_bytes else 127 * 128 + 63
    steps = np.abs(np.asarray(x, np.float64)).reshape(tokens, -1, 32).max(-1) / most
    integers = np.repeat(steps / 2, 32, axis=-1) @ weight.T if takes_bytes or tokens <= 16 else 0
    codes = {"nf4": 2.0**-9}.get(name, 0)
    rounds_weights = tokens >= 32 and not takes_bytes
    bound = size * (2.0**-9 if rounds_weights else max(codes, 1e-6)) * 1.01
    offset_sums = 0 if w.offset is None else 1e-5 * size
    assert np.all(np.abs(given - wanted) <= bound + integers + offset_sums + 1e-5)


@pytest.mark.parametrize("name", ["int8-offset", "int4-g16", "uint4-g128", "nf4", "five-bits"])
@pytest.mark.parametrize("instruction_set", ROUNDING_SETS)
def test_a_tokens_bits_do_not_depend_on_the_batch(instruction_set, name):
    _, blocked = in_blocks(name, 112, 384)
    x = random_x(139, 384).astype(jnp.bfloat16)
    # Of up to 4, 16, 31 tokens and of more: sets round tokens, or weights, in different ways.
    for most, fewer in ((4, (1, 2, 3)), (16, (5, 9)), (31, (17, 23)), (139, (32, 65, 80, 97))):
        whole = product(x[:most], blocked, instruction_set)
        for tokens in fewer:
            part = product(x[most - tokens : most], blocked, instruction_set)
            np.testing.assert_array_equal(part, whole[most - tokens :], err_msg=f"{tokens} tokens")


@pytest.mark.parametrize("tokens", [29, 71])
def test_tiles_and_dot_products_agree(tokens):
    if len(ROUNDING_SETS) < 2:
        pytest.skip("this machine has no tiles")
    # Of integers, dot products have others than those of bfloat16 numbers.
    _, blocked = in_blocks("nf4", 48, 384)
    x = random_x(tokens, 384).astype(jnp.bfloat16)
    tiles, dots = (product(x, blocked, each) for each in ROUNDING_SETS)
    # The two instructions round the sum of a pair of products in different ways.
    np.testing.assert_allclose(tiles, dots, rtol=1e-5, atol=2e-6 * np.abs(dots).max())


@pytest.mark.parametrize("tokens", [3, 40, 100])
@pytest.mark.parametrize("instruction_set", ROUNDING_SETS)
def test_what_is_not_finite_stays_in_its_row(instruction_set, tokens):
    _, blocked = in_blocks("uint4-g128", 32, 256)
    x = random_x(tokens, 256).astype(jnp.bfloat16)
    bad = x.at[1, 7].set(jnp.nan).at[2, 9].set(jnp.inf)
    given = product(bad, blocked, instruction_set)
    assert np.isnan(given[1]).all()
    assert not np.isfinite(given[2]).any()
    others = np.arange(tokens) != 1
    others[2] = False
    np.testing.assert_array_equal(given[others], product(x, blocked, instruction_set)[others])
