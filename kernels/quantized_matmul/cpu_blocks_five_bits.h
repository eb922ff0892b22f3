// Codes of five bits in blocks of rows: of every 32 columns of sixteen rows first the low halves,
// as 4-bit codes lie, then 64 bytes of fifth bits. Bit j of a byte belongs to the code that 8-bit
// codes would have in the same byte of the block's register j.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "cpu_blocks_scales.h"

namespace {

constexpr int kFiveBitBytes = 256 + 64;

// Register j of eight: four columns of sixteen rows, a byte each without a sign.
JAXINFER_INLINE __m512i load_five_bits(const uint8_t* from, int j) {
  const __m512i halves = _mm512_loadu_si512(from + 64 * (j % 4));
  const __m512i fifths = _mm512_loadu_si512(from + 256);
  // A byte's bit j becomes its bit 4; what comes from the neighbour does not get as far.
  const __m512i fifth = j < 4 ? _mm512_slli_epi16(fifths, 4 - j) : _mm512_srli_epi16(fifths, j - 4);
  const __m512i low = j < 4 ? halves : _mm512_srli_epi16(halves, 4);
  constexpr int kOrAnd = 0xf8;  // a | (b & c)
  return _mm512_ternarylogic_epi64(_mm512_and_si512(low, _mm512_set1_epi8(0x0f)), fifth,
                                   _mm512_set1_epi8(0x10), kOrAnd);
}

}  // namespace
