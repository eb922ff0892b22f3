// What multiplies tokens by a quantized matrix with one instruction set.
#pragma once

#include <algorithm>

#include "../cpp/instruction_sets.h"
#include "cpu_blocks.h"
#include "cpu_product.h"
#include "cpu_tokens.h"

namespace jaxinfer {

struct Multipliers {
  MultiplyRows* rows;
  MultiplyRows* blocks;              // null, as the next, where weights are never in blocks
  Rounding rounding;                 // of tokens that may be; null where it is not faster
  // Up to so many tokens in a program, integers are multiplied faster than anything else.
  int64_t most_integers;

  // How a program of `num_tokens` rounds them for matrices whose codes are integers or not.
  Rounding rounding_of(int64_t num_tokens, bool are_integers) const {
    const bool are_few = num_tokens <= most_integers;
    return {rounding.bfloat16, are_integers && are_few ? rounding.integers : nullptr,
            are_integers && !are_few ? rounding.bytes : nullptr};
  }

  // `rounded` are p's tokens for weights in blocks; without rounding, `p.x` is multiplied.
  void multiply(const Product& p, const RoundedTokens& rounded, int64_t first_row,
                int64_t last_row) const {
    if (!p.in_blocks) return rows(p, first_row, last_row);
    if (!rounded.rounding) return blocks(p, first_row, last_row);
    if (rounded.rounding.bytes) {
      return rounded.rounding.bytes->multiply(p, rounded.bytes, first_row, last_row);
    }
    if (rounded.rounding.integers) {
      return rounded.rounding.integers->multiply(p, rounded.integers, first_row, last_row);
    }
    rounded.rounding.bfloat16->multiply(p, rounded.bfloat16, first_row, last_row);
  }
};

// Rows that a thread takes at a time: whole cache lines of the result, few enough that one thread
// that is held up does not hold up all. With few tokens many: rows that follow each other are
// fetched ahead, and what is fetched beyond them is another thread's. With many, so few that they
// stay in the second-level cache.
inline int64_t rows_per_chunk(int64_t num_rows, int64_t num_tokens, int64_t num_threads) {
  constexpr int64_t kFewTokens = 4, kRowsOfALine = 16;
  const int64_t chunks_per_thread = num_tokens <= kFewTokens ? 2 : 4;
  const int64_t most = num_tokens < kTokenTile ? 512 : 128;
  const int64_t even = std::min(num_rows / (num_threads * chunks_per_thread), most);
  return std::max(even / kRowsOfALine, int64_t{1}) * kRowsOfALine;
}

inline Multipliers multipliers_portable() { return {multiply_rows_portable, nullptr, {}, 0}; }
#if defined(__x86_64__)
inline Multipliers multipliers_avx2() { return {multiply_rows_avx2, nullptr, {}, 0}; }
#if defined(JAXINFER_HAS_BLOCKS)
inline Multipliers multipliers_avx512() {
  return {multiply_rows_avx512, multiply_blocks_avx512, {}, 0};
}
inline Multipliers multipliers_avx512bf16() {
  return {multiply_rows_avx512, multiply_blocks_avx512,
          {&block_loops_avx512bf16, &integer_loops_avx512vnni, &byte_loops_avx512vnni}, 16};
}
inline Multipliers multipliers_amx() {
  return {multiply_rows_avx512, multiply_blocks_avx512,
          {&block_loops_amx, &integer_loops_amx, nullptr}, 4};
}
#else
// The compiler had none of it: no machine runs these sets, and no weights are in blocks.
inline Multipliers multipliers_avx512() { return {multiply_rows_avx512, nullptr, {}, 0}; }
inline Multipliers multipliers_avx512bf16() { return multipliers_avx512(); }
inline Multipliers multipliers_amx() { return multipliers_avx512(); }
#endif
#endif

inline Multipliers find_best_multipliers() {
#if defined(__x86_64__)
  if (runs_here("amx")) return multipliers_amx();
  if (runs_here("avx512bf16")) return multipliers_avx512bf16();
#endif
  return JAXINFER_BEST(multipliers)();
}

inline Multipliers multipliers_best() {
  static const Multipliers best = find_best_multipliers();
  return best;
}

}  // namespace jaxinfer
