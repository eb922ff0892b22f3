// The loops of paged attention for AMX, and for AVX-512's dot products of bfloat16 pairs, with LOOPS
// as their name: where the cache is bfloat16, products are of bfloat16 numbers. Other caches are
// left to the loops for AVX-512.
//
// Queries, times the scale, and the weights of values are rounded to bfloat16; sums, softmaxes and
// the sum of the rounded weights are float32. Where rows are many, a span of keys is one softmax:
// its keys and values are packed once, then sixteen or 32 rows at a time are scored, weighted and
// multiplied by values. For few rows see cpu_bfloat16_few.h and cpu_bfloat16_pairs.h.
//
// Chunks of keys begin at multiples of their size, and those that a row does not see are zeros: so
// its bits depend on no other row.

#include "../cpp/lanes.h"
#include "cpu_ahead.h"
#include "cpu_attention.h"
#if defined(__AMX_TILE__)
#include "cpu_bfloat16_few.h"
#endif
#include "cpu_bfloat16_pairs.h"
#include "cpu_exponential.h"
#include "cpu_keys.h"
#include "cpu_state.h"
#include "cpu_tiles.h"
#include "cpu_transpose.h"

namespace {

using namespace jaxinfer;

class RoundedTile : TileRows {
 public:
  RoundedTile(const Attention& p, const Tile& tile, float* scratch)
      : TileRows(p, tile),
        chunks_(rounded_up(head_dim_, kChunk) / kChunk),
        width_(chunks_ * kChunk),
        keys_(reinterpret_cast<uint16_t*>(scratch)),
        values_(keys_ + kSpanKeys * width_),
        queries_(values_ + kSpanKeys * width_),
        scores_(reinterpret_cast<float*>(queries_ + rounded_up(num_rows_, kRowsAtOnce) * width_)),
        products_(scores_ + kRowsAtOnce * kScoresStride),
        states_(products_ + kRowsAtOnce * width_),
        ahead_(p, tile, sizeof(uint16_t), kSpanKeys) {}

  void run() {
    pack_queries();
    for_spans(states_, [this](int64_t span, const State& state) { attend_span(span, state); });
  }

 private:
  void pack_queries() const {
    for (int64_t r = 0; r < rounded_up(num_rows_, kRowsAtOnce); ++r) {
      const float* from = p_.q + element_of(r < num_rows_ ? r : 0);  // others are not used
      round_query(from, head_dim_, p_.scale, width_, queries_ + r * width_);
    }
  }

  void attend_span(int64_t span, const State& state) {
    const int64_t begin = span * kSpanKeys;
    const int64_t first = at_least(begin, first_key_of(p_, tile_)) - begin;
    const int64_t end = at_most(begin + kSpanKeys, end_key_of(tile_)) - begin;
    const uint16_t* rows[kSpanKeys];
    find_rows(p_, tile_, begin, begin + first, begin + end, kChunk, rows);
    pack_keys(rows, first, end);
    pack_values(rows, first, end);
    for (int64_t r = 0; r < num_rows_; r += kRowsAtOnce) {
      if (num_rows_ - r > 16) {
        attend_rows<2>(r, begin, first, end, state);
      } else {
        attend_rows<1>(r, begin, first, end, state);
      }
    }
  }

  // A tile of pairs of a chunk of elements, for every chunk, for every sixteen keys.
  void pack_keys(const uint16_t* const* rows, int64_t first, int64_t end) const {
    for (int64_t key = first / kChunk * kChunk; key < rounded_up(end, kChunk);
         key += kTileColumns) {
      uint16_t* to = keys_ + key * width_;
      for (int64_t h = 0; h < head_dim_; h += kChunk, to += kTileElements) {
        Lanes square[kWidth];
#pragma GCC unroll 16
        for (int i = 0; i < kWidth; ++i) {
          square[i] = bits_of<Lanes>(read_chunk(rows[key + i] + h, head_dim_ - h));
        }
        transpose(square);
#pragma GCC unroll 16
        for (int i = 0; i < kWidth; ++i) _mm512_storeu_ps(to + 32 * i, (__m512)square[i]);
      }
    }
  }

  // A tile of pairs of a chunk of keys, for every chunk, for every sixteen elements. Keys that are
  // not seen are zeros: so are their weights.
  void pack_values(const uint16_t* const* rows, int64_t first, int64_t end) const {
    alignas(64) uint16_t low[32], high[32];
    for (int i = 0; i < 16; ++i) {
      low[2 * i] = static_cast<uint16_t>(i), low[2 * i + 1] = static_cast<uint16_t>(32 + i);
      high[2 * i] = static_cast<uint16_t>(16 + i), high[2 * i + 1] = static_cast<uint16_t>(48 + i);
    }
    const __m512i lows = _mm512_load_si512(low), highs = _mm512_load_si512(high);
    for (int64_t key = first / kChunk * kChunk; key < rounded_up(end, kChunk); key += 2) {
      const auto value = [&](int64_t i, int64_t h) {
        if (i < first || i >= end) return _mm512_setzero_si512();
        return read_chunk(rows[i] + head_dim_ + h, head_dim_ - h);
      };
      uint16_t* to = values_ + key * kTileColumns;
      for (int64_t h = 0; h < head_dim_; h += kChunk, to += 2 * kTileColumns * kSpanKeys) {
        const __m512i even = value(key, h), odd = value(key + 1, h);
        _mm512_storeu_si512(to, _mm512_permutex2var_epi16(even, lows, odd));
        _mm512_storeu_si512(to + kTileColumns * kSpanKeys,
                           _mm512_permutex2var_epi16(even, highs, odd));
      }
    }
  }

