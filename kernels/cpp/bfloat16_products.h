// Products of rows of bfloat16 numbers in registers, for AVX512-BF16 without tiles.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512BF16__)

namespace {

// A result's products are added up pair of columns by pair, whatever the other rows are. A block
// is [pairs, 16, 2]; of each row sixteen sums by the first block and sixteen by the second are
// stored, a row's `stride` floats behind those of the row before. Eight rows reach 99 % of what a
// Zen 4 core multiplies; twelve, for whose addresses there are no registers left, 94 %.
template <int kRows>
__attribute__((noinline)) void multiply_by_two_blocks(const uint16_t* rows, int64_t row_stride,
                                                      const uint16_t* first_block,
                                                      const uint16_t* second_block,
                                                      int64_t num_pairs, float* first_sums,
                                                      float* second_sums, int64_t stride) {
  __m512 first[kRows], second[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) first[r] = second[r] = _mm512_setzero_ps();
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    const auto of_first = (__m512bh)_mm512_loadu_si512(first_block + 32 * pair);
    const auto of_second = (__m512bh)_mm512_loadu_si512(second_block + 32 * pair);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      int32_t both;
      memcpy(&both, rows + r * row_stride + 2 * pair, sizeof(both));
      const auto of_row = (__m512bh)_mm512_set1_epi32(both);
      first[r] = _mm512_dpbf16_ps(first[r], of_row, of_first);
      second[r] = _mm512_dpbf16_ps(second[r], of_row, of_second);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    _mm512_storeu_ps(first_sums + r * stride, first[r]);
    _mm512_storeu_ps(second_sums + r * stride, second[r]);
  }
}

}  // namespace

#endif
