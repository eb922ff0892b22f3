// The loops over logits, compiled once for each instruction set with LOOPS as the name of their
// table.

#include "../cpp/lanes.h"
#include "cpu_stats.h"

namespace {

float largest_logit(const float* logits, int64_t count, int64_t* best) {
  Lanes most = broadcast(-INFINITY);
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) most = larger(most, load(logits + i));
  float top = largest(most);
  for (; i < count; ++i) top = top < logits[i] ? logits[i] : top;
  *best = -1;
  for (i = 0; i + kWidth <= count; i += kWidth) {
    const auto is_best = load(logits + i) == top;
    bool any = false;
    for (int lane = 0; lane < kWidth; ++lane) any |= is_best[lane] != 0;
    if (any) break;
  }
  for (; i < count; ++i) {
    if (logits[i] != top) continue;
    *best = i;
    break;
  }
  return top;
}

float sum_exponentials(const float* logits, int64_t count, float shift) {
  Lanes sums[kSixteen] = {};
  int64_t i = 0;
  for (int part = 0; i + kWidth <= count; i += kWidth) {
    sums[part] += exponential(load(logits + i) - shift);
    part = part + 1 == kSixteen ? 0 : part + 1;
  }
  float total = sum(sums);
  for (; i < count; ++i) total += exponential(logits[i] - shift);
  return total;
}

}  // namespace

namespace jaxinfer {

extern const LogitLoops LOOPS;
const LogitLoops LOOPS = {largest_logit, sum_exponentials};

}  // namespace jaxinfer