  // Rows from `row` on with the keys `[first, end)` of a span, all that they see of it.
  template <int kRowTiles>
  void attend_rows(int64_t row, int64_t begin, int64_t first, int64_t end, const State& state) {
    const int64_t count = at_most(num_rows_ - row, 16 * kRowTiles);
    const int64_t seen_first = at_least(first, first_seen(p_, position_of(row)) - begin);
    const int64_t seen_end = at_most(end, position_of(row + count - 1) + 1 - begin);
    const int64_t left = seen_first / kChunk * kChunk;
    const int64_t right = at_least(rounded_up(seen_end, kChunk), left);
    for (int64_t key = left; key < right; key += 2 * kTileColumns) {
      tiles_.multiply<kRowTiles>(queries_ + row * width_, width_, keys_ + key * width_,
                                 kTileColumns * width_, chunks_, scores_ + key, kScoresStride);
    }
    for (int64_t r = 0; r < count; ++r) {
      const int64_t position = position_of(row + r) - begin;
      float* scores = scores_ + r * kScoresStride;
      mask(scores, left, right, at_least(first, position - p_.window + 1),
           at_most(end, position + 1));
      weigh(scores, left, right, state.peak + row + r, state.total + row + r);
      ahead_.advance(span_bytes_ / num_rows_);
    }
    const auto* weights = reinterpret_cast<const uint16_t*>(scores_);
    for (int64_t h = 0; h < width_; h += 2 * kTileColumns) {
      tiles_.multiply<kRowTiles>(weights + left, 2 * kScoresStride,
                                 values_ + h * kSpanKeys + left * kTileColumns,
                                 kTileColumns * kSpanKeys, (right - left) / kChunk, products_ + h,
                                 width_);
    }
    for (int64_t r = 0; r < count; ++r) {
      memcpy(state.weighted + (row + r) * padded_, products_ + r * width_,
             static_cast<size_t>(padded_) * sizeof(float));
    }
  }

  // Finishes a row's scores in [left, right), and makes those outside [begin, end) minus infinity.
  void mask(float* scores, int64_t left, int64_t right, int64_t begin, int64_t end) const {
    for (int64_t i = left; p_.soft_cap != 0 && i < right; i += kWidth) {
      store(scores + i, capped(load(scores + i), p_.soft_cap));
    }
    const auto mask_part = [&](int64_t i) {
      store(scores + i, only_seen(load(scores + i), i, begin, end));
    };
    for (int64_t i = left; i < at_most(begin, right); i += kWidth) mask_part(i);
    for (int64_t i = at_least(end, left) / kWidth * kWidth; i < right; i += kWidth) mask_part(i);
  }

  // Makes a row's scores weights, rounded, where the scores were, and sums them up.
  void weigh(float* scores, int64_t left, int64_t right, float* peak, float* total) const {
    Lanes most = broadcast(-INFINITY), others = most;
    for (int64_t i = left; i < right; i += kChunk) {
      most = larger(most, load(scores + i));
      others = larger(others, load(scores + i + kWidth));
    }
    *peak = largest(larger(most, others));
    const float shift = (finite(broadcast(*peak)) * -kLog2E)[0];
    *total = round_weights(scores, left, right, shift, reinterpret_cast<uint16_t*>(scores));
  }

  const int64_t chunks_, width_;  // of a head, filled up with zeros
  uint16_t* const keys_;
  uint16_t* const values_;
  uint16_t* const queries_;  // [rows, width]
  float* const scores_;      // [kRowsAtOnce, kScoresStride]; weights in the first half of each row
  float* const products_;    // [kRowsAtOnce, width]
  float* const states_;      // two of them
  const int64_t span_bytes_ = kSpanKeys * 2 * head_dim_ * static_cast<int64_t>(sizeof(uint16_t));
  Ahead ahead_;
  const Tiles tiles_;
};

template <class FewTile>
void attend_few(const Attention& p, const Tile& tile, float* scratch) {
  Ahead ahead(p, tile, sizeof(uint16_t), kBlockKeys);
  for (const Tile* one = &tile; one; one = one->next) FewTile(p, *one, scratch, ahead).run();
}

void attend(const Attention& p, const Tile& tile, float* scratch) {
  if (p.cache.type != Elements::kBfloat16) return attention_loops_avx512.attend(p, tile, scratch);
  if (tile.num_queries * (p.num_heads / p.cache.num_kv_heads) > kFewRows) {
    return RoundedTile(p, tile, scratch).run();
  }
#if defined(__AMX_TILE__)
  if (p.cache.head_dim % kChunk == 0) return attend_few<FewRoundedTile>(p, tile, scratch);
#endif
  attend_few<FewPairsTile>(p, tile, scratch);
}

void merge(const Attention& p, const Tile& tile) { attention_loops_avx512.merge(p, tile); }
void write(const Write& p) { attention_loops_avx512.write(p); }

}  // namespace

namespace jaxinfer {

extern const Loops LOOPS;
const Loops LOOPS = {attend, merge, write, true};

}  // namespace jaxinfer
