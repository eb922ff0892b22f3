// Products of many tokens with weights in blocks of rows by AVX512-VNNI: codes as the bytes they
// are by tokens of one byte. An instruction multiplies four columns of sixteen rows, where one of
// bfloat16 multiplies two, and no weight is scaled before; a scale for every 32 columns of a token
// keeps what rounding costs small.

#include "cpu_blocks_five_bits.h"
#include "cpu_blocks_rounding.h"

namespace {

constexpr int kTokens = kByteTokens;
constexpr int kChunk = kByteColumns, kHalf = kChunk / 2;
constexpr int kDwords = kChunk / 4;  // of a chunk's columns in one token
constexpr float kMost = 127;

// Codes of a chunk, without a sign: what they stand for is kBias less.
struct Nibbles {
  static constexpr int kBytes = 256;
  template <bool kIsFirst>
  static JAXINFER_INLINE void load(const uint8_t* from, __m512i* codes) {
    const __m512i low = _mm512_set1_epi8(0x0f);
#pragma GCC unroll 4
    for (int j = 0; j < kDwords / 2; ++j) {
      const uint8_t* const at = from + 64 * j;
      if (kIsFirst) _mm_prefetch(reinterpret_cast<const char*>(at + 4096), _MM_HINT_T0);
      const __m512i both = _mm512_loadu_si512(at);
      codes[j] = _mm512_and_si512(both, low);
      codes[kDwords / 2 + j] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
    }
  }
};

struct Bytes {
  static constexpr int kBytes = 512;
  template <bool kIsFirst>
  static JAXINFER_INLINE void load(const uint8_t* from, __m512i* codes) {
#pragma GCC unroll 8
    for (int j = 0; j < kDwords; ++j) {
      const uint8_t* const at = from + 64 * j;
      if (kIsFirst) _mm_prefetch(reinterpret_cast<const char*>(at + 8192), _MM_HINT_T1);
      codes[j] = _mm512_xor_si512(_mm512_loadu_si512(at),
                                  _mm512_set1_epi8(static_cast<char>(0x80)));
    }
  }
};

struct FiveBits {
  static constexpr int kBytes = kFiveBitBytes;
  template <bool kIsFirst>
  static JAXINFER_INLINE void load(const uint8_t* from, __m512i* codes) {
#pragma GCC unroll 5
    for (int at = 0; kIsFirst && at < kBytes; at += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(from + at + 4096), _MM_HINT_T0);
    }
#pragma GCC unroll 8
    for (int j = 0; j < kDwords; ++j) codes[j] = load_five_bits(from, j);
  }
};

// Results of a block of sixteen rows for a tile of tokens.
template <class Codes, bool kIsFirst>
class Block {
 public:
  Block(const Product& p, const ByteTile* tiles, int64_t row)
      : p_(p), tiles_(tiles), codes_(p.codes + row * p.row_bytes),
        first_scale_(row * p.num_groups), group_shift_(shift_of_groups(p)) {
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) results_[t] = _mm512_setzero_ps();
  }

  JAXINFER_INLINE void run() {
    const int64_t num_chunks = p_.num_columns / kChunk;
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
      const ByteTile& tile = tiles_[chunk];
      __m512i codes[kDwords];
      Codes::template load<kIsFirst>(codes_ + chunk * Codes::kBytes, codes);
      const int64_t column = chunk * kChunk;
      if (p_.group_size < kChunk) {
        add<0, kDwords / 2>(codes, tile, tile.totals[0], column >> group_shift_);
        add<kDwords / 2, kDwords>(codes, tile, tile.totals[1], (column + kHalf) >> group_shift_);
      } else {
        add<0, kDwords>(codes, tile, tile.totals[2], column >> group_shift_);
      }
    }
  }

  JAXINFER_INLINE void store(float* out, int64_t stride, int64_t count) const {
    for (int t = 0; t < count; ++t) _mm512_storeu_ps(out + t * stride, results_[t]);
  }

 private:
  // Adds columns that have one scale.
  template <int kFirst, int kLast>
  JAXINFER_INLINE void add(const __m512i* codes, const ByteTile& tile, const float* totals,
                           int64_t group) {
    __m512i sums[kTokens];
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) sums[t] = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int j = kFirst; j < kLast; ++j) {
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) {
        sums[t] = _mm512_dpbusd_epi32(sums[t], codes[j], broadcast(tile.codes[j][t]));
      }
    }
    const int64_t index = first_scale_ + group * kBlockRows;
    const __m512 scale = load_scales(p_.scale, p_.scale_type, index);
    __m512 offset = _mm512_mul_ps(scale, _mm512_set1_ps(-static_cast<float>(p_.code_bias)));
    if (p_.offset) {
      offset = _mm512_add_ps(offset, load_scales(p_.offset, p_.offset_type, index));
    }
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
      const __m512 scales = _mm512_mul_ps(scale, _mm512_set1_ps(tile.scales[t]));
      const __m512 added = _mm512_fmadd_ps(offset, _mm512_set1_ps(totals[t]), results_[t]);
      results_[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[t]), scales, added);
    }
  }

  const Product& p_;
  const ByteTile* const tiles_;
  const uint8_t* const codes_;
  const int64_t first_scale_;
  const int group_shift_;
  __m512 results_[kTokens];
};

