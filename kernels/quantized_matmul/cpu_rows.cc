// Rows of a quantized product, compiled once for each instruction set with MULTIPLY_ROWS as the
// entry's name.
//
// A result is the sum over blocks of kBlock columns, in order, of the sum of sixteen lanes, each
// of which added its columns up in order. Every path below keeps to that, so the bits of a result
// do not depend on which path its call took.

#include "cpu_decode.h"

namespace {

constexpr int kPanelRows = 4;
static_assert(kPanelRows % kTileRows == 0, "a panel is whole tiles");
// A row of the panel begins 64 bytes further into a page than the one before: rows of x do not.
constexpr int kPanelStride = kBlock + 16;
// Tokens whose block of columns stays in the second-level cache while weight rows pass by.
constexpr int kTokenBlock = 96;

// Adds the lanes of each accumulator up, and the block's sum to what earlier blocks left.
template <int kRows, int kTokens>
JAXINFER_INLINE void finish_block(const Lanes (&sums)[kTokens][kRows], const Product& p,
                                  int64_t row, int64_t token, bool add_to) {
  for (int t = 0; t < kTokens; ++t) {
    float* out = p.out + (token + t) * p.num_rows + row;
    if constexpr (kRows == 4) {
      sum_4(sums[t], out, add_to);
    } else {
      for (int r = 0; r < kRows; ++r) out[r] = add_to ? out[r] + sum(sums[t][r]) : sum(sums[t][r]);
    }
  }
}

// Few tokens: weights go from memory to registers and no further.
template <class Decoder, int kRows, int kTokens>
__attribute__((noinline)) void multiply_directly(const Product& p, int64_t row, int64_t token) {
  const int64_t stride = p.num_columns;
  const float* x = p.x + token * stride;
  for (int64_t begin = 0; begin < p.num_columns; begin += kBlock) {
    const int64_t end = begin + kBlock < p.num_columns ? begin + kBlock : p.num_columns;
    Lanes sums[kTokens][kRows];
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sums[t][r] = zero();
    }
    decode_block<Decoder, kRows>(
        p, row, begin, end,
        [&](int r, int64_t column, const Lanes* weights) __attribute__((always_inline)) {
#pragma GCC unroll 2
          for (int v = 0; v < Decoder::kVectors; ++v) {
#pragma GCC unroll 8
            for (int t = 0; t < kTokens; ++t) {
              const Lanes values = load(x + t * stride + column + 16 * v);
              sums[t][r] = multiply_add(weights[v], values, sums[t][r]);
            }
          }
        });
    finish_block<kRows, kTokens>(sums, p, row, token, begin > 0);
  }
}

// Many tokens: a tile of a decoded panel by some of them, for one block of columns. Where sixteen
// lanes take several registers, one pass over the block for each leaves room for a larger tile.
template <int kRows, int kTokens>
__attribute__((noinline)) void multiply_tile(const float* panel, const Product& p, int64_t row,
                                             int64_t token, int64_t begin, int64_t end) {
  constexpr int kWidth = sizeof(Register) / sizeof(float);
  const int64_t stride = p.num_columns, num_columns = end - begin;
  alignas(64) float lanes[kTokens][kRows][16];
  for (int lane = 0; lane < 16; lane += kWidth) {
    const float* x = p.x + token * stride + begin + lane;
    Register sums[kTokens][kRows];
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sums[t][r] = zero_register();
    }
    for (int64_t column = 0; column < num_columns; column += 16) {
      Register weights[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        weights[r] = load_register(panel + r * kPanelStride + column + lane);
      }
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) {
        Register values = load_register(x + t * stride + column);
        // Or the compiler loads them again for each row, and loads are what there are most of.
        keep_in_register(values);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) sums[t][r] = multiply_add(weights[r], values, sums[t][r]);
      }
    }
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) store(lanes[t][r] + lane, sums[t][r]);
    }
  }
  Lanes sums[kTokens][kRows];
  for (int t = 0; t < kTokens; ++t) {
    for (int r = 0; r < kRows; ++r) sums[t][r] = load(lanes[t][r]);
  }
  finish_block<kRows, kTokens>(sums, p, row, token, begin > 0);
}

// Calls `run` with `count`, at most kMost, as a compile-time constant.
template <int kMost, class Run>
JAXINFER_INLINE void with_constant(int64_t count, Run run) {
  if constexpr (kMost > 1) {
    if (count < kMost) return with_constant<kMost - 1>(count, run);
  }
  run.template operator()<kMost>();
}

