// Float lanes of the widest register of the instruction set that the including file is compiled
// for, in the vectors of GCC and Clang.
//
// Only C headers are included and everything has internal linkage: an inline function compiled
// here for AVX-512 must never be the copy that the linker keeps for everybody.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define JAXINFER_INLINE inline __attribute__((always_inline))

namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

typedef float Lanes __attribute__((vector_size(kWidth * 4)));
typedef int32_t Ints __attribute__((vector_size(kWidth * 4)));
typedef uint32_t Words __attribute__((vector_size(kWidth * 4)));
typedef uint16_t Halves __attribute__((vector_size(kWidth * 2)));
typedef int8_t Bytes __attribute__((vector_size(kWidth)));

template <class To, class From>
JAXINFER_INLINE To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}
template <class To>
JAXINFER_INLINE To read(const void* from) {
  To to;
  memcpy(&to, from, sizeof(to));
  return to;
}

JAXINFER_INLINE Lanes broadcast(float value) { return value - Lanes{}; }
JAXINFER_INLINE Lanes load(const float* from) { return read<Lanes>(from); }
// Compilers would rather load it again for each of its uses.
JAXINFER_INLINE Lanes held_in_register(Lanes value) {
#if defined(__AVX512F__)
  asm("" : "+v"(value));
#elif defined(__AVX2__)
  asm("" : "+x"(value));
#endif
  return value;
}
JAXINFER_INLINE void store(float* to, Lanes value) { memcpy(to, &value, sizeof(value)); }
// NaN in `a` stays.
JAXINFER_INLINE Lanes larger(Lanes a, Lanes b) { return a < b ? b : a; }

JAXINFER_INLINE Lanes multiply_add(Lanes a, Lanes b, Lanes sum) {
#if defined(__AVX512F__)
  return (Lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__AVX2__)
  return (Lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#elif defined(__aarch64__)
  return (Lanes)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + sum;
#endif
}

JAXINFER_INLINE Ints lane_numbers() {
  Ints numbers;
  for (int i = 0; i < kWidth; ++i) numbers[i] = i;
  return numbers;
}

// Sixteen lanes in several registers; halves are added until one is left, whatever their width.
constexpr int kSixteen = 16 / kWidth;
JAXINFER_INLINE float sum(const Lanes (&lanes)[kSixteen]) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
  const __m256 low = _mm512_castps512_ps256((__m512)lanes[0]);
  const __m256 eight = low + _mm512_extractf32x8_ps((__m512)lanes[0], 1);
#else
  const __m256 eight = (__m256)lanes[0] + (__m256)lanes[1];
#endif
  const __m128 four = _mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1);
  const __m128 two = four + _mm_movehl_ps(four, four);
  return two[0] + two[1];
#else
  float at[16];
  memcpy(at, lanes, sizeof(at));
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) at[i] += at[i + half];
  }
  return at[0];
#endif
}
JAXINFER_INLINE float largest(Lanes lanes) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)lanes);
#else
  float most = lanes[0];
  for (int i = 1; i < kWidth; ++i) most = most < lanes[i] ? lanes[i] : most;
  return most;
#endif
}

// Whether any lane of what a comparison gave is true.
JAXINFER_INLINE bool any(Ints lanes) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)lanes) != 0;
#else
  int32_t all = 0;
  for (int i = 0; i < kWidth; ++i) all |= lanes[i];
  return all != 0;
#endif
}

// Added, a float's last bit is 1: what remains below is rounded to nearest, ties to even.
constexpr float kRounder = 12582912.0f;

