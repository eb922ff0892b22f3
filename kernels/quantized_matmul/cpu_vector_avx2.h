// Sixteen float lanes in two AVX2 registers. See cpu_vector.h.
#pragma once

#include <immintrin.h>

namespace {

struct Lanes {
  __m256 low, high;
};
using Register = __m256;
using Table = Lanes;
struct Indices {
  __m256i low, high;
};

// 12 accumulators, 2 rows of weights and a token: 15 of 16 registers.
constexpr int kTileRows = 2;
constexpr int kTileTokens = 6;
constexpr int kDirectTokens = 2;

inline Lanes zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Register zero_register() { return _mm256_setzero_ps(); }
inline Lanes broadcast(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
inline Lanes load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline Register load_register(const float* from) { return _mm256_loadu_ps(from); }
inline void store(float* to, Register value) { _mm256_storeu_ps(to, value); }
inline void store(float* to, Lanes value) {
  _mm256_storeu_ps(to, value.low);
  _mm256_storeu_ps(to + 8, value.high);
}
inline void keep_in_register(Register& values) { asm("" : "+x"(values)); }
inline Lanes add(Lanes a, Lanes b) {
  return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}
inline Lanes multiply(Lanes a, Lanes b) {
  return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
inline Lanes multiply_add(Lanes a, Lanes b, Lanes sum) {
  return {_mm256_fmadd_ps(a.low, b.low, sum.low), _mm256_fmadd_ps(a.high, b.high, sum.high)};
}

inline Register multiply_add(Register a, Register b, Register sum) {
  return _mm256_fmadd_ps(a, b, sum);
}

inline __m128i load_8(const void* from) {
  return _mm_loadl_epi64(static_cast<const __m128i*>(from));
}
inline __m128i load_16(const void* from) {
  return _mm_loadu_si128(static_cast<const __m128i*>(from));
}

inline Lanes load_int8(const uint8_t* from) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_8(from))),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_8(from + 8)))};
}

inline Lanes load_float16(const uint16_t* from) {
  return {_mm256_cvtph_ps(load_16(from)), _mm256_cvtph_ps(load_16(from + 8))};
}

inline __m256 from_bfloat16(__m128i bits) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
inline Lanes load_bfloat16(const uint16_t* from) {
  return {from_bfloat16(load_16(from)), from_bfloat16(load_16(from + 8))};
}

// As a half, an fp8 code's bits mean a value 256 times smaller, subnormals included. Only for
// NaN does adding to the last bit reach bit 14, with which the exponent is all ones.
inline Lanes load_fp8_over_256(const uint8_t* from) {
  __m256i half = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load_16(from)), 7);
  half = _mm256_and_si256(half, _mm256_set1_epi16(static_cast<short>(0xbf80)));
  const __m256i carried = _mm256_add_epi16(half, _mm256_set1_epi16(0x80));
  half = _mm256_or_si256(half, _mm256_and_si256(carried, _mm256_set1_epi16(0x4000)));
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(half)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1))};
}

inline Table as_table(Lanes values) { return values; }
inline Indices load_indices(const uint8_t* from) {
  return {_mm256_cvtepu8_epi32(load_8(from)), _mm256_cvtepu8_epi32(load_8(from + 8))};
}

// vpermps looks at three bits: bit 3, moved to the sign's place, chooses between the halves.
inline __m256 look_up_8(Table table, __m256i index) {
  const __m256 below = _mm256_permutevar8x32_ps(table.low, index);
  const __m256 above = _mm256_permutevar8x32_ps(table.high, index);
  return _mm256_blendv_ps(below, above, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
}
inline Lanes look_up_low(Table table, Indices bytes) {
  return {look_up_8(table, bytes.low), look_up_8(table, bytes.high)};
}
inline Lanes look_up_high(Table table, Indices bytes) {
  return {look_up_8(table, _mm256_srli_epi32(bytes.low, 4)),
          look_up_8(table, _mm256_srli_epi32(bytes.high, 4))};
}

inline __m128 fold_to_4(Lanes lanes) {
  const __m256 eight = _mm256_add_ps(lanes.low, lanes.high);
  return _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
}

}  // namespace

#include "cpu_vector_sum_x86.h"
