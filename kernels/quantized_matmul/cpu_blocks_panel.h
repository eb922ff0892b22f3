// Products of many tokens: weights are scaled and rounded to bfloat16 once, and tiles add up all
// columns. Included by cpu_blocks.cc.
#pragma once

// Where numbers of one column of sixteen rows, then of the next, are in pairs.
inline __m512i pairs_order() {
  alignas(64) uint16_t order[32];
  for (int i = 0; i < 32; ++i) order[i] = static_cast<uint16_t>(i % 2 * 16 + i / 2);
  return load_words(order);
}

// Scales pairs of columns of sixteen rows and rounds them.
JAXINFER_INLINE __m512i scaled(__m512i pairs, __m512 scale, __m512 offset, __m512i order) {
  const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(-65536)));
  const auto columns = (__m512i)_mm512_cvtne2ps_pbh(_mm512_fmadd_ps(odd, scale, offset),
                                                    _mm512_fmadd_ps(even, scale, offset));
  return _mm512_permutexvar_epi16(order, columns);
}

template <class Decoder>
class Panel {
 public:
  explicit Panel(const Product& p)
      : p_(p), decoder_(p), order_(pairs_order()), group_shift_(shift_of_groups(p)) {}

  // Decodes the block of rows that begins at `row`: [chunks, pairs, 16, 2].
  void decode(int64_t row, uint16_t* to) const {
    alignas(64) uint16_t tile[kTileWords];
    const uint8_t* codes = p_.codes + row * p_.row_bytes;
    for (int64_t column = 0; column < p_.num_columns;
         column += kChunk, codes += Decoder::kBytes, to += kTileWords) {
      decoder_.decode(codes, tile);
      const int64_t group = column >> group_shift_;
      if (p_.group_size >= kChunk) {
        scale_pairs<kPairs>(tile, row, group, to);
      } else {
        scale_pairs<kPairs / 2>(tile, row, group, to);
        scale_pairs<kPairs / 2>(tile + kTileWords / 2, row, group + 1, to + kTileWords / 2);
      }
    }
  }

 private:
  template <int kCount>
  JAXINFER_INLINE void scale_pairs(const uint16_t* tile, int64_t row, int64_t group,
                                   uint16_t* to) const {
    const int64_t index = row * p_.num_groups + group * kBlockRows;
    const __m512 scale = _mm512_mul_ps(load_scales(p_.scale, p_.scale_type, index),
                                       _mm512_set1_ps(Decoder::kFactor));
    const __m512 offset = p_.offset ? load_scales(p_.offset, p_.offset_type, index)
                                    : _mm512_setzero_ps();
#pragma GCC unroll 16
    for (int pair = 0; pair < kCount; ++pair) {
      const __m512i codes = load_words(tile + 32 * pair);
      _mm512_store_si512(to + 32 * pair, scaled(codes, scale, offset, order_));
    }
  }

  const Product& p_;
  const Decoder decoder_;
  const __m512i order_;
  const int group_shift_;
};

// Sums of one or two tiles of tokens by two blocks, [32, 16] of each block.
struct PairSums {
  alignas(64) float first[2 * kTokenTile * kBlockRows];
  alignas(64) float second[2 * kTokenTile * kBlockRows];
};

