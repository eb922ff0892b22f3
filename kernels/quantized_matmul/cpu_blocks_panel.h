// Products of many tokens: weights are scaled and rounded to bfloat16 once, and tiles add up all
// columns. Included by cpu_blocks.cc where there are tiles.
#pragma once

// Sixteen tokens by sixteen rows at a time would load two tiles for every product; two by two load
// one.
class PanelTiles {
 public:
  // Tiles 0, 1 and 4 are of the first tokens, which may be fewer than a tile.
  explicit PanelTiles(int64_t num_tokens) {
    volatile TileConfig config = {};
    config.palette = 1;
    for (int i = 0; i < 8; ++i) config.row_bytes[i] = 64, config.rows[i] = 16;
    if (num_tokens < kTokenTile) {
      config.rows[0] = config.rows[1] = config.rows[4] = static_cast<uint8_t>(num_tokens);
    }
    _tile_loadconfig(const_cast<TileConfig*>(&config));
  }
  ~PanelTiles() { _tile_release(); }

  // sums[token tile][block] of `num_chunks` chunks; of each two.
  JAXINFER_INLINE void multiply(const uint16_t* tokens, int64_t num_columns,
                                const uint16_t* weights, int64_t block_words,
                                int64_t num_chunks) {
    const int64_t stride = num_columns * 2;
    asm volatile("" ::: "memory");  // see Tiles::add
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
      const uint16_t* const of_chunk = weights + chunk * kTileWords;
      _tile_loadd(4, tokens + chunk * kChunk, stride);
      _tile_loadd(6, of_chunk, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, of_chunk + block_words, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, tokens + kTokenTile * num_columns + chunk * kChunk, stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }

  // The same of one token tile: sums[block].
  JAXINFER_INLINE void multiply_one(const uint16_t* tokens, int64_t num_columns,
                                    const uint16_t* weights, int64_t block_words,
                                    int64_t num_chunks) {
    const int64_t stride = num_columns * 2;
    asm volatile("" ::: "memory");
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
      const uint16_t* const of_chunk = weights + chunk * kTileWords;
      _tile_loadd(4, tokens + chunk * kChunk, stride);
      _tile_loadd(6, of_chunk, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, of_chunk + block_words, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
  }

  JAXINFER_INLINE void store_one(float* to, int64_t stride) const {
    _tile_stored(0, to, stride * 4);
    _tile_stored(1, to + kBlockRows, stride * 4);
  }

  // Rows of `to` are tokens, `stride` floats apart.
  JAXINFER_INLINE void store(float* to, int64_t stride) const {
    _tile_stored(0, to, stride * 4);
    _tile_stored(1, to + kBlockRows, stride * 4);
    _tile_stored(2, to + kTokenTile * stride, stride * 4);
    _tile_stored(3, to + kTokenTile * stride + kBlockRows, stride * 4);
  }
};

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

// Tokens of a tile beyond the last are computed, as zeros, and not stored.
inline void store_some(PanelTiles& tiles, float* to, int64_t stride, int64_t num_tokens,
                       int64_t num_rows, bool is_one_tile) {
  alignas(64) float sums[2 * kTokenTile * 2 * kBlockRows];
  is_one_tile ? tiles.store_one(sums, 2 * kBlockRows) : tiles.store(sums, 2 * kBlockRows);
  for (int64_t token = 0; token < num_tokens; ++token) {
    memcpy(to + token * stride, sums + token * 2 * kBlockRows,
           static_cast<size_t>(num_rows) * sizeof(float));
  }
}

template <class Decoder>
void multiply_panels(const Product& p, const Bfloat16Tokens& tokens, int64_t first_row,
                     int64_t last_row) {
  static thread_local KeptFloats memory;
  const int64_t num_chunks = p.num_columns / kChunk, block_words = num_chunks * kTileWords;
  const int64_t num_blocks = (last_row - first_row) / kBlockRows;
  // Blocks are multiplied in pairs: the last may be without another, and is its own.
  auto* const words = reinterpret_cast<uint16_t*>(memory.at_least((num_blocks + 1) * block_words / 2));
  const Panel<Decoder> panel(p);
  for (int64_t i = 0; i < num_blocks; ++i) {
    panel.decode(first_row + i * kBlockRows, words + i * block_words);
  }
  if (num_blocks % 2) {
    memset(words + num_blocks * block_words, 0, static_cast<size_t>(block_words) * 2);
  }
  PanelTiles tiles(p.num_tokens);
  if (p.num_tokens <= kTokenTile) {
    for (int64_t i = 0; i < num_blocks; i += 2) {
      const int64_t num_rows = i + 1 < num_blocks ? 2 * kBlockRows : kBlockRows;
      tiles.multiply_one(tokens.rows, p.num_columns, words + i * block_words, block_words,
                         num_chunks);
      store_some(tiles, p.out + first_row + i * kBlockRows, p.num_rows, p.num_tokens, num_rows,
                 true);
    }
    return;
  }
  for (int64_t token = 0; token < p.num_tokens; token += 2 * kTokenTile) {
    const int64_t left = p.num_tokens - token;
    // Packed tokens are whole tiles, but maybe not pairs of them: then the last two.
    const int64_t packed = packed_tokens(p.num_tokens) - 2 * kTokenTile;
    const int64_t first = token <= packed ? token : packed;
    const uint16_t* const rows = tokens.rows + first * p.num_columns;
    for (int64_t i = 0; i < num_blocks; i += 2) {
      float* const to = p.out + first * p.num_rows + first_row + i * kBlockRows;
      tiles.multiply(rows, p.num_columns, words + i * block_words, block_words, num_chunks);
      if (left >= 2 * kTokenTile && i + 1 < num_blocks) {
        tiles.store(to, p.num_rows);
      } else {
        const int64_t num_rows = i + 1 < num_blocks ? 2 * kBlockRows : kBlockRows;
        const int64_t remaining = p.num_tokens - first;
        const int64_t count = remaining < 2 * kTokenTile ? remaining : 2 * kTokenTile;
        store_some(tiles, to, p.num_rows, count, num_rows, false);
      }
    }
  }
}
