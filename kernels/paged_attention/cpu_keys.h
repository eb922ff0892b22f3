// Which keys of the cache a tile sees, and where they are.
#pragma once

#include <stdint.h>

#include "cpu_attention.h"

namespace {

inline int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }

// Never outside the cache.
inline int64_t page_of(const jaxinfer::Attention& p, const jaxinfer::Tile& tile, int64_t key) {
  const int64_t page = p.page_table[tile.row * p.max_pages + key / p.cache.page_size];
  return page < 0 || page >= p.cache.num_pages ? 0 : page;
}

// The first key that a query sees.
inline int64_t first_seen(const jaxinfer::Attention& p, int64_t position) {
  return at_least(position - p.window + 1, 0);
}

// What the queries of a tile see in its spans.
inline int64_t first_key_of(const jaxinfer::Attention& p, const jaxinfer::Tile& tile) {
  return at_least(tile.first_position - p.window + 1, tile.first_span * jaxinfer::kSpanKeys);
}
inline int64_t end_key_of(const jaxinfer::Tile& tile) {
  return at_most(tile.first_position + tile.num_queries, tile.last_span * jaxinfer::kSpanKeys);
}

// rows[i] is where key `begin + i` begins, of the tile's first KV head, for the keys
// `[first, end)`. Up to multiples of `width` on both sides it is the first key again: what
// registers hold besides does not matter, as scores of it are never used.
template <class Held>
void find_rows(const jaxinfer::Attention& p, const jaxinfer::Tile& tile, int64_t begin,
               int64_t first, int64_t end, int64_t width, const Held** rows) {
  const int64_t page_size = p.cache.page_size, head_dim = p.cache.head_dim;
  const int64_t stride = p.cache.num_kv_heads * 2 * head_dim;
  for (int64_t key = first; key < end;) {
    const int64_t offset = key % page_size, page_end = at_most(key - offset + page_size, end);
    const Held* row = static_cast<const Held*>(p.cache.elements) +
                      (page_of(p, tile, key) * page_size + offset) * stride +
                      tile.kv_head * 2 * head_dim;
    for (; key < page_end; ++key, row += stride) rows[key - begin] = row;
  }
  for (int64_t i = first - begin; i % width != 0; --i) rows[i - 1] = rows[first - begin];
  for (int64_t i = end - begin; i % width != 0; ++i) rows[i] = rows[first - begin];
}

}  // namespace
