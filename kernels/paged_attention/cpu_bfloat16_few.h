// Few rows of a bfloat16 cache with AMX: keys and values are multiplied where they are in the
// cache, sixteen keys at a time, and nothing is packed but queries and weights. See
// cpu_bfloat16.cc.
//
// Scores are products of keys with pairs of a query's elements. As a factor on the right a tile
// of values holds pairs of neighbouring elements, not of keys: so there are two rows of weights
// for each query, of which one meets the even elements and one the odd ones with zeros between.
#pragma once

#include "../cpp/lanes.h"
#include "cpu_ahead.h"
#include "cpu_attention.h"
#include "cpu_exponential.h"
#include "cpu_keys.h"
#include "cpu_state.h"
#include "cpu_tiles.h"

namespace {

// Tiles of so many rows; up to four or eight of them are columns of scores.
class FewTiles {
 public:
  explicit FewTiles(int64_t num_rows) : columns_(jaxinfer::score_columns(num_rows)) {
    volatile TileConfig config = {};  // as in Tiles
    config.palette = 1;
    const auto set = [&](int tile, int64_t rows, int64_t bytes) {
      config.rows[tile] = static_cast<uint8_t>(rows);
      config.row_bytes[tile] = static_cast<uint16_t>(bytes);
    };
    for (int sum = 0; sum < 4; ++sum) set(sum, 2 * num_rows, 64);
    set(4, 2 * num_rows, 64);  // weights
    set(5, 16, 64);            // keys, values
    set(6, 16, 4 * columns_);  // queries
    set(7, 16, 4 * columns_);  // scores
    _tile_loadconfig(const_cast<TileConfig*>(&config));
  }
  ~FewTiles() { _tile_release(); }
  FewTiles(const FewTiles&) = delete;
  FewTiles& operator=(const FewTiles&) = delete;

  // scores[key, column], of sixteen keys: their products with queries [chunk, pair, column, 2].
  void score(const uint16_t* keys, int64_t stride, const uint16_t* queries, int64_t num_chunks,
             float* scores, Ahead& ahead) const {
    asm volatile("" ::: "memory");
    _tile_zero(7);
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
      ahead.advance(kTileBytes);
      _tile_loadd(5, keys + chunk * kChunk, 2 * stride);
      _tile_loadd(6, queries + chunk * kChunk * columns_, 4 * columns_);
      _tile_dpbf16ps(7, 5, 6);
    }
    _tile_stored(7, scores, 4 * columns_);
    asm volatile("" ::: "memory");
  }

  // sums[chunk, row, 16]: products of weights [group, row, 16, 2] with chunks of values, added up
  // group after group.
  template <int kChunks, class FindValues>
  void weigh(const uint16_t* weights, int64_t num_rows, int64_t num_groups, FindValues find_values,
             float* sums, Ahead& ahead) const {
    asm volatile("" ::: "memory");
    _tile_zero(0);
    if constexpr (kChunks > 1) _tile_zero(1);
    if constexpr (kChunks > 2) _tile_zero(2);
    if constexpr (kChunks > 3) _tile_zero(3);
    for (int64_t group = 0; group < num_groups; ++group) {
      const auto values = find_values(group);
      _tile_loadd(4, weights + group * 2 * num_rows * kChunk, 64);
      ahead.advance(kTileBytes);
      _tile_loadd(5, values.at, 2 * values.stride);
      _tile_dpbf16ps(0, 4, 5);
      if constexpr (kChunks > 1) {
        ahead.advance(kTileBytes);
        _tile_loadd(5, values.at + kChunk, 2 * values.stride);
        _tile_dpbf16ps(1, 4, 5);
      }
      if constexpr (kChunks > 2) {
        ahead.advance(kTileBytes);
        _tile_loadd(5, values.at + 2 * kChunk, 2 * values.stride);
        _tile_dpbf16ps(2, 4, 5);
      }
      if constexpr (kChunks > 3) {
        ahead.advance(kTileBytes);
        _tile_loadd(5, values.at + 3 * kChunk, 2 * values.stride);
        _tile_dpbf16ps(3, 4, 5);
      }
    }
    const int64_t size = 2 * num_rows * kTileColumns;
    _tile_stored(0, sums, 64);
    if constexpr (kChunks > 1) _tile_stored(1, sums + size, 64);
    if constexpr (kChunks > 2) _tile_stored(2, sums + 2 * size, 64);
    if constexpr (kChunks > 3) _tile_stored(3, sums + 3 * size, 64);
    asm volatile("" ::: "memory");
  }

