// Statistics of a part of a row of logits, shared by the handler and the loops for each
// instruction set.
#pragma once

#include <stdint.h>

namespace jaxinfer {

struct LogitLoops {
  // The largest of `count` logits that are not NaN, and in `*best` the index of the first such;
  // minus infinity and -1 if all are NaN.
  float (*largest)(const float* logits, int64_t count, int64_t* best);
  // The sum of exp(logit - shift).
  float (*sum_exponentials)(const float* logits, int64_t count, float shift);
};

extern const LogitLoops logit_loops_portable;
#if defined(__x86_64__)
extern const LogitLoops logit_loops_avx2;
extern const LogitLoops logit_loops_avx512;
#endif

}  // namespace jaxinfer
