"""The Hopper kernel: interpreted against the reference, lowered, and its registers' places."""

from __future__ import annotations

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quantized_matmul_checks as checks
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels import device, quantized_matmul, tuning
from kernels.quantized_matmul import FORMATS, prepare, quantize
from kernels.quantized_matmul import mosaic_gpu_codes as codes
from kernels.quantized_matmul import pallas_mosaic_gpu as kernel
from kernels.quantized_matmul.mosaic_gpu_kernel import multiplying_registers
from kernels.quantized_matmul.mosaic_gpu_plan import Plan
from kernels.quantized_matmul.specs import FILE_FORMATS, LARGE_SPECS, SPECS, Spec

H200 = device.KNOWN_DEVICES["h200"]
ALL_SPECS = {**SPECS, **LARGE_SPECS}
SHARED_BYTES_OF_A_BLOCK = 227 * 1024


@pytest.fixture(scope="module")
def interpreter(mosaic_gpu_interpreter):
    """What `interpret` is for Mosaic GPU kernels."""
    return mosaic_gpu_interpreter()


def shapes_of(spec: Spec):
    """The arguments of a call, x as in bfloat16 where a codebook asks for it."""
    dtype = "bfloat16" if spec.fmt.codebook else spec.dtype

    def make():
        weight = jnp.zeros((spec.out_features, spec.in_features), jnp.float32)
        w = prepare(quantize(weight, spec.fmt), "gpu")
        return jnp.zeros((spec.num_tokens, spec.in_features), dtype), w

    return jax.eval_shape(make)


def narrow(spec: Spec) -> Spec:
    """The same call, smaller: interpreting takes a second per few steps."""
    return dataclasses.replace(
        spec,
        num_tokens=min(spec.num_tokens, 70),
        out_features=128,
        in_features=192 if spec.in_features % 256 else 256,
    )


def config_of(spec: Spec, dtype: str) -> kernel.Config:
    """The call's own config, but for work enough that a block does several steps."""
    _, w = shapes_of(spec)
    is_exact = dtype == "float32" and w.activations == "float"
    num_rows = spec.num_tokens * (3 if is_exact else 1)
    config = kernel.Config.for_call(num_rows, w, H200.core_count, is_exact)
    return dataclasses.replace(config, steps_per_block=3)


@pytest.mark.parametrize("name", [name for name in SPECS if not SPECS[name].fmt.codebook])
def test_it_computes_in_float32_what_the_reference_does(name, interpreter):
    spec = narrow(SPECS[name])
    with tuning.force(config_of(spec, "float32")):
        checks.check_against_reference(spec, "gpu", "pallas_mosaic_gpu", "h200", interpreter)


@pytest.mark.parametrize(
    "name", ["nf4-decode-8", "nf4-g128-prefill-90", "uint4-g32-prefill-70", "int8-decode-16"]
)
def test_it_rounds_no_more_than_products_of_bfloat16(name, interpreter):
    spec = narrow(SPECS[name])
    with tuning.force(config_of(spec, "bfloat16")):
        checks.check_rounding(spec, "gpu", "pallas_mosaic_gpu", "h200", interpreter)


@pytest.mark.parametrize(
    "change",
    [
        {"steps_per_block": 1},
        {"steps_per_block": 5, "num_stages": 2, "num_warpgroups": 1},
        {"steps_per_block": 8, "num_stages": 3, "num_warpgroups": 2, "tile_tokens": 16},
        {"steps_per_block": 2, "tile_in": 128, "num_warpgroups": 1},
    ],
    ids=str,
)
def test_the_result_does_not_depend_on_how_work_is_cut_up(change, interpreter):
    spec = Spec(5, 128, 128, FILE_FORMATS["uint4-g32-f16"])
    config = kernel.Config(1, 8, 64, 4, 4, scale_codes=False)
    with tuning.force(dataclasses.replace(config, **change)):
        checks.check_against_reference(spec, "gpu", "pallas_mosaic_gpu", "h200", interpreter)


def test_rows_are_independent(interpreter):
    spec = narrow(SPECS["int4-decode-64"])
    with tuning.force(config_of(spec, "float32")):
        checks.check_rows_are_independent(
            dataclasses.replace(spec, num_tokens=5),
            "gpu",
            "pallas_mosaic_gpu",
            "h200",
            interpreter,
        )


