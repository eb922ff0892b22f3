// The jax.ffi handlers of the quantized product on CPUs: they check a call's buffers and cut rows
// into chunks for XLA's own threads. The arithmetic is in cpu_rows.cc and cpu_blocks*.cc.
//
// Handlers' names carry a version: a program from a compilation cache finds the handler that it
// was compiled for, or none. Raise it whenever operands, attributes or results change.

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "../cpp/handler.h"
#include "../cpp/memory.h"
#include "../cpp/parallel.h"
#include "cpu_blocks.h"
#include "cpu_describe.h"
#include "cpu_multipliers.h"
#include "cpu_product.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
using namespace jaxinfer;

// Below this many multiplications, handing work to other threads costs more than it saves.
constexpr int64_t kTinyProduct = 1 << 19;

ffi::Error invalid(const std::string& message) {
  return ffi::Error::InvalidArgument("quantized_matmul on cpu: " + message);
}

// Checks everything that the loops rely on, and describes the call to them.
ffi::Error describe_product(ffi::AnyBuffer x, ffi::AnyBuffer codes, ffi::AnyBuffer scale,
                            ffi::AnyBuffer offset, ffi::AnyBuffer codebook, ffi::AnyBuffer out,
                            std::string_view code, int64_t row_block, Product& p) {
  if (x.dimensions().size() != 2 ||
      (x.element_type() != ffi::F32 && x.element_type() != ffi::BF16)) {
    return invalid("x is " + describe(x) + ": needs float32 or bfloat16 [T, I]");
  }
  p.num_tokens = x.dimensions()[0];
  p.num_columns = x.dimensions()[1];
  p.has_many_tokens = p.num_tokens >= kManyTokens;
  const std::string problem =
      describe_weights(codes, scale, offset, codebook, code, row_block, p.num_columns, p);
  if (!problem.empty()) return invalid(problem);
  if (out.element_type() != ffi::F32 || !is_matrix(out, p.num_tokens, p.num_rows)) {
    return invalid("the result is " + describe(out) + ": needs float32 [T, O]");
  }
  p.x = x.element_type() == ffi::F32 ? static_cast<const float*>(x.untyped_data()) : nullptr;
  p.out = static_cast<float*>(out.untyped_data());
  return ffi::Error::Success();
}

void widen(const uint16_t* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = static_cast<uint32_t>(from[i]) << 16;
    std::memcpy(to + i, &bits, sizeof(bits));
  }
}

// Lays bfloat16 tokens out for weights in blocks; whole tiles, the last one filled with zeros.
Bfloat16Tokens pack(Team& team, const BlockLoops& loops, const uint16_t* x, int64_t num_tokens,
                    int64_t num_columns, float* memory) {
  const Bfloat16Tokens packed = packed_at(memory, num_tokens, num_columns);
  const int64_t missing = packed_tokens(num_tokens) - num_tokens;
  std::memset(packed.rows + num_tokens * num_columns, 0,
              static_cast<size_t>(missing * num_columns) * sizeof(uint16_t));
  const int64_t chunks = (num_tokens + kTokenTile - 1) / kTokenTile;
  team.run(chunks, [&](int64_t chunk) {
    std::vector<float> wide(static_cast<size_t>(num_columns));
    const int64_t end = std::min((chunk + 1) * kTokenTile, num_tokens);
    for (int64_t token = chunk * kTokenTile; token < end; ++token) {
      widen(x + token * num_columns, num_columns, wide.data());
      loops.pack(wide.data(), num_columns, packed.rows + token * num_columns,
                 packed.sums + token * num_columns / kSumColumns);
    }
  });
  return packed;
}

template <Multipliers (*multipliers)()>
ffi::Error multiply(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer codes,
                    ffi::AnyBuffer scale, ffi::AnyBuffer offset, ffi::AnyBuffer codebook,
                    ffi::Result<ffi::AnyBuffer> out, std::string_view code, int64_t row_block) {
  Product p{};
  ffi::Error error =
      describe_product(x, codes, scale, offset, codebook, *out, code, row_block, p);
  if (error.failure() || p.num_tokens == 0 || p.num_rows == 0) return error;
  const Multipliers m = multipliers();
  if (p.in_blocks && !m.blocks) return invalid("weights in blocks of rows need AVX-512");

  const bool is_tiny = p.num_tokens * p.num_rows * p.num_columns < kTinyProduct;
  Team team(pool, is_tiny ? 1 : std::max<int64_t>(pool.num_threads(), 1));
  static thread_local KeptFloats kept;
  const auto* const halves = static_cast<const uint16_t*>(x.untyped_data());
  const bool rounds = !p.x && p.in_blocks && m.rounded_blocks;
  Bfloat16Tokens rounded{};
  if (rounds) {
    float* const memory = kept.at_least(packed_floats(p.num_tokens, p.num_columns));
    rounded = pack(team, *m.rounded_blocks, halves, p.num_tokens, p.num_columns, memory);
  } else if (!p.x) {
    const int64_t count = p.num_tokens * p.num_columns;
    float* const wide = kept.at_least(count);
    widen(halves, count, wide);
    p.x = wide;
  }
  const int64_t rows = rows_per_chunk(p.num_rows, p.num_tokens, team.num_threads());
  team.run((p.num_rows + rows - 1) / rows, [&](int64_t chunk) {
    const int64_t end = std::min((chunk + 1) * rows, p.num_rows);
    m.multiply(p, rounds ? &rounded : nullptr, chunk * rows, end);
  });
  return ffi::Error::Success();
}

}  // namespace

#define JAXINFER_HANDLER(name, multipliers)                           \
  extern "C" JAXINFER_EXPORT XLA_FFI_Error* name(XLA_FFI_CallFrame*); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, multiply<multipliers>,          \
                                ffi::Ffi::Bind()                      \
                                    .Ctx<ffi::ThreadPool>()           \
                                    .Arg<ffi::AnyBuffer>()            \
                                    .Arg<ffi::AnyBuffer>()            \
                                    .Arg<ffi::AnyBuffer>()            \
                                    .Arg<ffi::AnyBuffer>()            \
                                    .Arg<ffi::AnyBuffer>()            \
                                    .Ret<ffi::AnyBuffer>()            \
                                    .Attr<std::string_view>("code")   \
                                    .Attr<int64_t>("row_block"))

JAXINFER_HANDLER(jaxinfer_quantized_matmul_v2, multipliers_best);
// For tests, and to measure one against another.
JAXINFER_HANDLER(jaxinfer_quantized_matmul_v2_portable, multipliers_portable);
#if defined(__x86_64__)
JAXINFER_HANDLER(jaxinfer_quantized_matmul_v2_avx2, multipliers_avx2);
JAXINFER_HANDLER(jaxinfer_quantized_matmul_v2_avx512, multipliers_avx512);
JAXINFER_HANDLER(jaxinfer_quantized_matmul_v2_avx512bf16, multipliers_avx512bf16);
JAXINFER_HANDLER(jaxinfer_quantized_matmul_v2_amx, multipliers_amx);
#endif

// Of XLA's FFI, version 0: a runtime takes handlers of its own version and of earlier ones.
extern "C" JAXINFER_EXPORT int jaxinfer_ffi_version() { return XLA_FFI_API_MINOR; }
