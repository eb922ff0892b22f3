// Sixteen float lanes in the vectors of GCC and Clang, on any processor. See cpu_vector.h.
#pragma once

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

typedef float Lanes __attribute__((vector_size(64)));
typedef float Register __attribute__((vector_size(16)));
typedef int32_t Lanes32 __attribute__((vector_size(64)));
typedef int8_t Lanes8 __attribute__((vector_size(16)));
typedef uint16_t Lanes16 __attribute__((vector_size(32)));
typedef uint32_t LanesU32 __attribute__((vector_size(64)));
#if defined(__aarch64__)
// Byte b of every value is in `bytes[b]`: one instruction looks sixteen bytes up.
struct Table {
  uint8x16_t bytes[4];
};
typedef uint8x16_t Indices;
#else
struct Table {
  float values[16];
};
struct Indices {
  uint8_t bytes[16];
};
#endif

// 32 registers on 64-bit Arm, 16 of SSE: accumulators, rows of weights and a token fit.
#if defined(__aarch64__)
constexpr int kTileRows = 4;
#else
constexpr int kTileRows = 2;
#endif
constexpr int kTileTokens = 6;
constexpr int kDirectTokens = 2;

inline Lanes zero() { return Lanes{}; }
inline Register zero_register() { return Register{}; }
inline Lanes broadcast(float value) { return value - Lanes{}; }
inline Lanes load(const float* from) {
  Lanes lanes;
  memcpy(&lanes, from, sizeof(lanes));
  return lanes;
}
inline Register load_register(const float* from) {
  Register values;
  memcpy(&values, from, sizeof(values));
  return values;
}
inline void store(float* to, Lanes value) { memcpy(to, &value, sizeof(value)); }
inline void store(float* to, Register value) { memcpy(to, &value, sizeof(value)); }
inline void keep_in_register(Register&) {}
inline Lanes add(Lanes a, Lanes b) { return a + b; }
inline Lanes multiply(Lanes a, Lanes b) { return a * b; }
inline Register multiply_add(Register a, Register b, Register sum) {
#if defined(__aarch64__)
  return (Register)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + sum;
#endif
}
inline Lanes multiply_add(Lanes a, Lanes b, Lanes sum) {
  Register a4[4], b4[4], sum4[4];
  memcpy(a4, &a, sizeof(a));
  memcpy(b4, &b, sizeof(b));
  memcpy(sum4, &sum, sizeof(sum));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) sum4[i] = multiply_add(a4[i], b4[i], sum4[i]);
  memcpy(&sum, sum4, sizeof(sum));
  return sum;
}

inline Lanes load_int8(const uint8_t* from) {
  Lanes8 codes;
  memcpy(&codes, from, sizeof(codes));
  return __builtin_convertvector(__builtin_convertvector(codes, Lanes32), Lanes);
}

inline float from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

inline float from_float16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t exponent = (half >> 10) & 31, mantissa = half & 0x3ff;
  if (exponent == 0) {  // zero or subnormal, by way of an integer: denormals may be flushed
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  const uint32_t exponent_bits = exponent == 31 ? 255 : exponent + 112;
  return from_bits(sign | exponent_bits << 23 | mantissa << 13);
}

inline Lanes load_float16(const uint16_t* from) {
  Lanes lanes;
#if defined(__aarch64__)
  float32x4_t parts[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) parts[i] = vcvt_f32_f16((float16x4_t)vld1_u16(from + 4 * i));
  memcpy(&lanes, parts, sizeof(lanes));
#else
  for (int i = 0; i < 16; ++i) lanes[i] = from_float16(from[i]);
#endif
  return lanes;
}

inline Lanes load_bfloat16(const uint16_t* from) {
  Lanes16 bits;
  memcpy(&bits, from, sizeof(bits));
  const LanesU32 wide = __builtin_convertvector(bits, LanesU32) << 16;
  Lanes lanes;
  memcpy(&lanes, &wide, sizeof(lanes));
  return lanes;
}

