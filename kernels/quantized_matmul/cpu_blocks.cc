// Products of bfloat16 tokens with weights in blocks of rows: compiled once for AMX tiles and once
// for AVX-512's dot products, with LOOPS as the name of their table. Each adds the products of a
// result up in one order, pair of columns by pair, whatever the other tokens are.

#include "../cpp/memory.h"
#include "cpu_blocks.h"
#include "cpu_blocks_decode.h"
#include "cpu_blocks_panel_tiles.h"
#include "cpu_blocks_tiles.h"

#include <immintrin.h>
#include <string.h>

namespace {

using namespace jaxinfer;

// Memory of the calling thread for as long as it lives.
struct Scratch {
  alignas(64) uint16_t tiles[kChunksAtOnce * kTileWords];
  alignas(64) float sums[4 * 256];
};

// Sums of a block of rows, which a thread goes through group by group.
template <class Decoder>
class BlockProduct {
 public:
  BlockProduct(const Product& p, const Bfloat16Tokens& tokens, Tiles& tiles, Scratch& scratch,
               const float* group_sums, float* results)
      : p_(p), tokens_(tokens), tiles_(tiles), scratch_(scratch), group_sums_(group_sums),
        results_(results), decoder_(p), group_shift_(shift_of_groups(p)) {}

  // Rows [row, row + 16) of the result.
  void run(int64_t row) {
    add_columns(row);
    for (int64_t token = 0; token < p_.num_tokens; ++token) {
      float* const out = p_.out + token * p_.num_rows + row;
      _mm512_storeu_ps(out, _mm512_load_ps(results_ + token * kBlockRows));
    }
  }

 private:
  void add_columns(int64_t row) {
    const int64_t num_chunks = p_.num_columns / kChunk;
    codes_ = p_.codes + row * p_.row_bytes;
    first_scale_ = row * p_.num_groups;
    int64_t chunk = 0;
    if (p_.group_size < kChunk) {
      for (; chunk + 2 <= num_chunks; chunk += 2) halves<2>(chunk);
      if (chunk < num_chunks) halves<1>(chunk++);
    } else if (p_.group_size == kChunk) {
      for (; chunk + 4 <= num_chunks; chunk += 4) wholes<4, 1>(chunk);
    } else if (p_.group_size == 2 * kChunk) {
      for (; chunk + 4 <= num_chunks; chunk += 4) wholes<2, 2>(chunk);
    } else {
      for (; chunk + 4 <= num_chunks; chunk += 4) wholes<1, 4>(chunk);
    }
    for (; chunk < num_chunks; ++chunk) wholes<1, 1>(chunk);
  }

  JAXINFER_INLINE uint16_t* decode(int64_t chunk, int at) {
    uint16_t* const tile = scratch_.tiles + at * kTileWords;
    decoder_.decode(codes_ + chunk * Decoder::kBytes, tile);
    return tile;
  }

  // `kSums` groups' parts of `kParts` chunks each.
  template <int kSums, int kParts>
  JAXINFER_INLINE void wholes(int64_t chunk) {
#pragma GCC unroll 4
    for (int i = 0; i < kSums * kParts; ++i) decode(chunk + i, i);
    for_token_tiles<kSums, kParts * kChunk>(chunk * kChunk, [&](const uint16_t* tokens) {
      add<0, kSums, kParts>(tokens);
      add<1, kSums, kParts>(tokens);
      add<2, kSums, kParts>(tokens);
      add<3, kSums, kParts>(tokens);
    });
  }

  template <int kSum, int kSums, int kParts>
  JAXINFER_INLINE void add(const uint16_t* tokens) {
    if constexpr (kSum < kSums) {
      tiles_.template clear<kSum>();
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
        const int chunk = kSum * kParts + part;
        tiles_.template add<kSum>(tokens + chunk * kChunk, p_.num_columns,
                                  scratch_.tiles + chunk * kTileWords);
      }
    }
  }

