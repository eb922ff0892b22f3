"""Codes in a warpgroup's registers as bfloat16, for `pallas_mosaic_gpu`: a few instructions each.

A thread loads 4 bytes of every 16 and unpacks them where they are: not the codes but the columns of
x move, to where wgmma has them. Values are words of two bfloat16; only `inline_mgpu` functions are
not interpreted, and but for `_look_up` they do nothing but say how registers are to be read.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.mosaic.gpu import fragmented_array as mgpu
from jax.experimental.mosaic.gpu.utils import bitcast
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm
from jaxtyping import BFloat16, Float32, UInt32

from kernels._compat import load_as

Kind: TypeAlias = Literal["int8", "fp8", "int4", "uint4", "codebook"]
Pair: TypeAlias = tuple[Array, Array]  # words of wgmma's columns 2j, 2j + 1 and 2j + 8, 2j + 9

ROWS = 64  # of a warpgroup
_128 = 0x43004300  # a pair of bfloat16 128.0: its low 7 bits count in ones
BYTES = plgpu.Layout.WGMMA_8BIT  # thread j of a row has bytes 4j to 4j + 3 of every 16
WORDS = plgpu.Layout.TILED(  # ... and here they are one word
    mgpu.Tiling(((ROWS, 4), (16, 4), (8, 4), (1,))),
    warp_dims=(-7,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)


def reorder(x: BFloat16[Array, "R I"], kind: Kind) -> BFloat16[Array, "R I"]:
    """Returns x with every 16 columns in the order in which `decode` puts those of the codes.

    Bytes 4j to 4j + 3 become wgmma's columns 2j, 2j + 1, 2j + 8 and 2j + 9 in the order 0 2 1 3,
    those of a codebook's 0 1 2 3.
    """
    quads = x.reshape(x.shape[0], -1, 4, 2, 2)
    order = (0, 1, 3, 2, 4) if kind == "codebook" else (0, 1, 4, 2, 3)
    return quads.transpose(order).reshape(x.shape)


def constants(codebook: Float32[Array, "16"] | None) -> UInt32[Array, "words"]:
    """Returns words for `decode` to read from memory: an instruction has room for one constant.

    They are a bfloat16 pair of 128.0, or a codebook: the low bytes of 16 bfloat16, then the high.
    """
    if codebook is None:
        return jnp.full(1, _128, jnp.uint32)
    bits = lax.bitcast_convert_type(codebook.astype(jnp.bfloat16), jnp.uint16)
    halves = jnp.stack([bits & jnp.uint16(0xFF), bits >> 8]).astype(jnp.uint8)
    return lax.bitcast_convert_type(halves.reshape(8, 4), jnp.uint32)


def load_words(ref: Any, interpreted: bool) -> UInt32[Array, "64 words"]:
    """Reads bytes of 64 rows from shared memory, 4 of a row as one word."""
    values = load_as(ref, BYTES)
    shape = (ROWS, values.shape[1] // 4)
    if interpreted:
        return lax.bitcast_convert_type(values.reshape(*shape, 4), jnp.uint32)

    @plgpu.inline_mgpu(
        arg_types=(BYTES,),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.uint32, layout=WORDS),
    )
    def relabel(_: Any, values: Any) -> Any:
        word = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
        words = np.empty(WORDS.to_mgpu().registers_shape(shape), dtype=object)
        for index, register in np.ndenumerate(values.registers):
            words[index] = bitcast(register, word)
        return _array(words, WORDS, is_signed=False)

    return relabel(values)


def decode(
    words: UInt32[Array, "64 words"],
    kind: Kind,
    start: int,
    width: int,
    constants: list[Array],
    interpreted: bool,
) -> BFloat16[Array, "64 width"]:
    """Returns columns of codes as numbers: 16, 32 or a multiple of 64 from a multiple of that.

    An fp8 NaN becomes 480.
    """
    if kind == "int8":
        part = words[:, start // 4 : (start + width) // 4]
        # 128 + the low 7 bits, and 128 or 256: the sign's bit is the exponent's lowest.
        low = _masked(part, 0, 0x007F007F, constants), _masked(part, 8, 0x007F007F, constants)
        sign = _masked(part, 0, 0x00800080, constants), _masked(part, 8, 0x00800080, constants)
        return _as_columns([low], interpreted) - _as_columns([sign], interpreted)
    if kind == "fp8":
        part = words[:, start // 4 : (start + width) // 4]
        # Exponent and mantissa at bfloat16's low end are 2**-120 of the value.
        magnitudes = part << 4, lax.shift_right_logical(part, jnp.uint32(4))
        even, odd = (
            (magnitude & jnp.uint32(0x07F007F0)) | (sign & jnp.uint32(0x80008000))
            for magnitude, sign in zip(magnitudes, (part << 8, part), strict=True)
        )
        return _as_columns([(even, odd)], interpreted) * jnp.bfloat16(2.0**120)

    pieces: list[Pair] = []
    step = min(width, 32)
    for column in range(start, start + width, step):
        chunk, column_in_chunk = divmod(column, 64)
        high, column_in_half = divmod(column_in_chunk, 32)
        first = 8 * chunk + column_in_half // 4
        part = words[:, first : first + step // 4]
        if kind == "codebook":
            pieces.append(_look_up(part, constants, high, interpreted))
        else:
            even, odd = (_masked(part, 4 * high + byte, 0x000F000F, constants) for byte in (0, 8))
            pieces.append((even, odd))
    numbers = _as_columns(pieces, interpreted)
    if kind == "codebook":
        return numbers
    return numbers - jnp.bfloat16(136 if kind == "int4" else 128)


def _masked(words: Array, shift: int, mask: int, constants: list[Array]) -> Array:
    """Returns bits of each half word in place of the low ones of a bfloat16 128.0."""
    words = lax.shift_right_logical(words, jnp.uint32(shift)) if shift else words
    return (words & jnp.uint32(mask)) | constants[0]


def _as_columns(pieces: list[Pair], interpreted: bool) -> BFloat16[Array, "64 columns"]:
    """Reads words as wgmma's left operand: each pair of words in a thread is 4 of 16 columns."""
    shape = (ROWS, sum(4 * even.shape[1] for even, _ in pieces))
    if interpreted:
        columns = [
            lax.bitcast_convert_type(words.reshape(ROWS, -1, 4), jnp.bfloat16).reshape(ROWS, -1, 8)
            for pair in pieces
            for words in pair
        ]
        pairs = [jnp.concatenate(columns[i : i + 2], axis=2) for i in range(0, len(columns), 2)]
        return jnp.concatenate(pairs, axis=1).reshape(shape)

    @plgpu.inline_mgpu(
        arg_types=((WORDS, WORDS),) * len(pieces),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )
    def relabel(_: Any, *pieces: tuple[Any, Any]) -> Any:
        numbers = ir.VectorType.get((2,), ir.BF16Type.get())
        columns = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(shape), dtype=object)
        first = 0
        for pair in pieces:
            for half, words in enumerate(pair):
                for index, register in np.ndenumerate(words.registers):
                    columns[column_register(index, half, first)] = bitcast(register, numbers)
            first += 2 * pair[0].registers.shape[1]
        return _array(columns, plgpu.Layout.WGMMA, is_signed=None)

    return relabel(*pieces)