// To about one unit in the last place, for x up to 88; zero below -87. NaN stays.
JAXINFER_INLINE Lanes exponential(Lanes x) {
  const auto is_zero = x < -87.0f;
  const Lanes bounded = larger(x, broadcast(-87.0f));
  const Lanes shifted = multiply_add(bounded, broadcast(1.44269504f), broadcast(kRounder));
  const Lanes power = shifted - kRounder;
  // ln 2 in two parts, of which the first has few bits.
  Lanes rest = multiply_add(power, broadcast(-0.693359375f), bounded);
  rest = multiply_add(power, broadcast(2.12194440e-4f), rest);
  Lanes y = broadcast(1.9875691500e-4f);
  y = multiply_add(y, rest, broadcast(1.3981999507e-3f));
  y = multiply_add(y, rest, broadcast(8.3334519073e-3f));
  y = multiply_add(y, rest, broadcast(4.1665795894e-2f));
  y = multiply_add(y, rest, broadcast(1.6666665459e-1f));
  y = multiply_add(y, rest, broadcast(5.0000001201e-1f));
  y = multiply_add(y, rest * rest, rest) + 1.0f;
  // The last bits of `shifted` are the power of two: added to the exponent.
  y = bits_of<Lanes>(bits_of<Words>(y) + (bits_of<Words>(shifted) << 23));
  return is_zero ? Lanes{} : y;
}
// The same bits as a lane of the other.
JAXINFER_INLINE float exponential(float x) { return exponential(broadcast(x))[0]; }

JAXINFER_INLINE Lanes hyperbolic_tangent(Lanes x) {
  const Lanes square = x * x;
  Lanes small = broadcast(-5.70498872745e-3f);
  small = multiply_add(small, square, broadcast(2.06390887954e-2f));
  small = multiply_add(small, square, broadcast(-5.37397155531e-2f));
  small = multiply_add(small, square, broadcast(1.33314422036e-1f));
  small = multiply_add(small, square, broadcast(-3.33332819422e-1f));
  small = multiply_add(small * square, x, x);
  const Lanes magnitude = x < 0.0f ? -x : x;
  const Lanes bounded = magnitude > 10.0f ? broadcast(10.0f) : magnitude;
  const Lanes large = 1.0f - 2.0f / (exponential(bounded + bounded) + 1.0f);
  const Lanes with_sign = x < 0.0f ? -large : large;
  return magnitude < 0.625f ? small : with_sign;
}

// Compilers convert such vectors element by element unless told how.
JAXINFER_INLINE Words widened(Halves held) {
#if defined(__AVX512F__)
  return (Words)_mm512_cvtepu16_epi32((__m256i)held);
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu16_epi32((__m128i)held);
#else
  return __builtin_convertvector(held, Words);
#endif
}
JAXINFER_INLINE Ints widened(Bytes held) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepi8_epi32((__m128i)held);
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(bits_of<long long>(held)));
#else
  return __builtin_convertvector(held, Ints);
#endif
}
JAXINFER_INLINE Halves narrowed(Words words) {
#if defined(__AVX512F__)
  return (Halves)_mm512_cvtepi32_epi16((__m512i)words);
#else
  return __builtin_convertvector(words, Halves);
#endif
}
JAXINFER_INLINE Bytes lowest_bytes(Ints ints) {
#if defined(__AVX512F__)
  return (Bytes)_mm512_cvtepi32_epi8((__m512i)ints);
#else
  return __builtin_convertvector(ints, Bytes);
#endif
}

inline float from_float16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t exponent = (half >> 10) & 31, mantissa = half & 0x3ff;
  if (exponent == 0) {  // zero or subnormal, by way of an integer: denormals may be flushed
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  const uint32_t exponent_bits = exponent == 31 ? 255 : exponent + 112;
  return bits_of<float>(sign | exponent_bits << 23 | mantissa << 13);
}

inline uint16_t to_float16(float value) {
  const uint32_t bits = bits_of<uint32_t>(value), magnitude = bits & 0x7fffffff;
  const uint32_t sign = bits >> 16 & 0x8000;
  if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00 | (bits >> 13 & 0x3ff));
  if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
  if (magnitude < 0x38800000) {  // subnormal: a multiple of 2^-24
    const float rounded = bits_of<float>(magnitude) * 0x1p24f + kRounder;
    return static_cast<uint16_t>(sign | (bits_of<uint32_t>(rounded) & 0x7ff));
  }
  const uint32_t rounded = magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1);
  return static_cast<uint16_t>(sign | rounded >> 13);
}