 private:
  static constexpr int64_t kTileBytes = 2 * kTileElements;  // prefetched while as many are read

  const int64_t columns_;
};

// Four rows of scores [sixteen keys, kColumns], from row `first` on.
template <int kColumns>
JAXINFER_INLINE void rows_of(const float* scores, int first, Lanes (&rows)[4]) {
  constexpr int kParts = kColumns / 4;  // registers that hold four keys
  alignas(64) int32_t at[16];
  for (int i = 0; i < 16; ++i) at[i] = i % 4 * kColumns + first + i / 4;
  const __m512i lanes = _mm512_load_si512(at);
  __m512 part[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const float* from = scores + 16 * kParts * i;
    part[i] = _mm512_permutex2var_ps(_mm512_loadu_ps(from), lanes,
                                     _mm512_loadu_ps(from + 16 * (kParts - 1)));
  }
  const __m512 a = _mm512_shuffle_f32x4(part[0], part[1], 0x44);
  const __m512 b = _mm512_shuffle_f32x4(part[0], part[1], 0xee);
  const __m512 c = _mm512_shuffle_f32x4(part[2], part[3], 0x44);
  const __m512 d = _mm512_shuffle_f32x4(part[2], part[3], 0xee);
  rows[0] = (Lanes)_mm512_shuffle_f32x4(a, c, 0x88);
  rows[1] = (Lanes)_mm512_shuffle_f32x4(a, c, 0xdd);
  rows[2] = (Lanes)_mm512_shuffle_f32x4(b, d, 0x88);
  rows[3] = (Lanes)_mm512_shuffle_f32x4(b, d, 0xdd);
}

// A tile of up to kFewRows rows for each of its KV heads; heads of whole chunks.
class FewRoundedTile : TileRows {
 public:
  FewRoundedTile(const jaxinfer::Attention& p, const jaxinfer::Tile& tile, float* scratch,
                 Ahead& ahead)
      : TileRows(p, tile),
        columns_(jaxinfer::score_columns(num_rows_)),
        slot_(p.cache.num_kv_heads * 2 * head_dim_),
        copied_(tile.num_kv_heads * 2 * head_dim_),
        ahead_(ahead),
        tiles_(num_rows_),
        scores_(scratch),
        rows_(scores_ + kBlock * columns_ * tile.num_kv_heads),
        weights_(reinterpret_cast<uint16_t*>(rows_ + kBlock * columns_)),
        sums_(rows_ + kBlock * columns_ + 2 * kBlock * num_rows_),
        queries_(reinterpret_cast<uint16_t*>(sums_ + 2 * num_rows_ * head_dim_)),
        copies_(queries_ + tile.num_kv_heads * head_dim_ * columns_),
        states_(reinterpret_cast<float*>(copies_ + kBlock * copied_)) {}

  void run() {
    pack_queries();
    for_spans(states_, [this](int64_t span, const State& state) {
      for_blocks(span, state, [&](int64_t, int64_t first, int64_t end) {
        attend_block(first, end, state);
      });
    });
  }

 private:
  static constexpr int64_t kBlock = jaxinfer::kBlockKeys, kGroup = 16;  // keys

  struct Keys {
    const uint16_t* at;
    int64_t stride;
  };

  // [KV head, pair of elements, column, 2]; columns without a row are zeros.
  void pack_queries() const {
    memset(queries_, 0,
           static_cast<size_t>(tile_.num_kv_heads * head_dim_ * columns_) * sizeof(*queries_));
    for (int64_t r = 0; r < all_rows_; ++r) {
      const float* from = p_.q + element_of(r);
      uint16_t* to = queries_ + r / num_rows_ * head_dim_ * columns_ + 2 * (r % num_rows_);
      for (int64_t h = 0; h < head_dim_; h += kChunk, to += kChunk * columns_) {
        alignas(64) uint32_t pairs[kPairs];
        const __m512bh both = _mm512_cvtne2ps_pbh((__m512)(load(from + h + kWidth) * p_.scale),
                                                  (__m512)(load(from + h) * p_.scale));
        memcpy(pairs, &both, sizeof(pairs));
        for (int64_t i = 0; i < kPairs; ++i) memcpy(to + i * 2 * columns_, pairs + i, 4);
      }
    }
  }

