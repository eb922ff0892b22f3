// Weights in blocks of sixteen rows, as `Layout(row_block=16)` has them: a register holds the same
// columns of sixteen rows, so that scales are vectors and no sum crosses lanes.
//
// For codes of 5 bits see cpu_blocks_five_bits.h. Of every 32 columns a row has 16 bytes (4-bit
// codes, as ggml packs them) or 32 (8-bit codes);
// row r's dword j lies in lane r of the block's register j, its two middle bytes exchanged. So the
// low and the high half of a lane hold neighbouring columns, which is how bfloat16 products take
// their operands: a pair of columns for sixteen rows comes from one shift and one look-up.
//
// Scales and offsets of a block are [groups, 16].
#pragma once

#include <stdint.h>

#include "cpu_product.h"

namespace jaxinfer {

constexpr int64_t kBlockRows = 16;
constexpr int64_t kTokenTile = 16;
constexpr int64_t kSumColumns = 16;

// Tokens rounded to bfloat16. Of whole tiles, but of fewer tokens than a tile just those.
inline int64_t packed_tokens(int64_t num_tokens) {
  return num_tokens <= kTokenTile ? num_tokens
                                  : (num_tokens + kTokenTile - 1) / kTokenTile * kTokenTile;
}

struct Bfloat16Tokens {
  uint16_t* rows;  // [packed_tokens, num_columns]
  float* sums;     // [packed_tokens, num_columns / kSumColumns], of the rounded numbers
};

// `to[i] = activation(gates[i]) * ups[i]`; `to` may be `gates`.
using Gate = void(const float* gates, const float* ups, int64_t size, float* to);

struct BlockLoops {
  // Rounds one token of `size` columns, a multiple of 16.
  void (*pack)(const float* token, int64_t size, uint16_t* row, float* sums);
  // As MultiplyRows; `first_row` begins a block. Products of bfloat16 tokens with the codes as they
  // are, summed in float32 within a group, before its scale.
  void (*multiply)(const Product& p, const Bfloat16Tokens& tokens, int64_t first_row,
                   int64_t last_row);
  // For many tokens, null where there are no tiles: products of the rows from `first_row` on, gates,
  // and of as many half the matrix later, ups; gated and packed as columns of `to`.
  void (*multiply_gated)(const Product& p, const Bfloat16Tokens& tokens, Gate* gate,
                         int64_t first_row, int64_t last_row, const Bfloat16Tokens& to);
};

constexpr int64_t kIntegerColumns = 32;

// Columns of a token, rounded to `scale` times integers of fifteen bits: 128 * high + low.
struct IntegerChunk {
  int8_t high[kIntegerColumns], low[kIntegerColumns];  // as a lane of weights has its columns
  int32_t totals[2];                                   // of the first and of the second half
  float scale;
};

struct IntegerTokens {
  IntegerChunk* chunks;  // [num_tokens, num_columns / kIntegerColumns]
};

struct IntegerLoops {
  // Rounds one token of `size` columns, a multiple of kIntegerColumns.
  void (*pack)(const float* token, int64_t size, IntegerChunk* chunks);
  // As MultiplyRows, of weights with a code_bias; `first_row` begins a block. Sums are integers
  // within a group's chunks, then float32 chunk by chunk.
  void (*multiply)(const Product& p, const IntegerTokens& tokens, int64_t first_row,
                   int64_t last_row);
};

constexpr int64_t kByteColumns = 32, kByteTokens = 8;

// The same columns of some tokens, each rounded to its scale times integers of a byte.
struct ByteTile {
  int8_t codes[kByteColumns / 4][kByteTokens][4];  // as a lane of weights has its columns
  float scales[kByteTokens];
  float totals[3][kByteTokens];  // of the first and of the second half, and of both
};

struct ByteTokens {
  ByteTile* tiles;  // [num_tokens / kByteTokens, num_columns / kByteColumns], all of the last there
};

struct ByteLoops {
  // Rounds one token of `size` columns, a multiple of kByteColumns, to its lane of a row of tiles.
  void (*pack)(const float* token, int64_t size, ByteTile* tiles, int lane);
  // As IntegerLoops::multiply, for many tokens.
  void (*multiply)(const Product& p, const ByteTokens& tokens, int64_t first_row,
                   int64_t last_row);
};

#if defined(__x86_64__)
// The same but for what they fetch ahead.
extern const IntegerLoops integer_loops_avx512vnni, integer_loops_amx;
extern const ByteLoops byte_loops_avx512vnni;
extern const BlockLoops block_loops_avx512bf16;
extern const BlockLoops block_loops_amx;
// float32 tokens `p.x` with weights in float32.
MultiplyRows multiply_blocks_avx512;
#endif

}  // namespace jaxinfer
