"""The TPU kernels: interpreted against the reference, raced, and lowered for TPUs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import paged_attention_checks as checks
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from sweep import IN_SWEEP

from kernels import device, tuning
from kernels.paged_attention import attend, choose, kv_structs, write
from kernels.paged_attention.pallas_tpu import Config
from kernels.paged_attention.specs import SPECS, Spec, make_inputs
from kernels.paged_attention.tpu_layout import pack_rows, row_layout, unpack_rows

NAME = "pallas_tpu"
CALL = ("tpu", NAME)
CHIPS = {name: chip for name, chip in device.KNOWN_DEVICES.items() if chip.platform == "tpu"}
# What the lowering itself looks at, where it looks for more than the platform.
MESH = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice("TPU v6 lite", 1, "tpu"))
# Several blocks a row, several rows and tiles a step, and buffers that wrap around.
SMALL = Config(
    pages_per_block=4,
    tile_pages_per_block=2,
    num_buffers=3,
    rows_per_step=4,
    queries_per_tile=16,
)
ROWS = ((1, 9), (1, 1), (1, 40), (5, 14), (3, 17), (21, 29))
DECODES = ((1, 9), (1, 1), (1, 60), (1, 8), (1, 33))


def small(rows, heads, head_dim, **changes):
    """A spec of small pages; its cache is bfloat16, its queries float32."""
    num_heads, num_kv_heads = heads
    num_tokens = sum(q_len for q_len, _ in rows) + 1
    num_rows = num_tokens if rows is DECODES else len(rows) + 1
    spec = Spec(num_heads, num_kv_heads, head_dim, rows, num_tokens, num_rows, 9, 8)
    return dataclasses.replace(spec, **({"kv_dtype": "bfloat16"} | changes))


# Heads that share lanes or words, that fill them, and that take many; all with or without masks.
SMALL_SPECS = {
    "mixed": small(ROWS, (4, 2), 128),
    "mixed-int8-odd-heads": small(ROWS, (3, 3), 64, kv_dtype="int8", soft_cap=2.0),
    "mixed-two-tiles-a-head": small(ROWS, (4, 1), 256, window=7),
    "decode-7-heads": small(DECODES, (14, 2), 64, window=11),
    "decode-merged-80": small(DECODES, (6, 3), 80, soft_cap=0.7),
    "decode-int8": small(DECODES, (8, 4), 128, kv_dtype="int8"),
    "decode-float32": small(DECODES, (3, 3), 64, kv_dtype="float32"),
}
# Specs that between them take every way through the kernels.
QUICK = (
    "gemma3-local-mixed",
    "llama8b-decode-8",
    "llama8b-decode-2-long-int8",
    "mha-head-80-page-128",
)


@pytest.fixture(autouse=True)
def v6e():
    with device.assume(CHIPS["v6e"]):
        yield


@pytest.fixture
def interpreted():
    """Interprets the kernels; what XLA makes of that runs but once, so it need not be fast."""
    jax.config.update("jax_disable_most_optimizations", True)
    with device.interpreted():
        yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def small_blocks():
    with tuning.force(SMALL):
        yield


def held_by_a_tpu(spec):
    """The spec with float32 queries and a cache that a TPU may have."""
    kv_dtype = "bfloat16" if spec.kv_dtype == "float16" else spec.kv_dtype
    return dataclasses.replace(spec, dtype="float32", kv_dtype=kv_dtype)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else IN_SWEEP) for n in SPECS]
)
def test_equals_the_reference(name, interpreted):
    checks.check_reference(*CALL, held_by_a_tpu(SPECS[name]))


@pytest.mark.parametrize("name", SMALL_SPECS)
def test_equals_the_formula(name, interpreted, small_blocks):
    checks.check_formula(*CALL, SMALL_SPECS[name])


@pytest.mark.parametrize("name", ["mixed"])
def test_rounds_only_weights_and_results(name, interpreted, small_blocks):
    checks.check_reference(*CALL, dataclasses.replace(SMALL_SPECS[name], dtype="bfloat16"))


@pytest.mark.parametrize("name", ["mixed-two-tiles-a-head", "decode-int8", "decode-merged-80"])
def test_unseen_slots_do_not_matter(name, interpreted, small_blocks):
    checks.check_unseen_slots(*CALL, SMALL_SPECS[name])


@pytest.mark.parametrize("name", ["mixed"])
def test_page_numbers_do_not_matter(name, interpreted, small_blocks):
    checks.check_page_numbers(*CALL, SMALL_SPECS[name])


@pytest.mark.parametrize("name", ["mixed"])
def test_padding_does_not_matter(name, interpreted, small_blocks):
    checks.check_padding(*CALL, SMALL_SPECS[name])


def test_a_step_of_no_rows_gives_zeros(interpreted, small_blocks):
    checks.check_formula(*CALL, small((), (2, 1), 128))


@pytest.mark.parametrize("name", ["mixed", "mixed-int8-odd-heads", "decode-float32"])
def test_writes(name, interpreted):
    checks.check_write(*CALL, SMALL_SPECS[name])


def test_writes_many_tiles_of_tokens(interpreted):
    """Two rows' prompts, longer than what is in VMEM at once."""
    spec = Spec(2, 1, 128, ((150, 150), (300, 333)), 460, 2, 8, 64, kv_dtype="int8")
    checks.check_write(*CALL, spec)


