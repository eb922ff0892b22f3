// Sums of products of tokens and decoded weights. Included by cpu_blocks.cc.
#pragma once

#include "../cpp/tile_config.h"
#include "cpu_blocks_decode.h"

namespace {

#if defined(__AMX_TILE__)

// Tiles 0 to 3 are sums of up to sixteen tokens, 4 is tokens, 5 weights.
class Tiles {
 public:
  Tiles(int num_tokens, int num_pairs) {
    // Volatile: some compilers drop stores that only this instruction reads.
    volatile TileConfig config = {};
    config.palette = 1;
    for (int i = 0; i < 5; ++i) {
      config.row_bytes[i] = static_cast<uint16_t>(i < 4 ? 64 : 4 * num_pairs);
      config.rows[i] = static_cast<uint8_t>(num_tokens);
    }
    config.row_bytes[5] = 64;
    config.rows[5] = static_cast<uint8_t>(num_pairs);
    _tile_loadconfig(const_cast<TileConfig*>(&config));
  }
  ~Tiles() { _tile_release(); }

  // The instructions' operands are literals, for some compilers.
  template <int kSum>
  JAXINFER_INLINE void clear() {
    if constexpr (kSum == 0) _tile_zero(0);
    if constexpr (kSum == 1) _tile_zero(1);
    if constexpr (kSum == 2) _tile_zero(2);
    if constexpr (kSum == 3) _tile_zero(3);
  }
  template <int kSum>
  JAXINFER_INLINE void add(const uint16_t* tokens, int64_t stride, const uint16_t* weights) {
    // GCC's intrinsic does not say that it reads memory: what was decoded must be there.
    asm volatile("" ::: "memory");
    _tile_loadd(4, tokens, stride * 2);
    _tile_loadd(5, weights, 64);
    if constexpr (kSum == 0) _tile_dpbf16ps(0, 4, 5);
    if constexpr (kSum == 1) _tile_dpbf16ps(1, 4, 5);
    if constexpr (kSum == 2) _tile_dpbf16ps(2, 4, 5);
    if constexpr (kSum == 3) _tile_dpbf16ps(3, 4, 5);
  }
  template <int kSum>
  JAXINFER_INLINE void store(float* to) {
    if constexpr (kSum == 0) _tile_stored(0, to, 64);
    if constexpr (kSum == 1) _tile_stored(1, to, 64);
    if constexpr (kSum == 2) _tile_stored(2, to, 64);
    if constexpr (kSum == 3) _tile_stored(3, to, 64);
  }

};

#else

// The same in registers: the sums of four tokens at a time are in progress.
class Tiles {
 public:
  Tiles(int num_tokens, int num_pairs) : num_tokens_(num_tokens), num_pairs_(num_pairs) {}

  template <int kSum>
  void clear() { memset(sums_[kSum], 0, sizeof(sums_[kSum])); }

  template <int kSum>
  void add(const uint16_t* tokens, int64_t stride, const uint16_t* weights) {
    int t = 0;
    for (; t + 4 <= num_tokens_; t += 4) add_to<4>(sums_[kSum][t], tokens + t * stride, stride, weights);
    for (; t < num_tokens_; ++t) add_to<1>(sums_[kSum][t], tokens + t * stride, stride, weights);
  }

  template <int kSum>
  void store(float* to) {
    memcpy(to, sums_[kSum], static_cast<size_t>(num_tokens_) * 64);
  }

 private:
  template <int kTokens>
  JAXINFER_INLINE void add_to(float* to, const uint16_t* tokens, int64_t stride,
                              const uint16_t* weights) const {
    __m512 sums[kTokens];
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; ++t) sums[t] = _mm512_load_ps(to + 16 * t);
    for (int pair = 0; pair < num_pairs_; ++pair) {
      const auto both = (__m512bh)load_words(weights + 32 * pair);
#pragma GCC unroll 4
      for (int t = 0; t < kTokens; ++t) {
        int token;
        memcpy(&token, tokens + t * stride + 2 * pair, sizeof(token));
        sums[t] = _mm512_dpbf16_ps(sums[t], (__m512bh)_mm512_set1_epi32(token), both);
      }
    }
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; ++t) _mm512_store_ps(to + 16 * t, sums[t]);
  }

  const int num_tokens_, num_pairs_;
  alignas(64) float sums_[4][16][16];
};

#endif

}  // namespace