// Sign, 4 bits of exponent, 3 of mantissa; the exponent's bias is 7, here 15. 0x7f is NaN.
// Subnormal codes go by way of an integer.
inline Lanes load_fp8_over_256(const uint8_t* from) {
  Lanes8 bytes;
  memcpy(&bytes, from, sizeof(bytes));
  const Lanes32 codes = __builtin_convertvector(bytes, Lanes32);
  const Lanes32 magnitude = codes & 0x7f, sign = codes & INT32_MIN;
  const Lanes subnormal = __builtin_convertvector(magnitude, Lanes) * 0x1p-17f;
  Lanes32 bits;
  memcpy(&bits, &subnormal, sizeof(bits));
  const Lanes32 is_subnormal = magnitude < 8, is_nan = magnitude == 0x7f;
  bits = (is_subnormal & bits) | (~is_subnormal & ((magnitude << 20) + (112 << 23)));
  bits |= sign | (is_nan & 0x7fc00000);
  Lanes lanes;
  memcpy(&lanes, &bits, sizeof(lanes));
  return lanes;
}

#if defined(__aarch64__)
inline Table as_table(Lanes values) {
  uint8x16_t from[4];
  memcpy(from, &values, sizeof(values));
  const uint8x16_t even[2] = {vuzp1q_u8(from[0], from[1]), vuzp1q_u8(from[2], from[3])};
  const uint8x16_t odd[2] = {vuzp2q_u8(from[0], from[1]), vuzp2q_u8(from[2], from[3])};
  return {{vuzp1q_u8(even[0], even[1]), vuzp1q_u8(odd[0], odd[1]), vuzp2q_u8(even[0], even[1]),
           vuzp2q_u8(odd[0], odd[1])}};
}
inline Indices load_indices(const uint8_t* from) { return vld1q_u8(from); }
inline Lanes look_up(const Table& table, uint8x16_t codes) {
  uint8x16_t bytes[4];
#pragma GCC unroll 4
  for (int b = 0; b < 4; ++b) bytes[b] = vqtbl1q_u8(table.bytes[b], codes);
  const uint16x8_t low[2] = {(uint16x8_t)vzip1q_u8(bytes[0], bytes[1]),
                             (uint16x8_t)vzip2q_u8(bytes[0], bytes[1])};
  const uint16x8_t high[2] = {(uint16x8_t)vzip1q_u8(bytes[2], bytes[3]),
                              (uint16x8_t)vzip2q_u8(bytes[2], bytes[3])};
  const uint16x8_t parts[4] = {vzip1q_u16(low[0], high[0]), vzip2q_u16(low[0], high[0]),
                               vzip1q_u16(low[1], high[1]), vzip2q_u16(low[1], high[1])};
  Lanes lanes;
  memcpy(&lanes, parts, sizeof(lanes));
  return lanes;
}
inline Lanes look_up_low(const Table& table, Indices indices) {
  return look_up(table, vandq_u8(indices, vdupq_n_u8(15)));
}
inline Lanes look_up_high(const Table& table, Indices indices) {
  return look_up(table, vshrq_n_u8(indices, 4));
}
#else
inline Table as_table(Lanes values) {
  Table table;
  memcpy(table.values, &values, sizeof(values));
  return table;
}
inline Indices load_indices(const uint8_t* from) {
  Indices indices;
  memcpy(indices.bytes, from, sizeof(indices.bytes));
  return indices;
}
inline Lanes look_up_low(const Table& table, const Indices& indices) {
  Lanes lanes;
  for (int i = 0; i < 16; ++i) lanes[i] = table.values[indices.bytes[i] & 15];
  return lanes;
}
inline Lanes look_up_high(const Table& table, const Indices& indices) {
  Lanes lanes;
  for (int i = 0; i < 16; ++i) lanes[i] = table.values[indices.bytes[i] >> 4];
  return lanes;
}
#endif

inline float sum(Lanes lanes) {
  float at[16];
  memcpy(at, &lanes, sizeof(lanes));
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) at[i] += at[i + half];
  }
  return at[0];
}

inline void sum_4(const Lanes* lanes, float* to, bool add_to) {
  for (int i = 0; i < 4; ++i) to[i] = add_to ? to[i] + sum(lanes[i]) : sum(lanes[i]);
}

}  // namespace
