// The loops of paged attention, compiled once for each instruction set with LOOPS as their name.
//
// For each block of keys: keys are transposed and values decoded to float32, scores of all rows of
// a tile are a product with the keys, weights are their exponentials, and the result grows by the
// product of weights and values. Keys that no query of the tile sees are never read.
//
// Every sum over the elements of a head, or over keys, is added up in their order, whatever tile
// and path a query is in: its bits do not depend on them.

#include "cpu_attention.h"
#include "../cpp/lanes.h"
#include "cpu_products.h"
#include "cpu_transpose.h"
#include "cpu_write.h"

namespace {

using namespace jaxinfer;

inline int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }

// A softmax in progress; see state_floats().
struct State {
  State(float* memory, int64_t num_rows, int64_t padded)
      : weighted(memory), peak(memory + num_rows * padded), total(peak + num_rows) {}
  float *weighted, *peak, *total;
};

// One call of `attend`: a tile, and its part of the scratch memory.
class TileLoops {
 public:
  TileLoops(const Attention& p, const Tile& tile, float* scratch)
      : p_(p),
        tile_(tile),
        head_dim_(p.cache.head_dim),
        padded_(padded_head_dim(p.cache)),
        heads_(p.num_heads / p.cache.num_kv_heads),
        num_rows_(tile.num_queries * heads_),
        keys_(scratch),
        values_(keys_ + kBlock * padded_),
        scores_(values_ + kBlock * padded_),
        key_scales_(scores_ + kBlock * num_rows_),
        value_scales_(key_scales_ + kBlock),
        queries_(value_scales_ + kBlock),
        states_(queries_ + num_rows_ * padded_) {}

  template <class Type>
  void run() {
    pack_queries();
    const int64_t state_size = state_floats(p_, num_rows_);
    const State whole(states_, num_rows_, padded_);
    for (int64_t span = tile_.first_span; span < tile_.last_span; ++span) {
      const int64_t index = span - tile_.first_span;
      float* memory = tile_.partial ? tile_.partial + index * state_size
                                    : states_ + (index > 0 ? state_size : 0);
      const State state(memory, num_rows_, padded_);
      attend_span<Type>(span, state);
      if (!tile_.partial && index > 0) merge(whole, state);
    }
    if (!tile_.partial) finish(whole);
  }

  // Merges the keys that `next` has seen into a state of those before.
  void merge(const State& state, const State& next) const {
    for (int64_t r = 0; r < num_rows_; ++r) {
      if (next.peak[r] == -INFINITY) continue;
      const float peak = state.peak[r] < next.peak[r] ? next.peak[r] : state.peak[r];
      const float decay = exponential(state.peak[r] - peak);
      const float next_decay = exponential(next.peak[r] - peak);
      state.peak[r] = peak;
      state.total[r] = state.total[r] * decay + next.total[r] * next_decay;
      float* weighted = state.weighted + r * padded_;
      for (int64_t h = 0; h < padded_; h += kWidth) {
        const Lanes others = load(next.weighted + r * padded_ + h) * next_decay;
        store(weighted + h, multiply_add(load(weighted + h), broadcast(decay), others));
      }
    }
  }

  void finish(const State& state) const {
    for (int64_t r = 0; r < num_rows_; ++r) {
      float* out = p_.out + element_of(r);
      const float total = state.total[r] > 0 || state.total[r] != state.total[r]
                              ? state.total[r] : 1.0f;
      for (int64_t h = 0; h < head_dim_; h += kWidth) {
        const Lanes values = load(state.weighted + r * padded_ + h) / total;
        encode_part<Float32>(out + h, values, head_dim_ - h);
      }
    }
  }

 private:
  // Where a row's queries and results begin: rows are queries, and in them query heads.
  int64_t element_of(int64_t r) const {
    const int64_t token = tile_.first_token + r / heads_;
    return (token * p_.num_heads + tile_.kv_head * heads_ + r % heads_) * head_dim_;
  }

  int64_t first_key_of(int64_t position) const { return at_least(position - p_.window + 1, 0); }

