// How the rows of a call are cut into tiles, which threads take one by one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "../cpp/memory.h"
#include "cpu_attention.h"
#include "cpu_keys.h"

namespace jaxinfer {

// A step's rows, as AttentionMetadata has them.
struct Rows {
  const int32_t* kv_lens;    // [num_rows]
  const int32_t* cu_q_lens;  // [num_rows + 1]; null: token b is the one query of row b
  int64_t num_rows, num_tokens;
  int64_t num_seqs;
};

class Plan {
 public:
  // Also fills in the zeros of tokens that see no key. `tile_rows`: queries times heads of a tile.
  // `tiny_work`: multiplications below which handing tiles to other threads costs more than it
  // saves.
  Plan(const Attention& p, const Rows& rows, int64_t tile_rows, int64_t num_threads,
       int64_t tiny_work = 1 << 21)
      : p_(p), heads_(p.num_heads / p.cache.num_kv_heads), tile_rows_(tile_rows) {
    add_rows(rows);
    is_tiny = work_ < tiny_work;
    // The largest first, or all others would wait for it.
    sort();
    Shares shares(work_of_all(), is_tiny ? 1 : num_threads);
    if (num_threads > 1 && !is_tiny) {
      split(shares);
      sort();
      even_out(num_threads);
    }
    chain(shares);
  }

  Plan(const Plan&) = delete;  // tiles point to others
  Plan& operator=(const Plan&) = delete;

  std::vector<Tile> tiles;   // those of few rows may be followed by others
  std::vector<Tile> merges;  // of tiles that were split, when all their parts are done
  int64_t scratch_floats = 0;
  bool is_tiny = true;

 private:
  // Bringing a key costs as much as multiplying it with so many rows.
  static constexpr int64_t kRowsPerKey = 8;
  static constexpr int64_t kPartsPerThread = 4;  // at least, if all are as small as they may be
  // States of more rows than this are not worth keeping; tiles of fewer not worth cutting.
  static constexpr int64_t kMostSplitRows = 16;

  int64_t num_rows_of(const Tile& tile) const { return tile.num_queries * heads_; }

  bool is_few(const Tile& tile) const { return num_rows_of(tile) <= kFewRows; }

  static int64_t num_spans_of(const Tile& tile) { return tile.last_span - tile.first_span; }

  int64_t work_of_span(const Tile& tile) const {
    return tile.num_kv_heads * (num_rows_of(tile) + kRowsPerKey);
  }

  int64_t work_of(const Tile& tile) const { return num_spans_of(tile) * work_of_span(tile); }

  int64_t state_floats_of(const Tile& tile) const {
    return state_floats(p_, num_rows_of(tile) * tile.num_kv_heads);
  }

  void add_rows(const Rows& rows) {
    const int64_t most_keys = p_.max_pages * p_.cache.page_size;
    int64_t done = 0;  // tokens
    for (int64_t row = 0; row < std::min(rows.num_seqs, rows.num_rows); ++row) {
      // Whatever the numbers are: never outside the arrays.
      const int64_t given = rows.cu_q_lens ? rows.cu_q_lens[row] : row;
      const int64_t given_end = rows.cu_q_lens ? rows.cu_q_lens[row + 1] : row + 1;
      const int64_t begin = std::clamp(given, done, rows.num_tokens);
      const int64_t end = std::clamp(given_end, begin, rows.num_tokens);
      const int64_t kv_len = std::clamp<int64_t>(rows.kv_lens[row], 0, most_keys);
      const int64_t first = std::max(begin, end - kv_len);  // token with a key to see
      zero(done, first);
      add_row(row, first, end, kv_len);
      done = end;
    }
    zero(done, rows.num_tokens);
  }

  void zero(int64_t begin, int64_t end) const {
    const int64_t size = p_.num_heads * p_.cache.head_dim;
    const size_t num_bytes = static_cast<size_t>((end - begin) * size) * sizeof(float);
    std::memset(p_.out + begin * size, 0, num_bytes);
  }

  void add_row(int64_t row, int64_t begin, int64_t end, int64_t kv_len) {
    const int64_t most = std::max<int64_t>(tile_rows_ / heads_, 1);
    for (int64_t token = begin; token < end; token += most) {
      Tile tile{};
      tile.row = row, tile.first_token = token;
      tile.num_queries = std::min(most, end - token);
      tile.first_position = kv_len - (end - token);
      find_spans(tile);
      // All KV heads of few rows: together they are read in the order of memory.
      tile.num_kv_heads = is_few(tile) ? p_.cache.num_kv_heads : 1;
      scratch_floats = std::max(
          scratch_floats, jaxinfer::scratch_floats(p_, num_rows_of(tile), tile.num_kv_heads));
      const int64_t num_keys = end_key_of(tile) - first_key_of(p_, tile);
      work_ += num_keys * (num_rows_of(tile) + kRowsPerKey) * 2 * p_.cache.head_dim *
               p_.cache.num_kv_heads;
      for (int64_t head = 0; head < p_.cache.num_kv_heads; head += tile.num_kv_heads) {
        tile.kv_head = head;
        tiles.push_back(tile);
      }
    }
  }

