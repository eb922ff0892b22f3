// The jax.ffi handlers of the quantized product on CPUs: they check a call's buffers and cut rows
// into chunks for XLA's own threads. The arithmetic is in cpu_rows.cc.
//
// Handlers' names carry a version: a program from a compilation cache finds the handler that it
// was compiled for, or none. Raise it whenever operands, attributes or results change.

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>

#include "cpu_handler.h"
#include "cpu_parallel.h"
#include "cpu_product.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
using jaxinfer::Code;
using jaxinfer::describe;
using jaxinfer::FloatType;
using jaxinfer::MultiplyRows;
using jaxinfer::Product;

// Below this many multiplications, handing work to other threads costs more than it saves.
constexpr int64_t kTinyProduct = 1 << 19;
// A chunk's rows of output are whole cache lines, which threads then never share.
constexpr int64_t kRowsOfALine = 16;
// Chunks a thread gets, so that one that is held up does not hold up all.
constexpr int64_t kChunksPerThread = 8;
// With many tokens, rows that pass by a block of x while it is in the second-level cache.
constexpr int64_t kMostRowsPerChunk = 64;

ffi::Error invalid(const std::string& message) {
  return ffi::Error::InvalidArgument("quantized_matmul on cpu: " + message);
}

bool is_matrix(const ffi::AnyBuffer& buffer, int64_t rows, int64_t columns) {
  const auto sizes = buffer.dimensions();
  return sizes.size() == 2 && sizes[0] == rows && sizes[1] == columns;
}

bool is_absent(const ffi::AnyBuffer& buffer) { return buffer.element_count() == 0; }

// Fills in what the name of a code says; false for an unknown name or the wrong dtype.
bool set_code(std::string_view name, ffi::DataType dtype, bool has_codebook, Product& p) {
  if (name == "int8" || name == "fp8") {
    p.code = name == "int8" ? Code::kInt8 : Code::kFp8;
    return dtype == (name == "int8" ? ffi::S8 : ffi::F8E4M3FN) && !has_codebook;
  }
  if (name != "int4" && name != "uint4") return false;
  p.code = Code::kNibble;
  for (int i = 0; i < 16; ++i) p.table[i] = static_cast<float>(name == "int4" ? i - 8 : i);
  return dtype == ffi::U8 && (name == "uint4" || !has_codebook);
}

bool set_float_type(ffi::DataType dtype, FloatType& type) {
  switch (dtype) {
    case ffi::F16: type = FloatType::kFloat16; return true;
    case ffi::BF16: type = FloatType::kBfloat16; return true;
    case ffi::F32: type = FloatType::kFloat32; return true;
    default: return false;
  }
}

// Checks everything that the loops rely on, and describes the call to them.
ffi::Error describe_product(ffi::AnyBuffer x, ffi::AnyBuffer codes, ffi::AnyBuffer scale,
                            ffi::AnyBuffer offset, ffi::AnyBuffer codebook, ffi::AnyBuffer out,
                            std::string_view code, Product& p) {
  if (x.dimensions().size() != 2 || x.element_type() != ffi::F32) {
    return invalid("x is " + describe(x) + ": needs float32 [T, I]");
  }
  p.num_tokens = x.dimensions()[0];
  p.num_columns = x.dimensions()[1];
  const bool has_codebook = !is_absent(codebook);
  if (!set_code(code, codes.element_type(), has_codebook, p)) {
    return invalid("code '" + std::string(code) + "' does not go with codes " + describe(codes) +
                   (has_codebook ? " and a codebook" : ""));
  }
  const bool is_4bit = p.code == Code::kNibble;
  const int64_t multiple = is_4bit ? 32 : 16;
  if (p.num_columns == 0 || p.num_columns % multiple != 0) {
    return invalid("x has " + std::to_string(p.num_columns) + " columns: needs a multiple of " +
                   std::to_string(multiple));
  }
  p.row_bytes = is_4bit ? p.num_columns / 2 : p.num_columns;
  p.num_rows = codes.dimensions().size() == 2 ? codes.dimensions()[0] : 0;
  if (!is_matrix(codes, p.num_rows, p.row_bytes)) {
    return invalid("codes " + describe(codes) + " do not fit x " + describe(x));
  }
  p.num_groups = scale.dimensions().size() == 2 ? scale.dimensions()[1] : 0;
  if (!set_float_type(scale.element_type(), p.scale_type) || p.num_groups == 0 ||
      !is_matrix(scale, p.num_rows, p.num_groups) || p.num_columns % p.num_groups != 0) {
    return invalid("scale " + describe(scale) + " does not fit codes " + describe(codes));
  }
  p.group_size = p.num_columns / p.num_groups;
  if (p.group_size % 16 != 0 || (is_4bit && p.group_size != 16 && p.group_size % 32 != 0)) {
    return invalid("groups of " + std::to_string(p.group_size) +
                   " columns: needs a multiple of 16, for 4-bit codes 16 or a multiple of 32");
  }
  if (!is_absent(offset) && (!is_matrix(offset, p.num_rows, p.num_groups) || p.code == Code::kFp8 ||
                             !set_float_type(offset.element_type(), p.offset_type))) {
    return invalid("offset " + describe(offset) + " does not fit scale " + describe(scale));
  }
  if (has_codebook) {
    const auto sizes = codebook.dimensions();
    if (codebook.element_type() != ffi::F32 || sizes.size() != 1 || sizes[0] != 16) {
      return invalid("codebook is " + describe(codebook) + ": needs float32 [16]");
    }
    std::memcpy(p.table, codebook.untyped_data(), sizeof(p.table));
  }
  if (out.element_type() != ffi::F32 || !is_matrix(out, p.num_tokens, p.num_rows)) {
    return invalid("the result is " + describe(out) + ": needs float32 [T, O]");
  }
  p.x = static_cast<const float*>(x.untyped_data());
  p.codes = static_cast<const uint8_t*>(codes.untyped_data());
  p.scale = scale.untyped_data();
  p.offset = is_absent(offset) ? nullptr : offset.untyped_data();
  p.out = static_cast<float*>(out.untyped_data());
  return ffi::Error::Success();
}