  void pack_queries() {
    for (int64_t r = 0; r < num_rows_; ++r) {
      const float* from = p_.q + element_of(r);
      for (int64_t h = 0; h < head_dim_; h += kWidth) {
        store(queries_ + r * padded_ + h,
              decode_part<Float32>(from + h, head_dim_ - h) * p_.scale);
      }
    }
  }

  template <class Type>
  void attend_span(int64_t span, const State& state) {
    for (int64_t r = 0; r < num_rows_; ++r) {
      state.peak[r] = -INFINITY;
      state.total[r] = 0;
    }
    memset(state.weighted, 0, static_cast<size_t>(num_rows_ * padded_) * sizeof(float));
    const int64_t first = at_least(span * kSpanKeys, first_key_of(tile_.first_position));
    const int64_t end = at_most((span + 1) * kSpanKeys, tile_.first_position + tile_.num_queries);
    for (int64_t block = first / kBlock * kBlock; block < end; block += kBlock) {
      attend_block<Type>(block, at_least(first, block), at_most(end, block + kBlock), state);
    }
  }

  // Keys `[first, end)`, which lie in the block that begins at `block`.
  template <class Type>
  void attend_block(int64_t block, int64_t first, int64_t end, const State& state) {
    const typename Type::Held* rows[kBlock];
    find_rows(block, first, end, rows);
    if (num_rows_ <= kProductRows) return attend_few<Type>(rows, block, first, end, state);
    const int64_t left = (first - block) / kWidth * kWidth;
    gather_keys<Type>(rows + left, end - block - left, keys_ + left, kBlock);
    gather_values<Type>(rows, first - block, end - block);
    for (int64_t r = 0; r < num_rows_;) {
      const int64_t left = num_rows_ - r, num_groups = (left + kProductRows - 1) / kProductRows;
      const int64_t count = (left + num_groups - 1) / num_groups;  // evenly filled groups
      const int64_t last_position = tile_.first_position + (r + count - 1) / heads_;
      const int64_t seen_first = at_least(first, first_key_of(tile_.first_position + r / heads_));
      const int64_t seen_end = at_most(end, last_position + 1);
      if (seen_first < seen_end) {
        attend_rows(r, count, block, seen_first - block, seen_end - block, state);
      }
      r += count;
    }
  }

  // Where one product takes all rows: fewer keys at once, so that they stay in the first-level
  // cache, and values from where they are. The arithmetic is the same, and so are the bits.
  template <class Type>
  void attend_few(const typename Type::Held* const* rows, int64_t block, int64_t first,
                  int64_t end, const State& state) {
    const int64_t begin = first - block, left = begin / kWidth * kWidth;
    const int64_t right = (end - block + kWidth - 1) / kWidth * kWidth;
    const int64_t most = head_dim_ <= 64 ? kBlock : kBlock / 2;
    for (int64_t i = left; i < right; i += most) {
      const int64_t count = at_most(most, right - i);
      gather_keys<Type>(rows + i, count, keys_, most);
      multiply_few<false>(num_rows_, queries_, padded_, keys_, most, head_dim_, scores_ + i,
                          kBlock, count);
    }
    weigh_rows(0, num_rows_, block, begin, end - block, state);
    multiply_few_in_place<Type>(num_rows_, scores_ + begin, rows + begin, head_dim_, end - first,
                                state.weighted, padded_);
  }

  // Rows `[row, row + count)` with keys `[begin, end)` of the block, all that they see of it.
  void attend_rows(int64_t row, int64_t count, int64_t block, int64_t begin, int64_t end,
                   const State& state) {
    float* scores = scores_ + row * kBlock;
    const int64_t left = begin / kWidth * kWidth;
    const int64_t width = (end - left + kWidth - 1) / kWidth * kWidth;
    multiply_few<false>(count, queries_ + row * padded_, padded_, keys_ + left, kBlock, head_dim_,
                        scores + left, kBlock, width);
    weigh_rows(row, count, block, begin, end, state);
    multiply_few<true>(count, scores + begin, kBlock, values_ + begin * padded_, padded_,
                       end - begin, state.weighted + row * padded_, padded_, padded_);
  }

