// Products of a few tokens with weights in blocks of rows by AVX512-VNNI, which multiplies codes as
// the bytes they are: two instructions decode 128 of them, where bfloat16 takes seven. Tokens are
// integers of fifteen bits in two bytes, with a scale for every 32 columns: bfloat16 keeps eight.

#include "cpu_blocks_five_bits.h"
#include "cpu_blocks_rounding.h"

namespace {

constexpr int kChunk = kIntegerColumns, kHalf = kChunk / 2;
constexpr int kDwords = kHalf / 4;       // of a half's columns in one token
constexpr float kMost = 127 * 128 + 63;  // what two bytes hold without carry

// Sums of sixteen rows over a half chunk, of high and of low bytes.
struct Sums {
  __m512i high, low;
  JAXINFER_INLINE void add(__m512i codes, const IntegerChunk& x, int dword) {
    high = _mm512_dpbusd_epi32(high, codes, broadcast(x.high + 4 * dword));
    low = _mm512_dpbusd_epi32(low, codes, broadcast(x.low + 4 * dword));
  }
  JAXINFER_INLINE __m512i total() const {
    return _mm512_add_epi32(_mm512_slli_epi32(high, 7), low);
  }
};

// A code is what its bits say without a sign, less kBias.
struct Nibbles {
  static constexpr int kBytes = 256;
  // The second half's codes are sixteen times themselves.
  static constexpr int kSecondShift = 4;

  static JAXINFER_INLINE __m512i load(const uint8_t* from) {
    _mm_prefetch(reinterpret_cast<const char*>(from + 4096), _MM_HINT_T0);
    return _mm512_loadu_si512(from);
  }

  template <int kTokens>
  static JAXINFER_INLINE void add(const uint8_t* from, const IntegerChunk* const* x,
                                  Sums (*sums)[2]) {
    const __m512i low = _mm512_set1_epi8(0x0f), high = _mm512_set1_epi8(static_cast<char>(0xf0));
#pragma GCC unroll 4
    for (int j = 0; j < kDwords; ++j) {
      const __m512i codes = load(from + 64 * j);
      const __m512i first = _mm512_and_si512(codes, low), second = _mm512_and_si512(codes, high);
#pragma GCC unroll 4
      for (int t = 0; t < kTokens; ++t) {
        sums[t][0].add(first, *x[t], j);
        sums[t][1].add(second, *x[t], kDwords + j);
      }
    }
  }
};

// Bytes are those of heads too large for any cache. With kIsFetched they are asked for far ahead, not
// to the first level, for whose lines they would wait: on a Xeon with AMX a fifth more of them
// arrives. A Zen 4 finds such a stream itself, and what it is told to fetch costs it up to a fifth.
template <bool kIsFetched>
struct Bytes {
  static constexpr int kBytes = 512;
  static constexpr int kSecondShift = 0;

  static JAXINFER_INLINE __m512i load(const uint8_t* from) {
    if (kIsFetched) _mm_prefetch(reinterpret_cast<const char*>(from + 8192), _MM_HINT_T1);
    return _mm512_xor_si512(_mm512_loadu_si512(from), _mm512_set1_epi8(static_cast<char>(0x80)));
  }

  template <int kTokens>
  static JAXINFER_INLINE void add(const uint8_t* from, const IntegerChunk* const* x,
                                  Sums (*sums)[2]) {
#pragma GCC unroll 8
    for (int j = 0; j < 2 * kDwords; ++j) {
      const __m512i codes = load(from + 64 * j);
#pragma GCC unroll 4
      for (int t = 0; t < kTokens; ++t) sums[t][j / kDwords].add(codes, *x[t], j);
    }
  }
};

struct FiveBits {
  static constexpr int kBytes = kFiveBitBytes;
  static constexpr int kSecondShift = 0;

  template <int kTokens>
  static JAXINFER_INLINE void add(const uint8_t* from, const IntegerChunk* const* x,
                                  Sums (*sums)[2]) {
#pragma GCC unroll 5
    for (int at = 0; at < kBytes; at += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(from + at + 4096), _MM_HINT_T0);
    }
#pragma GCC unroll 8
    for (int j = 0; j < 2 * kDwords; ++j) {
      const __m512i codes = load_five_bits(from, j);
#pragma GCC unroll 4
      for (int t = 0; t < kTokens; ++t) sums[t][j / kDwords].add(codes, *x[t], j);
    }
  }
};

