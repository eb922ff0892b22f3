// The jax.ffi handler of the sampler on CPUs. XLA's threads share the rows: a token depends on no
// other row and on no thread.
//
// Handlers' names carry a version: a program from a compilation cache finds the handler that it
// was compiled for, or none. Raise it whenever operands, attributes or results change.

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "../cpp/handler.h"
#include "../cpp/instruction_sets.h"
#include "../cpp/parallel.h"
#include "cpu_row.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
using namespace jaxinfer;

template <class Type>
const Type* data(const ffi::AnyBuffer& buffer) {
  return static_cast<const Type*>(buffer.untyped_data());
}

struct Operands {
  ffi::AnyBuffer logits, best, reals, integers, stop_ids, bias_ids, bias_values, counts;
  ffi::AnyBuffer row_ids, length, mask_words, mask_rows, are_given;

  int64_t num_rows() const { return logits.dimensions()[0]; }
  int64_t vocab_size() const { return logits.dimensions()[1]; }
  bool has_masks() const { return *data<bool>(are_given); }

  // What is wrong, or nothing.
  std::string problem() const {
    const auto is = [](const ffi::AnyBuffer& buffer, ffi::DataType type, size_t rank) {
      return buffer.element_type() == type && buffer.dimensions().size() == rank;
    };
    if (!is(logits, ffi::F32, 2) || vocab_size() == 0) {
      return "logits are " + describe(logits) + ": needs float32 [B, V]";
    }
    const bool has_types =
        is(best, ffi::S32, 1) && is(reals, ffi::F32, 2) && is(integers, ffi::S32, 2) &&
        is(stop_ids, ffi::S32, 2) && is(bias_ids, ffi::S32, 2) && is(bias_values, ffi::F32, 2) &&
        is(counts, ffi::S16, 2) && is(row_ids, ffi::S32, 1) && is(length, ffi::S32, 1) &&
        is(mask_words, ffi::U32, 2) && is(mask_rows, ffi::S32, 1) && is(are_given, ffi::PRED, 0);
    if (!has_types) return "an operand has another type or rank than rows.py says";
    for (const auto* of_row : {&best, &row_ids, &length, &mask_rows}) {
      if (of_row->dimensions()[0] != num_rows()) return describe(*of_row) + " is not of each row";
    }
    for (const auto* of_row : {&reals, &integers, &stop_ids, &bias_ids, &bias_values, &counts}) {
      const bool is_short = of_row->dimensions()[0] != reals.dimensions()[0];
      if (is_short || of_row->dimensions()[0] == 0) return describe(*of_row) + " is not of each row";
    }
    const bool has_columns = reals.dimensions()[1] == kNumReals &&
                             integers.dimensions()[1] == kNumIntegers &&
                             bias_ids.dimensions()[1] == bias_values.dimensions()[1] &&
                             counts.dimensions()[1] == vocab_size();
    if (!has_columns) return "an operand has other columns than rows.py says";
    const bool is_wide = mask_words.dimensions()[1] * 32 >= vocab_size();
    if (has_masks() && (!is_wide || mask_words.dimensions()[0] == 0)) {
      return "masks are " + describe(mask_words) + ": needs a bit for each logit";
    }
    return "";
  }

  LogitRow row(int64_t i) const {
    const auto within = [](int32_t id, const ffi::AnyBuffer& of) {
      return std::clamp<int64_t>(id, 0, of.dimensions()[0] - 1);
    };
    const int64_t asks = within(data<int32_t>(row_ids)[i], reals);
    const int64_t num_stops = stop_ids.dimensions()[1], num_biases = bias_ids.dimensions()[1];
    const uint32_t* mask = nullptr;
    if (has_masks()) {
      const int64_t at = within(data<int32_t>(mask_rows)[i], mask_words);
      mask = data<uint32_t>(mask_words) + at * mask_words.dimensions()[1];
      if (!restricts(mask, vocab_size())) mask = nullptr;
    }
    return {data<float>(logits) + i * vocab_size(),
            vocab_size(),
            data<int32_t>(best)[i],
            data<float>(reals) + asks * kNumReals,
            data<int32_t>(integers) + asks * kNumIntegers,
            data<int32_t>(stop_ids) + asks * num_stops,
            num_stops,
            data<int32_t>(bias_ids) + asks * num_biases,
            data<float>(bias_values) + asks * num_biases,
            num_biases,
            data<int16_t>(counts) + asks * vocab_size(),
            data<int32_t>(length)[i],
            mask};
  }
};

