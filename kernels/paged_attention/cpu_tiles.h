// Products of bfloat16 matrices. See cpu_bfloat16.cc.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "../cpp/bfloat16_products.h"
#include "../cpp/lanes.h"
#include "../cpp/tile_config.h"

namespace {

constexpr int64_t kPairs = 16;                    // in a chunk of what is added up
constexpr int64_t kChunk = 2 * kPairs;
constexpr int64_t kTileColumns = 16;
constexpr int64_t kTileElements = kPairs * 2 * kTileColumns;

// A chunk of a row, zeros behind its end.
JAXINFER_INLINE __m512i read_chunk(const uint16_t* from, int64_t count) {
  if (count >= kChunk) return _mm512_loadu_si512(from);
  return _mm512_maskz_loadu_epi16((1u << count) - 1, from);
}

// A query times the scale, rounded; zeros up to `width`, whole chunks.
JAXINFER_INLINE void round_query(const float* query, int64_t head_dim, float scale, int64_t width,
                                 uint16_t* to) {
  for (int64_t h = 0; h < width; h += kWidth) {
    const Lanes part = h < head_dim ? decode_part<Float32>(query + h, head_dim - h) : Lanes{};
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)(part * scale));
    memcpy(to + h, &rounded, sizeof(rounded));
  }
}

#if defined(__AMX_TILE__)

// Sums of products of up to 32 rows, kept until it goes out of scope: nothing else uses tiles.
class Tiles {
 public:
  Tiles() {
    // Volatile: some compilers drop stores that only this instruction reads.
    volatile TileConfig config = {};
    config.palette = 1;
    for (int i = 0; i < 8; ++i) config.row_bytes[i] = 64, config.rows[i] = 16;
    _tile_loadconfig(const_cast<TileConfig*>(&config));
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  // sums[r, n] = sum over k of a[r, k] * b[k, n], of 16 * kRowTiles rows and 32 columns. Chunks
  // are added up one after the other, so those that are zeros change no bit. `b` is a tile
  // [kPairs, kTileColumns, 2] for every chunk of k; of the other sixteen columns `b_stride` on.
  template <int kRowTiles>
  void multiply(const uint16_t* a, int64_t a_stride, const uint16_t* b, int64_t b_stride,
                int64_t num_chunks, float* sums, int64_t sums_stride) const {
    const int64_t a_bytes = a_stride * 2, sums_bytes = sums_stride * 4;
    const uint16_t* const below = a + 16 * a_stride;
    // GCC's intrinsics do not say that they read memory: what was stored must be there.
    asm volatile("" ::: "memory");
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kRowTiles == 2) {
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk, b += kTileElements) {
      _tile_loadd(6, b, 64);
      _tile_loadd(7, b + b_stride, 64);
      _tile_loadd(4, a + chunk * kChunk, a_bytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (kRowTiles == 2) {
        _tile_loadd(5, below + chunk * kChunk, a_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, sums, sums_bytes);
    _tile_stored(1, sums + 16, sums_bytes);
    if constexpr (kRowTiles == 2) {
      _tile_stored(2, sums + 16 * sums_stride, sums_bytes);
      _tile_stored(3, sums + 16 * sums_stride + 16, sums_bytes);
    }
    asm volatile("" ::: "memory");
  }
};

#else

// The same in registers.
class Tiles {
 public:
  Tiles() {}  // a constant without one would want values

  template <int kRowTiles>
  void multiply(const uint16_t* a, int64_t a_stride, const uint16_t* b, int64_t b_stride,
                int64_t num_chunks, float* sums, int64_t sums_stride) const {
    constexpr int kRows = 8;
    for (int r = 0; r < 16 * kRowTiles; r += kRows, sums += kRows * sums_stride) {
      multiply_by_two_blocks<kRows>(a + r * a_stride, a_stride, b, b + b_stride,
                                    num_chunks * kPairs, sums, sums + kTileColumns, sums_stride);
    }
  }
};

#endif

}  // namespace
