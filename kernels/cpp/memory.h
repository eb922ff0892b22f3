// Memory that loops and handlers keep from call to call. As in lanes.h, only C headers are
// included and everything has internal linkage.
#pragma once

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

namespace {

// Floats aligned to cache lines, zeros at first. One that is `thread_local` lasts as its thread.
class KeptFloats {
 public:
  KeptFloats() = default;
  KeptFloats(const KeptFloats&) = delete;
  KeptFloats& operator=(const KeptFloats&) = delete;
  ~KeptFloats() { free(floats_); }

  // What was kept is lost where it grows.
  float* at_least(int64_t count) {
    if (count > count_) {
      free(floats_);
      count_ = (count + kLine - 1) / kLine * kLine;
      const size_t num_bytes = static_cast<size_t>(count_) * sizeof(float);
      floats_ = static_cast<float*>(aligned_alloc(kLine * sizeof(float), num_bytes));
      memset(floats_, 0, num_bytes);
    }
    return floats_;
  }

 private:
  static constexpr int64_t kLine = 16;  // floats of a cache line

  float* floats_ = nullptr;
  int64_t count_ = 0;
};

}  // namespace
