// The elementwise loops of decoder layers, compiled once for each instruction set with LOOPS as
// the name of their table. Every row is computed as if it were alone.

#include "../cpp/lanes.h"
#include "cpu_decoder.h"

namespace {

using jaxinfer::Activation;

// Calls `use(first, count)` for registers of elements; the last may be filled in part.
template <class Use>
JAXINFER_INLINE void for_lanes(int64_t size, Use use) {
  int64_t i = 0;
  for (; i + kWidth <= size; i += kWidth) use(i, static_cast<int64_t>(kWidth));
  if (i < size) use(i, size - i);
}

JAXINFER_INLINE Lanes load_part(const float* from, int64_t count) {
  return decode_part<Float32>(from, count);
}
JAXINFER_INLINE void store_part(float* to, Lanes values, int64_t count) {
  encode_part<Float32>(to, values, count);
}

void normalize(const float* x, const float* weight, float eps, int64_t size, float* to) {
  // Sixteen sums whatever the registers' width.
  Lanes sums[kSixteen] = {};
  int part = 0;
  for_lanes(size, [&](int64_t i, int64_t count) {
    const Lanes values = load_part(x + i, count);
    sums[part] = multiply_add(values, values, sums[part]);
    part = part + 1 == kSixteen ? 0 : part + 1;
  });
  const float variance = sum(sums) / static_cast<float>(size);
  const Lanes factor = broadcast(1.0f / sqrtf(variance + eps));
  for_lanes(size, [&](int64_t i, int64_t count) {
    store_part(to + i, load_part(x + i, count) * factor * load_part(weight + i, count), count);
  });
}

void rotate(const float* x, const float* cos, const float* sin, int64_t half, float* to) {
  for_lanes(half, [&](int64_t i, int64_t count) {
    const Lanes left = load_part(x + i, count), right = load_part(x + half + i, count);
    const Lanes c = load_part(cos + i, count), s = load_part(sin + i, count);
    store_part(to + i, left * c - right * s, count);
    store_part(to + half + i, right * c + left * s, count);
  });
}

// `x / (1 + exp(-x))`; NaN stays.
JAXINFER_INLINE Lanes silu(Lanes x) {
  const Lanes negative = -x;
  return x / (1.0f + exponential(negative > 87.0f ? broadcast(87.0f) : negative));
}

// The approximation of gelu by tanh: Hendrycks and Gimpel, 2016.
JAXINFER_INLINE Lanes gelu(Lanes x) {
  const Lanes inner = 0.7978845608f * (x + 0.044715f * x * x * x);
  return 0.5f * x * (1.0f + hyperbolic_tangent(inner));
}

template <Lanes (*activation)(Lanes)>
void gate(const float* gates, const float* ups, int64_t size, float* to) {
  for_lanes(size, [&](int64_t i, int64_t count) {
    const Lanes activated = activation(load_part(gates + i, count));
    store_part(to + i, activated * load_part(ups + i, count), count);
  });
}

void add(const float* x, int64_t size, float* to) {
  for_lanes(size, [&](int64_t i, int64_t count) {
    store_part(to + i, load_part(to + i, count) + load_part(x + i, count), count);
  });
}

}  // namespace

namespace jaxinfer {

extern const DecoderLoops LOOPS;
const DecoderLoops LOOPS = {normalize, rotate, {gate<silu>, gate<gelu>}, add};

}  // namespace jaxinfer