def test_writes_slots_in_any_order(interpreted):
    """Tokens next to each other that share pages, in no order: none is lost."""
    spec = small(ROWS, (2, 2), 64, kv_dtype="int8")
    _, kv, _ = make_inputs(spec, platform="tpu")
    num_slots = kv.scales.shape[0] * spec.page_size
    slots = np.random.default_rng(0).permutation(np.arange(spec.page_size, num_slots))[:60]
    new_kv = jax.random.normal(jax.random.key(0), (60, 2, 2, 64))
    written, expected = (
        write(kv, new_kv, jnp.asarray(slots, jnp.int32), platform="tpu", implementation=name)
        for name in (NAME, "reference")
    )
    for ours, theirs in zip(*map(jax.tree.leaves, (written, expected)), strict=True):
        np.testing.assert_array_equal(checks.bits(ours)[1:], checks.bits(theirs)[1:])


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("decode-int8", ((1, 9), (1, 17), (1, 3))),
        ("mixed", ((1, 9), (5, 14), (3, 3))),
    ],
)
def test_races_nothing(name, rows, capfd):
    """No race, no page out of range, and no copy that nobody waits for."""
    spec = SMALL_SPECS[name]
    num_rows = 4
    num_tokens = num_rows if "decode" in name else 12
    spec = dataclasses.replace(
        spec, rows=rows, num_rows=num_rows, num_tokens=num_tokens, max_pages=3, window=None
    )
    config = dataclasses.replace(SMALL, pages_per_block=1, tile_pages_per_block=1)
    # Copies happen when they start: done only when waited for, one without a wait is no race.
    races = pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager")
    with device.interpreted(races), tuning.force(config):
        for check in (checks.check_reference, checks.check_write):
            check(*CALL, spec)
            assert not interpret_pallas_call.races.races_found
    captured = capfd.readouterr()
    assert "non-zero" not in captured.out + captured.err


@pytest.mark.parametrize("name", SPECS)
def test_lowers_for_tpus(name):
    spec = dataclasses.replace(held_by_a_tpu(SPECS[name]), dtype="bfloat16")
    call = {"group": spec.group, "scale": spec.scale, "platform": "tpu", "implementation": NAME}
    call |= {"window": spec.window, "soft_cap": spec.soft_cap}
    q, kv, metadata = jax.eval_shape(lambda: make_inputs(spec, platform="tpu"))
    new_kv = jax.ShapeDtypeStruct((spec.num_tokens, spec.num_kv_heads, 2, spec.head_dim), q.dtype)

    def step(q, kv, new_kv, metadata):
        slots = metadata.slot_mapping[spec.group]
        kv = write(kv, new_kv, slots, platform="tpu", implementation=NAME)
        return attend(q, kv, metadata, **call), kv

    with use_abstract_mesh(MESH):
        lowered = jax.jit(step).trace(q, kv, new_kv, metadata).lower(lowering_platforms=("tpu",))
    assert lowered.as_text().count("tpu_custom_call") == 2 + (not spec.is_decode)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_blocks_are_legal(spec):
    layout = row_layout(spec.num_kv_heads, spec.head_dim, held_by_a_tpu(spec).kv_dtype)
    config = Config.for_call(
        layout, spec.page_size, spec.num_heads, spec.num_tokens, spec.max_pages
    )
    for pages in (config.pages_per_block, config.tile_pages_per_block):
        assert 128 % pages == 0
        buffers = pages * spec.page_size * layout.num_rows * 512 * config.num_buffers
        assert buffers <= 16 * 2**20
    assert config.queries_per_tile % 8 == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("heads", [(1, 256), (3, 64), (8, 128), (5, 80), (2, 8)])
def test_rows_of_words_hold_every_element(heads, dtype):
    elements = np.random.default_rng(0).integers(-99, 99, (5, heads[0], 2, heads[1]))
    elements = elements.astype(jnp.dtype(dtype))
    words = jax.jit(pack_rows)(elements)
    assert words.dtype.itemsize == 4
    unpacked = jax.jit(lambda words: unpack_rows(words, *heads))(words)
    np.testing.assert_array_equal(checks.bits(unpacked), checks.bits(elements))


def test_an_int8_cache_takes_half_of_a_bfloat16_one():
    for heads, head_dim in ((8, 128), (1, 256), (4, 64), (32, 80)):
        halves = [row_layout(heads, head_dim, dtype).num_rows for dtype in ("int8", "bfloat16")]
        assert 2 * halves[0] == halves[1]


def test_refuses_what_a_tpu_cannot_load():
    kv = kv_structs("tpu", "bfloat16", 9, 8, 2, 64)
    with pytest.raises(NotImplementedError, match="pallas_tpu: queries of float16"):
        choose(jax.ShapeDtypeStruct((8, 4, 64), jnp.float16), kv, **_only_ours())
    q = jax.ShapeDtypeStruct((8, 4, 64), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=r"is not laid out for a TPU: make it by"):
        choose(q, kv_structs("gpu", "bfloat16", 9, 8, 2, 64), **_only_ours())


def _only_ours():
    return {"platform": "tpu", "implementation": NAME}
