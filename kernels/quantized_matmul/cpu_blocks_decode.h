// Decodes weights in blocks of rows to pairs of bfloat16 numbers. Included by cpu_blocks.cc.
#pragma once

#include <string.h>

#include "cpu_blocks_five_bits.h"
#include "cpu_blocks_scales.h"

namespace {

constexpr int64_t kChunk = 32;       // columns that are decoded together
constexpr int kPairs = kChunk / 2;   // rows of a decoded tile: a pair of columns of sixteen rows
constexpr int kTileWords = kPairs * 32;
constexpr int kChunksAtOnce = 4;
constexpr int64_t kPrefetchAhead = 2048;  // bytes

JAXINFER_INLINE __m512i load_words(const void* from) { return _mm512_loadu_si512(from); }

JAXINFER_INLINE uint16_t rounded(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Looks four bits up. The instruction looks at five: the table is there twice.
class Table {
 public:
  template <class Value>
  explicit Table(Value value) {
    alignas(64) uint16_t words[32];
    for (int i = 0; i < 32; ++i) words[i] = rounded(value(i % 16));
    words_ = load_words(words);
  }
  template <int kShift>
  JAXINFER_INLINE __m512i look_up(__m512i codes) const {
    return _mm512_permutexvar_epi16(kShift ? _mm512_srli_epi16(codes, kShift) : codes, words_);
  }

 private:
  __m512i words_;
};

// Decodes a chunk of sixteen rows to a tile of codes, exactly; scales are to be multiplied by
// kFactor.
struct Nibbles {
  static constexpr int kBytes = 256;
  static constexpr float kFactor = 1;
  explicit Nibbles(const Product& p) : table([&](int i) { return p.table[i]; }) {}

  JAXINFER_INLINE void decode(const uint8_t* from, uint16_t* tile) const {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m512i codes = load_words(from + 64 * j);
      _mm_prefetch(reinterpret_cast<const char*>(from + 64 * j + kPrefetchAhead), _MM_HINT_T0);
      _mm512_store_si512(tile + 32 * (2 * j), table.look_up<0>(codes));
      _mm512_store_si512(tile + 32 * (2 * j + 8), table.look_up<4>(codes));
      _mm512_store_si512(tile + 32 * (2 * j + 1), table.look_up<8>(codes));
      _mm512_store_si512(tile + 32 * (2 * j + 9), table.look_up<12>(codes));
    }
  }

  const Table table;
};

struct WholeBytes {
  static constexpr int kBytes = 512;
  explicit WholeBytes(const Product&) {}
  JAXINFER_INLINE __m512i load(const uint8_t* from, int j) const {
    return load_words(from + 64 * j);
  }
};

struct BytesOfFiveBits {
  static constexpr int kBytes = kFiveBitBytes;
  explicit BytesOfFiveBits(const Product& p)
      : bias(_mm512_set1_epi8(static_cast<char>(p.code_bias))) {}
  JAXINFER_INLINE __m512i load(const uint8_t* from, int j) const {
    return _mm512_sub_epi8(load_five_bits(from, j), bias);
  }

  const __m512i bias;
};

// Codes that are numbers of a byte. At the top of 32 bits one is 2^24 times itself, of which only a
// float's upper half is used.
template <class Codes>
struct Numbers {
  static constexpr int kBytes = Codes::kBytes;
  static constexpr float kFactor = 0x1p-24f;
  explicit Numbers(const Product& p) : codes_(p) {}

  JAXINFER_INLINE void decode(const uint8_t* from, uint16_t* tile) const {
    const __m512i top = _mm512_set1_epi32(-16777216);
#pragma GCC unroll 8
    for (int at = 0; at < kBytes; at += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(from + at + kPrefetchAhead), _MM_HINT_T0);
    }
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      const __m512i codes = codes_.load(from, j);
      const __m512i second = _mm512_and_si512(_mm512_slli_epi32(codes, 8), top);
      const __m512i third = _mm512_and_si512(_mm512_slli_epi32(codes, 16), top);
      _mm512_store_si512(tile + 64 * j, pair(_mm512_slli_epi32(codes, 24), second));
      _mm512_store_si512(tile + 64 * j + 32, pair(third, _mm512_and_si512(codes, top)));
    }
  }

 private:
  static JAXINFER_INLINE __m512i pair(__m512i even, __m512i odd) {
    const __m512i low = _mm512_castps_si512(_mm512_cvtepi32_ps(even));
    const __m512i high = _mm512_castps_si512(_mm512_cvtepi32_ps(odd));
    return _mm512_or_si512(_mm512_srli_epi32(low, 16), high);
  }

  const Codes codes_;
};

using Bytes = Numbers<WholeBytes>;
using FiveBits = Numbers<BytesOfFiveBits>;

}  // namespace
