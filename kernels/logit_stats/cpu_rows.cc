// The loops over logits, compiled once for each instruction set with LOOPS as the name of their
// table.

#include "../cpp/lanes.h"
#include "cpu_stats.h"

namespace {

float largest_logit(const float* logits, int64_t count, int64_t* best) {
  // Several at once: one comparison would wait for the one before.
  constexpr int kAtOnce = 4;
  Lanes most[kAtOnce];
  for (Lanes& lanes : most) lanes = broadcast(-INFINITY);
  int64_t i = 0;
  for (; i + kAtOnce * kWidth <= count; i += kAtOnce * kWidth) {
#pragma GCC unroll 4
    for (int j = 0; j < kAtOnce; ++j) most[j] = larger(most[j], load(logits + i + j * kWidth));
  }
  float top = largest(larger(larger(most[0], most[1]), larger(most[2], most[3])));
  for (; i < count; ++i) top = top < logits[i] ? logits[i] : top;
  *best = -1;
  for (i = 0; i + kAtOnce * kWidth <= count; i += kAtOnce * kWidth) {
    Ints is_best = {};
#pragma GCC unroll 4
    for (int j = 0; j < kAtOnce; ++j) is_best |= load(logits + i + j * kWidth) == top;
    if (any(is_best)) break;
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