// How a cache holds its elements: `decode` makes lanes of them, `decode_word` of one part of each
// 32 bits, `encode` rounds to them.
struct Float32 {
  using Held = float;
  using HeldLanes = Lanes;
  static JAXINFER_INLINE Lanes decode(HeldLanes held) { return held; }
  static JAXINFER_INLINE Lanes decode_word(Words words, int) { return bits_of<Lanes>(words); }
  static JAXINFER_INLINE HeldLanes encode(Lanes values) { return values; }
};

struct Bfloat16 {
  using Held = uint16_t;
  using HeldLanes = Halves;
  static JAXINFER_INLINE Lanes decode(HeldLanes held) {
    return bits_of<Lanes>(widened(held) << 16);
  }
  static JAXINFER_INLINE Lanes decode_word(Words words, int part) {
    return bits_of<Lanes>(part == 0 ? words << 16 : words & 0xffff0000);
  }
  static JAXINFER_INLINE HeldLanes encode(Lanes values) {
    const Words bits = bits_of<Words>(values);
    const Words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const Words quiet_nan = bits >> 16 | 0x40;
    return narrowed(values == values ? rounded : quiet_nan);
  }
};

struct Float16 {
  using Held = uint16_t;
  using HeldLanes = Halves;
  static JAXINFER_INLINE Lanes decode(HeldLanes held) {
#if defined(__AVX512F__)
    return (Lanes)_mm512_cvtph_ps((__m256i)held);
#elif defined(__AVX2__)
    return (Lanes)_mm256_cvtph_ps((__m128i)held);
#elif defined(__aarch64__)
    return (Lanes)vcvt_f32_f16((float16x4_t)held);
#else
    Lanes values;
    for (int i = 0; i < kWidth; ++i) values[i] = from_float16(held[i]);
    return values;
#endif
  }
  static JAXINFER_INLINE Lanes decode_word(Words words, int part) {
    return decode(narrowed(part == 0 ? words & 0xffff : words >> 16));
  }
  static JAXINFER_INLINE HeldLanes encode(Lanes values) {
#if defined(__AVX512F__)
    return (HeldLanes)_mm512_cvtps_ph((__m512)values, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__AVX2__)
    return (HeldLanes)_mm256_cvtps_ph((__m256)values, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__aarch64__)
    return (HeldLanes)vcvt_f16_f32((float32x4_t)values);
#else
    HeldLanes held;
    for (int i = 0; i < kWidth; ++i) held[i] = to_float16(values[i]);
    return held;
#endif
  }
};

// Codes, without their scales.
struct Int8 {
  using Held = int8_t;
  using HeldLanes = Bytes;
  static JAXINFER_INLINE Lanes decode(HeldLanes held) {
    return __builtin_convertvector(widened(held), Lanes);
  }
  static JAXINFER_INLINE Lanes decode_word(Words words, int part) {
    return __builtin_convertvector(bits_of<Ints>(words << (24 - 8 * part)) >> 24, Lanes);
  }
  // Of values between -127.5 and 127.5.
  static JAXINFER_INLINE HeldLanes encode(Lanes values) {
    return lowest_bytes(bits_of<Ints>(values + kRounder));
  }
};

// Elements of a row from one on, zeros behind its end: heads need not fill registers.
template <class Type>
JAXINFER_INLINE Lanes decode_part(const typename Type::Held* from, int64_t count) {
  if (count >= kWidth) return Type::decode(read<typename Type::HeldLanes>(from));
  typename Type::HeldLanes held = {};
  memcpy(&held, from, static_cast<size_t>(count) * sizeof(*from));
  return Type::decode(held);
}
template <class Type>
JAXINFER_INLINE void encode_part(typename Type::Held* to, Lanes values, int64_t count) {
  const typename Type::HeldLanes held = Type::encode(values);
  if (count >= kWidth) {
    memcpy(to, &held, sizeof(held));
  } else {
    memcpy(to, &held, static_cast<size_t>(count) * sizeof(*to));
  }
}

}  // namespace
