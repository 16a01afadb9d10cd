// Threads of one rank that share units of work. Units lie in lists, one for all threads or one for each; a thread
// takes the next of a list by an atomic counter.
//
// Between calls a thread spins for at most 50 us (a decoder's ops follow each other within microseconds), then
// sleeps in the kernel, so that an idle worker costs nothing. A call waits for the threads that joined it, even if
// one of them has lost its core to another process; one that was not awake in time does not join, so the call
// does not wait for it.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace trunkline {

class ThreadPool {
 public:
  // `threads` counts the caller. Throws std::system_error, with no thread left, if one cannot be started.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls `body(unit, thread)` for every unit in [0, units) and returns when all are done. A thread begins with
  // neighbours: it takes the units of its own part in ascending order, then what is left of the others'. So until it
  // helps others it reads one stretch of memory, and what the processor and the kernels ask for ahead is its own.
  // Not reentrant. `body` must not throw.
  template <class Body>
  void run(int64_t units, Body&& body) {
    run_lists(threads(), units, body);
  }

  // Likewise, but the units are begun in ascending order: one may wait for those before it.
  template <class Body>
  void run_in_order(int64_t units, Body&& body) {
    run_lists(1, units, body);
  }

 private:
  using Call = void (*)(void* context, int64_t unit, int thread);

  // Units [next, stop) are left.
  struct alignas(64) List {
    std::atomic<int64_t> next{0};
    int64_t stop = 0;
  };

  template <class Body>
  void run_lists(int list_count, int64_t units, Body& body) {
    if (units <= 1 || workers_.empty()) {
      for (int64_t unit = 0; unit < units; ++unit) body(unit, 0);
      return;
    }
    run_on_all(
        list_count, units,
        [](void* context, int64_t unit, int thread) { (*static_cast<Body*>(context))(unit, thread); }, &body);
  }

  void run_on_all(int list_count, int64_t units, Call call, void* context);
  void work(int thread);
  void stop();
  void take(int thread);

  std::vector<std::thread> workers_;
  Call call_ = nullptr;
  void* context_ = nullptr;
  int lists_in_use_ = 0;
  std::vector<List> lists_;  // one for each thread; the first `lists_in_use_` are in use
  // Grows with every call; kStop ends the threads. Stored sequentially consistently: notify_all looks whether
  // a thread sleeps, and with a mere release it may look before the store. A thread that read the old value and
  // goes to sleep just then would be missed, and sleep through the call or for ever.
  alignas(64) std::atomic<uint32_t> generation_{0};
  // A thread joins by counting itself busy and then seeing `open_`; the caller closes, then waits for no busy
  // ones. Both orders are sequentially consistent, so one of the two sees the other.
  alignas(64) std::atomic<uint32_t> busy_{0};
  std::atomic<bool> open_{false};
};

}  // namespace trunkline