int64_t rows_per_chunk(const Product& p, int64_t num_threads) {
  const int64_t even = p.num_rows / (num_threads * kChunksPerThread);
  const int64_t tiny = kTinyProduct / 8 / p.num_columns;  // for one token
  const int64_t rows = std::min(std::max(even, tiny), std::max(kMostRowsPerChunk, tiny));
  return std::max(rows / kRowsOfALine, int64_t{1}) * kRowsOfALine;
}

template <MultiplyRows* multiply_rows>
ffi::Error multiply(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer codes,
                    ffi::AnyBuffer scale, ffi::AnyBuffer offset, ffi::AnyBuffer codebook,
                    ffi::Result<ffi::AnyBuffer> out, std::string_view code) {
  Product p{};
  ffi::Error error = describe_product(x, codes, scale, offset, codebook, *out, code, p);
  if (error.failure() || p.num_tokens == 0 || p.num_rows == 0) return error;
  const int64_t num_threads = std::max<int64_t>(pool.num_threads(), 1);
  if (num_threads == 1 || p.num_tokens * p.num_rows * p.num_columns < kTinyProduct) {
    multiply_rows(p, 0, p.num_rows);
    return ffi::Error::Success();
  }
  const int64_t rows = rows_per_chunk(p, num_threads);
  const int64_t num_chunks = (p.num_rows + rows - 1) / rows;
  jaxinfer::run_chunks(pool, num_threads, num_chunks, [p, rows](int64_t chunk) {
    multiply_rows(p, chunk * rows, std::min((chunk + 1) * rows, p.num_rows));
  });
  return ffi::Error::Success();
}

// The instruction sets that this machine runs, best first, separated by spaces. The question
// covers the registers that the operating system saves.
const char* instruction_sets() {
#if defined(__x86_64__)
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("f16c");
  const bool has_avx512 = __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx2 && has_avx512) return "avx512 avx2 portable";
  if (has_avx2) return "avx2 portable";
#endif
  return "portable";
}

MultiplyRows* best_multiply_rows() {
#if defined(__x86_64__)
  const std::string_view sets = instruction_sets();
  if (sets.find("avx512") == 0) return jaxinfer::multiply_rows_avx512;
  if (sets.find("avx2") == 0) return jaxinfer::multiply_rows_avx2;
#endif
  return jaxinfer::multiply_rows_portable;
}

// Asked when a program runs, not when it is compiled: it may come from another machine's cache.
void multiply_rows_best(const Product& p, int64_t first_row, int64_t last_row) {
  static MultiplyRows* const multiply_rows = best_multiply_rows();
  multiply_rows(p, first_row, last_row);
}

}  // namespace

#define JAXINFER_HANDLER(name, multiply_rows)                       \
  extern "C" JAXINFER_EXPORT XLA_FFI_Error* name(XLA_FFI_CallFrame*); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, multiply<multiply_rows>,      \
                                ffi::Ffi::Bind()                    \
                                    .Ctx<ffi::ThreadPool>()         \
                                    .Arg<ffi::AnyBuffer>()          \
                                    .Arg<ffi::AnyBuffer>()          \
                                    .Arg<ffi::AnyBuffer>()          \
                                    .Arg<ffi::AnyBuffer>()          \
                                    .Arg<ffi::AnyBuffer>()          \
                                    .Ret<ffi::AnyBuffer>()          \
                                    .Attr<std::string_view>("code"))

JAXINFER_HANDLER(jaxinfer_quantized_matmul_v1, multiply_rows_best);
// For tests, and to measure one against another.
JAXINFER_HANDLER(jaxinfer_quantized_matmul_v1_portable, jaxinfer::multiply_rows_portable);
#if defined(__x86_64__)
JAXINFER_HANDLER(jaxinfer_quantized_matmul_v1_avx2, jaxinfer::multiply_rows_avx2);
JAXINFER_HANDLER(jaxinfer_quantized_matmul_v1_avx512, jaxinfer::multiply_rows_avx512);
#endif

extern "C" JAXINFER_EXPORT const char* jaxinfer_instruction_sets() { return instruction_sets(); }

// Of XLA's FFI, version 0: a runtime takes handlers of its own version and of earlier ones.
extern "C" JAXINFER_EXPORT int jaxinfer_ffi_version() { return XLA_FFI_API_MINOR; }
