// Prefetches the keys and values of a tile, and of those that follow it, in the order of memory and
// across pages, where the hardware does not.
#pragma once

#include "../cpp/lanes.h"
#include "cpu_attention.h"
#include "cpu_keys.h"

namespace {

// Stays a number of keys, a block or a span, ahead of the loops, which say how many bytes they are
// about to read.
class Ahead {
 public:
  Ahead(const jaxinfer::Attention& p, const jaxinfer::Tile& tile, int64_t element_bytes,
        int64_t num_keys)
      : p_(p),
        slot_bytes_(p.cache.num_kv_heads * 2 * p.cache.head_dim * element_bytes),
        head_bytes_(2 * p.cache.head_dim * element_bytes) {
    start(&tile, first_key_of(p, tile));
    // At once: loads that wait for each other would bring the first keys much more slowly.
    advance(num_keys * tile.num_kv_heads * head_bytes_);
  }

  JAXINFER_INLINE void advance(int64_t num_bytes) {
    int64_t bytes = bytes_ + num_bytes;
    const char* at = at_;
    for (; bytes >= kLine; bytes -= kLine) {
      __builtin_prefetch(at, 0, 2);  // a block is too large for the first-level cache
      at += kLine;
      if (at < end_) continue;
      bytes_ = bytes;
      find_next();
      bytes = bytes_, at = at_;
    }
    bytes_ = bytes, at_ = at;
  }

 private:
  static constexpr int64_t kLine = 64;

  void start(const jaxinfer::Tile* tile, int64_t first_key) {
    tile_ = tile;
    if (tile) {
      key_ = first_key, last_ = end_key_of(*tile);
      find_next();
    } else {
      bytes_ = INT64_MIN / 2;  // nothing any more
    }
  }

  __attribute__((noinline)) void find_next() {
    const jaxinfer::Cache& cache = p_.cache;
    if (key_ >= last_) {
      const jaxinfer::Tile* const next = tile_->next;
      return start(next, next ? first_key_of(p_, *next) : 0);
    }
    const int64_t page_size = cache.page_size, offset = key_ % page_size;
    // All KV heads: the rest of the page at once. Otherwise key by key.
    const bool is_whole = tile_->num_kv_heads == cache.num_kv_heads;
    int64_t count = is_whole ? page_size - offset : 1;
    if (count > last_ - key_) count = last_ - key_;
    const int64_t slot = page_of(p_, *tile_, key_) * page_size + offset;
    at_ = static_cast<const char*>(cache.elements) + slot * slot_bytes_ +
          tile_->kv_head * head_bytes_;
    end_ = at_ + (is_whole ? count * slot_bytes_ : tile_->num_kv_heads * head_bytes_);
    key_ += count;
  }

  const jaxinfer::Attention& p_;
  const int64_t slot_bytes_, head_bytes_;
  const jaxinfer::Tile* tile_ = nullptr;
  const char *at_ = nullptr, *end_ = nullptr;
  int64_t key_ = 0, last_ = 0, bytes_ = 0;
};

}  // namespace
