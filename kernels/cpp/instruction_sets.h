// What loops are compiled for, and which of it this machine runs.
#pragma once

#include <string_view>

// Best first, separated by spaces: of "amx avx512bf16 avx512 avx2 portable" those that run here.
extern "C" const char* jaxinfer_instruction_sets();

namespace jaxinfer {

inline bool runs_here(std::string_view name) {
  // Names begin differently up to a space or the end.
  const std::string_view sets = jaxinfer_instruction_sets();
  for (size_t begin = 0; begin <= sets.size();) {
    const size_t end = sets.find(' ', begin);
    if (sets.substr(begin, end - begin) == name) return true;
    if (end == std::string_view::npos) break;
    begin = end + 1;
  }
  return false;
}

}  // namespace jaxinfer

// Of what is compiled as NAME_portable and for each instruction set: the best that runs here. To
// be asked when a program runs, not when it is compiled: it may come from another machine's cache.
#if defined(__x86_64__)
#define JAXINFER_BEST(name)                             \
  (::jaxinfer::runs_here("avx512") ? name##_avx512      \
   : ::jaxinfer::runs_here("avx2") ? name##_avx2 : name##_portable)
#else
#define JAXINFER_BEST(name) (name##_portable)
#endif