@pytest.mark.parametrize("name", ["int8-decode-16", "w8a8-decode-16"])
def test_a_block_of_whole_tiles_writes_the_wanted_dtype(name, interpreter):
    spec = dataclasses.replace(narrow(SPECS[name]), dtype="bfloat16")
    x, w = checks.specs.make_inputs(spec, platform="gpu")
    config = dataclasses.replace(config_of(spec, "bfloat16"), steps_per_block=64)
    with device.assume(H200), device.interpreted(interpreter), tuning.force(config):
        result = jax.jit(lambda x, w: kernel.matmul(x, w, jnp.bfloat16))(x, w)
    wanted = checks.run(x, prepare(w, "cpu"), "cpu", "reference")
    assert result.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(result, np.float32), wanted, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("name", checks.LOWERED)
def test_every_call_lowers_for_hopper(name):
    x, w = shapes_of(ALL_SPECS[name])
    with device.assume(H200):
        kernel.supports(x, w)
        traced = jax.jit(lambda x, w: kernel.matmul(x, w, x.dtype)).trace(x, w)
        lowered = traced.lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu_v2" in lowered.as_text()


@pytest.mark.parametrize("name", ALL_SPECS)
def test_heuristic_configs_fit_the_chip(name):
    x, w = shapes_of(ALL_SPECS[name])
    is_exact = x.dtype == jnp.float32 and w.activations == "float"
    num_rows = x.shape[0] * (3 if is_exact else 1)
    config = kernel.Config.for_call(num_rows, w, H200.core_count, is_exact)
    plan = Plan.of(config, w, num_rows)
    row_bytes = config.tile_in // (2 if w.is_4bit else 1)
    groups = config.tile_in // plan.group_size if plan.group_size else 0
    stage = plan.tile_out * row_bytes + config.tile_tokens * config.tile_in * 2
    stage += groups * (plan.tile_out * 8 + max(config.tile_tokens, 32) * 4)
    assert config.num_stages * stage <= SHARED_BYTES_OF_A_BLOCK
    if "llama" in name and x.shape[0] <= 64:
        # What is on its way: 4.8 TB/s, shared by 132 multiprocessors, for 0.7 us.
        assert (config.num_stages - 1) * plan.tile_out * row_bytes >= 26_000
    assert plan.num_in % config.tile_in == 0
    assert plan.num_out % plan.tile_out == 0
    blocks = -(-np.prod(plan.tiles) * plan.steps // config.steps_per_block)
    assert blocks <= H200.core_count
    if "llama" in name:
        assert blocks >= (0.8 if x.shape[0] > 64 else 0.9) * H200.core_count


@pytest.mark.parametrize(
    ("num_warpgroups", "at_start", "wanted"), [(4, 96, 112), (3, 128, 160), (2, 168, 240)]
)
def test_warpgroups_ask_for_no_more_registers_than_a_block_has(num_warpgroups, at_start, wanted):
    # What ptxas gives each thread at the start, as it reports; asking for more never returns.
    assert multiplying_registers(num_warpgroups) == wanted
    assert 24 + num_warpgroups * wanted <= (num_warpgroups + 1) * at_start


def test_what_it_cannot_do_is_refused_with_the_reason():
    x, w = shapes_of(SPECS["int4-decode-1"])
    with device.assume(H200):
        kernel.supports(x, w)
        with pytest.raises(NotImplementedError, match="prepare them for 'gpu'"):
            kernel.supports(x, dataclasses.replace(w, layout=quantized_matmul.LAYOUTS["cpu"]))
        with pytest.raises(NotImplementedError, match="multiples of 64"):
            kernel.supports(x, shapes_of(Spec(1, 96, 512, FORMATS["int8"]))[1])
        with pytest.raises(NotImplementedError, match="coarser than float32"):
            kernel.supports(x, shapes_of(SPECS["nf4-decode-8"])[1])
        with device.interpreted(True), pytest.raises(NotImplementedError, match="InterpretGPU"):
            kernel.supports(x, w)
    with (
        device.assume(device.KNOWN_DEVICES["a100"]),
        pytest.raises(NotImplementedError, match=r"A100.* has \(8, 0\)"),
    ):
        kernel.supports(x, w)


def held(layout: plgpu.Layout, columns: int) -> dict[tuple[int, ...], np.ndarray]:
    """(row, column) of what is in a register: [warp, lane, element, 2] by the register's place."""
    layout = layout.to_mgpu()
    index = np.stack(np.indices((codes.ROWS, columns)), axis=-1)
    for tile in layout.tiling.tiles:
        rank = index.ndim - 1
        untiled = index.shape[: rank - len(tile)]
        split = [
            n for size, n in zip(index.shape[rank - len(tile) : rank], tile, strict=True)
            for n in (size // n, n)
        ]  # fmt: skip
        index = index.reshape(*untiled, *split, 2)
        first = len(untiled)
        order = [*range(first), *range(first, index.ndim - 1, 2), *range(first + 1, index.ndim, 2)]
        index = index.transpose(*order, index.ndim - 1)
    rank = index.ndim - 1
    moved = [d % rank for d in (*layout.warp_dims, *layout.lane_dims, layout.vector_dim)]
    rest = [d for d in range(rank) if d not in moved]
    places = itertools.product(*(range(1 if d in moved else index.shape[d]) for d in range(rank)))
    index = index.transpose(*rest, *moved, rank)
    return {place: index[tuple(place[d] for d in rest)].reshape(4, 32, -1, 2) for place in places}


def test_a_word_is_four_bytes_of_the_same_thread():
    in_bytes, in_words = held(codes.BYTES, 64), held(codes.WORDS, 16)
    assert in_bytes.keys() == in_words.keys()
    for place, word in in_words.items():
        row, column = np.moveaxis(word[:, :, 0], -1, 0)
        np.testing.assert_array_equal(in_bytes[place][..., 0], row[..., None].repeat(4, -1))
        np.testing.assert_array_equal(in_bytes[place][..., 1], 4 * column[..., None] + np.arange(4))


@pytest.mark.parametrize("half", [0, 1])
def test_a_word_becomes_the_columns_that_the_interpreter_takes_it_for(half):
    # Values that name their word and half; what the interpreted function does is the definition.
    words = np.arange(codes.ROWS * 8, dtype=np.uint32).reshape(codes.ROWS, 8)
    pair = [jnp.full(words.shape, 2**31, jnp.uint32)] * 2
    pair[half] = jnp.asarray(words)
    columns = np.asarray(codes._as_columns([tuple(pair)], interpreted=True)).view(np.uint16)
    for place, word in held(codes.WORDS, 8).items():
        columns_there = held(plgpu.Layout.WGMMA, 32)[codes.column_register(place, half, 0)]
        row, column = np.moveaxis(columns_there, -1, 0)
        low, high = np.moveaxis(columns[row, column].astype(np.uint32), -1, 0)
        wanted = words[word[:, :, 0, 0], word[:, :, 0, 1]]
        np.testing.assert_array_equal(low | (high << 16), wanted)


def run_ptx(code: str, operands: list[int]) -> int:
    """Runs the few instructions that a table is read with; $0 is the result."""
    values = {f"${i + 1}": operand for i, operand in enumerate(operands)}

    def get(name: str) -> int:
        return values[name] if name in values else int(name, 0)

    for line in re.findall(r"^([a-z].*);$", code, re.MULTILINE):
        operation, target, *sources = re.split(r",? ", line)
        a, b, *more = map(get, sources)
        if operation == "and.b32":
            result = a & b
        elif operation == "shr.u32":
            result = a >> b
        elif operation == "lop3.b32":
            c, table = more
            bits = [(a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1) for i in range(32)]
            result = sum((table >> bit & 1) << i for i, bit in enumerate(bits))
        else:
            assert operation == "prmt.b32", line
            pool = a.to_bytes(4, "little") + b.to_bytes(4, "little")
            picks = [more[0] >> 4 * i & 15 for i in range(4)]
            assert max(picks) < 8, "a selector of 8 and more repeats a sign"
            result = int.from_bytes(bytes(pool[pick] for pick in picks), "little")
        values[target] = result
    return values["$0"]


@pytest.mark.parametrize("high", [0, 1])
def test_table_instructions_do_what_the_interpreter_does(high):
    rng = np.random.default_rng(0)
    table = codes.constants(jnp.asarray(rng.standard_normal(16), jnp.float32))
    words = rng.integers(0, 2**32, (codes.ROWS, 4), dtype=np.uint32)
    wanted = codes._look_up(jnp.asarray(words), list(table), high, interpreted=True)
    for pair, source in zip(wanted, ("$1", "upper"), strict=True):
        code = codes.LOOK_UP.format(source=source, pick="0x7351" if high else "0x6240")
        code = "\n".join(line for line in code.splitlines() if not line.startswith("."))
        operands = [int(entry) for entry in table]
        for word, result in zip(words.flat, np.asarray(pair).flat, strict=True):
            assert run_ptx(code, [int(word), *operands]) == result
