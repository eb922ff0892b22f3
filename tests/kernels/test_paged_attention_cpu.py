"""The C++ loops against the formula, on every instruction set that this machine runs."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import paged_attention_checks as checks
import pytest
from jax.sharding import Mesh, PartitionSpec
from paged_attention_checks import MIXED, SMALL_SPECS, TOLERANCE, TOLERANCE_BFLOAT16, small
from sweep import IN_SWEEP

from kernels import native
from kernels.paged_attention import QuantizedKV, choose, cpu, kv_partition, kv_structs, xla
from kernels.paged_attention.specs import SPECS, make_inputs

pytestmark = [
    pytest.mark.skipif(not cpu.is_available(), reason=str(cpu.unavailable())),
    pytest.mark.usefixtures("quick_compilation"),
]

SETS = native.runnable_instruction_sets() if cpu.is_available() else ()
DTYPES = ("float32", "bfloat16", "float16", "int8")
QUICK = ("gemma3-groups-mixed-int8", "mha-head-80-page-128")
# Products of these sets are of bfloat16 numbers if the cache is.
BFLOAT16_SETS = tuple(name for name in SETS if name in ("amx", "avx512bf16"))
ROUNDED_SPECS = {
    "mixed-bfloat16": small(MIXED, num_tokens=100, num_rows=9, kv_dtype="bfloat16"),
    "window-7-bfloat16": dataclasses.replace(SMALL_SPECS["window-7"], kv_dtype="bfloat16"),
    "few-bfloat16": dataclasses.replace(
        SMALL_SPECS["decode"], head_dim=64, page_size=16, kv_dtype="bfloat16"
    ),
}
WRITTEN = ("mqa-soft-cap-mixed", "gemma3-groups-mixed-int8", "smollm2-mixed-bf16-page-128")


def attention(spec, inputs, instruction_set=None):
    """The attention of `inputs`, traced anew: jit does not see what is forced."""
    call = {"group": spec.group, "scale": spec.scale}
    call |= {"window": spec.window, "soft_cap": spec.soft_cap}
    with pytest.MonkeyPatch.context() as patch:
        if instruction_set:
            patch.setenv("JAXINFER_CPU_ISA", instruction_set)
        return np.asarray(jax.jit(lambda *inputs: cpu.attend(*inputs, **call))(*inputs))


def rounds(spec, instruction_set=SETS[0] if SETS else None):
    """Whether products of a spec's queries are of bfloat16 numbers."""
    return instruction_set in BFLOAT16_SETS and spec.kv_dtype == "bfloat16"


@pytest.mark.parametrize("spec", SMALL_SPECS.values(), ids=SMALL_SPECS)
def test_equals_the_formula(spec):
    checks.check_formula("cpu", "cpu", spec)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else IN_SWEEP) for name in SPECS]
)
def test_equals_the_reference(name):
    spec = SPECS[name]
    # A query's elements and the weights of values are rounded to bfloat16.
    atol = TOLERANCE_BFLOAT16 if rounds(spec) else None
    checks.check_reference("cpu", "cpu", spec, atol)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in WRITTEN else IN_SWEEP) for name in SPECS]
)
def test_writes_rounded_values_to_their_slots_only(name):
    checks.check_write("cpu", "cpu", SPECS[name])


@pytest.mark.parametrize(
    "name", ["mixed", "mixed-int8", "decode-int8", "window-7", "groups", *ROUNDED_SPECS]
)
@pytest.mark.parametrize(
    "check",
    [checks.check_unseen_slots, checks.check_page_numbers, checks.check_padding],
    ids=lambda check: check.__name__,
)
def test_does_not_depend_on(check, name):
    check("cpu", "cpu", (SMALL_SPECS | ROUNDED_SPECS)[name])


