// The loops of paged attention, compiled once for each instruction set with LOOPS as their name.
//
// For each block of keys: keys are transposed and values decoded to float32, scores of all rows of
// a tile are a product with the keys, weights are their exponentials, and the result grows by the
// product of weights and values. Keys that no query of the tile sees are never read. A tile of few
// rows reads keys and values where they are in the cache, and its scores are dot products.
//
// Every sum over keys is added up in their order; sums over the elements of a head are added up in
// one order where rows are few and in another where they are many. So a query's bits depend on how
// its own prompt was cut into chunks, but on no other row.

#include "cpu_attention.h"
#include "../cpp/lanes.h"
#include "cpu_dots.h"
#include "cpu_keys.h"
#include "cpu_products.h"
#include "cpu_state.h"
#include "cpu_transpose.h"
#include "cpu_write.h"

namespace {

using namespace jaxinfer;

// One call of `attend`: a tile, and its part of the scratch memory.
class TileLoops : TileRows {
 public:
  TileLoops(const Attention& p, const Tile& tile, float* scratch, Ahead& ahead)
      : TileRows(p, tile),
        ahead_(ahead),
        keys_(scratch),
        values_(keys_ + kBlock * padded_),
        scores_(values_ + kBlock * padded_),
        key_scales_(scores_ + kBlock * padded_rows(all_rows_)),
        value_scales_(key_scales_ + kBlock),
        queries_(value_scales_ + kBlock),
        states_(queries_ + all_rows_ * padded_) {}

  template <class Type>
  void run() {
    pack_queries();
    for_spans(states_, [this](int64_t span, const State& state) {
      for_blocks(span, state, [&](int64_t block, int64_t first, int64_t end) {
        attend_block<Type>(block, first, end, state);
      });
    });
  }

 private:
  void pack_queries() {
    for (int64_t r = 0; r < all_rows_; ++r) {
      const float* from = p_.q + element_of(r);
      for (int64_t h = 0; h < padded_; h += kWidth) {
        const Lanes query = h < head_dim_ ? decode_part<Float32>(from + h, head_dim_ - h) : Lanes{};
        store(queries_ + r * padded_ + h, query * p_.scale);
      }
    }
  }

  // Keys `[first, end)`, which lie in the block that begins at `block`.
  template <class Type>
  void attend_block(int64_t block, int64_t first, int64_t end, const State& state) {
    const typename Type::Held* rows[kBlock];
    find_rows(p_, tile_, block, first, end, kWidth, rows);
    if (num_rows_ <= kFewRows) return attend_few<Type>(rows, block, first, end, state);
    find_scales(0, block, first, end);
    const int64_t left = (first - block) / kWidth * kWidth;
    gather_keys<Type>(rows + left, end - block - left, keys_ + left, kBlock);
    gather_values<Type>(rows, first - block, end - block);
    for (int64_t r = 0; r < num_rows_;) {
      const int64_t left = num_rows_ - r, num_groups = (left + kProductRows - 1) / kProductRows;
      const int64_t count = (left + num_groups - 1) / num_groups;  // evenly filled groups
      const int64_t last_position = position_of(r + count - 1);
      const int64_t seen_first = at_least(first, first_seen(p_, position_of(r)));
      const int64_t seen_end = at_most(end, last_position + 1);
      if (seen_first < seen_end) {
        attend_rows(r, count, block, seen_first - block, seen_end - block, state);
      }
      r += count;
    }
  }

  // Keys are scored page by page for all KV heads, in the order of memory.
  template <class Type>
  void attend_few(const typename Type::Held* const* rows, int64_t block, int64_t first,
                  int64_t end, const State& state) {
    const int64_t begin = first - block, left = begin / kWidth * kWidth;
    const int64_t right = (end - block + kWidth - 1) / kWidth * kWidth;
    const int64_t bytes_ahead = head_dim_ * static_cast<int64_t>(sizeof(typename Type::Held));
    for (int64_t i = left; i < right; i += kSixteen * kWidth) {
      const int64_t count = at_most(kSixteen * kWidth, right - i);
      for (int64_t head = 0; head < tile_.num_kv_heads; ++head) {
        const int64_t row = head * num_rows_;
        score_few<FloatProducts<Type>>(num_rows_, queries_ + row * padded_, padded_, rows + i,
                                       head * 2 * head_dim_, head_dim_, count,
                                       scores_ + row * kBlock + i, ahead_, bytes_ahead);
      }
    }
    for (int64_t head = 0; head < tile_.num_kv_heads; ++head) {
      const int64_t row = head * num_rows_;
      find_scales(head, block, first, end);
      weigh_rows(scores_ + row * kBlock, row, 0, num_rows_, block, begin, end - block, state);
      multiply_few_in_place<Type>(num_rows_, scores_ + row * kBlock + begin, rows + begin,
                                  (2 * head + 1) * head_dim_, head_dim_, end - first,
                                  state.weighted + row * padded_, padded_, ahead_);
    }
  }

  // Rows `[row, row + count)` with keys `[begin, end)` of the block, all that they see of it.
  void attend_rows(int64_t row, int64_t count, int64_t block, int64_t begin, int64_t end,
                   const State& state) {
    float* scores = scores_ + row * kBlock;
    const int64_t left = begin / kWidth * kWidth;
    const int64_t width = (end - left + kWidth - 1) / kWidth * kWidth;
    multiply_few<false>(count, queries_ + row * padded_, padded_, keys_ + left, kBlock, head_dim_,
                        scores + left, kBlock, width);
    weigh_rows(scores, row, row, count, block, begin, end, state);
    multiply_few<true>(count, scores + begin, kBlock, values_ + begin * padded_, padded_,
                       end - begin, state.weighted + row * padded_, padded_, padded_);
  }

