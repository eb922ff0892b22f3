// Writes new keys and values to their slots of a cache. See cpu_rows.cc.
#pragma once

#include "cpu_attention.h"
#include "../cpp/lanes.h"

namespace {

// Rounds `count` numbers to codes with one scale, as `quantize_kv` does, and returns it. Its
// division by 127 is what XLA makes of it, so that both write the same bits.
inline float quantize(const float* from, int8_t* to, int64_t count) {
  Lanes most = {};
  for (int64_t h = 0; h < count; h += kWidth) {
    const Lanes values = decode_part<Float32>(from + h, count - h);
    const Lanes magnitude = values < 0.0f ? -values : values;
    most = most < magnitude ? magnitude : most;
  }
  const float scale = largest(most) * (1.0f / 127.0f);
  const float divisor = scale > 0 ? scale : 1.0f;
  for (int64_t h = 0; h < count; h += kWidth) {
    const Lanes codes = decode_part<Float32>(from + h, count - h) / divisor;
    encode_part<Int8>(to + h, codes, count - h);
  }
  return scale;
}

template <class Type>
void write_token(const jaxinfer::Write& p, const float* from, int64_t slot) {
  const jaxinfer::Cache& cache = p.cache;
  const int64_t num_rows = 2 * cache.num_kv_heads, size = cache.head_dim;
  auto* to = static_cast<typename Type::Held*>(cache.elements) + slot * num_rows * size;
  for (int64_t h = 0; h < num_rows * size; h += kWidth) {
    const int64_t left = num_rows * size - h;
    encode_part<Type>(to + h, decode_part<Float32>(from + h, left), left);
  }
}

template <>
inline void write_token<Int8>(const jaxinfer::Write& p, const float* from, int64_t slot) {
  const jaxinfer::Cache& cache = p.cache;
  const int64_t num_rows = 2 * cache.num_kv_heads, size = cache.head_dim;
  const int64_t page = slot / cache.page_size, offset = slot % cache.page_size;
  int8_t* to = static_cast<int8_t*>(cache.elements) + slot * num_rows * size;
  for (int64_t row = 0; row < num_rows; ++row) {
    cache.scales[(page * num_rows + row) * cache.page_size + offset] =
        quantize(from + row * size, to + row * size, size);
  }
}

template <class Type>
void write_tokens(const jaxinfer::Write& p) {
  const int64_t num_slots = p.cache.num_pages * p.cache.page_size;
  for (int64_t token = 0; token < p.num_tokens; ++token) {
    const int64_t slot = p.slots[token];
    if (slot < 0 || slot >= num_slots) continue;  // never outside the cache
    write_token<Type>(p, p.new_kv + token * 2 * p.cache.num_kv_heads * p.cache.head_dim, slot);
  }
}

inline void write(const jaxinfer::Write& p) {
  switch (p.cache.type) {
    case jaxinfer::Elements::kFloat32: return write_tokens<Float32>(p);
    case jaxinfer::Elements::kBfloat16: return write_tokens<Bfloat16>(p);
    case jaxinfer::Elements::kFloat16: return write_tokens<Float16>(p);
    case jaxinfer::Elements::kInt8: return write_tokens<Int8>(p);
  }
}

}  // namespace