  void weigh_rows(int64_t row, int64_t count, int64_t block, int64_t begin, int64_t end,
                  const State& state) {
    const int64_t left = begin / kWidth * kWidth;
    const int64_t right = (end + kWidth - 1) / kWidth * kWidth;
    for (int64_t r = row; r < row + count; ++r) {
      const int64_t position = tile_.first_position + r / heads_;
      weigh(r, left, right, at_least(begin, first_key_of(position) - block),
            at_most(end, position + 1 - block), state);
    }
  }

  // Makes a row's scores in [left, right) weights: those in [begin, end); the others are zero.
  void weigh(int64_t row, int64_t left, int64_t right, int64_t begin, int64_t end,
             const State& state) {
    float* scores = scores_ + row * kBlock;
    if (begin >= end) {
      for (int64_t i = left; i < right; i += kWidth) store(scores + i, Lanes{});
      return;
    }
    Lanes most = broadcast(-INFINITY);
    for (int64_t i = left; i < right; i += kWidth) {
      Lanes score = load(scores + i);
      if (p_.cache.scales) score *= load(key_scales_ + i);
      if (p_.soft_cap != 0) score = p_.soft_cap * hyperbolic_tangent(score / p_.soft_cap);
      const Ints key = lane_numbers() + static_cast<int32_t>(i);
      const auto is_seen = (key >= static_cast<int32_t>(begin)) & (key < static_cast<int32_t>(end));
      score = is_seen ? score : broadcast(-INFINITY);
      store(scores + i, score);
      most = larger(most, score);
    }
    const float before = state.peak[row], here = largest(most);
    const float peak = before < here ? here : before;
    const float shift = peak == -INFINITY ? 0.0f : peak;
    Lanes sums[kSixteen] = {};
    for (int64_t i = left; i < right; i += kWidth) {
      Lanes weights = exponential(load(scores + i) - shift);
      sums[i / kWidth % kSixteen] += weights;
      if (p_.cache.scales) weights *= load(value_scales_ + i);
      store(scores + i, weights);
    }
    const float decay = exponential(before - shift);
    state.total[row] = state.total[row] * decay + sum(sums);
    state.peak[row] = peak;
    if (decay == 1.0f) return;
    float* weighted = state.weighted + row * padded_;
    for (int64_t h = 0; h < padded_; h += kWidth) {
      store(weighted + h, load(weighted + h) * decay);
    }
  }

  // Transposes keys; registers of them are full, whatever `count` is.
  template <class Type>
  void gather_keys(const typename Type::Held* const* rows, int64_t count, float* to,
                   int64_t stride) {
    constexpr int64_t kWords = 4 / sizeof(typename Type::Held);  // elements of one
    const int64_t whole = head_dim_ / kWidth * kWidth;
    for (int64_t i = 0; i < count; i += kWidth) {
      int64_t h = 0;
      for (; h + kWords * kWidth <= head_dim_; h += kWords * kWidth) {
        gather_words<Type>(rows + i, h, to + h * stride + i, stride);
      }
      for (; h < whole; h += kWidth) {
        gather_elements<Type, kWidth>(rows + i, h, to + h * stride + i, stride);
      }
      if (h < head_dim_) gather_elements<Type, 8>(rows + i, h, to + h * stride + i, stride);
    }
  }

