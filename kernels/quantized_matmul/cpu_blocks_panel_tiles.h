// Sums of products of many tokens by two decoded blocks of rows. Included by cpu_blocks_panel.h.
#pragma once

#include <string.h>

#include "../cpp/bfloat16_products.h"
#include "../cpp/tile_config.h"
#include "cpu_blocks_decode.h"

namespace {

#if defined(__AMX_TILE__)

// Sixteen tokens by sixteen rows at a time would load two tiles for every product; two by two load
// one.
class PanelTiles {
 public:
  static constexpr bool kTakesPairs = true;  // of tiles of tokens, whatever is in the last

  // Tiles 0, 1 and 4 are of the first tokens, which may be fewer than a tile.
  explicit PanelTiles(int64_t num_tokens) {
    volatile TileConfig config = {};
    config.palette = 1;
    for (int i = 0; i < 8; ++i) config.row_bytes[i] = 64, config.rows[i] = 16;
    if (num_tokens < kTokenTile) {
      config.rows[0] = config.rows[1] = config.rows[4] = static_cast<uint8_t>(num_tokens);
    }
    _tile_loadconfig(const_cast<TileConfig*>(&config));
  }
  ~PanelTiles() { _tile_release(); }

  // sums[token tile][block] of `num_chunks` chunks; of each two.
  JAXINFER_INLINE void multiply(const uint16_t* tokens, int64_t num_columns,
                                const uint16_t* weights, int64_t block_words,
                                int64_t num_chunks, int64_t) {
    const int64_t stride = num_columns * 2;
    asm volatile("" ::: "memory");  // see Tiles::add
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
      const uint16_t* const of_chunk = weights + chunk * kTileWords;
      // Weights stay in the first-level cache, tokens pass it by.
      _tile_stream_loadd(4, tokens + chunk * kChunk, stride);
      _tile_loadd(6, of_chunk, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, of_chunk + block_words, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_stream_loadd(5, tokens + kTokenTile * num_columns + chunk * kChunk, stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }

  // The same of one token tile: sums[block].
  JAXINFER_INLINE void multiply_one(const uint16_t* tokens, int64_t num_columns,
                                    const uint16_t* weights, int64_t block_words,
                                    int64_t num_chunks) {
    const int64_t stride = num_columns * 2;
    asm volatile("" ::: "memory");
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
      const uint16_t* const of_chunk = weights + chunk * kTileWords;
      _tile_loadd(4, tokens + chunk * kChunk, stride);
      _tile_loadd(6, of_chunk, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, of_chunk + block_words, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
  }

  // Of each block [tokens, 16], of two tiles of tokens or of one.
  JAXINFER_INLINE void store_pairs(float* first, float* second, bool has_two) const {
    _tile_stored(0, first, kBlockRows * 4);
    _tile_stored(1, second, kBlockRows * 4);
    if (!has_two) return;
    _tile_stored(2, first + kTokenTile * kBlockRows, kBlockRows * 4);
    _tile_stored(3, second + kTokenTile * kBlockRows, kBlockRows * 4);
  }

  // Rows of `to` are tokens, `stride` floats apart.
  JAXINFER_INLINE void store(float* to, int64_t stride) const {
    _tile_stored(0, to, stride * 4);
    _tile_stored(1, to + kBlockRows, stride * 4);
    _tile_stored(2, to + kTokenTile * stride, stride * 4);
    _tile_stored(3, to + kTokenTile * stride + kBlockRows, stride * 4);
  }
};

#else

// The same in registers.
class PanelTiles {
 public:
  static constexpr bool kTakesPairs = false;

  explicit PanelTiles(int64_t num_tokens) : num_tokens_(num_tokens) {}

  JAXINFER_INLINE void multiply(const uint16_t* tokens, int64_t num_columns,
                                const uint16_t* weights, int64_t block_words, int64_t num_chunks,
                                int64_t num_tokens) {
    const Blocks blocks = {weights, weights + block_words, num_chunks * kPairs};
    int64_t token = 0;
    for (; token + kAtOnce <= num_tokens; token += kAtOnce) {
      add<kAtOnce>(tokens, num_columns, blocks, token);
    }
    add_last<kAtOnce - 1>(tokens, num_columns, blocks, token, num_tokens - token);
  }

  JAXINFER_INLINE void multiply_one(const uint16_t* tokens, int64_t num_columns,
                                    const uint16_t* weights, int64_t block_words,
                                    int64_t num_chunks) {
    multiply(tokens, num_columns, weights, block_words, num_chunks, num_tokens_);
  }

  JAXINFER_INLINE void store_pairs(float* first, float* second, bool has_two) const {
    const size_t bytes = (has_two ? 2 : 1) * kTokenTile * kBlockRows * sizeof(float);
    memcpy(first, sums_[0], bytes);
    memcpy(second, sums_[1], bytes);
  }

  JAXINFER_INLINE void store(float* to, int64_t stride) const {
    for (int64_t token = 0; token < 2 * kTokenTile; ++token, to += stride) {
      _mm512_storeu_ps(to, _mm512_load_ps(sums_[0] + token * kBlockRows));
      _mm512_storeu_ps(to + kBlockRows, _mm512_load_ps(sums_[1] + token * kBlockRows));
    }
  }

 private:
  static constexpr int kAtOnce = 8;

  struct Blocks {
    const uint16_t *first, *second;
    int64_t num_pairs;
  };

  // Of the `left` tokens from `token` on, fewer than kAtOnce.
  template <int kMost>
  JAXINFER_INLINE void add_last(const uint16_t* tokens, int64_t num_columns, const Blocks& blocks,
                                int64_t token, int64_t left) {
    if constexpr (kMost > 0) {
      if (left == kMost) return add<kMost>(tokens, num_columns, blocks, token);
      add_last<kMost - 1>(tokens, num_columns, blocks, token, left);
    }
  }

  template <int kTokens>
  JAXINFER_INLINE void add(const uint16_t* tokens, int64_t num_columns, const Blocks& blocks,
                           int64_t token) {
    multiply_by_two_blocks<kTokens>(tokens + token * num_columns, num_columns, blocks.first,
                                    blocks.second, blocks.num_pairs,
                                    sums_[0] + token * kBlockRows, sums_[1] + token * kBlockRows,
                                    kBlockRows);
  }

  const int64_t num_tokens_;
  alignas(64) float sums_[2][2 * kTokenTile * kBlockRows];
};

#endif

}  // namespace
