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
#include "cpu_tokens.h"
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
                            ffi::AnyBuffer offset, ffi::AnyBuffer codebook, ffi::AnyBuffer num_tokens,
                            ffi::AnyBuffer out, std::string_view code, int64_t row_block,
                            Product& p) {
  if (x.dimensions().size() != 2 ||
      (x.element_type() != ffi::F32 && x.element_type() != ffi::BF16)) {
    return invalid("x is " + describe(x) + ": needs float32 or bfloat16 [T, I]");
  }
  const int64_t all_tokens = x.dimensions()[0];
  if (num_tokens.element_type() != ffi::S32 || num_tokens.dimensions().size() != 0) {
    return invalid("num_tokens is " + describe(num_tokens) + ": needs an int32");
  }
  const int64_t wanted = *static_cast<const int32_t*>(num_tokens.untyped_data());
  p.num_tokens = std::clamp<int64_t>(wanted, 0, all_tokens);
  p.num_columns = x.dimensions()[1];
  p.has_many_tokens = all_tokens >= kManyTokens;
  const std::string problem =
      describe_weights(codes, scale, offset, codebook, code, row_block, p.num_columns, p);
  if (!problem.empty()) return invalid(problem);
  if (out.element_type() != ffi::F32 || !is_matrix(out, all_tokens, p.num_rows)) {
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

// Rounds bfloat16 tokens, as many at a time as a thread is worth.
void pack(Team& team, const uint16_t* x, const RoundedTokens& to) {
  const int64_t columns = to.num_columns;
  team.run((to.num_tokens + kTokenTile - 1) / kTokenTile, [&](int64_t chunk) {
    std::vector<float> wide(static_cast<size_t>(columns));
    const int64_t end = std::min((chunk + 1) * kTokenTile, to.num_tokens);
    for (int64_t token = chunk * kTokenTile; token < end; ++token) {
      widen(x + token * columns, columns, wide.data());
      to.pack(wide.data(), token);
    }
  });
}

template <Multipliers (*multipliers)()>
ffi::Error multiply(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer codes,
                    ffi::AnyBuffer scale, ffi::AnyBuffer offset, ffi::AnyBuffer codebook,
                    ffi::AnyBuffer num_tokens, ffi::Result<ffi::AnyBuffer> out, std::string_view code, int64_t row_block) {
  Product p{};
  ffi::Error error =
      describe_product(x, codes, scale, offset, codebook, num_tokens, *out, code, row_block, p);
  const int64_t all_tokens = error.failure() ? 0 : x.dimensions()[0];
  if (all_tokens == 0 || p.num_rows == 0) return error;
  const Multipliers m = multipliers();
  if (p.in_blocks && !m.blocks) return invalid("weights in blocks of rows need AVX-512");

  const bool is_tiny = p.num_tokens * p.num_rows * p.num_columns < kTinyProduct;
  Team team(pool, is_tiny ? 1 : std::max<int64_t>(pool.num_threads(), 1));
  static thread_local KeptFloats kept;
  const auto* const halves = static_cast<const uint16_t*>(x.untyped_data());
  const bool rounds = !p.x && p.in_blocks;
  const Rounding rounding = m.rounding_of(all_tokens, p.code_bias >= 0);
  const RoundedTokens rounded(
      rounds ? rounding : Rounding{}, p.num_tokens, p.num_columns,
      kept.at_least(RoundedTokens::num_floats(p.num_tokens, p.num_columns)));
  if (rounded.rounding) {
    pack(team, halves, rounded);
  } else if (!p.x) {
    const int64_t count = p.num_tokens * p.num_columns;
    float* const wide = kept.at_least(count);
    widen(halves, count, wide);
    p.x = wide;
  }
  const int64_t rows = rows_per_chunk(p.num_rows, p.num_tokens, team.num_threads());
  team.run((p.num_rows + rows - 1) / rows, [&](int64_t chunk) {
    const int64_t end = std::min((chunk + 1) * rows, p.num_rows);
    if (p.num_tokens > 0) m.multiply(p, rounded, chunk * rows, end);
    // What is read of the other tokens must not differ from run to run.
    for (int64_t token = p.num_tokens; token < all_tokens; ++token) {
      std::fill(p.out + token * p.num_rows + chunk * rows, p.out + token * p.num_rows + end, 0.0f);
    }
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
                                    .Arg<ffi::AnyBuffer>()            \
                                    .Ret<ffi::AnyBuffer>()            \
                                    .Attr<std::string_view>("code")   \
                                    .Attr<int64_t>("row_block"))

JAXINFER_HANDLER(jaxinfer_quantized_matmul_v5, multipliers_best);
// For tests, and to measure one against another.
JAXINFER_HANDLER(jaxinfer_quantized_matmul_v5_portable, multipliers_portable);
#if defined(__x86_64__)
JAXINFER_HANDLER(jaxinfer_quantized_matmul_v5_avx2, multipliers_avx2);
JAXINFER_HANDLER(jaxinfer_quantized_matmul_v5_avx512, multipliers_avx512);
JAXINFER_HANDLER(jaxinfer_quantized_matmul_v5_avx512bf16, multipliers_avx512bf16);
JAXINFER_HANDLER(jaxinfer_quantized_matmul_v5_amx, multipliers_amx);
#endif

// Of XLA's FFI, version 0: a runtime takes handlers of its own version and of earlier ones.
extern "C" JAXINFER_EXPORT int jaxinfer_ffi_version() { return XLA_FFI_API_MINOR; }
