// What the jax.ffi handlers of all operations share.
#pragma once

#include <cstdint>
#include <string>

#include "xla/ffi/api/ffi.h"

#define JAXINFER_EXPORT __attribute__((visibility("default")))

namespace jaxinfer {

inline std::string describe(const xla::ffi::AnyBuffer& buffer) {
  std::string text = "[";
  for (int64_t size : buffer.dimensions()) {
    text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  }
  return text + "] of type " + std::to_string(static_cast<int>(buffer.element_type()));
}

}  // namespace jaxinfer