template <class Codes, bool kIsFirst>
JAXINFER_INLINE void multiply_tile(const Product& p, const ByteTile* tiles, int64_t token,
                                   int64_t row) {
  const int64_t left = p.num_tokens - token;
  Block<Codes, kIsFirst> block(p, tiles, row);
  block.run();
  block.store(p.out + token * p.num_rows + row, p.num_rows, left < kTokens ? left : kTokens);
}

template <class Codes>
void multiply_blocks(const Product& p, const ByteTokens& tokens, int64_t first_row,
                     int64_t last_row) {
  const int64_t num_chunks = p.num_columns / kChunk;
  for (int64_t row = first_row; row < last_row; row += kBlockRows) {
    const ByteTile* tiles = tokens.tiles;
    multiply_tile<Codes, true>(p, tiles, 0, row);
    for (int64_t token = kTokens; token < p.num_tokens; token += kTokens) {
      multiply_tile<Codes, false>(p, tiles += num_chunks, token, row);
    }
  }
}

void multiply(const Product& p, const ByteTokens& tokens, int64_t first_row, int64_t last_row) {
  if (p.num_tokens == 0) return;
  if (p.code == Code::kNibble) return multiply_blocks<Nibbles>(p, tokens, first_row, last_row);
  if (p.code == Code::kFiveBits) return multiply_blocks<FiveBits>(p, tokens, first_row, last_row);
  multiply_blocks<Bytes>(p, tokens, first_row, last_row);
}

// Rounds half a chunk, stores its dwords in the order in which a lane of weights has its columns,
// and returns the sum.
JAXINFER_INLINE int32_t pack_half(__m512 x, int8_t (*to)[kTokens][4], int lane) {
  const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x));
  const __m128i ordered = in_lane_order(bytes);
  const int32_t dwords[4] = {_mm_extract_epi32(ordered, 0), _mm_extract_epi32(ordered, 1),
                             _mm_extract_epi32(ordered, 2), _mm_extract_epi32(ordered, 3)};
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) memcpy(to[j][lane], &dwords[j], 4);
  // Bytes are added up without a sign.
  const __m128i sign = _mm_set1_epi8(static_cast<char>(0x80));
  const __m128i sums = _mm_sad_epu8(_mm_xor_si128(bytes, sign), _mm_setzero_si128());
  return _mm_cvtsi128_si32(sums) + _mm_extract_epi32(sums, 2) - 128 * kHalf;
}

void pack(const float* token, int64_t size, ByteTile* tiles, int lane) {
  for (int64_t i = 0; i < size / kChunk; ++i, token += kChunk, ++tiles) {
    const __m512 first = _mm512_loadu_ps(token), second = _mm512_loadu_ps(token + kHalf);
    const float most = largest(first, second);
    // Of numbers so small that the inverse overflows nothing is left, nor would be in a product.
    const bool is_nothing = most < 1e-30f;
    const float scale = is_nothing ? 0.0f : most * (1 / kMost);
    const __m512 inverse = _mm512_set1_ps(is_nothing ? 0.0f : kMost / most);
    const int32_t of_first = pack_half(_mm512_mul_ps(first, inverse), tiles->codes, lane);
    const int32_t of_second =
        pack_half(_mm512_mul_ps(second, inverse), tiles->codes + kDwords / 2, lane);
    tiles->scales[lane] = scale;
    tiles->totals[0][lane] = scale * static_cast<float>(of_first);
    tiles->totals[1][lane] = scale * static_cast<float>(of_second);
    tiles->totals[2][lane] = scale * static_cast<float>(of_first + of_second);
  }
}

}  // namespace

namespace jaxinfer {

extern const ByteLoops byte_loops_avx512vnni;
const ByteLoops byte_loops_avx512vnni = {pack, multiply};

}  // namespace jaxinfer
