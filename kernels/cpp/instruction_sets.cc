// See instruction_sets.h. The questions cover the registers that the operating system saves.

#include "instruction_sets.h"

#include <string>

#include "handler.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#if defined(__x86_64__)

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

// With the products of bytes that loops of this set use beside those of bfloat16 numbers.
bool has_avx512bf16() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return has_avx512() && __builtin_cpu_supports("avx512vnni") &&
         __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 5 & 1);
}

// Linux gives a process tiles when it asks, once, for all its threads that begin afterwards and
// for those that run already.
bool has_amx() {
#if defined(__linux__)
  constexpr unsigned kTileConfig = 17, kTileData = 18, kRequest = 0x1023;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!has_avx512bf16() || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  if (!(edx >> 22 & 1) || !(edx >> 24 & 1)) return false;
  unsigned low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if (!(low >> kTileConfig & 1) || !(low >> kTileData & 1)) return false;
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}

std::string find_sets() {
  std::string sets;
#if defined(JAXINFER_HAS_BLOCKS)
  if (has_amx()) sets += "amx ";
  if (has_avx512bf16()) sets += "avx512bf16 ";
#endif
  if (has_avx512()) sets += "avx512 ";
  if (has_avx2()) sets += "avx2 ";
  return sets + "portable";
}

#else

std::string find_sets() { return "portable"; }

#endif

}  // namespace

extern "C" JAXINFER_EXPORT const char* jaxinfer_instruction_sets() {
  static const std::string sets = find_sets();
  return sets.c_str();
}
