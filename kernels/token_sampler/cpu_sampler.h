// The sampler's loops over logits, shared by its rows and the loops for each instruction set.
#pragma once

#include <float.h>
#include <stdint.h>

namespace jaxinfer {

// Logits whose largest, or the sum of whose weights, is kept.
constexpr int64_t kBlock = 64;

// A logit that is never chosen while any other is left.
constexpr float kBanned = -FLT_MAX;

struct Penalties {
  float repetition, presence, frequency;
};

// A logit's weight is exp((logit - top) / temperature), `top` being the largest logit.
struct Scale {
  float top, temperature;
};

struct SamplerLoops {
  // Of each block the largest logit that is not NaN, or minus infinity.
  void (*find_largest)(const float* logits, int64_t count, float* largest);
  // `counts` hold twice a token's occurrences in the output, plus 1 if the prompt holds it.
  void (*penalize)(float* logits, const int16_t* counts, int64_t count, const Penalties& penalties);
  // Bans tokens whose bit is not set.
  void (*mask)(float* logits, const uint32_t* words, int64_t count);
  // The scaled logits, and their weights, of at most a block.
  void (*weigh)(const float* logits, int64_t count, Scale scale, float* scaled, float* weights);
  // The sum of the weights of each block.
  void (*sum_weights)(const float* logits, int64_t count, Scale scale, float* sums);
};

extern const SamplerLoops sampler_loops_portable;
#if defined(__x86_64__)
extern const SamplerLoops sampler_loops_avx2;
extern const SamplerLoops sampler_loops_avx512;
#endif

}  // namespace jaxinfer
