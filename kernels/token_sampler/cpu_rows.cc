// The sampler's loops over logits, compiled once for each instruction set with LOOPS as the name
// of their table.

#include "../cpp/lanes.h"
#include "cpu_sampler.h"

namespace {

using jaxinfer::kBanned;
using jaxinfer::kBlock;
using jaxinfer::Penalties;
using jaxinfer::Scale;

// Lanes from one on, filled up with minus infinity behind the end.
JAXINFER_INLINE Lanes load_part(const float* from, int64_t count) {
  if (count >= kWidth) return load(from);
  Lanes lanes = broadcast(-INFINITY);
  memcpy(&lanes, from, static_cast<size_t>(count) * sizeof(*from));
  return lanes;
}
JAXINFER_INLINE void store_part(float* to, Lanes lanes, int64_t count) {
  if (count >= kWidth) {
    store(to, lanes);
  } else {
    memcpy(to, &lanes, static_cast<size_t>(count) * sizeof(*to));
  }
}

void find_largest(const float* logits, int64_t count, float* to) {
  for (int64_t first = 0; first < count; first += kBlock) {
    const int64_t last = first + kBlock < count ? first + kBlock : count;
    Lanes most = broadcast(-INFINITY);
    for (int64_t i = first; i < last; i += kWidth) {
      most = larger(most, load_part(logits + i, last - i));
    }
    *to++ = largest(most);
  }
}

void penalize(float* logits, const int16_t* counts, int64_t count, const Penalties& penalties) {
  for (int64_t i = 0; i < count; i += kWidth) {
    Halves held = {};
    const int64_t left = count - i < kWidth ? count - i : kWidth;
    memcpy(&held, counts + i, static_cast<size_t>(left) * sizeof(*counts));
    const Ints seen = bits_of<Ints>(widened(held));
    const Lanes occurrences = __builtin_convertvector(seen >> 1, Lanes);
    const Lanes x = load_part(logits + i, left);
    const Lanes damped = x > 0.0f ? x / penalties.repetition : x * penalties.repetition;
    const Lanes present = occurrences > 0.0f ? broadcast(penalties.presence) : Lanes{};
    const Lanes less = penalties.frequency * occurrences + present;
    store_part(logits + i, (seen != 0 ? damped : x) - less, left);
  }
}

void mask(float* logits, const uint32_t* words, int64_t count) {
  const Words lanes = bits_of<Words>(lane_numbers());
  for (int64_t i = 0; i < count; i += 32) {
    const uint32_t word = words[i / 32];
    if (word == ~uint32_t{0}) continue;
    const int64_t last = i + 32 < count ? i + 32 : count;
    for (int64_t at = i; at < last; at += kWidth) {
      const Words bits = ((Words{} + word) >> (lanes + static_cast<uint32_t>(at - i))) & 1;
      const Lanes x = load_part(logits + at, last - at);
      store_part(logits + at, bits != 0 ? x : broadcast(kBanned), last - at);
    }
  }
}

JAXINFER_INLINE Lanes scaled_part(const float* logits, int64_t count, Scale scale) {
  return (load_part(logits, count) - scale.top) / scale.temperature;
}

void weigh(const float* logits, int64_t count, Scale scale, float* scaled, float* weights) {
  for (int64_t i = 0; i < count; i += kWidth) {
    const Lanes x = scaled_part(logits + i, count - i, scale);
    store_part(scaled + i, x, count - i);
    store_part(weights + i, exponential(x), count - i);
  }
}

void sum_weights(const float* logits, int64_t count, Scale scale, float* to) {
  for (int64_t first = 0; first < count; first += kBlock) {
    const int64_t last = first + kBlock < count ? first + kBlock : count;
    Lanes sums[kSixteen] = {};
    int part = 0;
    for (int64_t i = first; i < last; i += kWidth) {
      sums[part] += exponential(scaled_part(logits + i, last - i, scale));
      part = part + 1 == kSixteen ? 0 : part + 1;
    }
    *to++ = sum(sums);
  }
}

}  // namespace

namespace jaxinfer {

extern const SamplerLoops LOOPS;
const SamplerLoops LOOPS = {find_largest, penalize, mask, weigh, sum_weights};

}  // namespace jaxinfer
