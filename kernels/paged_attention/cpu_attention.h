// What paged attention on CPUs is made of, shared by the FFI handlers and the loops for each
// instruction set. Plain data: the handlers have checked every relation between the fields.
#pragma once

#include <stdint.h>

namespace jaxinfer {

enum class Elements { kFloat32, kBfloat16, kFloat16, kInt8 };

// A result is made span by span of keys, each span block by block, and spans are merged in order.
// Both begin at multiples of their size, so a query's bits depend on its own keys and on whether
// its tile has few rows, which follows from its own chunk of a prompt: on no other row, no thread.
constexpr int64_t kBlockKeys = 64;
constexpr int64_t kSpanKeys = 256;

// One layer's cache; `scales` is null unless elements are int8 codes.
struct Cache {
  void* elements;  // [num_pages, page_size, num_kv_heads, 2, head_dim]
  float* scales;   // [num_pages, num_kv_heads, 2, page_size]
  Elements type;
  int64_t num_pages, page_size, num_kv_heads, head_dim;
};

struct Attention {
  Cache cache;
  const float* q;             // [num_tokens, num_heads, head_dim]
  float* out;                 // the same
  const int32_t* page_table;  // [num_rows, max_pages]
  int64_t num_heads, max_pages;
  int64_t window;  // keys that a query sees; more than there are for all
  float scale;
  float soft_cap;  // 0 for none
};

// Consecutive queries of one row with some KV heads, each of which its query heads share.
struct Tile {
  int64_t row, first_token, num_queries;
  int64_t kv_head, num_kv_heads;  // from one on; more than one only where rows are few
  int64_t first_position;         // of the first query; the others follow
  int64_t first_span, last_span;  // which spans of keys, the last one excluded
  float* partial;  // [spans, state_floats()]: leave each span's state there; null to write `out`
  const Tile* next;  // of few rows, to be done after this one; null for none
};

// Queries of a tile times query heads of a KV head: as many as fit this, or one query. Where keys
// are packed for a tile, more rows are worth it: 256 queries with 4,000 keys took 0.86 of the time
// with the second, but 1.07 where the loops for AVX-512 take them as they are.
constexpr int64_t kTileRows = 96;
constexpr int64_t kPackedTileRows = 192;
// Up to so many, keys and values are multiplied where they are in the cache: for more of them
// transposing keys is cheaper than adding up the lanes of every dot product.
constexpr int64_t kFewRows = 8;


inline int64_t rounded_up(int64_t count, int64_t multiple) {
  return (count + multiple - 1) / multiple * multiple;
}
inline int64_t padded_head_dim(const Cache& cache) { return rounded_up(cache.head_dim, 16); }

// A softmax in progress, per row of a tile, of all its KV heads: weighted values, largest score,
// sum of weights.
inline int64_t padded_rows(int64_t num_rows) { return rounded_up(num_rows, 16); }
inline int64_t state_floats(const Attention& p, int64_t num_rows) {
  return num_rows * padded_head_dim(p.cache) + 2 * padded_rows(num_rows);
}

// Rows that are multiplied at once where numbers are rounded to bfloat16.
constexpr int64_t kRowsAtOnce = 32;
// Rows of scores begin in different sets of the first-level cache.
constexpr int64_t kScoresStride = kSpanKeys + 16;

// Rows of scores of few rows lie side by side, in so many columns.
inline int64_t score_columns(int64_t num_rows) { return num_rows <= 4 ? 4 : 8; }

// What few rows need where numbers are rounded: see FewRoundedTile.
inline int64_t few_scratch_floats(const Cache& cache, int64_t num_rows, int64_t num_kv_heads) {
  const int64_t columns = score_columns(num_rows), head_dim = rounded_up(cache.head_dim, 32);
  return kBlockKeys * (columns * (num_kv_heads + 1) + 2 * num_rows) +
         head_dim * (2 * num_rows + num_kv_heads * (columns / 2 + kBlockKeys));
}

// What attending to a tile of `num_rows` (queries times heads) for each of its KV heads needs,
// with rounding or without: 64-byte aligned.
inline int64_t scratch_floats(const Attention& p, int64_t num_rows, int64_t num_kv_heads) {
  const int64_t padded = padded_head_dim(p.cache), all_rows = num_rows * num_kv_heads;
  const int64_t floats = kBlockKeys * (2 * padded + padded_rows(all_rows) + 2) + all_rows * padded;
  const int64_t width = rounded_up(p.cache.head_dim, 32);
  const int64_t many = kSpanKeys * width + rounded_up(num_rows, kRowsAtOnce) * width / 2 +
                       kRowsAtOnce * (kScoresStride + width);
  // Whatever the elements: layers whose caches differ in that may be planned together.
  const int64_t rounded =
      num_rows > kFewRows ? many : few_scratch_floats(p.cache, num_rows, num_kv_heads);
  return (rounded > floats ? rounded : floats) + 2 * state_floats(p, all_rows);
}

struct Write {
  Cache cache;
  const float* new_kv;    // [num_tokens, num_kv_heads, 2, head_dim]
  const int32_t* slots;   // [num_tokens]
  int64_t num_tokens;
};

struct Loops {
  // Also the tiles that follow it.
  void (*attend)(const Attention& p, const Tile& tile, float* scratch);
  // Merges the states of all spans of a tile, and writes `out`. The first state is changed.
  void (*merge)(const Attention& p, const Tile& tile);
  void (*write)(const Write& p);
  bool packs_bfloat16;  // keys of many rows
};

inline int64_t tile_rows(const Loops& loops, const Cache& cache) {
  return loops.packs_bfloat16 && cache.type == Elements::kBfloat16 ? kPackedTileRows : kTileRows;
}

extern const Loops attention_loops_portable;
#if defined(__x86_64__)
extern const Loops attention_loops_avx2;
extern const Loops attention_loops_avx512;
#if defined(JAXINFER_HAS_BLOCKS)
extern const Loops attention_loops_avx512bf16;
extern const Loops attention_loops_amx;
#endif
#endif

}  // namespace jaxinfer