  void find_spans(Tile& tile) const {
    tile.first_span = first_seen(p_, tile.first_position) / kSpanKeys;
    tile.last_span = (tile.first_position + tile.num_queries - 1) / kSpanKeys + 1;
  }

  void sort() {
    std::stable_sort(tiles.begin(), tiles.end(), [this](const Tile& a, const Tile& b) {
      return work_of(a) > work_of(b);
    });
  }

  // Cuts the least of a few large tiles where there is not one for each thread any more, so that
  // all threads take part in them. No part has few rows: that would change its bits.
  void even_out(int64_t num_threads) {
    const auto is_large = [this](const Tile& tile) { return num_rows_of(tile) > kTileRows / 2; };
    const int64_t count = std::count_if(tiles.begin(), tiles.end(), is_large);
    const int64_t left = count % num_threads;
    if (left == 0 || count > kPartsPerThread * num_threads) return;
    const int64_t least = kMostSplitRows / heads_ + 1;  // queries of a part
    std::vector<Tile> parts;
    int64_t index = 0;
    for (const Tile& tile : tiles) {
      int64_t num_parts = 1;
      if (is_large(tile) && index++ >= count - left) {
        num_parts = std::clamp<int64_t>(tile.num_queries / least, 1, num_threads / left);
      }
      if (num_parts == 1) {
        parts.push_back(tile);
        continue;
      }
      for (int64_t i = 0; i < num_parts; ++i) {
        const int64_t first = tile.num_queries * i / num_parts;
        Tile part = tile;
        part.num_queries = tile.num_queries * (i + 1) / num_parts - first;
        part.first_token += first, part.first_position += first;
        find_spans(part);
        parts.push_back(part);
      }
    }
    tiles.swap(parts);
    sort();
  }

  // How much work a thread takes at once: large parts first, because keys are prefetched within a
  // part only, then smaller ones, so that threads end together.
  class Shares {
   public:
    Shares(int64_t work, int64_t num_threads)
        : num_threads_(num_threads), left_(work),
          least_(num_threads > 1 ? work / (num_threads * kPartsPerThread) : work) {}

    int64_t least() const { return least_; }
    int64_t next() const { return std::max(left_ * 3 / (4 * num_threads_), least_); }
    void take(int64_t work) { left_ -= work; }

   private:
    const int64_t num_threads_;
    int64_t left_;
    const int64_t least_;
  };

  // Cuts tiles if threads would otherwise run out of them: those whose KV heads are much work
  // even for one span into tiles of one, and then those of few rows and many keys.
  void split(Shares shares) {
    std::vector<Tile> of_heads, parts;
    for (Tile tile : tiles) {
      const int64_t end = tile.kv_head + tile.num_kv_heads;
      if (work_of_span(tile) > shares.least()) tile.num_kv_heads = 1;
      for (; tile.kv_head < end; tile.kv_head += tile.num_kv_heads) of_heads.push_back(tile);
    }
    for (Tile& tile : of_heads) {
      if (num_rows_of(tile) > kMostSplitRows || num_spans_of(tile) <= spans_of(shares, tile)) {
        parts.push_back(tile);
        shares.take(work_of(tile));
        continue;
      }
      const int64_t size = state_floats_of(tile);
      partials_.emplace_back(new float[static_cast<size_t>(num_spans_of(tile) * size)]);
      tile.partial = partials_.back().get();
      merges.push_back(tile);
      for (Tile part = tile; part.first_span < tile.last_span; part.first_span = part.last_span) {
        part.last_span = std::min(part.first_span + spans_of(shares, tile), tile.last_span);
        part.partial = tile.partial + (part.first_span - tile.first_span) * size;
        parts.push_back(part);
        shares.take(work_of(part));
      }
    }
    tiles.swap(parts);
  }

  // Makes tiles of few rows follow one another, up to a share of the work: each is prefetched
  // during the one before.
  void chain(Shares shares) {
    chained_.swap(tiles);
    int64_t work = 0, most = 0;
    for (size_t i = 0; i < chained_.size(); ++i) {
      work += work_of(chained_[i]);
      if (i > 0 && work <= most && is_few(tiles.back()) && is_few(chained_[i])) {
        (tiles.back().next ? chained_[i - 1] : tiles.back()).next = &chained_[i];
      } else {
        tiles.push_back(chained_[i]);
        work = work_of(chained_[i]), most = shares.next();
      }
      shares.take(work_of(chained_[i]));
    }
  }

  int64_t work_of_all() const {
    int64_t work = 0;
    for (const Tile& tile : tiles) work += work_of(tile);
    return work;
  }

  // How many spans of a tile are the next share, at least one.
  int64_t spans_of(const Shares& shares, const Tile& tile) const {
    return std::max<int64_t>(shares.next() / work_of_span(tile), 1);
  }

  const Attention& p_;
  const int64_t heads_, tile_rows_;
  int64_t work_ = 0;
  std::vector<Tile> chained_;
  std::vector<std::unique_ptr<float[]>> partials_;
};

// Memory of the calling thread for as long as it lives, aligned to cache lines.
static inline float* thread_scratch(int64_t num_floats) {
  static thread_local KeptFloats kept;
  return kept.at_least(num_floats);
}

}  // namespace jaxinfer