def column_register(word: tuple[int, ...], half: int, first: int) -> tuple[int, ...]:
    """Returns where wgmma has the two columns that a word is, by the word's place.

    Registers are numbered by 16 (or wgmma's 8) columns and by halves of a warp's rows.
    """
    return (0, first + 2 * word[1] + half, 0, 0, word[4], 0, 0, 0, 0)


def _look_up(words: Array, table: list[Array], high: int, interpreted: bool) -> Pair:
    """Returns the table's entries for the low or high codes of bytes 0 and 1, and of 2 and 3."""
    if interpreted:
        low, upper = lax.bitcast_convert_type(jnp.stack(table), jnp.uint8).reshape(2, 16)
        entries = low.astype(jnp.uint32) | (upper.astype(jnp.uint32) << 8)
        first, second, third, fourth = (
            entries[lax.shift_right_logical(words, jnp.uint32(shift + 4 * high)) & jnp.uint32(15)]
            for shift in (0, 8, 16, 24)
        )
        return first | (second << 16), third | (fourth << 16)

    @plgpu.inline_mgpu(
        arg_types=(WORDS, *(plgpu.Layout.WG_SPLAT(()),) * 8),
        return_type=(plgpu.ShapeDtypeStruct(words.shape, jnp.uint32, layout=WORDS),) * 2,
    )
    def permute(_: Any, words: Any, *table: Any) -> tuple[Any, Any]:
        word = ir.IntegerType.get_signless(32)
        entries = [entry.registers.item() for entry in table]
        pairs = []
        for source in ("$1", "upper"):
            registers = np.empty_like(words.registers)
            for index, register in np.ndenumerate(words.registers):
                code = LOOK_UP.format(source=source, pick="0x7351" if high else "0x6240")
                operands = [bitcast(register, word), *entries]
                found: Any = llvm.inline_asm(word, operands, code, "=r" + ",r" * len(operands))
                registers[index] = bitcast(found, words.registers[index].type)
            pairs.append(_array(registers, WORDS, is_signed=False))
        return tuple(pairs)

    return permute(words, *table)


# Four codes index 8 bytes of the table at a time; bit 3 of each chooses between the two results.
LOOK_UP = """{{
.reg .b32 upper, index, choice, first, second, low, high;
shr.u32 upper, $1, 16;
and.b32 index, {source}, 0x7777;
shr.u32 choice, {source}, 1;
lop3.b32 choice, choice, 0x4444, 0x3210, 0xEA;
prmt.b32 first, $2, $3, index;
prmt.b32 second, $4, $5, index;
prmt.b32 low, first, second, choice;
prmt.b32 first, $6, $7, index;
prmt.b32 second, $8, $9, index;
prmt.b32 high, first, second, choice;
prmt.b32 $0, low, high, {pick};
}}"""


def _array(registers: Any, layout: Any, *, is_signed: bool | None) -> Any:
    return mgpu.FragmentedArray(
        _registers=registers, _layout=layout.to_mgpu(), _is_signed=is_signed
    )
