// Products of float32 tokens with weights in blocks of rows, by AVX-512: a weight is decoded to
// float32 as the reference does it. A result's columns are added up in four sums, in order,
// whatever the other tokens are.

#include "cpu_blocks_five_bits.h"
#include "cpu_blocks_scales.h"

namespace {

constexpr int kChunk = 32, kSums = 4, kTokens = 4;

// Which byte of a lane is the column of each of four: see cpu_blocks.h.
constexpr int kMiddlesExchanged[4] = {0, 2, 1, 3};

class Block {
 public:
  Block(const Product& p, int64_t row)
      : p_(p), codes_(p.codes + row * p.row_bytes), first_scale_(row * p.num_groups),
        table_(_mm512_loadu_ps(p.table)) {}

  // Decodes columns [32 * chunk, 32 * (chunk + 1)) of sixteen rows.
  void decode(int64_t chunk, float (*to)[16]) const {
    for (int half = 0; half < 2; ++half) {
      const int64_t group = (chunk * kChunk + half * 16) / p_.group_size;
      const int64_t index = first_scale_ + group * kBlockRows;
      const __m512 scale = load_scales(p_.scale, p_.scale_type, index);
      const __m512 offset = p_.offset ? load_scales(p_.offset, p_.offset_type, index)
                                      : _mm512_setzero_ps();
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          const __m512 code = p_.code == Code::kNibble ? nibble(chunk, half, j, i)
                                                       : byte(chunk, 4 * half + j, i);
          const __m512 weight = _mm512_mul_ps(code, scale);
          _mm512_store_ps(to[16 * half + 4 * j + i],
                          p_.offset ? _mm512_add_ps(weight, offset) : weight);
        }
      }
    }
  }

 private:
  JAXINFER_INLINE __m512i load(int64_t byte) const { return _mm512_loadu_si512(codes_ + byte); }

  JAXINFER_INLINE __m512 nibble(int64_t chunk, int half, int j, int i) const {
    const int shift = 8 * kMiddlesExchanged[i] + 4 * half;
    return _mm512_permutexvar_ps(_mm512_srli_epi32(load(chunk * 256 + 64 * j), shift), table_);
  }
  JAXINFER_INLINE __m512i bytes(int64_t chunk, int j) const {
    if (p_.code != Code::kFiveBits) return load(chunk * 512 + 64 * j);
    return _mm512_sub_epi8(load_five_bits(codes_ + chunk * kFiveBitBytes, j),
                           _mm512_set1_epi8(static_cast<char>(p_.code_bias)));
  }
  JAXINFER_INLINE __m512 byte(int64_t chunk, int j, int i) const {
    const __m512i last = _mm512_slli_epi32(bytes(chunk, j), 24 - 8 * kMiddlesExchanged[i]);
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(last, 24));
  }

  const Product& p_;
  const uint8_t* const codes_;
  const int64_t first_scale_;
  const __m512 table_;
};

template <int kCount>
JAXINFER_INLINE void add(const float (*weights)[16], const float* x, int64_t stride, float* sums) {
  __m512 at[kCount][kSums];
#pragma GCC unroll 4
  for (int t = 0; t < kCount; ++t) {
#pragma GCC unroll 4
    for (int i = 0; i < kSums; ++i) at[t][i] = _mm512_loadu_ps(sums + (t * kSums + i) * 16);
  }
  for (int column = 0; column < kChunk; column += kSums) {
#pragma GCC unroll 4
    for (int i = 0; i < kSums; ++i) {
      const __m512 weight = _mm512_load_ps(weights[column + i]);
#pragma GCC unroll 4
      for (int t = 0; t < kCount; ++t) {
        const __m512 value = _mm512_set1_ps(x[t * stride + column + i]);
        at[t][i] = _mm512_fmadd_ps(weight, value, at[t][i]);
      }
    }
  }
#pragma GCC unroll 4
  for (int t = 0; t < kCount; ++t) {
#pragma GCC unroll 4
    for (int i = 0; i < kSums; ++i) _mm512_storeu_ps(sums + (t * kSums + i) * 16, at[t][i]);
  }
}

// Tokens whose sums stay in the first-level cache.
constexpr int64_t kMostTokens = 64;

void multiply_block(const Product& p, int64_t row, int64_t first_token, int64_t num_tokens) {
  alignas(64) float weights[kChunk][16];
  alignas(64) float sums[kMostTokens * kSums * 16];
  for (int64_t i = 0; i < num_tokens * kSums * 16; ++i) sums[i] = 0;
  const Block block(p, row);
  for (int64_t chunk = 0; chunk < p.num_columns / kChunk; ++chunk) {
    block.decode(chunk, weights);
    const float* const x = p.x + first_token * p.num_columns + chunk * kChunk;
    int64_t t = 0;
    for (; t + kTokens <= num_tokens; t += kTokens) {
      add<kTokens>(weights, x + t * p.num_columns, p.num_columns, sums + t * kSums * 16);
    }
    for (; t < num_tokens; ++t) {
      add<1>(weights, x + t * p.num_columns, p.num_columns, sums + t * kSums * 16);
    }
  }
  for (int64_t t = 0; t < num_tokens; ++t) {
    const float* const of_token = sums + t * kSums * 16;
    const __m512 even = _mm512_add_ps(_mm512_load_ps(of_token), _mm512_load_ps(of_token + 32));
    const __m512 odd = _mm512_add_ps(_mm512_load_ps(of_token + 16), _mm512_load_ps(of_token + 48));
    _mm512_storeu_ps(p.out + (first_token + t) * p.num_rows + row, _mm512_add_ps(even, odd));
  }
}

}  // namespace

namespace jaxinfer {

void multiply_blocks_avx512(const Product& p, int64_t first_row, int64_t last_row) {
  for (int64_t row = first_row; row < last_row; row += kBlockRows) {
    for (int64_t token = 0; token < p.num_tokens; token += kMostTokens) {
      const int64_t left = p.num_tokens - token;
      multiply_block(p, row, token, left < kMostTokens ? left : kMostTokens);
    }
  }
}

}  // namespace jaxinfer
