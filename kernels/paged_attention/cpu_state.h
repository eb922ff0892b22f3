// Softmaxes in progress: how those of one span of keys are merged with the next, and finished.
#pragma once

#include "../cpp/lanes.h"
#include "cpu_attention.h"
#include "cpu_keys.h"

namespace {

// A softmax in progress; see state_floats(). Rows are those of the first KV head, then the next.
struct State {
  State(float* memory, int64_t num_rows, int64_t padded)
      : weighted(memory),
        peak(memory + num_rows * padded),
        total(peak + jaxinfer::padded_rows(num_rows)) {}
  float *weighted, *peak, *total;
};

// What scores are taken relative to, given their largest.
JAXINFER_INLINE Lanes finite(Lanes peak) { return peak == -INFINITY ? Lanes{} : peak; }

// Scores of keys `first` and on, with minus infinity for those outside [begin, end).
JAXINFER_INLINE Lanes only_seen(Lanes scores, int64_t first, int64_t begin, int64_t end) {
  const Ints key = lane_numbers() + static_cast<int32_t>(first);
  const auto is_seen = (key >= static_cast<int32_t>(begin)) & (key < static_cast<int32_t>(end));
  return is_seen ? scores : broadcast(-INFINITY);
}

// `cap * tanh(scores / cap)`; the scores themselves where there is no cap.
JAXINFER_INLINE Lanes capped(Lanes scores, float cap) {
  return cap != 0 ? cap * hyperbolic_tangent(scores / cap) : scores;
}

// The rows of a tile: of a KV head they are queries, and in them its query heads.
class TileRows {
 public:
  TileRows(const jaxinfer::Attention& p, const jaxinfer::Tile& tile)
      : p_(p),
        tile_(tile),
        head_dim_(p.cache.head_dim),
        padded_(jaxinfer::padded_head_dim(p.cache)),
        heads_(p.num_heads / p.cache.num_kv_heads),
        num_rows_(tile.num_queries * heads_),
        all_rows_(num_rows_ * tile.num_kv_heads) {}

  // Merges the states of spans that follow each other into the first.
  void merge_spans(float* states) const {
    const int64_t size = jaxinfer::state_floats(p_, all_rows_);
    const State whole(states, all_rows_, padded_);
    for (int64_t i = 1; i < tile_.last_span - tile_.first_span; ++i) {
      merge(whole, State(states + i * size, all_rows_, padded_));
    }
    finish(whole);
  }

 protected:
  // Calls `attend_span` for each span with where its state shall be; `states` is memory for two.
  template <class AttendSpan>
  void for_spans(float* states, AttendSpan attend_span) const {
    const int64_t size = jaxinfer::state_floats(p_, all_rows_);
    const State whole(states, all_rows_, padded_);
    for (int64_t span = tile_.first_span; span < tile_.last_span; ++span) {
      const int64_t index = span - tile_.first_span;
      float* memory = tile_.partial ? tile_.partial + index * size
                                    : states + (index > 0 ? size : 0);
      const State state(memory, all_rows_, padded_);
      attend_span(span, state);
      if (!tile_.partial && index > 0) merge(whole, state);
    }
    if (!tile_.partial) finish(whole);
  }

  // Calls `attend_block` for each block of keys that the tile sees of a span with its begin and
  // what it sees of it; `state` begins anew.
  template <class AttendBlock>
  void for_blocks(int64_t span, const State& state, AttendBlock attend_block) const {
    for (int64_t r = 0; r < all_rows_; r += kWidth) {
      store(state.peak + r, broadcast(-INFINITY));
      store(state.total + r, Lanes{});
    }
    memset(state.weighted, 0, static_cast<size_t>(all_rows_ * padded_) * sizeof(float));
    constexpr int64_t kBlock = jaxinfer::kBlockKeys, kSpan = jaxinfer::kSpanKeys;
    const int64_t first = at_least(span * kSpan, first_key_of(p_, tile_));
    const int64_t end = at_most((span + 1) * kSpan, end_key_of(tile_));
    for (int64_t block = first / kBlock * kBlock; block < end; block += kBlock) {
      attend_block(block, at_least(first, block), at_most(end, block + kBlock));
    }
  }

  // Finishes a row's scores in [left, right), and makes those outside [begin, end) minus infinity.
  // Returns the largest.
  float mask_scores(float* scores, int64_t left, int64_t right, int64_t begin,
                    int64_t end) const {
    Lanes most = broadcast(-INFINITY);
    for (int64_t i = left; i < right; i += kWidth) {
      const Lanes score = only_seen(capped(load(scores + i), p_.soft_cap), i, begin, end);
      store(scores + i, score);
      most = larger(most, score);
    }
    return largest(most);
  }

  // Where a row's queries and results begin.
  int64_t element_of(int64_t r) const {
    const int64_t kv_head = tile_.kv_head + r / num_rows_, of_head = r % num_rows_;
    const int64_t token = tile_.first_token + of_head / heads_;
    return (token * p_.num_heads + kv_head * heads_ + of_head % heads_) * head_dim_;
  }

  // The position of a row of a KV head.
  int64_t position_of(int64_t of_head) const { return tile_.first_position + of_head / heads_; }

  const jaxinfer::Attention& p_;
  const jaxinfer::Tile& tile_;
  const int64_t head_dim_, padded_, heads_;
  const int64_t num_rows_, all_rows_;  // of each KV head, and of all of the tile

 private:
  // Merges the keys that `next` has seen into a state of those before.
  void merge(const State& state, const State& next) const {
    float decay[kWidth], next_decay[kWidth];
    for (int64_t first = 0; first < all_rows_; first += kWidth) {
      const Lanes before = load(state.peak + first), others = load(next.peak + first);
      const Lanes peak = larger(before, others), shift = finite(peak);
      const Lanes decays = exponential(before - shift), next_decays = exponential(others - shift);
      store(decay, decays), store(next_decay, next_decays);
      store(state.peak + first, peak);
      store(state.total + first,
            load(state.total + first) * decays + load(next.total + first) * next_decays);
      for (int64_t r = first; r < at_most(first + kWidth, all_rows_); ++r) {
        for (int64_t h = r * padded_; h < (r + 1) * padded_; h += kWidth) {
          const Lanes added = load(next.weighted + h) * next_decay[r - first];
          store(state.weighted + h, multiply_add(load(state.weighted + h),
                                                 broadcast(decay[r - first]), added));
        }
      }
    }
  }

  void finish(const State& state) const {
    for (int64_t r = 0; r < all_rows_; ++r) {
      float* out = p_.out + element_of(r);
      const float total = state.total[r];
      const float share = total > 0 || total != total ? 1.0f / total : 1.0f;
      for (int64_t h = 0; h < head_dim_; h += kWidth) {
        const Lanes values = load(state.weighted + r * padded_ + h) * share;
        encode_part<Float32>(out + h, values, head_dim_ - h);
      }
    }
  }
};

}  // namespace
