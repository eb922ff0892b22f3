// Scales of sixteen rows, for all loops over weights in blocks. Included by cpu_blocks*.cc.
#pragma once

#include <immintrin.h>

#include "cpu_blocks.h"

#define JAXINFER_INLINE inline __attribute__((always_inline))

namespace {

using namespace jaxinfer;

JAXINFER_INLINE __m512 load_scales(const void* from, FloatType type, int64_t index) {
  if (type == FloatType::kFloat32) return _mm512_loadu_ps(static_cast<const float*>(from) + index);
  const auto* const halves = static_cast<const uint16_t*>(from) + index;
  const __m256i held = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves));
  if (type == FloatType::kFloat16) return _mm512_cvtph_ps(held);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(held), 16));
}

// A column's group is the column shifted right by so many bits: sizes of groups are powers of two,
// or of a whole row, and a division takes as long as a tile's product.
inline int shift_of_groups(const Product& p) {
  return p.num_groups == 1 ? 63 : __builtin_ctzll(static_cast<uint64_t>(p.group_size));
}

}  // namespace