// Results of a block of sixteen rows for kTokens tokens.
template <class Codes, int kTokens>
class Block {
 public:
  Block(const Product& p, const IntegerTokens& tokens, int64_t first_token, int64_t row)
      : p_(p), codes_(p.codes + row * p.row_bytes), first_scale_(row * p.num_groups) {
    for (int t = 0; t < kTokens; ++t) {
      x_[t] = tokens.chunks + (first_token + t) * (p.num_columns / kChunk);
      results_[t] = _mm512_setzero_ps();
    }
  }

  template <bool kHasOffset>
  JAXINFER_INLINE void run() {
    if (p_.group_size < kChunk) {
      for (int64_t chunk = 0; chunk < p_.num_columns / kChunk; ++chunk) halves<kHasOffset>(chunk);
      return;
    }
    const int64_t chunks_of_group = p_.group_size / kChunk;
    int64_t chunk = 0;
    for (int64_t group = 0; group < p_.num_groups; ++group) {
      add_group<kHasOffset>(group, chunk, chunk + chunks_of_group);
      chunk += chunks_of_group;
    }
  }

  JAXINFER_INLINE void store(float* out, int64_t stride) const {
    for (int t = 0; t < kTokens; ++t) _mm512_storeu_ps(out + t * stride, results_[t]);
  }

 private:
  // The integer sums of the chunk's halves, codes as they are with their sign.
  JAXINFER_INLINE void add_chunk(int64_t chunk, __m512i (*totals)[2]) const {
    const IntegerChunk* x[kTokens];
    Sums sums[kTokens][2];
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; ++t) {
      x[t] = x_[t] + chunk;
      sums[t][0] = sums[t][1] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    }
    Codes::template add<kTokens>(codes_ + chunk * Codes::kBytes, x, sums);
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; ++t) {
      totals[t][0] = sums[t][0].total();
      totals[t][1] = _mm512_srai_epi32(sums[t][1].total(), Codes::kSecondShift);
    }
  }

  JAXINFER_INLINE __m512i without_bias(__m512i total, int32_t of_token) const {
    return _mm512_sub_epi32(total, _mm512_set1_epi32(p_.code_bias * of_token));
  }

  template <bool kHasOffset>
  JAXINFER_INLINE void add_group(int64_t group, int64_t first_chunk, int64_t last_chunk) {
    __m512 sums[kTokens];
    float of_tokens[kTokens];
    for (int t = 0; t < kTokens; ++t) sums[t] = _mm512_setzero_ps(), of_tokens[t] = 0;
    for (int64_t chunk = first_chunk; chunk < last_chunk; ++chunk) {
      __m512i totals[kTokens][2];
      add_chunk(chunk, totals);
#pragma GCC unroll 4
      for (int t = 0; t < kTokens; ++t) {
        const IntegerChunk& x = x_[t][chunk];
        const int32_t of_token = x.totals[0] + x.totals[1];
        const __m512i total = without_bias(_mm512_add_epi32(totals[t][0], totals[t][1]), of_token);
        const __m512 scale = _mm512_set1_ps(x.scale);
        sums[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total), scale, sums[t]);
        if (kHasOffset) of_tokens[t] += x.scale * static_cast<float>(of_token);
      }
    }
    finish<kHasOffset>(first_scale_ + group * kBlockRows, sums, of_tokens);
  }

  template <bool kHasOffset>
  JAXINFER_INLINE void halves(int64_t chunk) {
    __m512i totals[kTokens][2];
    add_chunk(chunk, totals);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      __m512 sums[kTokens];
      float of_tokens[kTokens];
#pragma GCC unroll 4
      for (int t = 0; t < kTokens; ++t) {
        const IntegerChunk& x = x_[t][chunk];
        const __m512i total = without_bias(totals[t][half], x.totals[half]);
        sums[t] = _mm512_mul_ps(_mm512_cvtepi32_ps(total), _mm512_set1_ps(x.scale));
        of_tokens[t] = x.scale * static_cast<float>(x.totals[half]);
      }
      const int64_t group = (chunk * kChunk + half * kHalf) / p_.group_size;
      finish<kHasOffset>(first_scale_ + group * kBlockRows, sums, of_tokens);
    }
  }

  template <bool kHasOffset>
  JAXINFER_INLINE void finish(int64_t index, const __m512* sums, const float* of_tokens) {
    const __m512 scales = load_scales(p_.scale, p_.scale_type, index);
    __m512 offsets;
    if (kHasOffset) offsets = load_scales(p_.offset, p_.offset_type, index);
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; ++t) {
      results_[t] = _mm512_fmadd_ps(sums[t], scales, results_[t]);
      if (!kHasOffset) continue;
      results_[t] = _mm512_fmadd_ps(offsets, _mm512_set1_ps(of_tokens[t]), results_[t]);
    }
  }

  const Product& p_;
  const uint8_t* const codes_;
  const int64_t first_scale_;
  const IntegerChunk* x_[kTokens];
  __m512 results_[kTokens];
};