  // Groups of half a chunk: tiles are configured for as many pairs.
  template <int kChunks>
  JAXINFER_INLINE void halves(int64_t chunk) {
#pragma GCC unroll 2
    for (int i = 0; i < kChunks; ++i) decode(chunk + i, i);
    for_token_tiles<2 * kChunks, kChunk / 2>(chunk * kChunk, [&](const uint16_t* tokens) {
      add_half<0, 2 * kChunks>(tokens);
      add_half<1, 2 * kChunks>(tokens);
      add_half<2, 2 * kChunks>(tokens);
      add_half<3, 2 * kChunks>(tokens);
    });
  }

  template <int kSum, int kSums>
  JAXINFER_INLINE void add_half(const uint16_t* tokens) {
    if constexpr (kSum < kSums) {
      tiles_.template clear<kSum>();
      tiles_.template add<kSum>(tokens + kSum * kChunk / 2, p_.num_columns,
                                scratch_.tiles + kSum * kTileWords / 2);
    }
  }

  // Calls `add(tokens)` for every tile of tokens, their columns from `column` on, and adds each of
  // the `kSums` sums it leaves, of `columns` columns each, to the results by its group's scale.
  template <int kSums, int kColumns, class Add>
  JAXINFER_INLINE void for_token_tiles(int64_t column, Add add) {
    __m512 scales[kSums], offsets[kSums];
    int64_t groups[kSums];
#pragma GCC unroll 4
    for (int i = 0; i < kSums; ++i) {
      const int64_t end = column + (i + 1) * kColumns;
      groups[i] = (end - 1) >> group_shift_;
      const int64_t index = first_scale_ + groups[i] * kBlockRows;
      scales[i] = _mm512_mul_ps(load_scales(p_.scale, p_.scale_type, index),
                                _mm512_set1_ps(Decoder::kFactor));
      if (!p_.offset) continue;
      // Of a group's columns all at once, when its last ones are there.
      const bool is_whole = end == (groups[i] + 1) * p_.group_size;
      offsets[i] = is_whole ? load_scales(p_.offset, p_.offset_type, index) : _mm512_setzero_ps();
    }
    for (int64_t first = 0; first < p_.num_tokens; first += kTokenTile) {
      add(tokens_.rows + first * p_.num_columns + column);
      store_sums<kSums>();
      const int64_t left = p_.num_tokens - first;
      const int64_t count = left < kTokenTile ? left : kTokenTile;
      float* const results = results_ + first * kBlockRows;
      if (column == 0) memset(results, 0, static_cast<size_t>(count) * 64);
      if (p_.offset) {
        const float* totals = group_sums_ + first * p_.num_groups;
        finish<kSums, true>(results, count, scales, offsets, totals, groups);
      } else {
        finish<kSums, false>(results, count, scales, offsets, nullptr, groups);
      }
    }
  }

  // Adds the sums of `count` tokens to their results, by each group's scale.
  template <int kSums, bool kHasOffset>
  JAXINFER_INLINE void finish(float* results, int64_t count, const __m512* scales,
                              const __m512* offsets, const float* totals,
                              const int64_t* groups) const {
    const int64_t num_groups = p_.num_groups;
    for (int64_t token = 0; token < count; ++token, results += 16, totals += num_groups) {
      __m512 sum = _mm512_load_ps(results);
      const float* const sums = scratch_.sums + token * 16;
#pragma GCC unroll 4
      for (int i = 0; i < kSums; ++i) {
        sum = _mm512_fmadd_ps(scales[i], _mm512_load_ps(sums + 256 * i), sum);
        if constexpr (kHasOffset) {
          sum = _mm512_fmadd_ps(offsets[i], _mm512_set1_ps(totals[groups[i]]), sum);
        }
      }
      _mm512_store_ps(results, sum);
    }
  }

