// Which loops of paged attention run with the best instruction sets.
#pragma once

#include "../cpp/instruction_sets.h"
#include "cpu_attention.h"

namespace jaxinfer {

#if defined(__x86_64__)
inline const Loops& attention_amx() {
#if defined(JAXINFER_HAS_BLOCKS)
  return attention_loops_amx;
#else
  return attention_loops_avx512;  // the compiler had no AMX: no machine runs this set
#endif
}
#endif

inline const Loops& find_best_attention() {
#if defined(__x86_64__)
  if (runs_here("amx")) return attention_amx();
#endif
  return JAXINFER_BEST(attention_loops);
}

inline const Loops& attention_best() {
  static const Loops& best = find_best_attention();
  return best;
}

}  // namespace jaxinfer
