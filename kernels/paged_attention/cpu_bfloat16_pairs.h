// Few rows of a bfloat16 cache where there are no tiles, or heads are not whole chunks: products of
// pairs of bfloat16 numbers in registers. Pairs of a score are neighbouring elements, which lie
// side by side in the cache; pairs of a result are neighbouring keys, whose values are interleaved
// on the way. See cpu_bfloat16.cc.
#pragma once

#include "../cpp/lanes.h"
#include "cpu_ahead.h"
#include "cpu_attention.h"
#include "cpu_dots.h"
#include "cpu_exponential.h"
#include "cpu_keys.h"
#include "cpu_state.h"
#include "cpu_tiles.h"

namespace {

struct PairProducts {
  using Held = uint16_t;
  using Query = uint16_t;
  using Register = __m512i;
  static constexpr int kElements = kChunk;
  static JAXINFER_INLINE Register load_query(const Query* from) {
    return _mm512_loadu_si512(from);
  }
  static JAXINFER_INLINE Register load_elements(const Held* from, int64_t left) {
    return read_chunk(from, left);
  }
  static JAXINFER_INLINE Lanes add(Register query, Register elements, Lanes sum) {
    return (Lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)query, (__m512bh)elements);
  }
};

// sums[r, :] = sum over keys of weights[r, key] * values of rows[key], pair by pair. `left`
// elements of the values remain from `offset` on; registers of `sums` are full.
template <int kRows, int kChunks>
__attribute__((noinline)) void multiply_pairs(const uint16_t* weights, const uint16_t* const* rows,
                                              int64_t offset, int64_t left, int64_t num_pairs,
                                              float* sums, int64_t stride, Ahead& ahead) {
  alignas(64) uint16_t places[64];
  for (int i = 0; i < 64; ++i) places[i] = static_cast<uint16_t>(i / 2 + i % 2 * kChunk);
  const __m512i lows = _mm512_load_si512(places), highs = _mm512_load_si512(places + kChunk);
  __m512 held[kRows][2 * kChunks];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < 2 * kChunks; ++v) held[r][v] = _mm512_setzero_ps();
  }
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    ahead.advance(2 * kChunks * kChunk * sizeof(uint16_t));
    const uint16_t *first = rows[2 * pair] + offset, *second = rows[2 * pair + 1] + offset;
    __m512bh line[2 * kChunks];
#pragma GCC unroll 2
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int64_t skipped = chunk * kChunk;
      const __m512i even = read_chunk(first + skipped, kChunks > 1 ? kChunk : left);
      const __m512i odd = read_chunk(second + skipped, kChunks > 1 ? kChunk : left);
      line[2 * chunk] = (__m512bh)_mm512_permutex2var_epi16(even, lows, odd);
      line[2 * chunk + 1] = (__m512bh)_mm512_permutex2var_epi16(even, highs, odd);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      int32_t both;
      memcpy(&both, weights + r * kBlock + 2 * pair, sizeof(both));
      const auto factor = (__m512bh)_mm512_set1_epi32(both);
#pragma GCC unroll 4
      for (int v = 0; v < 2 * kChunks; ++v) {
        held[r][v] = _mm512_dpbf16_ps(held[r][v], factor, line[v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < 2 * kChunks; ++v) {
      _mm512_storeu_ps(sums + r * stride + v * kWidth, held[r][v]);
    }
  }
}

template <int kRows>
void multiply_rows_of_pairs(const uint16_t* weights, const uint16_t* const* rows, int64_t offset,
                            int64_t head_dim, int64_t num_pairs, float* sums, int64_t stride,
                            Ahead& ahead) {
  int64_t h = 0;
  // Sums of more rows would not fit the registers.
  for (; kRows <= 6 && h + 2 * kChunk <= head_dim; h += 2 * kChunk) {
    multiply_pairs<kRows, 2>(weights, rows, offset + h, kChunk, num_pairs, sums + h, stride, ahead);
  }
  for (; h < head_dim; h += kChunk) {
    multiply_pairs<kRows, 1>(weights, rows, offset + h, head_dim - h, num_pairs, sums + h, stride,
                             ahead);
  }
}

void multiply_few_of_pairs(int64_t num_rows, const uint16_t* weights, const uint16_t* const* rows,
                           int64_t offset, int64_t head_dim, int64_t num_pairs, float* sums,
                           int64_t stride, Ahead& ahead) {
  static_assert(jaxinfer::kFewRows == 8, "a case for each");
  const auto run = [&](auto* multiply) {
    multiply(weights, rows, offset, head_dim, num_pairs, sums, stride, ahead);
  };
  switch (num_rows) {
    case 1: return run(multiply_rows_of_pairs<1>);
    case 2: return run(multiply_rows_of_pairs<2>);
    case 3: return run(multiply_rows_of_pairs<3>);
    case 4: return run(multiply_rows_of_pairs<4>);
    case 5: return run(multiply_rows_of_pairs<5>);
    case 6: return run(multiply_rows_of_pairs<6>);
    case 7: return run(multiply_rows_of_pairs<7>);
    default: return run(multiply_rows_of_pairs<8>);
  }
}

