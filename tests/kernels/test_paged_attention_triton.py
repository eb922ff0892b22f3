"""The Triton kernels: interpreted against the reference, lowered for CUDA and ROCm."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import paged_attention_checks as checks
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from sweep import IN_SWEEP

from kernels import device, tuning
from kernels.paged_attention import QuantizedKV, choose, kv_structs, triton_kernels, write
from kernels.paged_attention.pallas_triton import Config, Sizes
from kernels.paged_attention.specs import SPECS, make_inputs

NAME = "pallas_triton"
CALL = ("gpu", NAME)
SMALL_SPECS = checks.SMALL_SPECS
CHIPS = {name: chip for name, chip in device.KNOWN_DEVICES.items() if chip.platform == "gpu"}
CHIPS["unknown"] = device.Device("gpu", "unknown")
# What the lowering itself looks at, where it looks for more than the platform.
MESH = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))


@pytest.fixture(autouse=True)
def a100():
    with device.assume(CHIPS["a100"]):
        yield


@pytest.fixture
def interpreted():
    with device.interpreted():
        yield


pytestmark = [
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
    pytest.mark.usefixtures("quick_compilation"),
]


# Each interpreted kernel takes XLA seconds to compile: these have every feature between them.
ALWAYS = {
    "smollm2-decode-32-one-long",
    "llama8b-decode-2-long-int8",
    "gemma3-local-mixed",
    "gemma3-groups-mixed-int8",
    "mha-head-80-page-128",
    "phi3-mixed-int8",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else IN_SWEEP) for name in SPECS]
)
def test_equals_the_reference(name, interpreted):
    checks.check_reference(*CALL, checks.in_float32(SPECS[name]))


@pytest.mark.parametrize("name", ["soft-cap-int8", "only-prefill"])
def test_equals_the_formula(name, interpreted):
    checks.check_formula(*CALL, SMALL_SPECS[name])


def test_rounds_only_weights_and_results(interpreted):
    checks.check_reference(*CALL, SPECS["llama8b-mixed-bf16-page-32"])


@pytest.mark.parametrize("name", ["mixed", "mixed-int8", "window-7"])
def test_unseen_slots_do_not_matter(name, interpreted):
    checks.check_unseen_slots(*CALL, SMALL_SPECS[name])


def test_page_numbers_do_not_matter(interpreted):
    checks.check_page_numbers(*CALL, SMALL_SPECS["mixed-int8"])


@pytest.mark.parametrize("name", ["mixed", "decode-int8"])
def test_padding_does_not_matter(name, interpreted):
    checks.check_padding(*CALL, SMALL_SPECS[name])


@pytest.mark.parametrize("name", ["mixed", "mixed-int8"])
def test_writes_tokens_into_their_slots(name, interpreted):
    checks.check_write(*CALL, SMALL_SPECS[name])


def test_writes_what_every_implementation_writes(interpreted):
    spec = dataclasses.replace(SPECS["phi2-decode-4-int8"], num_tokens=16)
    _, kv, _ = make_inputs(spec, platform="gpu")
    new_kv = jax.random.normal(jax.random.key(0), (16, 4, 2, 80), jnp.bfloat16)
    # Halves of a scale of 1, which round to even; a token of zeros, whose scale is 0.
    halves = jnp.asarray(np.append(np.arange(79) - 12.5, 127), jnp.bfloat16)
    new_kv = new_kv.at[3].set(halves).at[5].set(0)
    slots = 16 + jnp.arange(16, dtype=jnp.int32)
    ours, theirs = (
        write(kv, new_kv, slots, platform="gpu", implementation=name) for name in (NAME, "xla")
    )
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    decodes=st.lists(st.integers(1, 150), max_size=4),
    prefills=st.lists(st.tuples(st.integers(1, 90), st.integers(0, 60)), max_size=3),
    window=st.sampled_from([None, 33]),
    seed=st.integers(0, 3),
)
def test_any_ragged_batch_equals_the_reference(decodes, prefills, window, seed):
    rows = [(1, kv_len) for kv_len in decodes]
    rows += [(q_len, q_len + cached) for q_len, cached in prefills]
    spec = checks.small(rows, num_tokens=300, num_rows=8, num_kv_heads=1, window=window)
    q, kv, metadata = make_inputs(spec, seed, platform="gpu")
    kv = jnp.zeros((300, *kv.shape[1:])).at[: kv.shape[0]].set(kv)  # one shape: one compilation
    config = Config(block_keys=16, block_queries=6, num_splits=4, num_warps=4, num_stages=1)
    with device.interpreted(), tuning.force(config):
        actual = checks.run(*CALL, spec, (q, kv, metadata))
    expected = checks.run("gpu", "reference", spec, (q, kv, metadata))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=checks.TOLERANCE)


@pytest.mark.parametrize("window", [None, 40])
def test_a_decode_row_is_bit_equal_with_any_batchmates(window, interpreted):
    rng = np.random.default_rng(0)
    spec = checks.small([(1, 1000)] * 4, max_pages=256, window=window, kv_dtype="int8")
    q, kv, metadata = make_inputs(spec, platform="gpu")
    results = []
    for lens in ([150] * 4, [1] * 4, [1000] * 4, rng.integers(0, 1000, 4)):
        place = rng.integers(4)
        kv_lens = jnp.asarray(lens, jnp.int32).at[place].set(150)
        table = metadata.page_table.at[0, place].set(metadata.page_table[0, 0])
        step = dataclasses.replace(metadata, kv_lens=kv_lens, page_table=table)
        results.append(checks.run(*CALL, spec, (q.at[place].set(q[0]), kv, step))[place])
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("window", [None, 1, 50])
def test_splits_cover_every_visible_key_once(window):
    call = triton_kernels.Call(16, 1, 4, 0, 1.0, window, None, 1, 64, 16, True)
    kv_len, split = jnp.arange(300, dtype=jnp.int32)[:, None], jnp.arange(4, dtype=jnp.int32)
    begin, end = (np.asarray(each) for each in call.split(kv_len, split[None]))
    for length in range(300):
        covered = [range(*span) for span in zip(begin[length], end[length], strict=True)]
        first = 0 if window is None else max(0, length - window)
        assert [block for each in covered for block in each] == [
            *range(first // 16, math.ceil(length / 16))
        ]


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
@pytest.mark.parametrize("num_rows", [1, 64, 256])
@pytest.mark.parametrize("itemsizes", [(2, 2), (1, 2), (1, 4), (4, 4)])
def test_configs_are_legal_and_small(itemsizes, num_rows, chip):
    for num_heads, num_kv_heads in ((32, 8), (64, 1), (28, 4), (8, 8), (9, 3)):
        for head_dim in (64, 80, 96, 128, 256):
            sizes = Sizes(num_rows, num_heads, num_kv_heads, head_dim, *itemsizes)
            decode, tiles = Config.for_decode(sizes, chip), Config.for_tiles(sizes, chip)
            for config in (decode, tiles):
                for size in (config.block_keys, config.num_splits, config.num_warps):
                    assert size.bit_count() == 1
                assert config.block_keys >= 16
                assert 2 * config.block_keys * sizes.key_bytes <= 32 << 10
            assert tiles.block_queries * sizes.group_size * sizes.query_bytes <= 64 << 10
            assert decode.num_splits * sizes.result_bytes <= 48 << 20


def test_a_short_batch_is_split_more():
    sizes = Sizes(1, 32, 8, 128, 2, 2)
    few, many = (
        Config.for_decode(dataclasses.replace(sizes, num_rows=n), CHIPS["a100"]) for n in (1, 256)
    )
    assert few.num_splits > many.num_splits


def lowered(function, *inputs, platform="cuda", **options):
    with use_abstract_mesh(MESH):
        traced = jax.jit(function, **options).trace(*inputs)
        return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("name", SPECS)
def test_lowers_for_cuda(name):
    spec = SPECS[name]
    call, _ = dataclasses.replace(spec, rows=()).prepare("gpu", NAME)
    text = lowered(call, *jax.eval_shape(partial(make_inputs, spec, platform="gpu")))
    assert text.count("xla.gpu.triton") == (2 if spec.is_decode else 3)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16", "float32", "int8"])
@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_write_lowers_for_cuda(head_dim, kv_dtype):
    kv = kv_structs("gpu", kv_dtype, 9, 16, 3, head_dim)
    new_kv = jax.ShapeDtypeStruct((5, 3, 2, head_dim), jnp.bfloat16)
    call = partial(write, platform="gpu", implementation=NAME)
    text = lowered(
        lambda new_kv, kv, slots: call(kv, new_kv, slots),
        new_kv,
        kv,
        jax.ShapeDtypeStruct((5,), jnp.int32),
        donate_argnums=1,
    )
    assert text.count("xla.gpu.triton") == 1
    assert text.count("output_operand_alias<") == len(jax.tree.leaves(kv))  # in place


@pytest.mark.parametrize("name", ["llama70b-mixed-int8", "gemma2-mixed"])
def test_lowers_for_rocm(name):
    call, inputs = SPECS[name].prepare("gpu", NAME)
    chip = device.Device("gpu", "AMD Instinct MI300X", 304)
    with device.assume(chip):
        assert lowered(call, *inputs, platform="rocm").count("xla.gpu.triton") == 3


def test_refuses_with_a_reason():
    q = jax.ShapeDtypeStruct((8, 4, 128), jnp.bfloat16)
    kv = partial(kv_structs, "gpu", num_pages=9, page_size=16, num_kv_heads=2, head_dim=128)
    large = kv_structs("gpu", "int8", 70000, 16, 8, 128)
    int8 = jax.ShapeDtypeStruct((9, 16, 2, 2, 128), jnp.int8)
    cases = {
        "a cache of int8 needs scales": (q, int8),
        "queries of float64": (jax.ShapeDtypeStruct(q.shape, np.float64), kv(dtype="bfloat16")),
        "more than 256": (q, kv_structs("gpu", "bfloat16", 9, 16, 2, 512)),
        "between 2 and 4 GiB": (q, large),
    }
    for reason, arrays in cases.items():
        with pytest.raises(NotImplementedError, match=reason):
            choose(*arrays, platform="gpu", implementation=NAME)
    old = device.Device("gpu", "Tesla T4", 40, (7, 5))
    with device.assume(old), pytest.raises(NotImplementedError, match=r"\(7, 5\) is below"):
        choose(q, kv(dtype="bfloat16"), platform="gpu", implementation=NAME)
    assert isinstance(large, QuantizedKV)