  // Makes the scores of `count` rows weights: those in [begin, end) that the query sees; the
  // others become zero. The rows are `row` and so on of the tile, `of_head` of their KV head.
  void weigh_rows(float* scores, int64_t row, int64_t of_head, int64_t count, int64_t block,
                  int64_t begin, int64_t end, const State& state) {
    const int64_t left = begin / kWidth * kWidth;
    const int64_t right = (end + kWidth - 1) / kWidth * kWidth;
    float here[16] = {}, shift[16], decay[16];
    for (int64_t r = 0; r < count; ++r) {
      const int64_t position = position_of(of_head + r);
      const int64_t seen = at_least(begin, first_seen(p_, position) - block);
      here[r] = mask(scores + r * kBlock, left, right, seen, at_most(end, position + 1 - block));
    }
    for (int64_t r = 0; r < count; r += kWidth) {
      const Lanes before = load(state.peak + row + r);
      const Lanes peak = larger(before, load(here + r)), shifts = finite(peak);
      store(shift + r, shifts);
      store(decay + r, exponential(before - shifts));
      store(here + r, peak);
    }
    for (int64_t r = 0; r < count; ++r) {
      const float total = weigh(scores + r * kBlock, left, right, shift[r]);
      state.total[row + r] = state.total[row + r] * decay[r] + total;
      state.peak[row + r] = here[r];
      if (decay[r] == 1.0f) continue;
      float* weighted = state.weighted + (row + r) * padded_;
      for (int64_t h = 0; h < padded_; h += kWidth) {
        store(weighted + h, load(weighted + h) * decay[r]);
      }
    }
  }

  // Finishes a row's scores in [left, right), and makes those outside [begin, end) minus infinity.
  // Returns the largest.
  float mask(float* scores, int64_t left, int64_t right, int64_t begin, int64_t end) const {
    Lanes most = broadcast(-INFINITY);
    for (int64_t i = left; i < right; i += kWidth) {
      Lanes score = load(scores + i);
      if (p_.cache.scales) score *= load(key_scales_ + i);
      score = only_seen(capped(score, p_.soft_cap), i, begin, end);
      store(scores + i, score);
      most = larger(most, score);
    }
    return largest(most);
  }

  // Makes a row's scores weights, and returns their sum.
  float weigh(float* scores, int64_t left, int64_t right, float shift) const {
    Lanes sums[kSixteen] = {};
    for (int64_t i = left; i < right; i += kWidth) {
      Lanes weights = exponential(load(scores + i) - shift);
      sums[i / kWidth % kSixteen] += weights;
      if (p_.cache.scales) weights *= load(value_scales_ + i);
      store(scores + i, weights);
    }
    return sum(sums);
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

  // Where the scales of a block's int8 codes are, of one of the tile's KV heads.
  void find_scales(int64_t head, int64_t block, int64_t first, int64_t end) const {
    const Cache& cache = p_.cache;
    if (!cache.scales) return;
    for (int64_t key = first; key < end;) {
      const int64_t offset = key % cache.page_size;
      const int64_t page_end = at_most(key - offset + cache.page_size, end);
      const int64_t of_page = page_of(p_, tile_, key) * cache.num_kv_heads + tile_.kv_head + head;
      const float* scales = cache.scales + of_page * 2 * cache.page_size + offset;
      const size_t num_bytes = static_cast<size_t>(page_end - key) * sizeof(float);
      memcpy(key_scales_ + (key - block), scales, num_bytes);
      memcpy(value_scales_ + (key - block), scales + cache.page_size, num_bytes);
      key = page_end;
    }
  }

  Ahead& ahead_;
  float* const keys_;          // [head_dim, kBlock]
  float* const values_;        // [kBlock, padded]
  float* const scores_;        // [rows, kBlock]
  float* const key_scales_;    // [kBlock]
  float* const value_scales_;  // [kBlock], right behind
  float* const queries_;       // [all rows, padded]
  float* const states_;        // two of them
};

template <class Type>
void attend_all(const Attention& p, const Tile& tile, float* scratch) {
  Ahead ahead(p, tile, sizeof(typename Type::Held), kBlockKeys);
  for (const Tile* one = &tile; one; one = one->next) {
    TileLoops(p, *one, scratch, ahead).run<Type>();
  }
}

void attend(const Attention& p, const Tile& tile, float* scratch) {
  switch (p.cache.type) {
    case Elements::kFloat32: return attend_all<Float32>(p, tile, scratch);
    case Elements::kBfloat16: return attend_all<Bfloat16>(p, tile, scratch);
    case Elements::kFloat16: return attend_all<Float16>(p, tile, scratch);
    case Elements::kInt8: return attend_all<Int8>(p, tile, scratch);
  }
}

void merge(const Attention& p, const Tile& tile) { TileRows(p, tile).merge_spans(tile.partial); }

}  // namespace

namespace jaxinfer {

extern const Loops LOOPS;
const Loops LOOPS = {attend, merge, write, false};

}  // namespace jaxinfer