template <const SamplerLoops& (*loops)()>
ffi::Error compute(ffi::ThreadPool pool, ffi::AnyBuffer logits, ffi::AnyBuffer best,
                   ffi::AnyBuffer reals, ffi::AnyBuffer integers, ffi::AnyBuffer stop_ids,
                   ffi::AnyBuffer bias_ids, ffi::AnyBuffer bias_values, ffi::AnyBuffer counts,
                   ffi::AnyBuffer row_ids, ffi::AnyBuffer length, ffi::AnyBuffer mask_words,
                   ffi::AnyBuffer mask_rows, ffi::AnyBuffer are_given,
                   ffi::Result<ffi::AnyBuffer> tokens) {
  const Operands operands{logits,     best,   reals,   integers, stop_ids,   bias_ids, bias_values,
                          counts,     row_ids, length, mask_words, mask_rows, are_given};
  std::string problem = operands.problem();
  if (problem.empty() && (tokens->element_type() != ffi::S32 ||
                          static_cast<int64_t>(tokens->element_count()) != operands.num_rows())) {
    problem = "the result is " + describe(*tokens) + ": needs int32 [B]";
  }
  if (!problem.empty()) return ffi::Error::InvalidArgument("token_sampler on cpu: " + problem);
  auto* const to = static_cast<int32_t*>(tokens->untyped_data());
  std::vector<std::pair<int64_t, LogitRow>> asking;
  for (int64_t i = 0; i < operands.num_rows(); ++i) {
    const LogitRow row = operands.row(i);
    to[i] = row.best;
    if (!row.is_plain()) asking.emplace_back(i, row);
  }
  const auto count = static_cast<int64_t>(asking.size());
  run_chunks(pool, std::max<int64_t>(pool.num_threads(), 1), count, [&](int64_t at) {
    const auto& [i, row] = asking[static_cast<size_t>(at)];
    to[i] = RowSampler(row, loops()).choose();
  });
  return ffi::Error::Success();
}

const SamplerLoops& portable_loops() { return sampler_loops_portable; }
#if defined(__x86_64__)
const SamplerLoops& avx2_loops() { return sampler_loops_avx2; }
const SamplerLoops& avx512_loops() { return sampler_loops_avx512; }
#endif

const SamplerLoops& best_loops() {
  static const SamplerLoops& loops = JAXINFER_BEST(sampler_loops);
  return loops;
}

}  // namespace

// Operands: see `Operands`.
#define JAXINFER_HANDLER(name, loops)                                 \
  extern "C" JAXINFER_EXPORT XLA_FFI_Error* name(XLA_FFI_CallFrame*); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, compute<loops>,                 \
                                ffi::Ffi::Bind()                      \
                                    .Ctx<ffi::ThreadPool>()           \
                                    .Arg<ffi::AnyBuffer>()            \
                                    .Arg<ffi::AnyBuffer>()            \
                                    .Arg<ffi::AnyBuffer>()            \
                                    .Arg<ffi::AnyBuffer>()            \
                                    .Arg<ffi::AnyBuffer>()            \
                                    .Arg<ffi::AnyBuffer>()            \
                                    .Arg<ffi::AnyBuffer>()            \
                                    .Arg<ffi::AnyBuffer>()            \
                                    .Arg<ffi::AnyBuffer>()            \
                                    .Arg<ffi::AnyBuffer>()            \
                                    .Arg<ffi::AnyBuffer>()            \
                                    .Arg<ffi::AnyBuffer>()            \
                                    .Arg<ffi::AnyBuffer>()            \
                                    .Ret<ffi::AnyBuffer>())

JAXINFER_HANDLER(jaxinfer_token_sampler_v1, best_loops);
// For tests, and to measure one against another.
JAXINFER_HANDLER(jaxinfer_token_sampler_v1_portable, portable_loops);
#if defined(__x86_64__)
JAXINFER_HANDLER(jaxinfer_token_sampler_v1_avx2, avx2_loops);
JAXINFER_HANDLER(jaxinfer_token_sampler_v1_avx512, avx512_loops);
// The same loops: what is more about these sets is about products with weights.
JAXINFER_HANDLER(jaxinfer_token_sampler_v1_avx512bf16, avx512_loops);
JAXINFER_HANDLER(jaxinfer_token_sampler_v1_amx, avx512_loops);
#endif