# Heads that fill no register, pages that fill no block, spans and blocks that end anywhere.
RAGGED = partial(small, [(1, 9), (1, 300), (3, 3), (70, 340)], num_tokens=80, num_rows=6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instruction_set", SETS)
def test_every_instruction_set_equals_the_formula(instruction_set, dtype):
    for changes in (
        {"head_dim": 40, "num_heads": 14, "page_size": 6, "max_pages": 60},
        {"window": 100, "soft_cap": 3.0, "page_size": 128, "max_pages": 3, "head_dim": 64},
    ):
        spec = RAGGED(kv_dtype=dtype, **changes)
        inputs = make_inputs(spec)
        out = attention(spec, inputs, instruction_set)
        if rounds(spec, instruction_set):
            check_rounded(spec, inputs, out)
            continue
        np.testing.assert_allclose(out, checks.formula(spec, *inputs), rtol=0, atol=TOLERANCE)
        if instruction_set == "avx2" and "avx512" in SETS:
            np.testing.assert_array_equal(out, attention(spec, inputs, "avx512"))


def check_rounded(spec, inputs, out):
    """The formula for rounded queries, up to the rounding of weights."""
    q, kv, metadata = inputs
    scaled = np.asarray(q, np.float32) * np.float32(spec.scale)
    rounded = np.asarray(jnp.asarray(scaled, jnp.bfloat16), np.float64) / spec.scale
    error = np.abs(out - checks.formula(spec, rounded, kv, metadata))
    # Every weight is off by at most 2^-9 of itself, and so is the sum of how far values are away.
    values = checks.numbers_of(kv)[..., 1, :]
    assert error.max() <= 2**-9 * (np.abs(values).max() + np.abs(out).max())
    # Rounded this way and that, they mostly cancel.
    assert np.sqrt(np.mean(error**2)) <= 2**-9 * np.std(out)


ROUNDED_ROWS = {
    "one-head": ([(9, 9), (33, 40), (97, 97)], {"num_heads": 2}),
    "wide": ([(1, 5), (20, 170)], {"num_kv_heads": 1, "head_dim": 256}),
    "heads-of-96": ([(64, 513), (2, 2)], {"num_heads": 10, "head_dim": 96, "max_pages": 140}),
    "far-window": ([(40, 700), (12, 300)], {"window": 260, "head_dim": 24, "max_pages": 180}),
    "narrow-window": ([(50, 300), (30, 30)], {"window": 3, "soft_cap": 2.0, "max_pages": 80}),
}


# Rows of one to eight heads, heads of one to nine chunks of elements; pages that hold sixteen keys
# and those that do not; windows that begin inside sixteen keys.
FEW_ROUNDED_ROWS = {
    "smollm2": {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
    "gemma": {"num_heads": 4, "num_kv_heads": 1, "head_dim": 256, "window": 100},
    "mha": {"num_heads": 2, "head_dim": 96, "soft_cap": 3.0},
    "eight": {"num_heads": 16, "head_dim": 128, "window": 37},
    "five": {"num_heads": 5, "num_kv_heads": 1, "head_dim": 288},
    "narrow": {"num_heads": 7, "num_kv_heads": 1, "head_dim": 24, "window": 129},
    "heads-of-80": {"num_heads": 6, "num_kv_heads": 3, "head_dim": 80},
}


@pytest.mark.parametrize("instruction_set", BFLOAT16_SETS)
@pytest.mark.parametrize("page_size", [6, 16, 48])
@pytest.mark.parametrize("kind", FEW_ROUNDED_ROWS)
def test_few_rows_of_a_bfloat16_cache(kind, page_size, instruction_set):
    rows = [(1, 1), (1, 15), (1, 64), (1, 257), (1, 700), (2, 2), (2, 130)]
    pages = {"page_size": page_size, "max_pages": 700 // page_size + 1}
    spec = small(rows, kv_dtype="bfloat16", **pages, **FEW_ROUNDED_ROWS[kind])
    inputs = make_inputs(spec)
    check_rounded(spec, inputs, attention(spec, inputs, instruction_set))


@pytest.mark.parametrize("instruction_set", BFLOAT16_SETS)
@pytest.mark.parametrize("kind", ROUNDED_ROWS)
def test_many_rows_of_a_bfloat16_cache(kind, instruction_set):
    rows, changes = ROUNDED_ROWS[kind]
    spec = small(rows, kv_dtype="bfloat16", **changes)
    inputs = make_inputs(spec)
    check_rounded(spec, inputs, attention(spec, inputs, instruction_set))


@pytest.mark.parametrize("instruction_set", BFLOAT16_SETS)
@pytest.mark.parametrize("rows", [[(300, 300)], [(1, 300), (1, 7)]], ids=["many", "few"])
def test_values_that_are_all_the_same_are_returned(rows, instruction_set):
    """Weights are divided by the sum of what they were rounded to.

    By the sum of what they were before, results would be off by about 1e-4; sums of 300 float32
    products one after the other are off by three units in the last place, those of tiles by two.
    """
    spec = small(rows, head_dim=32, max_pages=80, kv_dtype="bfloat16")
    q, kv, metadata = make_inputs(spec)
    kv = kv.at[:, :, :, 1].set(np.asarray(1.5, jnp.bfloat16).view(np.uint16))
    out = attention(spec, (3 * q, kv, metadata), instruction_set)
    np.testing.assert_allclose(out, 1.5, rtol=5e-7 if instruction_set == "amx" else 1e-6)


@pytest.mark.parametrize("instruction_set", SETS)
def test_weights_are_exact_to_a_few_roundings(instruction_set):
    """Of two keys with scores x and 0 the weights have the ratio exp(x)."""
    x = np.concatenate([np.linspace(-86, 0, 4000), -np.logspace(-6, 0, 96)]).astype(np.float32)
    spec = small([(1, 2)] * len(x), num_heads=1, num_kv_heads=1, page_size=2, max_pages=1)
    _, _, metadata = make_inputs(spec)
    pages = np.asarray(metadata.page_table)[0, :, 0]
    kv = np.zeros((len(x) + 1, 2, 1, 2, 8), np.float32)
    kv[pages, 0, 0, 0, 0] = x
    kv[:, 0, 0, 1, 0] = kv[:, 1, 0, 1, 1] = 1
    q = np.full((len(x), 1, 8), 1 / spec.scale, np.float32)
    out = attention(dataclasses.replace(spec), (q, kv, metadata), instruction_set)[:, 0]
    exact_x = np.float64(np.float32(np.float32(1 / spec.scale) * np.float32(spec.scale)) * x)
    np.testing.assert_allclose(out[:, 0] / np.float64(out[:, 1]), np.exp(exact_x), rtol=4e-7)


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize(
    ("dtype", "head_dim"), [("float32", 8), ("int8", 8), ("bfloat16", 8), ("bfloat16", 32)]
)
def test_a_querys_bits_do_not_depend_on_the_batch(dtype, head_dim, window):
    """A prompt whole, in chunks, token by token; each chunk alone and beside others: its bits."""
    length = 700
    cache = {"window": window, "kv_dtype": dtype, "head_dim": head_dim, "max_pages": 180}
    whole = small([(length, length)], **cache)
    q, kv, metadata = make_inputs(whole)
    expected = attention(whole, (q, kv, metadata))

    def of_rows(rows):
        spec = small(rows, **cache)
        table = jnp.tile(metadata.page_table, (1, len(rows), 1))
        step = dataclasses.replace(make_inputs(spec)[2], page_table=table)
        position = np.concatenate([np.arange(end - size, end) for size, end in rows])
        return position, attention(spec, (q[position], kv, step))

    # The others are the same row at other lengths, so all of them are known.
    for sizes in ([1, 1, 699], [1, 33, 257, 100], [1] * 12, [97]):
        ends = [length - 60 * i for i in range(len(sizes))]
        rows = [(size, max(end, size)) for size, end in zip(sizes, ends, strict=True)]
        position, out = of_rows(rows)
        for first in {0, len(rows) - 1}:
            alone = of_rows([rows[first]])[1]
            start = sum(sizes[:first])
            np.testing.assert_array_equal(out[start : start + len(alone)], alone, f"{sizes}")
        # Tiles of few rows add up scores in an order of their own.
        atol = TOLERANCE_BFLOAT16 if rounds(whole) else 2e-6 * np.abs(expected).max()
        np.testing.assert_allclose(out, expected[position], rtol=0, atol=atol, err_msg=f"{sizes}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_threads_share_long_rows(dtype):
    spec = small([(1, 4000)], num_heads=12, head_dim=64, max_pages=1000, kv_dtype=dtype)
    inputs = make_inputs(spec)
    call = jax.jit(partial(cpu.attend, group=0, scale=spec.scale, window=None, soft_cap=None))
    alone = np.asarray(call(*inputs))
    atol = TOLERANCE_BFLOAT16 if rounds(spec) else TOLERANCE
    np.testing.assert_allclose(alone, checks.formula(spec, *inputs), rtol=0, atol=atol)
    with ThreadPoolExecutor(6) as pool:  # more callers than XLA has threads
        for result in pool.map(lambda _: np.asarray(call(*inputs)), range(24)):
            np.testing.assert_array_equal(result, alone)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instruction_set", SETS)
def test_writes_the_bits_that_xla_writes(monkeypatch, instruction_set, dtype):
    monkeypatch.setenv("JAXINFER_CPU_ISA", instruction_set)
    rng = np.random.default_rng(0)
    new_kv = rng.standard_normal((64, 3, 2, 40), np.float32)
    new_kv *= np.logspace(-9, 4, 64, dtype=np.float32)[:, None, None, None]
    new_kv[3] = 0
    new_kv[5, 0] = [[127, 0.5, 1.5, -2.5, -126.5] * 8] * 2  # codes between codes
    new_kv[7, 0, 0, :3] = 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11  # between two numbers
    if dtype != "int8":
        new_kv[9, 0, 0, :4] = np.inf, -np.inf, 65519.9, 65520
    structs = kv_structs("cpu", dtype, 18, 4, 3, 40)
    kv = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), structs)
    slots = jnp.asarray(4 + rng.permutation(68)[:64], jnp.int32)
    wanted, written = (
        jax.jit(lambda *call, module=module: module.write(*call))(kv, new_kv, slots)
        for module in (xla, cpu)
    )
    for ours, theirs in zip(*map(jax.tree.leaves, (written, wanted)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("kind", ["mixed", "mixed-int8", "mixed-bfloat16", "decode"])
def test_heads_split_over_a_mesh(kind):
    spec = (SMALL_SPECS | ROUNDED_SPECS)[kind]
    inputs = make_inputs(spec)
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",))
    call, _ = spec.prepare("cpu", "cpu")
    heads, kv_heads = PartitionSpec(None, "tensor"), kv_partition(inputs[1], "tensor")
    split = jax.shard_map(
        call, mesh=mesh, in_specs=(heads, kv_heads, PartitionSpec()), out_specs=heads
    )
    np.testing.assert_array_equal(jax.jit(split)(*inputs), attention(spec, inputs))


def test_numbers_that_are_out_of_range_read_nothing_outside():
    spec = SMALL_SPECS["mixed"]
    q, kv, metadata = make_inputs(spec)
    wild = dataclasses.replace(
        metadata,
        num_seqs=jnp.int32(1000),
        kv_lens=metadata.kv_lens * 1_000_000 - 5,
        cu_q_lens=metadata.cu_q_lens.at[3:].set(jnp.asarray([-9, 10**9, 7, 2, -1, 50, 10**9])),
        page_table=metadata.page_table.at[0, 1].set(-(10**9)).at[0, 2].set(10**9),
    )
    assert attention(spec, (q, kv, wild)).shape == q.shape
    slots = jnp.asarray([-1, 10**9, 5] + [0] * 97, jnp.int32)
    written = np.asarray(cpu.write(kv, jnp.ones((100, 2, 2, 8)), slots))
    np.testing.assert_array_equal(written[2:], kv[2:])


def test_it_is_what_cpus_choose_for_what_it_supports():
    struct = jax.ShapeDtypeStruct
    q, kv = struct((8, 4, 8), jnp.float32), kv_structs("cpu", "int8", 9, 4, 2, 8)
    assert str(choose(q, kv, platform="cpu")) == "cpu"
    for kv, reason in {
        struct((9, 4, 2, 2, 8), jnp.bfloat16): "the cache is bfloat16",
        struct((9, 4, 2, 2, 12), jnp.float32): "heads of 12",
    }.items():
        chosen = choose(struct((8, 4, kv.shape[-1]), q.dtype), kv, platform="cpu")
        assert chosen.name == "xla"
        assert reason in str(chosen)
    with pytest.raises(NotImplementedError, match="q is float64"):
        cpu.supports(struct(q.shape, np.float64), kv)
    with pytest.raises(NotImplementedError, match="laid out for a TPU"):
        cpu.supports(q, kv_structs("tpu", "int8", 9, 4, 2, 8))


def _attend(q, kv, metadata, results=None, **changes):
    scales = (kv.scales,) if isinstance(kv, QuantizedKV) else changes.pop("scales", ())
    attributes = {"group": np.int64(0), "window": np.int64(0), "scale": np.float32(1)}
    attributes |= {"soft_cap": np.float32(0), "is_decode": np.bool_(False)} | changes
    call = jax.ffi.ffi_call("jaxinfer_attend_v2", results or jax.typeof(q))
    m = metadata
    rows = (m.page_table, m.kv_lens, m.cu_q_lens, m.num_seqs)
    jax.block_until_ready(call(q, getattr(kv, "values", kv), *rows, *scales, **attributes))


def _write(kv, new_kv, slots, aliases):
    call = jax.ffi.ffi_call("jaxinfer_write_kv_v1", jax.typeof(kv), input_output_aliases=aliases)
    jax.block_until_ready(call(kv, new_kv, slots))


_replace = dataclasses.replace
BAD_CALLS = {
    "the cache is .*: needs float32": lambda q, kv, m: _attend(q, kv.astype(jnp.int32), m),
    "the cache is .*: needs pages": lambda q, kv, m: _attend(q[..., :4], kv[..., :4], m),
    "have scales": lambda q, kv, m: _attend(q, kv.astype(jnp.int8), m),
    "they alone, have scales": lambda q, kv, m: _attend(q, kv, m, scales=(q,)),
    "scales .* do not fit": lambda q, kv, m: _attend(
        q, QuantizedKV(kv.astype(jnp.int8), jnp.ones((1, 2, 2, 4))), m
    ),
    "q is .* of type": lambda q, kv, m: _attend(q.astype(jnp.float16), kv, m),
    "q is \\[100, 3, 8\\]": lambda q, kv, m: _attend(q[:, :3], kv, m),
    "page_table is": lambda q, kv, m: _attend(q, kv, m, group=np.int64(1)),
    "kv_lens .* do not fit": lambda q, kv, m: _attend(q, kv, _replace(m, kv_lens=m.kv_lens[1:])),
    "cu_q_lens .* do not fit": lambda q, kv, m: _attend(q, kv, _replace(m, cu_q_lens=m.kv_lens)),
    "num_seqs .* do not fit": lambda q, kv, m: _attend(q, kv, _replace(m, num_seqs=m.kv_lens)),
    "a token for each row": lambda q, kv, m: _attend(q, kv, m, is_decode=np.bool_(True)),
    "window and soft_cap": lambda q, kv, m: _attend(q, kv, m, window=np.int64(-1)),
    "the result is": lambda q, kv, m: _attend(q, kv, m, jax.typeof(q[:1])),
    "new_kv .* do not fit": lambda q, kv, m: _write(kv, q, m.slot_mapping[0], {0: 0}),
    "slots .* do not fit": lambda q, kv, m: _write(kv, jnp.ones((5, 2, 2, 8)), m.kv_lens, {0: 0}),
    "results must be aliases": lambda q, kv, m: _write(kv, jnp.ones((9, 2, 2, 8)), m.kv_lens, {}),
}


@pytest.mark.parametrize("message", BAD_CALLS)
def test_the_handlers_refuse_what_their_loops_cannot_take(message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        BAD_CALLS[message](*make_inputs(SMALL_SPECS["mixed"]))


def test_a_library_without_the_handlers_says_so(monkeypatch):
    monkeypatch.setattr(cpu, "_ATTEND", "jaxinfer_attend_v0")
    assert "does not fit" in str(cpu.unavailable())
    assert not cpu.is_available()
