// What the programs that test_native_build.py builds with sanitizers share.
#pragma once

#include <cstddef>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "../../kernels/paged_attention/cpu_best.h"
#include "cpu_multipliers.h"

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  int below(int count) { return static_cast<int>(engine_() % static_cast<unsigned>(count)); }
  template <size_t kCount>
  int one_of(const int (&values)[kCount]) {
    return values[below(kCount)];
  }
  float uniform() { return static_cast<float>(below(2001) - 1000) / 1000.0f; }

 private:
  std::mt19937 engine_;
};

// A thread a task: some start after the call is over.
struct Pool {
  std::vector<std::thread> started;

  template <class Task>
  void Schedule(Task&& task) {
    started.emplace_back(std::forward<Task>(task));
  }
  ~Pool() {
    for (std::thread& thread : started) thread.join();
  }
};

// A process asks for tiles before it uses them: see instruction_sets.cc.
inline bool gets_tiles() {
#if defined(__x86_64__) && defined(__linux__)
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
  return false;
#endif
}

// The loops of attention for an instruction set that runs here; null for an unknown name.
inline const jaxinfer::Loops* find_attention(const std::string& name) {
  if (name == "portable") return &jaxinfer::attention_loops_portable;
#if defined(__x86_64__)
  if (name == "avx2") return &jaxinfer::attention_loops_avx2;
  if (name == "avx512" || name == "avx512bf16") return &jaxinfer::attention_loops_avx512;
  if (name == "amx" && gets_tiles()) return &jaxinfer::attention_amx();
#endif
  return nullptr;
}

// What multiplies with an instruction set that runs here: the caller has asked the library. None
// for an unknown name.
inline jaxinfer::Multipliers find_multipliers(const std::string& name) {
  if (name == "portable") return jaxinfer::multipliers_portable();
#if defined(__x86_64__)
  if (name == "avx2") return jaxinfer::multipliers_avx2();
  if (name == "avx512") return jaxinfer::multipliers_avx512();
  if (name == "avx512bf16") return jaxinfer::multipliers_avx512bf16();
  if (name == "amx" && gets_tiles()) return jaxinfer::multipliers_amx();
#endif
  return {};
}
