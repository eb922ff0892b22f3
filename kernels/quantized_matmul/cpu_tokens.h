// Tokens rounded for weights in blocks of rows, in memory of the caller's.
#pragma once

#include <algorithm>
#include <cstring>

#include "cpu_blocks.h"

namespace jaxinfer {

// What tokens are rounded to, with the loops that do it; of all null, they stay float32.
struct Rounding {
  const BlockLoops* bfloat16;
  const IntegerLoops* integers;  // preferred, as the next: of both there is one at most
  const ByteLoops* bytes;
  explicit operator bool() const { return bfloat16 || integers || bytes; }
};

struct RoundedTokens {
  Rounding rounding;
  int64_t num_tokens, num_columns;
  Bfloat16Tokens bfloat16;
  IntegerTokens integers;
  ByteTokens bytes;

  // Floats of memory for tokens rounded in any way.
  static int64_t num_floats(int64_t num_tokens, int64_t num_columns) {
    constexpr int64_t chunk_floats = sizeof(IntegerChunk) / sizeof(float);
    static_assert(chunk_floats >= kIntegerColumns / 2 + kIntegerColumns / kSumColumns);
    static_assert(sizeof(IntegerChunk) * kByteTokens >= sizeof(ByteTile));
    static_assert(kIntegerColumns == kByteColumns && kTokenTile % kByteTokens == 0);
    const int64_t chunks = (num_columns + kIntegerColumns - 1) / kIntegerColumns;
    const int64_t tokens = std::max(packed_tokens(num_tokens), kByteTokens);
    return tokens * chunks * chunk_floats;
  }

  RoundedTokens(Rounding rounding, int64_t num_tokens, int64_t num_columns, float* memory)
      : rounding(rounding), num_tokens(num_tokens), num_columns(num_columns),
        bfloat16{reinterpret_cast<uint16_t*>(memory),
                 memory + packed_tokens(num_tokens) * num_columns / 2},
        integers{reinterpret_cast<IntegerChunk*>(memory)},
        bytes{reinterpret_cast<ByteTile*>(memory)} {
    // Tiles of tokens are multiplied whole.
    if (rounding.bytes) {
      if (num_tokens % kByteTokens == 0) return;
      std::memset(row_of_tiles(num_tokens / kByteTokens), 0,
                  static_cast<size_t>(num_columns / kByteColumns) * sizeof(ByteTile));
    } else if (rounding.bfloat16 && !rounding.integers) {
      const int64_t missing = packed_tokens(num_tokens) - num_tokens;
      std::memset(bfloat16.rows + num_tokens * num_columns, 0,
                  static_cast<size_t>(missing * num_columns) * sizeof(uint16_t));
    }
  }

  void pack(const float* values, int64_t token) const {
    if (rounding.bytes) {
      rounding.bytes->pack(values, num_columns, row_of_tiles(token / kByteTokens),
                           static_cast<int>(token % kByteTokens));
    } else if (rounding.integers) {
      rounding.integers->pack(values, num_columns,
                              integers.chunks + token * num_columns / kIntegerColumns);
    } else {
      rounding.bfloat16->pack(values, num_columns, bfloat16.rows + token * num_columns,
                              bfloat16.sums + token * num_columns / kSumColumns);
    }
  }

 private:
  ByteTile* row_of_tiles(int64_t row) const {
    return bytes.tiles + row * (num_columns / kByteColumns);
  }
};

}  // namespace jaxinfer