  // Keys `[first, end)`, which lie in one block.
  void attend_block(int64_t first, int64_t end, const State& state) {
    const int64_t left = first / kGroup * kGroup;
    const int64_t num_groups = (end - left + kGroup - 1) / kGroup;
    const int64_t size = kGroup * columns_, chunks = head_dim_ / kChunk;
    Keys groups[kBlock / kGroup];
    for (int64_t group = 0; group < num_groups; ++group) {
      groups[group] =
          find_group(left + group * kGroup, first, end, copies_ + group * kGroup * copied_);
      for (int64_t head = 0; head < tile_.num_kv_heads; ++head) {
        tiles_.score(groups[group].at + head * 2 * head_dim_, groups[group].stride,
                     queries_ + head * head_dim_ * columns_, chunks,
                     scores_ + head * kBlock * columns_ + group * size, ahead_);
      }
    }
    for (int64_t head = 0; head < tile_.num_kv_heads; ++head) {
      weigh_rows(head, left, num_groups, first, end, state);
      for (int64_t chunk = 0; chunk < chunks; chunk += 4) {
        weigh_values(groups, num_groups, head, chunk, at_most(chunks - chunk, 4));
      }
      add_values(head, state);
    }
  }

  // Sixteen keys from `begin` on where they are, if they all are seen and in one page. If not, a
  // copy, in which those that are not in `[first, end)` are zeros: times the zeros of their
  // weights what is in the cache might not be zero.
  Keys find_group(int64_t begin, int64_t first, int64_t end, uint16_t* copy) const {
    const int64_t page_size = p_.cache.page_size;
    const auto find = [&](int64_t key) {
      return static_cast<const uint16_t*>(p_.cache.elements) +
             (page_of(p_, tile_, key) * page_size + key % page_size) * slot_ +
             tile_.kv_head * 2 * head_dim_;
    };
    const bool is_whole = begin >= first && begin + kGroup <= end;
    if (is_whole && page_size % kGroup == 0) return {find(begin), slot_};
    const size_t num_bytes = static_cast<size_t>(copied_) * sizeof(*copy);
    for (int64_t i = 0; i < kGroup; ++i) {
      const int64_t key = begin + i;
      if (key >= first && key < end) {
        memcpy(copy + i * copied_, find(key), num_bytes);
      } else {
        memset(copy + i * copied_, 0, num_bytes);
      }
    }
    return {copy, copied_};
  }

