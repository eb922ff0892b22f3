// Transposes a square of as many rows as a register has lanes. See ../cpp/lanes.h.
#pragma once

#include "../cpp/lanes.h"

namespace {

#if defined(__AVX512F__)

JAXINFER_INLINE void transpose(Lanes (&rows)[kWidth]) {
  __m512 a[16], b[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    a[2 * i] = _mm512_unpacklo_ps((__m512)rows[2 * i], (__m512)rows[2 * i + 1]);
    a[2 * i + 1] = _mm512_unpackhi_ps((__m512)rows[2 * i], (__m512)rows[2 * i + 1]);
  }
  // b[4 i + c]: column c of each four lanes, of rows 4 i to 4 i + 3.
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    b[4 * i] = _mm512_shuffle_ps(a[4 * i], a[4 * i + 2], 0x44);
    b[4 * i + 1] = _mm512_shuffle_ps(a[4 * i], a[4 * i + 2], 0xee);
    b[4 * i + 2] = _mm512_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0x44);
    b[4 * i + 3] = _mm512_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512 even_low = _mm512_shuffle_f32x4(b[c], b[4 + c], 0x88);
    const __m512 odd_low = _mm512_shuffle_f32x4(b[c], b[4 + c], 0xdd);
    const __m512 even_high = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0x88);
    const __m512 odd_high = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0xdd);
    rows[c] = (Lanes)_mm512_shuffle_f32x4(even_low, even_high, 0x88);
    rows[8 + c] = (Lanes)_mm512_shuffle_f32x4(even_low, even_high, 0xdd);
    rows[4 + c] = (Lanes)_mm512_shuffle_f32x4(odd_low, odd_high, 0x88);
    rows[12 + c] = (Lanes)_mm512_shuffle_f32x4(odd_low, odd_high, 0xdd);
  }
}

#elif defined(__AVX2__)

JAXINFER_INLINE void transpose(Lanes (&rows)[kWidth]) {
  __m256 a[8], b[8];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    a[2 * i] = _mm256_unpacklo_ps((__m256)rows[2 * i], (__m256)rows[2 * i + 1]);
    a[2 * i + 1] = _mm256_unpackhi_ps((__m256)rows[2 * i], (__m256)rows[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    b[4 * i] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0x44);
    b[4 * i + 1] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0xee);
    b[4 * i + 2] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0x44);
    b[4 * i + 3] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    rows[c] = (Lanes)_mm256_permute2f128_ps(b[c], b[4 + c], 0x20);
    rows[4 + c] = (Lanes)_mm256_permute2f128_ps(b[c], b[4 + c], 0x31);
  }
}

#else

JAXINFER_INLINE void transpose(Lanes (&rows)[kWidth]) {
  for (int i = 0; i < kWidth; ++i) {
    for (int j = 0; j < i; ++j) {
      const float above = rows[j][i];
      rows[j][i] = rows[i][j];
      rows[i][j] = above;
    }
  }
}

#endif

// Transposes as many words of elements as a register has lanes, of as many keys: the fewer bits
// an element has, the fewer times.
template <class Type>
JAXINFER_INLINE void gather_words(const typename Type::Held* const* rows, int64_t h, float* to,
                                  int64_t stride) {
  constexpr int kWords = 4 / sizeof(typename Type::Held);
  Lanes square[kWidth];
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; ++i) square[i] = read<Lanes>(rows[i] + h);
  transpose(square);
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; ++i) {
#pragma GCC unroll 4
    for (int part = 0; part < kWords; ++part) {
      const Lanes element = Type::decode_word(bits_of<Words>(square[i]), part);
      store(to + (i * kWords + part) * stride, element);
    }
  }
}

// Transposes `kCount` elements of as many keys as a register has lanes.
template <class Type, int kCount>
JAXINFER_INLINE void gather_elements(const typename Type::Held* const* rows, int64_t h,
                                     float* to, int64_t stride) {
  Lanes square[kWidth];
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; ++i) square[i] = decode_part<Type>(rows[i] + h, kCount);
  transpose(square);
#pragma GCC unroll 16
  for (int i = 0; i < (kCount < kWidth ? kCount : kWidth); ++i) store(to + i * stride, square[i]);
}

}  // namespace
