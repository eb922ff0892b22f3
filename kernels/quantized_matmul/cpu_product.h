// What a quantized product is made of, shared by the FFI handler and the loops for each
// instruction set. Plain data: the handler has checked every relation between the fields.
#pragma once

#include <cstdint>

namespace jaxinfer {

// Of so many tokens in a program, weights are scaled and rounded for all of them at once.
constexpr int64_t kManyTokens = 32;

enum class Code { kInt8, kFp8, kNibble, kFiveBits };  // five bits: only in blocks
enum class FloatType { kFloat16, kBfloat16, kFloat32 };

// out[t, o] = sum over i of x[t, i] * w[o, i], everything in row-major order.
struct Product {
  const float* x;           // [num_tokens, num_columns]
  const uint8_t* codes;     // [num_rows, row_bytes]; 32 columns of 4 bits take 16 bytes, of 5 bits 20
  const void* scale;        // [num_rows, num_groups] of scale_type
  const void* offset;       // the same of offset_type, or null
  float table[16];          // what a 4-bit code stands for, before scale and offset
  float* out;               // [num_tokens, num_rows]
  int64_t num_tokens;
  int64_t num_rows;
  int64_t num_columns;      // a multiple of 16; of 32 where codes have 4 or 5 bits
  int64_t num_groups;
  int64_t group_size;       // a multiple of 16; where codes have 4 bits, 16 or a multiple of 32
  int64_t row_bytes;
  Code code;
  int32_t code_bias;  // a code is its bits less this; negative where no integer is
  FloatType scale_type, offset_type;
  bool has_many_tokens;  // kManyTokens: of the program, not of the call, for the same bits
  bool in_blocks;  // codes, scale and offset lie as cpu_blocks.h says
};

// Computes out[:, first_row:last_row]. A result's bits depend neither on the other rows and
// tokens of the call nor on how rows are cut: they may be split over threads at will.
using MultiplyRows = void(const Product& product, int64_t first_row, int64_t last_row);

MultiplyRows multiply_rows_portable;
#if defined(__x86_64__)
MultiplyRows multiply_rows_avx2;
MultiplyRows multiply_rows_avx512;
#endif

}  // namespace jaxinfer
