// Checks the buffers of a cache, for the handlers of every operation that reads or writes one.
#pragma once

#include <string>

#include "../cpp/handler.h"
#include "cpu_attention.h"

namespace jaxinfer {

inline bool set_elements(xla::ffi::DataType type, Elements& elements) {
  switch (type) {
    case xla::ffi::F32: elements = Elements::kFloat32; return true;
    case xla::ffi::U16: elements = Elements::kBfloat16; return true;
    case xla::ffi::F16: elements = Elements::kFloat16; return true;
    case xla::ffi::S8: elements = Elements::kInt8; return true;
    default: return false;
  }
}

// Describes a cache, but for the scales of int8 codes, to the loops. Returns what is wrong, or an
// empty string.
inline std::string describe_elements(const xla::ffi::AnyBuffer& elements, Cache& cache) {
  const auto sizes = elements.dimensions();
  if (sizes.size() != 5 || sizes[3] != 2 || !set_elements(elements.element_type(), cache.type)) {
    return "the cache is " + describe(elements) +
           ": needs float32, float16, uint16 or int8 [P, page, K, 2, H]";
  }
  cache.num_pages = sizes[0], cache.page_size = sizes[1];
  cache.num_kv_heads = sizes[2], cache.head_dim = sizes[4];
  if (elements.element_count() == 0 || cache.head_dim % 8 != 0) {
    return "the cache is " + describe(elements) + ": needs pages, and heads of a multiple of 8";
  }
  cache.elements = elements.untyped_data();
  return "";
}

}  // namespace jaxinfer
