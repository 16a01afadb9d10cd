// What the ops of one `CpuKernels` share: the level they run on, the threads, and their memory. Passed from Python
// as a handle. Ops of one context must not run at the same time; `ContextUse` refuses it.
#pragma once

#include <tvm/ffi/error.h>

#include <atomic>
#include <cstdint>
#include <vector>

#include "cpu_level.h"
#include "scratch.h"
#include "thread_pool.h"

namespace trunkline {

// Elements of a unit of ops that only read and write: below this a second thread costs more than it takes over.
constexpr int64_t kUnitElements = 16384;

struct CpuContext {
  CpuContext(CpuLevel chosen, int threads)
      : level(chosen), pool(threads), thread_scratch(static_cast<size_t>(threads)) {}

  const CpuLevel level;
  ThreadPool pool;
  std::vector<Scratch> thread_scratch;  // by the thread number that the pool passes
  Scratch states;                       // partial results of decode attention
  Scratch carried;                      // states that pieces of decode attention leave to others
  Scratch turns;                        // zero between calls
  Scratch lists;                        // of units
  Scratch routing;                      // where tokens go
  Scratch experts;                      // rows sorted by expert
  Scratch adapters;                     // rows sorted by adapter, and what is added to their results
  std::atomic<bool> in_use{false};

  // To be called before the pool runs bodies that use `scratch`: they must not throw, so they must not allocate.
  void reserve_scratch(size_t bytes) {
    for (Scratch& scratch : thread_scratch) scratch.reserve(bytes);
  }
  char* scratch(int thread) { return thread_scratch[static_cast<size_t>(thread)].memory(); }
};

// One op's use of a context, from its start to its end.
class ContextUse {
 public:
  explicit ContextUse(int64_t handle) : context_(*reinterpret_cast<CpuContext*>(handle)) {
    if (context_.in_use.exchange(true, std::memory_order_acquire)) {
      TVM_FFI_THROW(RuntimeError) << "these kernels are in use by another thread; every thread needs its own";
    }
  }
  ~ContextUse() { context_.in_use.store(false, std::memory_order_release); }
  ContextUse(const ContextUse&) = delete;
  ContextUse& operator=(const ContextUse&) = delete;

  CpuContext& context() const { return context_; }

 private:
  CpuContext& context_;
};

}  // namespace trunkline