  template <int kSums>
  JAXINFER_INLINE void store_sums() {
    tiles_.template store<0>(scratch_.sums);
    if constexpr (kSums > 1) tiles_.template store<1>(scratch_.sums + 256);
    if constexpr (kSums > 2) tiles_.template store<2>(scratch_.sums + 512);
    if constexpr (kSums > 3) tiles_.template store<3>(scratch_.sums + 768);
  }

  const Product& p_;
  const Bfloat16Tokens& tokens_;
  Tiles& tiles_;
  Scratch& scratch_;
  const float* const group_sums_;  // [num_tokens, num_groups]
  float* const results_;  // [num_tokens, 16]: in `out` they would share a set of the cache
  const Decoder decoder_;
  const int group_shift_;
  const uint8_t* codes_ = nullptr;
  int64_t first_scale_ = 0;
};

void pack(const float* token, int64_t size, uint16_t* row, float* sums) {
  for (int64_t i = 0; i < size; i += 16) {
    const __m256i halves = (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(token + i));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + i), halves);
    const __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
    sums[i / kSumColumns] = _mm512_reduce_add_ps(_mm512_castsi512_ps(wide));
  }
}

const float* sums_of_groups(const Product& p, const float* sums) {
  if (!p.offset || p.group_size == kSumColumns) return sums;
  static thread_local KeptFloats memory;
  float* const totals = memory.at_least(p.num_tokens * p.num_groups);
  const int64_t parts = p.group_size / kSumColumns;
  for (int64_t i = 0; i < p.num_tokens * p.num_groups; ++i) {
    float total = 0;
    for (int64_t part = 0; part < parts; ++part) total += sums[i * parts + part];
    totals[i] = total;
  }
  return totals;
}

template <class Decoder>
void multiply_blocks(const Product& p, const Bfloat16Tokens& tokens, int64_t first_row,
                     int64_t last_row) {
  static thread_local Scratch scratch;
  static thread_local KeptFloats results;
  const int pairs = p.group_size < kChunk ? kPairs / 2 : kPairs;
  const int64_t most = p.num_tokens < kTokenTile ? p.num_tokens : kTokenTile;
  Tiles tiles(static_cast<int>(most), pairs);
  BlockProduct<Decoder> product(p, tokens, tiles, scratch, sums_of_groups(p, tokens.sums),
                                results.at_least(p.num_tokens * kBlockRows));
  for (int64_t row = first_row; row < last_row; row += kBlockRows) product.run(row);
}

#include "cpu_blocks_panel.h"

// Calls one of three functions, made for each decoder, by a product's codes.
template <class Function, class... Rest>
void call_by_code(const Product& p, Function* of_nibbles, Function* of_five_bits,
                  Function* of_bytes, const Rest&... rest) {
  switch (p.code) {
    case Code::kNibble: return of_nibbles(p, rest...);
    case Code::kFiveBits: return of_five_bits(p, rest...);
    default: return of_bytes(p, rest...);
  }
}

void multiply(const Product& p, const Bfloat16Tokens& tokens, int64_t first_row,
              int64_t last_row) {
  if (p.has_many_tokens) {
    return call_by_code(p, multiply_panels<Nibbles>, multiply_panels<FiveBits>,
                        multiply_panels<Bytes>, tokens, first_row, last_row);
  }
  call_by_code(p, multiply_blocks<Nibbles>, multiply_blocks<FiveBits>, multiply_blocks<Bytes>,
               tokens, first_row, last_row);
}

void multiply_and_gate(const Product& p, const Bfloat16Tokens& tokens, Gate* gate,
                       int64_t first_row, int64_t last_row, const Bfloat16Tokens& to) {
  call_by_code(p, multiply_gated<Nibbles>, multiply_gated<FiveBits>, multiply_gated<Bytes>, tokens,
               gate, first_row, last_row, to);
}

}  // namespace

namespace jaxinfer {

extern const BlockLoops LOOPS;
const BlockLoops LOOPS = {pack, multiply, multiply_and_gate};

}  // namespace jaxinfer
