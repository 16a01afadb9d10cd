// What the ops of one `CpuKernels` share: the level they run on, the threads, and their memory. Passed from Python
// as a handle.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu_level.h"
#include "scratch.h"
#include "thread_pool.h"

namespace trunkline {

struct CpuContext {
  CpuContext(CpuLevel chosen, int threads)
      : level(chosen), pool(threads), thread_scratch(static_cast<size_t>(threads)) {}

  const CpuLevel level;
  ThreadPool pool;
  std::vector<Scratch> thread_scratch;  // by the thread number that the pool passes
  Scratch states;                       // partial results of decode attention
  Scratch turns;                        // zero between calls
  Scratch lists;                        // of units
};

inline CpuContext& context_of(int64_t handle) { return *reinterpret_cast<CpuContext*>(handle); }

}  // namespace trunkline
