// Shares a call's work between the caller's thread and those of a pool that may be busy.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace jaxinfer {

namespace internal {

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins, and after a while lets others have the core: the awaited thread may need it.
template <class Condition>
void wait_until(Condition condition) {
  constexpr int kSpins = 1 << 13;
  for (int spins = 0; !condition(); ++spins) {
    if (spins < kSpins) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
}

// What the threads of one call share. They own it together: a helper that a busy pool starts
// after the call has returned finds it closed, and touches nothing else.
class Shared {
 public:
  using Run = void(const void* work, int64_t chunk);

  void run(int64_t count, Run* run, const void* work) {
    count_.store(count, std::memory_order_relaxed);
    run_.store(run, std::memory_order_relaxed);
    work_.store(work, std::memory_order_relaxed);
    finished_.store(0, std::memory_order_relaxed);
    const uint64_t job = (ticket_.load(std::memory_order_relaxed) >> kCountBits) + 1;
    ticket_.store(job << kCountBits | static_cast<uint64_t>(count), std::memory_order_release);
    take(job);
    wait_until([&] { return finished_.load(std::memory_order_acquire) == count; });
  }

  void help() {
    uint64_t done = 0;
    for (;;) {
      uint64_t job = 0;
      wait_until([&] {
        job = ticket_.load(std::memory_order_acquire) >> kCountBits;
        return job != done || is_closed_.load(std::memory_order_acquire);
      });
      if (job == done) return;
      take(job);
      done = job;
    }
  }

  void close() { is_closed_.store(true, std::memory_order_release); }

 private:
  static constexpr int kCountBits = 32;

  // Takes chunks of one job. Its description is changed only when no chunk of it is left: what was
  // read of another job's is not used, as the ticket is then no longer as expected.
  void take(uint64_t job) {
    int64_t taken = 0;
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    for (;;) {
      const auto left = static_cast<int64_t>(ticket & ((uint64_t{1} << kCountBits) - 1));
      if (ticket >> kCountBits != job || left == 0) break;
      const int64_t count = count_.load(std::memory_order_relaxed);
      Run* const run = run_.load(std::memory_order_relaxed);
      const void* const work = work_.load(std::memory_order_relaxed);
      if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel)) continue;
      run(work, count - left);
      ++taken;
      ticket = ticket_.load(std::memory_order_acquire);
    }
    if (taken > 0) finished_.fetch_add(taken, std::memory_order_acq_rel);
  }

  alignas(64) std::atomic<uint64_t> ticket_{0};  // number of the job, chunks left of it
  std::atomic<int64_t> count_{0};
  std::atomic<Run*> run_{nullptr};
  std::atomic<const void*> work_{nullptr};
  alignas(64) std::atomic<int64_t> finished_{0};
  std::atomic<bool> is_closed_{false};
};

}  // namespace internal

// The caller and helpers of a pool, for as long as this lives: while they wait for the next job
// they spin, because waking a thread takes longer than most jobs. The caller works too and waits
// only for chunks that others have begun: a pool whose threads are all taken, even by callers like
// this one, delays it but cannot block it.
class Team {
 public:
  // `num_threads` counts the caller.
  template <class Pool>
  Team(Pool& pool, int64_t num_threads) : num_threads_(num_threads) {
    if (num_threads <= 1) return;
    shared_ = std::make_shared<internal::Shared>();
    for (int64_t i = 1; i < num_threads; ++i) {
      pool.Schedule([shared = shared_] { shared->help(); });
    }
  }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;
  ~Team() {
    if (shared_) shared_->close();
  }

  int64_t num_threads() const { return num_threads_; }

  // Calls `work(chunk)` for each of `count` chunks, below 2^32, and returns when all are done. It
  // must not throw.
  template <class Work>
  void run(int64_t count, const Work& work) {
    if (!shared_ || count <= 1) {
      for (int64_t chunk = 0; chunk < count; ++chunk) work(chunk);
      return;
    }
    const auto run = [](const void* pointer, int64_t chunk) {
      (*static_cast<const Work*>(pointer))(chunk);
    };
    shared_->run(count, run, &work);
  }

 private:
  const int64_t num_threads_;
  std::shared_ptr<internal::Shared> shared_;
};

// One job: see `Team`.
template <class Pool, class Work>
void run_chunks(Pool& pool, int64_t num_threads, int64_t count, const Work& work) {
  Team(pool, num_threads < count ? num_threads : count).run(count, work);
}

}  // namespace jaxinfer