// Calls `take(pair, first_token, num_tokens, tiles)` with the sums of all tokens by every pair of
// blocks; `row_of(block)` is where a block's rows begin, or negative where the last pair has no
// second.
template <class Decoder, class RowOf, class Take>
void multiply_pairs(const Product& p, const Bfloat16Tokens& tokens, int64_t num_pairs,
                    RowOf row_of, Take take) {
  static thread_local KeptFloats memory;
  const int64_t num_chunks = p.num_columns / kChunk, block_words = num_chunks * kTileWords;
  auto* const words = reinterpret_cast<uint16_t*>(memory.at_least(num_pairs * block_words));
  const Panel<Decoder> panel(p);
  for (int64_t block = 0; block < 2 * num_pairs; ++block) {
    uint16_t* const to = words + block * block_words;
    if (const int64_t row = row_of(block); row >= 0) {
      panel.decode(row, to);
    } else {
      memset(to, 0, static_cast<size_t>(block_words) * 2);
    }
  }
  PanelTiles tiles(p.num_tokens);
  // Packed tokens are whole tiles, but maybe not pairs of them: then the last two.
  const int64_t last = PanelTiles::kTakesPairs ? packed_tokens(p.num_tokens) - 2 * kTokenTile
                                               : p.num_tokens;
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    const uint16_t* const weights = words + 2 * pair * block_words;
    if (p.num_tokens <= kTokenTile) {
      tiles.multiply_one(tokens.rows, p.num_columns, weights, block_words, num_chunks);
      take(pair, 0, p.num_tokens, tiles);
      continue;
    }
    for (int64_t token = 0; token < p.num_tokens; token += 2 * kTokenTile) {
      const int64_t first = token <= last ? token : last, left = p.num_tokens - first;
      const int64_t count = left < 2 * kTokenTile ? left : 2 * kTokenTile;
      tiles.multiply(tokens.rows + first * p.num_columns, p.num_columns, weights, block_words,
                     num_chunks, count);
      take(pair, first, count, tiles);
    }
  }
}

// Tokens of a tile beyond the last are computed, as zeros, and not stored.
inline void store_some(const PairSums& sums, float* to, int64_t stride, int64_t num_tokens,
                       bool has_second) {
  for (int64_t token = 0; token < num_tokens; ++token, to += stride) {
    _mm512_storeu_ps(to, _mm512_load_ps(sums.first + token * kBlockRows));
    if (!has_second) continue;
    _mm512_storeu_ps(to + kBlockRows, _mm512_load_ps(sums.second + token * kBlockRows));
  }
}

template <class Decoder>
void multiply_panels(const Product& p, const Bfloat16Tokens& tokens, int64_t first_row,
                     int64_t last_row) {
  const auto row_of = [&](int64_t block) {
    const int64_t row = first_row + block * kBlockRows;
    return row < last_row ? row : -1;
  };
  const int64_t num_blocks = (last_row - first_row) / kBlockRows;
  multiply_pairs<Decoder>(
      p, tokens, (num_blocks + 1) / 2, row_of,
      [&](int64_t pair, int64_t first_token, int64_t num_tokens, const PanelTiles& tiles) {
        const int64_t row = first_row + 2 * pair * kBlockRows;
        const bool has_second = row + kBlockRows < last_row;
        float* const to = p.out + first_token * p.num_rows + row;
        if (num_tokens == 2 * kTokenTile && has_second) return tiles.store(to, p.num_rows);
        PairSums sums;
        tiles.store_pairs(sums.first, sums.second, num_tokens > kTokenTile);
        store_some(sums, to, p.num_rows, num_tokens, has_second);
      });
}

// What products of gates and of ups would be written for and read again is done to them where they
// are: for 256 tokens they are larger than the second-level cache.
template <class Decoder>
void multiply_gated(const Product& p, const Bfloat16Tokens& tokens, Gate* gate, int64_t first_row,
                    int64_t last_row, const Bfloat16Tokens& to) {
  const int64_t num_gates = p.num_rows / 2;
  const auto row_of = [&](int64_t block) {
    return block % 2 * num_gates + first_row + block / 2 * kBlockRows;
  };
  multiply_pairs<Decoder>(
      p, tokens, (last_row - first_row) / kBlockRows, row_of,
      [&](int64_t pair, int64_t first_token, int64_t num_tokens, const PanelTiles& tiles) {
        PairSums sums;
        tiles.store_pairs(sums.first, sums.second, num_tokens > kTokenTile);
        gate(sums.first, sums.second, num_tokens * kBlockRows, sums.first);
        const int64_t column = first_row + pair * kBlockRows;
        for (int64_t i = 0; i < num_tokens; ++i) {
          const int64_t at = (first_token + i) * num_gates + column;
          pack(sums.first + i * kBlockRows, kBlockRows, to.rows + at, to.sums + at / kSumColumns);
        }
      });
}
