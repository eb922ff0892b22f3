"""What the call of all layers refuses: by `supports`, and in C++ whatever it is handed."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoder_layers_cases import (
    Case,
    Step,
    make_caches,
    make_layers,
    make_metadata,
    make_tables,
    make_x,
)
from native_matmul_cases import FORMATS, random_weight

from kernels import decoder_layers
from kernels.decoder_layers import cpu, reference
from kernels.paged_attention import kv_structs
from kernels.quantized_matmul import dequantize
from kernels.quantized_matmul.format import CANONICAL

pytestmark = [
    pytest.mark.skipif(not cpu.is_available(), reason=str(cpu.unavailable())),
    pytest.mark.usefixtures("quick_compilation"),
]

CASE = Case(has_biases=True, has_head_norms=True, windows=(None, 7))
STEP = Step(((1, 9), (3, 7)), 6, 3)
_replace = dataclasses.replace


def asked(module=cpu, case=CASE, **changes):
    """`supports` of an implementation, with some arguments exchanged."""
    call = {"x": make_x(case, STEP), "kv": make_caches(case, STEP), "layers": make_layers(case)}
    module.supports(**(call | {"shape": case.shape} | changes))


def layers_with_out(change):
    """Layers the last of which has another matrix `out`."""
    *layers, last = make_layers(CASE)
    matrix = _replace(last.out, pieces=(change(last.out.pieces[0]),))
    return (*layers, _replace(last, out=matrix))


def test_it_is_what_cpus_choose():
    call = (make_x(CASE, STEP), make_caches(CASE, STEP), make_layers(CASE), CASE.shape)
    chosen = decoder_layers.choose(*call, platform="cpu")
    assert (chosen.name, chosen.module, chosen.refusals) == ("cpu", cpu, ())
    asked(reference)
    for platform in ("gpu", "tpu"):
        with pytest.raises(NotImplementedError, match=f"cannot run this on {platform}"):
            decoder_layers.choose(*call, platform=platform)
    with pytest.raises(ValueError, match="no implementation 'reference' for cpu"):
        decoder_layers.choose(*call, platform="cpu", implementation="reference")


def test_run_is_what_is_chosen():
    call = (make_x(CASE, STEP), make_tables(CASE, STEP), make_caches(CASE, STEP))
    call = (*call, make_layers(CASE), make_metadata(CASE, STEP), CASE.shape)
    chosen, direct = decoder_layers.run(*call, platform="cpu"), cpu.run(*call)
    for mine, theirs in zip(jax.tree.leaves(chosen), jax.tree.leaves(direct), strict=True):
        np.testing.assert_array_equal(mine, theirs)


_OTHER_GELU = _replace(CASE.shape, activation="gelu")
_INT8_KV = (kv_structs("cpu", "int8", 9, 4, 2, 32),) * 2
_TPU_KV = (kv_structs("tpu", "float32", 9, 4, 2, 128),) * 2
_BF16_KV = (jax.ShapeDtypeStruct((9, 4, 2, 2, 32), jnp.bfloat16),) * 2
REFUSED = {
    "x is bfloat16": lambda: {"x": make_x(CASE, STEP).astype(jnp.bfloat16)},
    "activation gelu: needs one of": lambda: {"shape": _OTHER_GELU},
    "the cache is int8": lambda: {"kv": _INT8_KV},
    "the cache is laid out for a TPU": lambda: {"kv": _TPU_KV},
    "the cache is bfloat16: needs": lambda: {"kv": _BF16_KV},
    "a matrix is not quantized": lambda: {"layers": layers_with_out(dequantize)},
    "permuted columns": lambda: {
        "layers": layers_with_out(lambda w: _replace(w, perm=jnp.arange(w.shape[1])))
    },
    "rounded activations": lambda: {
        "layers": layers_with_out(lambda w: _replace(w, activations="int8"))
    },
    "the weight is laid out as": lambda: {
        "layers": layers_with_out(lambda w: _replace(w, layout=CANONICAL))
    },
    "int8 codes need multiples of 16": lambda: {
        "layers": layers_with_out(lambda w: random_weight(FORMATS["int8"], 64, 120))
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_supports_says_what_it_lacks(message):
    with pytest.raises(NotImplementedError, match=message):
        asked(**REFUSED[message]())


@pytest.mark.parametrize("name", ["activation gelu", "permuted columns", "rounded activations"])
def test_the_reference_refuses_what_is_no_formula_of_its(name):
    [changes] = (make() for message, make in REFUSED.items() if message.startswith(name))
    with pytest.raises(NotImplementedError):
        asked(reference, **changes)


def test_a_library_without_the_handler_says_so(monkeypatch):
    monkeypatch.setattr(cpu, "_TARGET", "jaxinfer_decoder_layers_v0")
    with pytest.raises(NotImplementedError, match="does not fit"):
        asked()


def call_with(monkeypatch, change):
    """Runs the handler with what `cpu.run` hands it, changed by `change(operands, call)`."""
    real = jax.ffi.ffi_call

    def ffi_call(target, results, input_output_aliases):
        def run(*operands, **attributes):
            call = {"results": results, "aliases": input_output_aliases, "attributes": attributes}
            operands = [jnp.asarray(each) for each in operands]
            operands = change(operands, call) or operands
            aliases = {"input_output_aliases": call["aliases"]}
            return real(target, call["results"], **aliases)(*operands, **call["attributes"])

        return run

    step = make_metadata(CASE, STEP)
    with monkeypatch.context() as patch:
        patch.setattr(jax.ffi, "ffi_call", ffi_call)
        outputs = cpu.run(
            make_x(CASE, STEP),
            make_tables(CASE, STEP),
            make_caches(CASE, STEP),
            make_layers(CASE),
            step,
            CASE.shape,
        )
    return jax.block_until_ready(outputs)


# Where operands are: after the step's come two rotary tables, two caches, and the first layer.
X, NUM_SEQS, KV_LENS, CU_Q_LENS, SLOTS, PAGE_TABLE, COS, KV, INPUT_NORM = (
    0,
    1,
    2,
    3,
    4,
    5,
    6,
    10,
    12,
)
QKV_CODES, QKV_SCALE, QKV_OFFSET, QKV_BOOK, QKV_BIAS, QUERY_NORM = range(13, 19)
# Where numbers are: rotary, group, window; qkv's pieces, its rows in a block, code, row block.
ROTARY, GROUP, WINDOW, PIECES, BLOCK_ROWS, CODE, ROW_BLOCK, OUT_PIECES, OUT_ROWS = range(9)


def operand(index, make):
    def change(operands, call):
        operands[index] = make(operands[index])

    return change


def number(index, value):
    def change(operands, call):
        layout = call["attributes"]["layout"].copy()
        layout[index] = value
        call["attributes"]["layout"] = layout

    return change


def attribute(name, value):
    def change(operands, call):
        call["attributes"][name] = type(call["attributes"][name])(value)

    return change


def no_alias(operands, call):
    call["aliases"] = {0: 0}


def fewer_numbers(operands, call):
    call["attributes"]["layout"] = call["attributes"]["layout"][:-5]


def more_numbers(operands, call):
    call["attributes"]["layout"] = np.append(call["attributes"]["layout"], 0)


def result(index, struct):
    def change(operands, call):
        call["results"] = tuple(
            struct if i == index else each for i, each in enumerate(call["results"])
        )
        call["aliases"] = {key: to for key, to in call["aliases"].items() if to != index}

    return change


def other_pages(operands, call):
    shape = (operands[KV].shape[0] * 2, 2, *operands[KV].shape[2:])
    operands[KV + 1] = operands[KV + 1].reshape(shape)
    call["results"] = (*call["results"][:3], jax.ShapeDtypeStruct(shape, jnp.float32))


def only_the_step(operands, call):
    call["aliases"] = {0: 0}
    call["results"] = call["results"][:2]
    return operands[:COS]


def floats(*shape):
    return lambda old: jnp.ones(shape, jnp.float32)


def cache_of(*shape, dtype=jnp.float32):
    def change(operands, call):
        operands[KV] = jnp.ones(shape, dtype)
        call["results"] = (*call["results"][:2], jax.typeof(operands[KV]), call["results"][3])

    return change


BAD_CALLS = [
    ("x is .* needs float32 \\[T, D\\]", result(0, jax.ShapeDtypeStruct((6, 32), jnp.float32))),
    ("x is .* needs float32 \\[T, D\\]", result(0, jax.ShapeDtypeStruct((6, 64), jnp.int32))),
    ("impossible sizes", attribute("num_kv_heads", 0)),
    ("impossible sizes", attribute("num_heads", 3)),
    ("impossible sizes", attribute("head_dim", 12)),
    ("impossible sizes", attribute("intermediate", 0)),
    ("impossible sizes", attribute("activation", 2)),
    ("page_table is .* needs int32", operand(PAGE_TABLE, lambda old: old[0])),
    ("page_table is .* needs int32", operand(PAGE_TABLE, lambda old: old.astype(jnp.float32))),
    ("do not fit page_table", operand(NUM_SEQS, lambda old: old[None])),
    ("do not fit page_table", operand(KV_LENS, lambda old: old[1:])),
    ("do not fit page_table", operand(CU_Q_LENS, lambda old: old[1:])),
    ("do not fit page_table", operand(SLOTS, lambda old: old[:, 1:])),
    ("do not fit page_table", operand(SLOTS, lambda old: old[:1])),
    ("a decode step has a token a row", attribute("is_decode", True)),
    ("the workspace is", result(1, jax.ShapeDtypeStruct((7,), jnp.float32))),
    ("a rotary table is", operand(COS, lambda old: old[:, 1:])),
    ("a rotary table is", operand(COS + 3, lambda old: old[1:])),
    ("a rotary table is", operand(COS, lambda old: old.astype(jnp.bfloat16))),
    ("a rotary table is", attribute("num_rotaries", 3)),
    ("the cache is .* needs float32", cache_of(9, 4, 2, 2, 32, dtype=jnp.int32)),
    ("the cache is .* needs pages", cache_of(0, 4, 2, 2, 32)),
    ("the cache .* does not fit the layers' heads", cache_of(9, 4, 2, 2, 32, dtype=jnp.int8)),
    ("the cache .* does not fit the layers' heads", cache_of(9, 4, 2, 2, 16)),
    ("the cache .* does not fit the layers' heads", cache_of(9, 4, 4, 2, 32)),
    ("pages differ in size", other_pages),
    ("results must be aliases of the caches", no_alias),
    ("there are only 0 operands", only_the_step),
    ("there are only .* operands", lambda operands, call: operands[:-1]),
    ("there are only .* operands", lambda operands, call: operands[: QKV_OFFSET + 1]),
    ("there are too many operands", lambda operands, call: [*operands, operands[X]]),
    ("there are too many operands", more_numbers),
    ("there are only .* numbers", fewer_numbers),
    ("rotary table, group or window is not there", number(ROTARY, 2)),
    ("rotary table, group or window is not there", number(GROUP, -1)),
    ("rotary table, group or window is not there", number(GROUP, 2)),
    ("rotary table, group or window is not there", number(WINDOW, -3)),
    ("input_norm is .* needs float32 \\[64\\]", operand(INPUT_NORM, floats(63))),
    ("input_norm is .* needs float32 \\[64\\]", operand(INPUT_NORM, floats(0))),
    ("input_norm is", operand(INPUT_NORM, lambda old: old.astype(jnp.int32))),
    ("query_norm is .* needs float32 \\[32\\]", operand(QUERY_NORM, floats(64))),
    ("qkv is .* needs float32 \\[256\\]", operand(QKV_BIAS, floats(64))),
    ("qkv has 0 pieces", number(PIECES, 0)),
    ("qkv has 5 pieces", number(PIECES, 5)),
    ("qkv has a piece of 256 rows, not of 2 blocks", number(BLOCK_ROWS, 256)),
    ("qkv has a piece of 256 rows, not of 2 blocks", number(BLOCK_ROWS, 0)),
    ("qkv has a piece of 256 rows, not of 2 blocks", number(BLOCK_ROWS, -128)),
    ("out has a piece of 64 rows, not of 1 blocks", number(OUT_ROWS, 32)),
    ("unknown code", number(CODE, 6)),
    ("unknown code", number(CODE, -1)),
    ("qkv: code 'fp8' does not go with", number(CODE, 1)),
    ("qkv: code 'int5' does not go with", number(CODE, 4)),
    ("qkv: codes .* in blocks of 8", number(ROW_BLOCK, 8)),
    ("qkv: codes .* do not fit", operand(QKV_CODES, lambda old: old[:, :32])),
    (
        "qkv has 128 rows: needs 256|qkv has a piece of 128 rows|qkv: scale",
        operand(QKV_CODES, lambda old: old[:128]),
    ),
    ("qkv: scale .* does not fit", operand(QKV_SCALE, lambda old: old[1:])),
    ("qkv: offset .* does not fit", operand(QKV_OFFSET, floats(3))),
    ("qkv: code 'int8' does not go with .* and a codebook", operand(QKV_BOOK, floats(16))),
]


@pytest.mark.parametrize(("message", "change"), BAD_CALLS)
def test_the_handler_refuses_what_its_loops_cannot_take(monkeypatch, message, change):
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"decoder_layers on cpu: .*{message}"):
        call_with(monkeypatch, change)


def test_the_call_that_others_are_made_of_is_right(monkeypatch):
    (hidden, _) = call_with(monkeypatch, lambda operands, call: None)
    assert np.isfinite(np.asarray(hidden)[: STEP.num_live]).all()
