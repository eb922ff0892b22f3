// Codes to sixteen floats at a time, by `w = scale * q + offset` with a rounding after each step.
// A decoder holds what one group of one row needs in registers. See cpu_vector.h about linkage.
#pragma once

#include "cpu_product.h"
#include "cpu_vector.h"

namespace {

using jaxinfer::Code;
using jaxinfer::FloatType;
using jaxinfer::Product;

#define JAXINFER_INLINE inline __attribute__((always_inline))

// Columns whose products are added up lane by lane before the lanes are: a decoded panel of 4 rows
// and the x of a tile fit a first-level cache of 48 KB.
constexpr int kBlock = 1024;
// One more where a group begins before the block.
constexpr int kMaxBlockGroups = kBlock / 16 + 1;

// Every decoder: codes of `kBits`, `kVectors` vectors of columns a step, of `kGroups` groups.
template <bool kOffset>
struct Int8Decoder {
  static constexpr int kBits = 8, kVectors = 1, kGroups = 1;
  Lanes scale, offset;

  JAXINFER_INLINE void start_group(Lanes, const float* scales, const float* offsets) {
    scale = broadcast(*scales);
    if (kOffset) offset = broadcast(*offsets);
  }
  JAXINFER_INLINE void decode(const uint8_t* codes, int64_t column, Lanes* weights) const {
    weights[0] = multiply(load_int8(codes + column), scale);
    if (kOffset) weights[0] = add(weights[0], offset);
  }
};

struct Fp8Decoder {
  static constexpr int kBits = 8, kVectors = 1, kGroups = 1;
  Lanes scale;

  JAXINFER_INLINE void start_group(Lanes, const float* scales, const float*) {
    scale = broadcast(256.0f * *scales);
  }
  JAXINFER_INLINE void decode(const uint8_t* codes, int64_t column, Lanes* weights) const {
    weights[0] = multiply(load_fp8_over_256(codes + column), scale);
  }
};

// Scales the table instead of the weights it is asked for: half the work and the same roundings.
// With groups of 16 the low and the high halves of a chunk's bytes are groups of their own.
template <bool kOffset, int kGroupsPerChunk>
struct NibbleDecoder {
  static constexpr int kBits = 4, kVectors = 2, kGroups = kGroupsPerChunk;
  Table tables[kGroups];

  JAXINFER_INLINE void start_group(Lanes base, const float* scales, const float* offsets) {
    for (int g = 0; g < kGroups; ++g) {
      const Lanes scaled = multiply(base, broadcast(scales[g]));
      tables[g] = as_table(kOffset ? add(scaled, broadcast(offsets[g])) : scaled);
    }
  }
  JAXINFER_INLINE void decode(const uint8_t* codes, int64_t column, Lanes* weights) const {
    const Indices bytes = load_indices(codes + column / 2);
    weights[0] = look_up_low(tables[0], bytes);
    weights[1] = look_up_high(tables[kGroups - 1], bytes);
  }
};

inline int float_size(FloatType type) { return type == FloatType::kFloat32 ? 4 : 2; }

inline Lanes load_floats(const void* from, FloatType type) {
  switch (type) {
    case FloatType::kFloat16: return load_float16(static_cast<const uint16_t*>(from));
    case FloatType::kBfloat16: return load_bfloat16(static_cast<const uint16_t*>(from));
    case FloatType::kFloat32: break;
  }
  return load(static_cast<const float*>(from));
}

// Converts `count` floats; `to` has room for the next multiple of 16.
inline void convert_floats(const void* base, FloatType type, int64_t first, int count, float* to) {
  const int size = float_size(type);
  const uint8_t* from = static_cast<const uint8_t*>(base) + first * size;
  for (; count >= 16; count -= 16, from += 16 * size, to += 16) {
    store(to, load_floats(from, type));
  }
  if (count > 0) {
    float padded[16] = {};  // reading 16 would pass the end of the array
    memcpy(padded, from, static_cast<size_t>(count) * size);
    store(to, load_floats(padded, type));
  }
}

// The scales and offsets of one row's groups in a block, as floats.
struct BlockScales {
  alignas(64) float scales[kMaxBlockGroups + 15];
  alignas(64) float offsets[kMaxBlockGroups + 15];

  inline void convert(const Product& p, int64_t row, int64_t first_group, int count) {
    const int64_t first = row * p.num_groups + first_group;
    convert_floats(p.scale, p.scale_type, first, count, scales);
    if (p.offset != nullptr) convert_floats(p.offset, p.offset_type, first, count, offsets);
  }
};

// Asks for the codes of a later row, a cache line at a time. A row is too short a stream for the
// processor to foresee the next one. Beyond the last row this asks for what nobody reads.
JAXINFER_INLINE void prefetch_ahead(const uint8_t* codes, int64_t byte, int64_t row_bytes) {
  constexpr int64_t kRowsAhead = 8, kCacheLine = 64;
  if (byte % kCacheLine != 0) return;
  const uintptr_t at = reinterpret_cast<uintptr_t>(codes) +
                       static_cast<uintptr_t>(byte + kRowsAhead * row_bytes);
  __builtin_prefetch(reinterpret_cast<const void*>(at));
}

// Calls `use(row, column, weights)` for rows [first_row, first_row + kRows) and every step of
// columns [begin, end), columns outermost.
template <class Decoder, int kRows, class Use>
JAXINFER_INLINE void decode_block(const Product& p, int64_t first_row, int64_t begin, int64_t end,
                                  Use use) {
  constexpr int kColumns = 16 * Decoder::kVectors;
  const int64_t step_groups = Decoder::kGroups * p.group_size;
  const int64_t first_group = begin / p.group_size;
  const int num_groups = static_cast<int>((end - 1) / p.group_size - first_group + 1);
  const Lanes base = load(p.table);
  const uint8_t* codes[kRows];
  BlockScales floats[kRows];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    codes[r] = p.codes + (first_row + r) * p.row_bytes;
    floats[r].convert(p, first_row + r, first_group, num_groups);
  }
  Decoder decoders[kRows];
  int64_t column = begin, group_end = first_group * p.group_size;
  for (int group = 0; column < end; group += Decoder::kGroups) {
    group_end += step_groups;
    const int64_t stop = group_end < end ? group_end : end;
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      decoders[r].start_group(base, floats[r].scales + group, floats[r].offsets + group);
    }
    for (; column < stop; column += kColumns) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        Lanes weights[Decoder::kVectors];
        prefetch_ahead(codes[r], column * Decoder::kBits / 8, p.row_bytes);
        decoders[r].decode(codes[r], column, weights);
        use(r, column, weights);
      }
    }
  }
}

}  // namespace
