// Products of a few rows with lines of lanes: scores are queries by keys, results are weights by
// values. See cpu_rows.cc.
#pragma once

#include "cpu_attention.h"
#include "../cpp/lanes.h"
#include "cpu_ahead.h"

namespace {

constexpr int kBlock = jaxinfer::kBlockKeys;

// What fills the registers: accumulators, a row of lanes, one number.
constexpr int kProductRows = 6;
constexpr int kProductLanes = kWidth == 16 ? 4 : 2;

// sums[r, :] (+)= sum over i of a[r, i] * b[i, :], each in the order of i.
template <int kRows, int kLanes, bool kAdd>
__attribute__((noinline)) void multiply(const float* a, int64_t a_stride, const float* b,
                                        int64_t b_stride, int64_t count, float* sums,
                                        int64_t sums_stride) {
  Lanes held[kRows][kLanes];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kLanes; ++v) {
      held[r][v] = kAdd ? load(sums + r * sums_stride + v * kWidth) : Lanes{};
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    Lanes line[kLanes];
#pragma GCC unroll 4
    for (int v = 0; v < kLanes; ++v) line[v] = load(b + i * b_stride + v * kWidth);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Lanes factor = broadcast(a[r * a_stride + i]);
#pragma GCC unroll 4
      for (int v = 0; v < kLanes; ++v) held[r][v] = multiply_add(factor, line[v], held[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kLanes; ++v) store(sums + r * sums_stride + v * kWidth, held[r][v]);
  }
}

template <int kRows, bool kAdd>
void multiply_rows(const float* a, int64_t a_stride, const float* b, int64_t b_stride,
                   int64_t count, float* sums, int64_t sums_stride, int64_t width) {
  int64_t at = 0;
  for (; at + kProductLanes * kWidth <= width; at += kProductLanes * kWidth) {
    multiply<kRows, kProductLanes, kAdd>(a, a_stride, b + at, b_stride, count, sums + at,
                                         sums_stride);
  }
  for (; at < width; at += kWidth) {
    multiply<kRows, 1, kAdd>(a, a_stride, b + at, b_stride, count, sums + at, sums_stride);
  }
}

// Dispatches on the number of rows, at most kProductRows; `width` is a multiple of kWidth.
template <bool kAdd>
void multiply_few(int64_t rows, const float* a, int64_t a_stride, const float* b,
                  int64_t b_stride, int64_t count, float* sums, int64_t sums_stride,
                  int64_t width) {
  static_assert(kProductRows == 6, "a case for each");
  const auto run = [&](auto* multiply) {
    multiply(a, a_stride, b, b_stride, count, sums, sums_stride, width);
  };
  switch (rows) {
    case 1: return run(multiply_rows<1, kAdd>);
    case 2: return run(multiply_rows<2, kAdd>);
    case 3: return run(multiply_rows<3, kAdd>);
    case 4: return run(multiply_rows<4, kAdd>);
    case 5: return run(multiply_rows<5, kAdd>);
    default: return run(multiply_rows<6, kAdd>);
  }
}

// The same for values that stay where they are in the cache: sums[r, :] += sum over i of
// a[r, i] * values of rows[i]. `left` of them remain from `offset` on.
template <class Type, int kRows, int kLanes>
__attribute__((noinline)) void multiply_in_place(const float* a,
                                                 const typename Type::Held* const* rows,
                                                 int64_t offset, int64_t left, int64_t count,
                                                 float* sums, int64_t sums_stride, Ahead& ahead) {
  Lanes held[kRows][kLanes];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kLanes; ++v) held[r][v] = load(sums + r * sums_stride + v * kWidth);
  }
  for (int64_t i = 0; i < count; ++i) {
    ahead.advance(kLanes * kWidth * sizeof(typename Type::Held));
    Lanes line[kLanes];
#pragma GCC unroll 4
    for (int v = 0; v < kLanes; ++v) {
      line[v] = decode_part<Type>(rows[i] + offset + v * kWidth, kLanes > 1 ? kWidth : left);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Lanes factor = broadcast(a[r * kBlock + i]);
#pragma GCC unroll 4
      for (int v = 0; v < kLanes; ++v) held[r][v] = multiply_add(factor, line[v], held[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kLanes; ++v) store(sums + r * sums_stride + v * kWidth, held[r][v]);
  }
}

template <class Type, int kRows>
void multiply_rows_in_place(const float* a, const typename Type::Held* const* rows,
                            int64_t offset, int64_t head_dim, int64_t count, float* sums,
                            int64_t sums_stride, Ahead& ahead) {
  constexpr int kLanes = kRows <= kProductRows ? kProductLanes : kProductLanes / 2;
  int64_t h = 0;
  for (; h + kLanes * kWidth <= head_dim; h += kLanes * kWidth) {
    multiply_in_place<Type, kRows, kLanes>(a, rows, offset + h, kWidth, count, sums + h,
                                           sums_stride, ahead);
  }
  for (; h < head_dim; h += kWidth) {
    multiply_in_place<Type, kRows, 1>(a, rows, offset + h, head_dim - h, count, sums + h,
                                      sums_stride, ahead);
  }
}

template <class Type>
void multiply_few_in_place(int64_t num_rows, const float* a,
                           const typename Type::Held* const* rows, int64_t offset,
                           int64_t head_dim, int64_t count, float* sums, int64_t sums_stride,
                           Ahead& ahead) {
  static_assert(jaxinfer::kFewRows == 8, "a case for each");
  const auto run = [&](auto* multiply) {
    multiply(a, rows, offset, head_dim, count, sums, sums_stride, ahead);
  };
  switch (num_rows) {
    case 1: return run(multiply_rows_in_place<Type, 1>);
    case 2: return run(multiply_rows_in_place<Type, 2>);
    case 3: return run(multiply_rows_in_place<Type, 3>);
    case 4: return run(multiply_rows_in_place<Type, 4>);
    case 5: return run(multiply_rows_in_place<Type, 5>);
    case 6: return run(multiply_rows_in_place<Type, 6>);
    case 7: return run(multiply_rows_in_place<Type, 7>);
    default: return run(multiply_rows_in_place<Type, 8>);
  }
}

}  // namespace
