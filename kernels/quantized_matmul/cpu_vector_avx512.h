// Sixteen float lanes in one AVX-512 register. See cpu_vector.h.
#pragma once

#include <immintrin.h>

namespace {

using Lanes = __m512;
using Register = __m512;
using Table = __m512;
using Indices = __m512i;

// 24 accumulators, 4 rows of weights, and something to decode with: 32 registers.
constexpr int kTileRows = 4;
constexpr int kTileTokens = 6;
constexpr int kDirectTokens = 5;

inline Lanes zero() { return _mm512_setzero_ps(); }
inline Register zero_register() { return zero(); }
inline Lanes broadcast(float value) { return _mm512_set1_ps(value); }
inline Lanes load(const float* from) { return _mm512_loadu_ps(from); }
inline Register load_register(const float* from) { return load(from); }
inline void store(float* to, Lanes value) { _mm512_storeu_ps(to, value); }
inline void keep_in_register(Register& values) { asm("" : "+v"(values)); }
inline Lanes add(Lanes a, Lanes b) { return _mm512_add_ps(a, b); }
inline Lanes multiply(Lanes a, Lanes b) { return _mm512_mul_ps(a, b); }
inline Lanes multiply_add(Lanes a, Lanes b, Lanes sum) { return _mm512_fmadd_ps(a, b, sum); }

inline __m128i load_bytes(const uint8_t* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}

inline Lanes load_int8(const uint8_t* from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_bytes(from)));
}

// As a half, an fp8 code's bits mean a value 256 times smaller, subnormals included. Only for
// NaN does adding to the last bit reach bit 14, with which the exponent is all ones.
inline Lanes load_fp8_over_256(const uint8_t* from) {
  __m256i half = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load_bytes(from)), 7);
  half = _mm256_and_si256(half, _mm256_set1_epi16(static_cast<short>(0xbf80)));
  const __m256i carried = _mm256_add_epi16(half, _mm256_set1_epi16(0x80));
  const __m256i is_nan = _mm256_and_si256(carried, _mm256_set1_epi16(0x4000));
  return _mm512_cvtph_ps(_mm256_or_si256(half, is_nan));
}

inline Lanes load_float16(const uint16_t* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

inline Lanes load_bfloat16(const uint16_t* from) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

inline Table as_table(Lanes values) { return values; }
inline Indices load_indices(const uint8_t* from) { return _mm512_cvtepu8_epi32(load_bytes(from)); }
// vpermps looks at the lowest four bits only: the low half of a byte needs no mask.
inline Lanes look_up_low(Table table, Indices bytes) {
  return _mm512_permutexvar_ps(bytes, table);
}
inline Lanes look_up_high(Table table, Indices bytes) {
  return _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), table);
}

inline __m128 fold_to_4(Lanes lanes) {
  const __m256 low = _mm512_castps512_ps256(lanes);
  const __m256 eight = _mm256_add_ps(low, _mm512_extractf32x8_ps(lanes, 1));
  return _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
}

}  // namespace

#include "cpu_vector_sum_x86.h"
