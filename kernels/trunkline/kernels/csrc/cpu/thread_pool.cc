#include "thread_pool.h"

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace trunkline {
namespace {

constexpr uint32_t kStop = UINT32_MAX;
constexpr auto kSpin = std::chrono::microseconds(50);

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Returns as soon as `word` is no longer `old`.
uint32_t wait_for_change(const std::atomic<uint32_t>& word, uint32_t old) {
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  for (;;) {
    for (int i = 0; i < 64; ++i) {
      const uint32_t now = word.load(std::memory_order_acquire);
      if (now != old) return now;
      pause();
    }
    if (std::chrono::steady_clock::now() >= deadline) break;
  }
  for (;;) {
    word.wait(old, std::memory_order_acquire);
    const uint32_t now = word.load(std::memory_order_acquire);
    if (now != old) return now;
  }
}

}  // namespace

ThreadPool::ThreadPool(int threads) : lists_(static_cast<size_t>(threads)) {
  workers_.reserve(static_cast<size_t>(threads - 1));
  try {
    for (int thread = 1; thread < threads; ++thread) workers_.emplace_back([this, thread] { work(thread); });
  } catch (...) {
    stop();  // the destructor does not run, and that of a thread that was not joined ends the process
    throw;
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
  generation_.store(kStop);
  generation_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run_on_all(int list_count, int64_t units, Call call, void* context) {
  call_ = call;
  context_ = context;
  lists_in_use_ = list_count;
  for (int i = 0; i < list_count; ++i) {
    lists_[i].next.store(units * i / list_count, std::memory_order_relaxed);
    lists_[i].stop = units * (i + 1) / list_count;
  }
  open_.store(true);
  uint32_t generation = generation_.load(std::memory_order_relaxed) + 1;
  if (generation == kStop) generation = 0;
  generation_.store(generation);
  generation_.notify_all();
  take(0);
  open_.store(false);
  for (uint32_t left = busy_.load(); left != 0;) left = wait_for_change(busy_, left);
}

void ThreadPool::work(int thread) {
  uint32_t seen = 0;
  for (;;) {
    seen = wait_for_change(generation_, seen);
    if (seen == kStop) return;
    busy_.fetch_add(1);
    if (open_.load()) take(thread);
    busy_.fetch_sub(1);
    busy_.notify_all();
  }
}

void ThreadPool::take(int thread) {
  for (int i = 0; i < lists_in_use_; ++i) {
    List& list = lists_[(thread + i) % lists_in_use_];
    for (;;) {
      const int64_t unit = list.next.fetch_add(1, std::memory_order_relaxed);
      if (unit >= list.stop) break;
      call_(context_, unit, thread);
    }
  }
}

}  // namespace trunkline
