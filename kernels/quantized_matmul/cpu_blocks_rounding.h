// Rounding of tokens to integers, for loops that multiply codes as the bytes they are. Included by
// cpu_blocks_integers.cc and cpu_blocks_bytes.cc.
#pragma once

#include <string.h>

#include "cpu_blocks_scales.h"

namespace {

JAXINFER_INLINE __m512i broadcast(const int8_t* bytes) {
  int32_t dword;
  memcpy(&dword, bytes, sizeof(dword));
  return _mm512_set1_epi32(dword);
}

// The largest magnitude of a chunk; NaN where there is one, whose bits are above all numbers'.
JAXINFER_INLINE float largest(__m512 first, __m512 second) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  const __m512i bits = _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(first), magnitude),
                                        _mm512_and_si512(_mm512_castps_si512(second), magnitude));
  const uint32_t most = _mm512_reduce_max_epu32(bits);
  float value;
  memcpy(&value, &most, sizeof(value));
  return value;
}

// Bytes of every dword in the order in which a lane of weights has its columns.
JAXINFER_INLINE __m128i in_lane_order(__m128i bytes) {
  return _mm_shuffle_epi8(
      bytes, _mm_set_epi8(15, 13, 14, 12, 11, 9, 10, 8, 7, 5, 6, 4, 3, 1, 2, 0));
}

}  // namespace