// A tile of up to kFewRows rows for each of its KV heads.
class FewPairsTile : TileRows {
 public:
  FewPairsTile(const jaxinfer::Attention& p, const jaxinfer::Tile& tile, float* scratch,
               Ahead& ahead)
      : TileRows(p, tile),
        width_(jaxinfer::rounded_up(head_dim_, kChunk)),
        ahead_(ahead),
        scores_(scratch),
        sums_(scores_ + kBlock * all_rows_),
        weights_(reinterpret_cast<uint16_t*>(sums_ + num_rows_ * width_)),
        queries_(weights_ + kBlock * num_rows_),
        states_(reinterpret_cast<float*>(queries_ + all_rows_ * width_)) {}

  void run() {
    pack_queries();
    for_spans(states_, [this](int64_t span, const State& state) {
      for_blocks(span, state, [&](int64_t block, int64_t first, int64_t end) {
        attend_block(block, first, end, state);
      });
    });
  }

 private:
  void pack_queries() const {
    for (int64_t r = 0; r < all_rows_; ++r) {
      round_query(p_.q + element_of(r), head_dim_, p_.scale, width_, queries_ + r * width_);
    }
  }

  // Keys `[first, end)`, which lie in the block that begins at `block`. They are scored page by
  // page for all KV heads, in the order of memory.
  void attend_block(int64_t block, int64_t first, int64_t end, const State& state) {
    const uint16_t* rows[kBlock];
    find_rows(p_, tile_, block, first, end, kChunk, rows);
    const int64_t left = (first - block) / kChunk * kChunk;
    const int64_t right = jaxinfer::rounded_up(end - block, kChunk);
    const int64_t key_bytes = head_dim_ * static_cast<int64_t>(sizeof(uint16_t));
    for (int64_t i = left; i < right; i += kWidth) {
      for (int64_t head = 0; head < tile_.num_kv_heads; ++head) {
        const int64_t row = head * num_rows_;
        score_few<PairProducts>(num_rows_, queries_ + row * width_, width_, rows + i,
                                head * 2 * head_dim_, head_dim_, kWidth,
                                scores_ + row * kBlock + i, ahead_, key_bytes);
      }
    }
    for (int64_t head = 0; head < tile_.num_kv_heads; ++head) {
      weigh_rows(head, block, left, right, first, end, state);
      multiply_few_of_pairs(num_rows_, weights_ + left, rows + left, (2 * head + 1) * head_dim_,
                            head_dim_, (right - left) / 2, sums_, width_, ahead_);
      add_values(head, state);
    }
  }

  // Makes the scores of a KV head weights, rounded, and makes what is summed up relative to them.
  void weigh_rows(int64_t head, int64_t block, int64_t left, int64_t right, int64_t first,
                  int64_t end, const State& state) {
    float here[kWidth] = {}, shift[kWidth];
    const int64_t row = head * num_rows_;
    for (int64_t r = 0; r < num_rows_; ++r) {
      const int64_t position = position_of(r);
      here[r] = mask_scores(scores_ + (row + r) * kBlock, left, right,
                            at_least(first, first_seen(p_, position)) - block,
                            at_most(end, position + 1) - block);
    }
    const Lanes before = load(state.peak + row);
    const Lanes peak = larger(before, load(here)), shifts = finite(peak);
    store(decays_, exponential(before - shifts));
    store(shift, shifts * -kLog2E);
    store(here, peak);
    for (int64_t r = 0; r < num_rows_; ++r) {
      const float total = round_weights(scores_ + (row + r) * kBlock, left, right, shift[r],
                                        weights_ + r * kBlock);
      state.total[row + r] = state.total[row + r] * decays_[r] + total;
      state.peak[row + r] = here[r];
    }
  }

  // Adds what a block's weighted values sum up to.
  void add_values(int64_t head, const State& state) const {
    for (int64_t r = 0; r < num_rows_; ++r) {
      float* weighted = state.weighted + (head * num_rows_ + r) * padded_;
      const float* sums = sums_ + r * width_;
      const Lanes decay = broadcast(decays_[r]);
      for (int64_t h = 0; h < padded_; h += kWidth) {
        store(weighted + h, multiply_add(load(weighted + h), decay, load(sums + h)));
      }
    }
  }

  const int64_t width_;  // of a head, filled up with zeros to whole chunks
  Ahead& ahead_;
  float* const scores_;      // [all rows, kBlock]
  float* const sums_;        // [rows, width]
  uint16_t* const weights_;  // [rows, kBlock]
  uint16_t* const queries_;  // [all rows, width]
  float* const states_;      // two of them
  float decays_[kWidth];
};

}  // namespace
