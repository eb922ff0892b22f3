// Exponentials of what is rounded to bfloat16. See cpu_bfloat16.cc.
#pragma once

#include <immintrin.h>

#include "../cpp/lanes.h"

namespace {

constexpr float kLog2E = 1.44269504f;

// 2^x to 3e-6 of itself, much less than the rounding of weights. NaN stays.
JAXINFER_INLINE Lanes power_of_two(Lanes x) {
  const Lanes rest = (Lanes)_mm512_reduce_ps((__m512)x, 1);  // x - floor(x)
  Lanes y = broadcast(0.013534167781472206f);
  y = multiply_add(y, rest, broadcast(0.05201146379113197f));
  y = multiply_add(y, rest, broadcast(0.2414427548646927f));
  y = multiply_add(y, rest, broadcast(0.6930038332939148f));
  y = multiply_add(y, rest, broadcast(1.0000026226043701f));
  return (Lanes)_mm512_scalef_ps((__m512)y, (__m512)x);  // times 2^floor(x)
}

// weights[i] = 2^(scores[i] * log2(e) + shift), rounded, for 32 at a time in [left, right); they
// may take the place of the scores. Returns the sum of what they were rounded to.
JAXINFER_INLINE float round_weights(const float* scores, int64_t left, int64_t right, float shift,
                                    uint16_t* weights) {
  const auto one = (__m512bh)_mm512_set1_epi32(0x3f803f80);
  const Lanes factor = broadcast(kLog2E), shifts = broadcast(shift);
  __m512 sums = _mm512_setzero_ps();
  for (int64_t i = left; i < right; i += 2 * kWidth) {
    const Lanes low = power_of_two(multiply_add(load(scores + i), factor, shifts));
    const Lanes high = power_of_two(multiply_add(load(scores + i + kWidth), factor, shifts));
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    sums = _mm512_dpbf16_ps(sums, both, one);
    _mm512_storeu_si512(weights + i, (__m512i)both);
  }
  const Lanes summed[kSixteen] = {(Lanes)sums};
  return sum(summed);
}

}  // namespace
