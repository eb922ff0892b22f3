// Scores of few rows: dot products of queries with keys that stay where they are in the cache.
// See cpu_rows.cc, and cpu_bfloat16_pairs.h.
#pragma once

#include "../cpp/lanes.h"
#include "cpu_ahead.h"
#include "cpu_products.h"

namespace {

// Rows whose partial sums fill the registers. With more of them than this, keys are read again.
constexpr int kDotRows = kWidth == 16 ? 8 : 4;
// AVX2 sums up what AVX-512 does, in two registers.
constexpr int kDotParts = kWidth == 8 ? 2 : 1;

// Keys at once: as many as registers can hold.
template <int kRows>
constexpr int dot_keys() {
  constexpr int kMost = (kWidth == 16 ? 24 : 12) / (kRows * kDotParts);
  return kMost >= 8 && kWidth >= 8 ? 8 : kMost >= 4 ? 4 : kMost >= 2 ? 2 : 1;
}

// `a` and `b` hold partial sums of `kKeys` keys each. Returns half as many partial sums of each.
template <int kKeys>
JAXINFER_INLINE Lanes fold(Lanes a, Lanes b) {
#if defined(__AVX512F__)
  const auto x = (__m512)a, y = (__m512)b;
  switch (kKeys) {
    case 1: return (Lanes)_mm512_shuffle_f32x4(x, y, 0x44) +
                   (Lanes)_mm512_shuffle_f32x4(x, y, 0xee);
    case 2: return (Lanes)_mm512_shuffle_f32x4(x, y, 0x88) +
                   (Lanes)_mm512_shuffle_f32x4(x, y, 0xdd);
    case 4: return (Lanes)_mm512_shuffle_ps(x, y, 0x44) + (Lanes)_mm512_shuffle_ps(x, y, 0xee);
    default: return (Lanes)_mm512_shuffle_ps(x, y, 0x88) + (Lanes)_mm512_shuffle_ps(x, y, 0xdd);
  }
#elif defined(__AVX2__)
  const auto x = (__m256)a, y = (__m256)b;
  switch (kKeys) {
    case 1: return (Lanes)_mm256_permute2f128_ps(x, y, 0x20) +
                   (Lanes)_mm256_permute2f128_ps(x, y, 0x31);
    case 2: return (Lanes)_mm256_shuffle_ps(x, y, 0x44) + (Lanes)_mm256_shuffle_ps(x, y, 0xee);
    default: return (Lanes)_mm256_shuffle_ps(x, y, 0x88) + (Lanes)_mm256_shuffle_ps(x, y, 0xdd);
  }
#elif defined(__aarch64__)
  return (Lanes)vpaddq_f32((float32x4_t)a, (float32x4_t)b);
#else
  if (kKeys == 1) return Lanes{a[0], a[1], b[0], b[1]} + Lanes{a[2], a[3], b[2], b[3]};
  return Lanes{a[0], a[2], b[0], b[2]} + Lanes{a[1], a[3], b[1], b[3]};
#endif
}

// Of `kCount` registers with partial sums of `kKeys` keys each, one.
template <int kKeys, int kCount>
JAXINFER_INLINE Lanes fold_all(const Lanes* sums) {
  if constexpr (kCount == 1) {
    return sums[0];
  } else {
    constexpr int kHalf = kCount / 2;
    return fold<kKeys * kHalf>(fold_all<kKeys, kHalf>(sums),
                               fold_all<kKeys, kHalf>(sums + kHalf));
  }
}

// Folding leaves the sums of neighbouring keys some lanes apart.
JAXINFER_INLINE Lanes in_order(Lanes folded) {
#if defined(__AVX512F__)
  const __m512i lanes = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return (Lanes)_mm512_permutexvar_ps(lanes, (__m512)folded);
#elif defined(__AVX2__)
  const __m256i lanes = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  return (Lanes)_mm256_permutevar8x32_ps((__m256)folded, lanes);
#else
  return folded;
#endif
}

// How elements of a cache are multiplied: as float32.
template <class Type>
struct FloatProducts {
  using Held = typename Type::Held;
  using Query = float;
  using Register = Lanes;
  static constexpr int kElements = kWidth;  // of a register
  static JAXINFER_INLINE Register load_query(const Query* from) { return load(from); }
  static JAXINFER_INLINE Register load_elements(const Held* from, int64_t left) {
    return held_in_register(decode_part<Type>(from, left));
  }
  static JAXINFER_INLINE Lanes add(Register query, Register elements, Lanes sum) {
    return multiply_add(query, elements, sum);
  }
};

// Adds the products of some elements, `left` of them in all.
template <class Products, int kRows, int kKeys>
JAXINFER_INLINE void add_products(const typename Products::Query* queries, int64_t padded,
                                  const typename Products::Held* const* rows, int64_t h,
                                  int64_t left, Lanes (&sums)[kRows][kDotParts][kKeys]) {
#pragma GCC unroll 2
  for (int part = 0; part < kDotParts; ++part) {
    const int64_t skipped = part * Products::kElements;
    typename Products::Register query[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      query[r] = Products::load_query(queries + r * padded + h + skipped);
    }
#pragma GCC unroll 8
    for (int key = 0; key < kKeys; ++key) {
      const auto elements = Products::load_elements(rows[key] + h + skipped, left - skipped);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        sums[r][part][key] = Products::add(query[r], elements, sums[r][part][key]);
      }
    }
  }
}