  template <class Type>
  void gather_values(const typename Type::Held* const* rows, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto* from = rows[i] + head_dim_;
      float* to = values_ + i * padded_;
      for (int64_t h = 0; h < padded_; h += kWidth) {
        store(to + h, h < head_dim_ ? decode_part<Type>(from + h, head_dim_ - h) : Lanes{});
      }
    }
  }

  // Where each key of a block begins, and of int8 its scales. What registers hold besides the keys
  // `[first, end)` does not matter, as their scores are never used: the first key again.
  template <class Held>
  void find_rows(int64_t block, int64_t first, int64_t end, const Held** rows) {
    const Cache& cache = p_.cache;
    const int32_t* table = p_.page_table + tile_.row * p_.max_pages;
    const int64_t stride = cache.num_kv_heads * 2 * head_dim_;
    for (int64_t key = first; key < end;) {
      const int64_t offset = key % cache.page_size;
      int64_t page = table[key / cache.page_size];
      if (page < 0 || page >= cache.num_pages) page = 0;  // never outside the cache
      const int64_t page_end = at_most(key - offset + cache.page_size, end);
      const Held* row = static_cast<const Held*>(cache.elements) +
                        (page * cache.page_size + offset) * stride + tile_.kv_head * 2 * head_dim_;
      if (cache.scales) {
        const int64_t head = page * cache.num_kv_heads + tile_.kv_head;
        const float* scales = cache.scales + head * 2 * cache.page_size + offset;
        const size_t num_bytes = static_cast<size_t>(page_end - key) * sizeof(float);
        memcpy(key_scales_ + (key - block), scales, num_bytes);
        memcpy(value_scales_ + (key - block), scales + cache.page_size, num_bytes);
      }
      for (; key < page_end; ++key, row += stride) rows[key - block] = row;
    }
    for (int64_t i = first - block; i % kWidth != 0; --i) rows[i - 1] = rows[first - block];
    for (int64_t i = end - block; i % kWidth != 0; ++i) rows[i] = rows[first - block];
  }

  // Transposes as many words of elements as a register has lanes, of as many keys: the fewer bits
  // an element has, the fewer times.
  template <class Type>
  static JAXINFER_INLINE void gather_words(const typename Type::Held* const* rows, int64_t h,
                                           float* to, int64_t stride) {
    constexpr int kWords = 4 / sizeof(typename Type::Held);
    Lanes square[kWidth];
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) square[i] = read<Lanes>(rows[i] + h);
    transpose(square);
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) {
#pragma GCC unroll 4
      for (int part = 0; part < kWords; ++part) {
        const Lanes element = Type::decode_word(bits_of<Words>(square[i]), part);
        store(to + (i * kWords + part) * stride, element);
      }
    }
  }

  // Transposes `kCount` elements of as many keys as a register has lanes.
  template <class Type, int kCount>
  static JAXINFER_INLINE void gather_elements(const typename Type::Held* const* rows, int64_t h,
                                              float* to, int64_t stride) {
    Lanes square[kWidth];
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) square[i] = decode_part<Type>(rows[i] + h, kCount);
    transpose(square);
#pragma GCC unroll 16
    for (int i = 0; i < (kCount < kWidth ? kCount : kWidth); ++i) store(to + i * stride, square[i]);
  }

  const Attention& p_;
  const Tile& tile_;
  const int64_t head_dim_, padded_, heads_, num_rows_;
  float* const keys_;          // [head_dim, kBlock]
  float* const values_;        // [kBlock, padded]
  float* const scores_;        // [rows, kBlock]
  float* const key_scales_;    // [kBlock]
  float* const value_scales_;  // [kBlock], right behind
  float* const queries_;       // [rows, padded]
  float* const states_;        // two of them
};

void attend(const Attention& p, const Tile& tile, float* scratch) {
  TileLoops loops(p, tile, scratch);
  switch (p.cache.type) {
    case Elements::kFloat32: return loops.run<Float32>();
    case Elements::kBfloat16: return loops.run<Bfloat16>();
    case Elements::kFloat16: return loops.run<Float16>();
    case Elements::kInt8: return loops.run<Int8>();
  }
}

void merge(const Attention& p, const Tile& tile) {
  const int64_t num_rows = tile.num_queries * (p.num_heads / p.cache.num_kv_heads);
  const int64_t padded = padded_head_dim(p.cache);
  const TileLoops loops(p, tile, nullptr);
  const State whole(tile.partial, num_rows, padded);
  for (int64_t i = 1; i < tile.last_span - tile.first_span; ++i) {
    loops.merge(whole, State(tile.partial + i * state_floats(p, num_rows), num_rows, padded));
  }
  loops.finish(whole);
}

}  // namespace

namespace jaxinfer {

extern const Loops LOOPS;
const Loops LOOPS = {attend, merge, write};

}  // namespace jaxinfer