template <class Codes, int kTokens>
void multiply_rows(const Product& p, const IntegerTokens& tokens, int64_t first_token,
                   int64_t first_row, int64_t last_row) {
  for (int64_t row = first_row; row < last_row; row += kBlockRows) {
    Block<Codes, kTokens> block(p, tokens, first_token, row);
    p.offset ? block.template run<true>() : block.template run<false>();
    block.store(p.out + first_token * p.num_rows + row, p.num_rows);
  }
}

template <class Codes>
void multiply_tokens(const Product& p, const IntegerTokens& tokens, int64_t first_row,
                     int64_t last_row) {
  int64_t token = 0;
  for (; token + 4 <= p.num_tokens; token += 4) {
    multiply_rows<Codes, 4>(p, tokens, token, first_row, last_row);
  }
  switch (p.num_tokens - token) {
    case 3: return multiply_rows<Codes, 3>(p, tokens, token, first_row, last_row);
    case 2: return multiply_rows<Codes, 2>(p, tokens, token, first_row, last_row);
    case 1: return multiply_rows<Codes, 1>(p, tokens, token, first_row, last_row);
  }
}

JAXINFER_INLINE void store_bytes(__m512i values, int8_t* to) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), in_lane_order(_mm512_cvtepi32_epi8(values)));
}

void pack(const float* token, int64_t size, IntegerChunk* chunks) {
  for (int64_t i = 0; i < size / kChunk; ++i, token += kChunk, ++chunks) {
    const float most = largest(_mm512_loadu_ps(token), _mm512_loadu_ps(token + kHalf));
    // Of numbers so small that the inverse overflows nothing is left, nor would be in a product.
    const bool is_nothing = most < 1e-30f;
    chunks->scale = is_nothing ? 0.0f : most / kMost;
    const __m512 inverse = _mm512_set1_ps(is_nothing ? 0.0f : kMost / most);
    for (int half = 0; half < 2; ++half) {
      const __m512 x = _mm512_mul_ps(_mm512_loadu_ps(token + half * kHalf), inverse);
      const __m512i values = _mm512_cvtps_epi32(x);
      const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(values, _mm512_set1_epi32(64)), 7);
      store_bytes(high, chunks->high + half * kHalf);
      store_bytes(_mm512_sub_epi32(values, _mm512_slli_epi32(high, 7)), chunks->low + half * kHalf);
      chunks->totals[half] = _mm512_reduce_add_epi32(values);
    }
  }
}

template <bool kIsFetched>
void multiply(const Product& p, const IntegerTokens& tokens, int64_t first_row,
              int64_t last_row) {
  if (p.code == Code::kNibble) return multiply_tokens<Nibbles>(p, tokens, first_row, last_row);
  if (p.code == Code::kFiveBits) return multiply_tokens<FiveBits>(p, tokens, first_row, last_row);
  multiply_tokens<Bytes<kIsFetched>>(p, tokens, first_row, last_row);
}

}  // namespace

namespace jaxinfer {

extern const IntegerLoops integer_loops_avx512vnni, integer_loops_amx;
const IntegerLoops integer_loops_avx512vnni = {pack, multiply<false>};
const IntegerLoops integer_loops_amx = {pack, multiply<true>};

}  // namespace jaxinfer