  // Makes the scores of a KV head weights, rounded, and makes what is summed up relative to them.
  void weigh_rows(int64_t head, int64_t left, int64_t num_groups, int64_t first, int64_t end,
                  const State& state) const {
    const float* scores = scores_ + head * kBlock * columns_;
    float here[kWidth] = {}, shift[kWidth], decay[kWidth];
    for (int64_t group = 0; group < num_groups; ++group) {
      const float* from = scores + group * kGroup * columns_;
      Lanes rows[4];
      for (int part = 0; part < columns_; part += 4) {
        columns_ == 4 ? rows_of<4>(from, 0, rows) : rows_of<8>(from, part, rows);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) store(rows_ + (part + i) * kBlock + group * kGroup, rows[i]);
      }
    }
    for (int64_t r = 0; r < num_rows_; ++r) {
      const int64_t position = position_of(r);
      here[r] = mask_scores(rows_ + r * kBlock, 0, num_groups * kGroup,
                            at_least(first, first_seen(p_, position)) - left,
                            at_most(end, position + 1) - left);
    }
    const int64_t row = head * num_rows_;
    const Lanes before = load_rows(state.peak + row);
    const Lanes peak = larger(before, load(here)), shifts = finite(peak);
    store(decay, exponential(before - shifts));
    store(shift, shifts * -kLog2E);
    store(here, peak);
    for (int64_t r = 0; r < num_rows_; ++r) {
      const float total =
          weigh(rows_ + r * kBlock, num_groups, shift[r], weights_ + 2 * r * kChunk);
      state.total[row + r] = state.total[row + r] * decay[r] + total;
      state.peak[row + r] = here[r];
      decays_[r] = decay[r];
    }
  }

  Lanes load_rows(const float* from) const {
    return (Lanes)_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << num_rows_) - 1), from);
  }

  // Writes a row's weights for even elements, and behind them those for odd ones; returns their
  // sum.
  float weigh(const float* scores, int64_t num_groups, float shift, uint16_t* weights) const {
    Lanes sums[kSixteen] = {};
    for (int64_t group = 0; group < num_groups; ++group) {
      const Lanes weight = power_of_two(
          multiply_add(load(scores + group * kGroup), broadcast(kLog2E), broadcast(shift)));
      const __m256bh rounded = _mm512_cvtneps_pbh((__m512)weight);
      const __m512i even = _mm512_cvtepu16_epi32((__m256i)rounded);
      const __m512i odd = _mm512_slli_epi32(even, 16);  // also the float32 of the same number
      uint16_t* to = weights + group * 2 * num_rows_ * kChunk;
      _mm512_storeu_si512(to, even);
      _mm512_storeu_si512(to + kChunk, odd);
      sums[0] += (Lanes)odd;
    }
    return sum(sums);
  }

  void weigh_values(const Keys* groups, int64_t num_groups, int64_t head, int64_t chunk,
                    int64_t num_chunks) {
    const auto find = [&](int64_t group) {
      return Keys{groups[group].at + (2 * head + 1) * head_dim_ + chunk * kChunk,
                  groups[group].stride};
    };
    float* sums = sums_ + chunk * 2 * num_rows_ * kTileColumns;
    switch (num_chunks) {
      case 1: return tiles_.weigh<1>(weights_, num_rows_, num_groups, find, sums, ahead_);
      case 2: return tiles_.weigh<2>(weights_, num_rows_, num_groups, find, sums, ahead_);
      case 3: return tiles_.weigh<3>(weights_, num_rows_, num_groups, find, sums, ahead_);
      default: return tiles_.weigh<4>(weights_, num_rows_, num_groups, find, sums, ahead_);
    }
  }

  // Adds what a block's weighted values sum up to, with even and odd elements in their places.
  void add_values(int64_t head, const State& state) const {
    alignas(64) int32_t places[32];
    for (int i = 0; i < 32; ++i) places[i] = i / 2 + i % 2 * 16;
    const __m512i lows = _mm512_load_si512(places), highs = _mm512_load_si512(places + 16);
    for (int64_t r = 0; r < num_rows_; ++r) {
      float* weighted = state.weighted + (head * num_rows_ + r) * padded_;
      const float* sums = sums_ + 2 * r * kTileColumns;
      const Lanes decay = broadcast(decays_[r]);
      for (int64_t h = 0; h < head_dim_; h += kChunk, sums += 2 * num_rows_ * kTileColumns) {
        const __m512 even = _mm512_loadu_ps(sums), odd = _mm512_loadu_ps(sums + kTileColumns);
        const auto low = (Lanes)_mm512_permutex2var_ps(even, lows, odd);
        const auto high = (Lanes)_mm512_permutex2var_ps(even, highs, odd);
        store(weighted + h, multiply_add(load(weighted + h), decay, low));
        store(weighted + h + kWidth, multiply_add(load(weighted + h + kWidth), decay, high));
      }
    }
  }

  const int64_t columns_, slot_, copied_;  // elements of a key in the cache, and in a copy
  Ahead& ahead_;
  const FewTiles tiles_;
  float* const scores_;       // [KV heads, kBlock, columns]
  float* const rows_;         // [columns, kBlock]
  uint16_t* const weights_;   // [groups, rows, 2, kGroup, 2]
  float* const sums_;         // [chunks, rows, 2, 16]
  uint16_t* const queries_;   // [KV heads, head_dim / 2, columns, 2]
  uint16_t* const copies_;    // [kBlock, KV heads, 2, head_dim]
  float* const states_;       // two of them
  mutable float decays_[jaxinfer::kFewRows];
};

}  // namespace
