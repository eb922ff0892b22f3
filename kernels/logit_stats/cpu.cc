// The jax.ffi handler of statistics of logits on CPUs. Rows are cut into parts of one size, which
// XLA's threads share: a row's bits depend on no other row and on no thread.
//
// Handlers' names carry a version: a program from a compilation cache finds the handler that it
// was compiled for, or none. Raise it whenever operands, attributes or results change.

#include <algorithm>
#include <cmath>
#include <vector>

#include "../cpp/handler.h"
#include "../cpp/instruction_sets.h"
#include "../cpp/parallel.h"
#include "cpu_stats.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
using namespace jaxinfer;

// Logits of a part: they stay in the first-level cache while they are searched.
constexpr int64_t kPart = 8192;
// Below so many, other threads are not worth waking.
constexpr int64_t kFewLogits = 1 << 15;

struct Part {
  float top, total;
  int64_t best;
};

template <const LogitLoops& (*loops)()>
ffi::Error compute(ffi::ThreadPool pool, ffi::AnyBuffer logits, ffi::Result<ffi::AnyBuffer> best,
                   ffi::Result<ffi::AnyBuffer> log_total) {
  const auto sizes = logits.dimensions();
  if (logits.element_type() != ffi::F32 || sizes.size() != 2 || sizes[1] == 0 ||
      best->element_type() != ffi::S32 || log_total->element_type() != ffi::F32 ||
      static_cast<int64_t>(best->element_count()) != sizes[0] ||
      static_cast<int64_t>(log_total->element_count()) != sizes[0]) {
    return ffi::Error::InvalidArgument("logit_stats on cpu: logits are " + describe(logits) +
                                       ", results " + describe(*best) + " and " +
                                       describe(*log_total) +
                                       ": needs float32 [B, V], int32 [B] and float32 [B]");
  }
  const int64_t num_rows = sizes[0], vocab_size = sizes[1];
  const int64_t num_parts = (vocab_size + kPart - 1) / kPart;
  const auto* const from = static_cast<const float*>(logits.untyped_data());
  std::vector<Part> parts(static_cast<size_t>(num_rows * num_parts));
  std::vector<float> tops(static_cast<size_t>(num_rows));
  const auto for_parts = [&](Team& team, auto work) {
    team.run(num_rows * num_parts, [&](int64_t i) {
      const int64_t row = i / num_parts, first = i % num_parts * kPart;
      work(parts[static_cast<size_t>(i)], row, first, from + row * vocab_size + first,
           std::min(kPart, vocab_size - first));
    });
  };
  const bool is_small = num_rows * vocab_size < kFewLogits;
  Team team(pool, is_small ? 1 : std::max<int64_t>(pool.num_threads(), 1));
  for_parts(team, [](Part& part, int64_t, int64_t first, const float* at, int64_t count) {
    part.top = loops().largest(at, count, &part.best);
    if (part.best >= 0) part.best += first;
  });
  auto* const best_ids = static_cast<int32_t*>(best->untyped_data());
  for (int64_t row = 0; row < num_rows; ++row) {
    const Part* const of_row = parts.data() + row * num_parts;
    // The first of the largest. A part without one may not hide those behind it.
    const Part* top = of_row;
    for (int64_t i = 1; i < num_parts; ++i) {
      if (of_row[i].best >= 0 && (top->best < 0 || of_row[i].top > top->top)) top = of_row + i;
    }
    tops[static_cast<size_t>(row)] = top->top;
    best_ids[row] = static_cast<int32_t>(std::max<int64_t>(top->best, 0));
  }
  for_parts(team, [&](Part& part, int64_t row, int64_t, const float* at, int64_t count) {
    part.total = loops().sum_exponentials(at, count, tops[static_cast<size_t>(row)]);
  });
  auto* const totals = static_cast<float*>(log_total->untyped_data());
  for (int64_t row = 0; row < num_rows; ++row) {
    float total = 0;
    for (int64_t i = 0; i < num_parts; ++i) total += parts[row * num_parts + i].total;
    totals[row] = tops[static_cast<size_t>(row)] + std::log(total);
  }
  return ffi::Error::Success();
}

const LogitLoops& portable_loops() { return logit_loops_portable; }
#if defined(__x86_64__)
const LogitLoops& avx2_loops() { return logit_loops_avx2; }
const LogitLoops& avx512_loops() { return logit_loops_avx512; }
#endif

const LogitLoops& best_loops() {
  static const LogitLoops& loops = JAXINFER_BEST(logit_loops);
  return loops;
}

}  // namespace

#define JAXINFER_HANDLER(name, loops)                                 \
  extern "C" JAXINFER_EXPORT XLA_FFI_Error* name(XLA_FFI_CallFrame*); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, compute<loops>,                 \
                                ffi::Ffi::Bind()                      \
                                    .Ctx<ffi::ThreadPool>()           \
                                    .Arg<ffi::AnyBuffer>()            \
                                    .Ret<ffi::AnyBuffer>()            \
                                    .Ret<ffi::AnyBuffer>())

JAXINFER_HANDLER(jaxinfer_logit_stats_v1, best_loops);
// For tests, and to measure one against another.
JAXINFER_HANDLER(jaxinfer_logit_stats_v1_portable, portable_loops);
#if defined(__x86_64__)
JAXINFER_HANDLER(jaxinfer_logit_stats_v1_avx2, avx2_loops);
JAXINFER_HANDLER(jaxinfer_logit_stats_v1_avx512, avx512_loops);
// The same loops: what is more about these sets is about products with weights.
JAXINFER_HANDLER(jaxinfer_logit_stats_v1_avx512bf16, avx512_loops);
JAXINFER_HANDLER(jaxinfer_logit_stats_v1_amx, avx512_loops);
#endif
