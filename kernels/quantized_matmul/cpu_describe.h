// Checks the buffers of a quantized matrix, for the handlers of every operation that multiplies.
#pragma once

#include <cstring>
#include <string>
#include <string_view>

#include "../cpp/handler.h"
#include "cpu_blocks.h"
#include "cpu_product.h"

namespace jaxinfer {

inline bool is_matrix(const xla::ffi::AnyBuffer& buffer, int64_t rows, int64_t columns) {
  const auto sizes = buffer.dimensions();
  return sizes.size() == 2 && sizes[0] == rows && sizes[1] == columns;
}

inline bool is_absent(const xla::ffi::AnyBuffer& buffer) { return buffer.element_count() == 0; }

// Fills in what the name of a code says; false for an unknown name or the wrong dtype.
inline bool set_code(std::string_view name, xla::ffi::DataType dtype, bool has_codebook,
                     Product& p) {
  if (name == "int8" || name == "fp8") {
    p.code = name == "int8" ? Code::kInt8 : Code::kFp8;
    p.code_bias = name == "int8" ? 128 : -1;  // its sign's bit turned over
    return dtype == (name == "int8" ? xla::ffi::S8 : xla::ffi::F8E4M3FN) && !has_codebook;
  }
  if (name == "int5" || name == "uint5") {
    p.code = Code::kFiveBits;
    p.code_bias = name == "int5" ? 16 : 0;
    return dtype == xla::ffi::U8 && !has_codebook;
  }
  if (name != "int4" && name != "uint4") return false;
  p.code = Code::kNibble;
  p.code_bias = has_codebook ? -1 : name == "int4" ? 8 : 0;
  for (int i = 0; i < 16; ++i) p.table[i] = static_cast<float>(name == "int4" ? i - 8 : i);
  return dtype == xla::ffi::U8 && (name == "uint4" || !has_codebook);
}

inline bool set_float_type(xla::ffi::DataType dtype, FloatType& type) {
  switch (dtype) {
    case xla::ffi::F16: type = FloatType::kFloat16; return true;
    case xla::ffi::BF16: type = FloatType::kBfloat16; return true;
    case xla::ffi::F32: type = FloatType::kFloat32; return true;
    default: return false;
  }
}

// Checks everything that the loops rely on of a matrix with `num_columns`, and describes it to
// them. Returns what is wrong, or an empty string.
inline std::string describe_weights(const xla::ffi::AnyBuffer& codes,
                                    const xla::ffi::AnyBuffer& scale,
                                    const xla::ffi::AnyBuffer& offset,
                                    const xla::ffi::AnyBuffer& codebook, std::string_view code,
                                    int64_t row_block, int64_t num_columns, Product& p) {
  const bool has_codebook = !is_absent(codebook);
  if (!set_code(code, codes.element_type(), has_codebook, p)) {
    return "code '" + std::string(code) + "' does not go with codes " + describe(codes) +
           (has_codebook ? " and a codebook" : "");
  }
  p.num_columns = num_columns;
  const bool is_4bit = p.code == Code::kNibble;
  const bool is_5bit = p.code == Code::kFiveBits;
  const int64_t multiple = is_4bit || is_5bit ? 32 : 16;
  if (p.num_columns == 0 || p.num_columns % multiple != 0) {
    return "x has " + std::to_string(p.num_columns) + " columns: needs a multiple of " +
           std::to_string(multiple);
  }
  p.row_bytes = p.num_columns / 8 * (is_4bit ? 4 : is_5bit ? 5 : 8);
  p.num_rows = codes.dimensions().size() == 2 ? codes.dimensions()[0] : 0;
  if (!is_matrix(codes, p.num_rows, p.row_bytes)) {
    return "codes " + describe(codes) + " do not fit " + std::to_string(num_columns) + " columns";
  }
  p.num_groups = scale.dimensions().size() == 2 ? scale.dimensions()[1] : 0;
  if (!set_float_type(scale.element_type(), p.scale_type) || p.num_groups == 0 ||
      !is_matrix(scale, p.num_rows, p.num_groups) || p.num_columns % p.num_groups != 0) {
    return "scale " + describe(scale) + " does not fit codes " + describe(codes);
  }
  p.group_size = p.num_columns / p.num_groups;
  if (p.group_size % 16 != 0 || (is_4bit && p.group_size != 16 && p.group_size % 32 != 0)) {
    return "groups of " + std::to_string(p.group_size) +
           " columns: needs a multiple of 16, for 4-bit codes 16 or a multiple of 32";
  }
  if (!is_absent(offset) && (!is_matrix(offset, p.num_rows, p.num_groups) || p.code == Code::kFp8 ||
                             !set_float_type(offset.element_type(), p.offset_type))) {
    return "offset " + describe(offset) + " does not fit scale " + describe(scale);
  }
  if (is_5bit && row_block == 1) return "codes of 5 bits have to be in blocks";
  if (row_block != 1) {
    const bool is_possible = row_block == kBlockRows && p.code != Code::kFp8 &&
                             p.num_rows % kBlockRows == 0 && num_columns % 32 == 0 &&
                             (p.num_groups == 1 || (p.group_size <= 128 &&
                              (p.group_size & (p.group_size - 1)) == 0));
    if (!is_possible) return "codes " + describe(codes) + " in blocks of " + std::to_string(row_block);
  }
  p.in_blocks = row_block != 1;
  if (has_codebook) {
    const auto sizes = codebook.dimensions();
    if (codebook.element_type() != xla::ffi::F32 || sizes.size() != 1 || sizes[0] != 16) {
      return "codebook is " + describe(codebook) + ": needs float32 [16]";
    }
    std::memcpy(p.table, codebook.untyped_data(), sizeof(p.table));
  }
  p.codes = static_cast<const uint8_t*>(codes.untyped_data());
  p.scale = scale.untyped_data();
  p.offset = is_absent(offset) ? nullptr : offset.untyped_data();
  return "";
}

}  // namespace jaxinfer
