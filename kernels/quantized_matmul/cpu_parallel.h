// Runs chunks of work on the caller's thread and on those of a pool that may be busy.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

namespace jaxinfer {

namespace internal {

// What the threads of one call share. Tasks own it together: one that a busy pool starts after
// the call has returned finds no chunk left, and touches nothing else.
template <class Work>
class Chunks {
 public:
  Chunks(int64_t count, Work work) : count_(count), work_(std::move(work)) {}

  void take() {
    int64_t taken = 0;
    for (;; ++taken) {
      const int64_t chunk = next_.fetch_add(1, std::memory_order_relaxed);
      if (chunk >= count_) break;
      work_(chunk);
    }
    if (taken == 0) return;
    // Last one out tells the caller. Under the lock, so that it cannot miss the notice.
    std::lock_guard<std::mutex> lock(mutex_);
    finished_ += taken;
    if (finished_ == count_) all_finished_.notify_one();
  }

  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    all_finished_.wait(lock, [this] { return finished_ == count_; });
  }

 private:
  const int64_t count_;
  const Work work_;
  std::atomic<int64_t> next_{0};
  std::mutex mutex_;
  std::condition_variable all_finished_;
  int64_t finished_ = 0;  // guarded by mutex_
};

}  // namespace internal

// Calls `work(chunk)` for each of `count` chunks. The caller works too and then waits only for
// chunks that others have begun: a pool whose threads are all taken, even by callers of this
// function, delays it but cannot block it. `work` is copied and must not throw.
template <class Pool, class Work>
void run_chunks(Pool& pool, int64_t num_threads, int64_t count, Work work) {
  auto chunks = std::make_shared<internal::Chunks<Work>>(count, std::move(work));
  const int64_t helpers = (num_threads < count ? num_threads : count) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([chunks] { chunks->take(); });
  chunks->take();
  chunks->wait();
}

}  // namespace jaxinfer