template <int kRows>
struct Tile {
  const float* panel;
  const Product& p;
  int64_t row, token, begin, end;
  template <int kTokens>
  void operator()() const {
    multiply_tile<kRows, kTokens>(panel, p, row, token, begin, end);
  }
};

template <class Decoder, int kRows>
struct Direct {
  const Product& p;
  int64_t row, token;
  template <int kTokens>
  void operator()() const {
    multiply_directly<Decoder, kRows, kTokens>(p, row, token);
  }
};

// The tokens of the next of the evenly filled tiles that `left` tokens take.
inline int64_t tile_tokens(int64_t left) {
  const int64_t num_tiles = (left + kTileTokens - 1) / kTileTokens;
  return (left + num_tiles - 1) / num_tiles;
}

template <class Decoder>
void multiply_panel(const Product& p, int64_t row, int64_t num_rows, int64_t first_token,
                    int64_t last_token, int64_t begin, int64_t end) {
  alignas(64) float panel[kPanelRows * kPanelStride];
  for (int64_t r = 0; r < num_rows; ++r) {
    float* to = panel + r * kPanelStride;
    decode_block<Decoder, 1>(
        p, row + r, begin, end,
        [&](int, int64_t column, const Lanes* weights) __attribute__((always_inline)) {
          for (int v = 0; v < Decoder::kVectors; ++v) {
            store(to + (column - begin) + 16 * v, weights[v]);
          }
        });
  }
  for (int64_t token = first_token; token < last_token;) {
    const int64_t count = tile_tokens(last_token - token);
    int64_t r = 0;
    for (; r + kTileRows <= num_rows; r += kTileRows) {
      with_constant<kTileTokens>(
          count, Tile<kTileRows>{panel + r * kPanelStride, p, row + r, token, begin, end});
    }
    for (; r < num_rows; ++r) {
      with_constant<kTileTokens>(
          count, Tile<1>{panel + r * kPanelStride, p, row + r, token, begin, end});
    }
    token += count;
  }
}

template <class Decoder>
void multiply_all(const Product& p, int64_t first_row, int64_t last_row) {
  if (p.num_tokens <= kDirectTokens) {
    int64_t row = first_row;
    for (; row + kTileRows <= last_row; row += kTileRows) {
      with_constant<kDirectTokens>(p.num_tokens, Direct<Decoder, kTileRows>{p, row, 0});
    }
    for (; row < last_row; ++row) {
      with_constant<kDirectTokens>(p.num_tokens, Direct<Decoder, 1>{p, row, 0});
    }
    return;
  }
  for (int64_t token = 0; token < p.num_tokens; token += kTokenBlock) {
    const int64_t last = token + kTokenBlock < p.num_tokens ? token + kTokenBlock : p.num_tokens;
    for (int64_t begin = 0; begin < p.num_columns; begin += kBlock) {
      const int64_t end = begin + kBlock < p.num_columns ? begin + kBlock : p.num_columns;
      for (int64_t row = first_row; row < last_row; row += kPanelRows) {
        const int64_t rows = row + kPanelRows < last_row ? kPanelRows : last_row - row;
        multiply_panel<Decoder>(p, row, rows, token, last, begin, end);
      }
    }
  }
}

}  // namespace

namespace jaxinfer {

void MULTIPLY_ROWS(const Product& p, int64_t first_row, int64_t last_row) {
  const bool has_offset = p.offset != nullptr, small_groups = p.group_size == 16;
  switch (p.code) {
    case Code::kFp8:
      return multiply_all<Fp8Decoder>(p, first_row, last_row);
    case Code::kInt8:
      if (has_offset) return multiply_all<Int8Decoder<true>>(p, first_row, last_row);
      return multiply_all<Int8Decoder<false>>(p, first_row, last_row);
    case Code::kNibble:
      if (has_offset && small_groups) {
        return multiply_all<NibbleDecoder<true, 2>>(p, first_row, last_row);
      }
      if (has_offset) return multiply_all<NibbleDecoder<true, 1>>(p, first_row, last_row);
      if (small_groups) return multiply_all<NibbleDecoder<false, 2>>(p, first_row, last_row);
      return multiply_all<NibbleDecoder<false, 1>>(p, first_row, last_row);
  }
}

}  // namespace jaxinfer
