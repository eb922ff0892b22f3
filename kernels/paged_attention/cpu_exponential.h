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

}  // namespace