// scores[r, i] = dot product of queries[r, :] with the elements of rows[i] from `offset` on, for
// `count` keys, a multiple of kWidth. A score's bits depend on its query and key alone.
template <class Products, int kRows>
__attribute__((noinline)) void score_rows(const typename Products::Query* queries, int64_t padded,
                                          const typename Products::Held* const* rows,
                                          int64_t offset, int64_t head_dim, int64_t count,
                                          float* scores, Ahead& ahead, int64_t bytes_ahead) {
  constexpr int kKeys = dot_keys<kRows>(), kGroups = kWidth / kKeys;
  constexpr int64_t kStep = kDotParts * Products::kElements;
  const int64_t whole = head_dim / kStep * kStep;
  for (int64_t i = 0; i < count; i += kWidth) {
    Lanes folded[kRows][kGroups];
    for (int group = 0; group < kGroups; ++group) {
      const typename Products::Held* keys[kKeys];
#pragma GCC unroll 8
      for (int key = 0; key < kKeys; ++key) keys[key] = rows[i + group * kKeys + key] + offset;
      ahead.advance(kKeys * bytes_ahead);
      Lanes sums[kRows][kDotParts][kKeys] = {};
      for (int64_t h = 0; h < whole; h += kStep) {
        add_products<Products, kRows, kKeys>(queries, padded, keys, h, kStep, sums);
      }
      if (whole < head_dim) {
        add_products<Products, kRows, kKeys>(queries, padded, keys, whole, head_dim - whole, sums);
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int key = 0; kDotParts == 2 && key < kKeys; ++key) {
          sums[r][0][key] += sums[r][kDotParts - 1][key];
        }
        folded[r][group] = fold_all<1, kKeys>(sums[r][0]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      store(scores + r * kBlock + i, in_order(fold_all<kKeys, kGroups>(folded[r])));
    }
  }
}

// While a key is scored, so many bytes more of the cache are prefetched.
template <class Products>
void score_few(int64_t num_rows, const typename Products::Query* queries, int64_t padded,
               const typename Products::Held* const* rows, int64_t offset, int64_t head_dim,
               int64_t count, float* scores, Ahead& ahead, int64_t bytes_ahead) {
  const auto run = [&](int64_t r, auto* score) {
    score(queries + r * padded, padded, rows, offset, head_dim, count, scores + r * kBlock, ahead,
          r == 0 ? bytes_ahead : 0);
  };
  int64_t r = 0;
  for (; r + kDotRows < num_rows; r += kDotRows) run(r, score_rows<Products, kDotRows>);
  switch (num_rows - r) {
    case 1: return run(r, score_rows<Products, 1>);
    case 2: return run(r, score_rows<Products, 2>);
    case 3: return run(r, score_rows<Products, 3>);
    case 4: return run(r, score_rows<Products, 4>);
    case 5: return run(r, score_rows<Products, kDotRows < 5 ? 1 : 5>);
    case 6: return run(r, score_rows<Products, kDotRows < 5 ? 1 : 6>);
    case 7: return run(r, score_rows<Products, kDotRows < 5 ? 1 : 7>);
    default: return run(r, score_rows<Products, kDotRows>);
  }
}

}  // namespace
