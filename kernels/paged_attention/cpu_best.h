// Which loops of paged attention run with the best instruction sets.
#pragma once

#include "../cpp/instruction_sets.h"
#include "cpu_attention.h"

namespace jaxinfer {

#if defined(__x86_64__)
#if defined(JAXINFER_HAS_BLOCKS)
inline const Loops& attention_avx512bf16() { return attention_loops_avx512bf16; }
inline const Loops& attention_amx() { return attention_loops_amx; }
#else
// The compiler had none of it: no machine runs these sets.
inline const Loops& attention_avx512bf16() { return attention_loops_avx512; }
inline const Loops& attention_amx() { return attention_loops_avx512; }
#endif
#endif

inline const Loops& find_best_attention() {
#if defined(__x86_64__)
  if (runs_here("amx")) return attention_amx();
  if (runs_here("avx512bf16")) return attention_avx512bf16();
#endif
  return JAXINFER_BEST(attention_loops);
}

inline const Loops& attention_best() {
  static const Loops& best = find_best_attention();
  return best;
}

}  // namespace jaxinfer
