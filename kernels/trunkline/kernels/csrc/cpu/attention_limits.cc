// Exported measures of what the machine can do, for benchmarks: to be timed by the caller.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>
#include <vector>

#include "attention_checks.h"
#include "common/exports.h"

namespace trunkline {
namespace {

constexpr int64_t kReadWords = 1 << 16;

// Reads all of a contiguous tensor once, by all threads; returns something that depends on every word.
int64_t limit_read(int64_t handle, TensorView tensor) {
  const ContextUse use(handle);
  CpuContext& context = use.context();
  require(tensor.IsContiguous(), "the tensor must be contiguous");
  const int64_t count = tensor.numel() * tensor.dtype().bits / 32;
  const auto* words = reinterpret_cast<const uint32_t*>(bytes_of(tensor));
  const auto read = limit_table_of(context).read_words;
  std::atomic<uint32_t> result{0};
  context.pool.run((count + kReadWords - 1) / kReadWords, [&](int64_t unit, int) {
    const int64_t start = unit * kReadWords;
    result.fetch_xor(read(words + start, std::min(kReadWords, count - start)), std::memory_order_relaxed);
  });
  return result.load();
}

// Multiplies within the first-level cache, `repeats` times on every thread, in the type of `like`; returns the
// floating-point operations done.
double limit_multiply(int64_t handle, TensorView like, int64_t repeats) {
  const ContextUse use(handle);
  CpuContext& context = use.context();
  const auto multiply = limit_table_of(context).multiply[kv_type_of(like, "like")];
  const int64_t threads = context.pool.threads();
  for (Scratch& scratch : context.thread_scratch) {
    std::memset(scratch.reserve(kLimitScratchBytes), 0, kLimitScratchBytes);
  }
  std::vector<double> done(static_cast<size_t>(threads), 0.0);  // by unit: one thread may take several
  context.pool.run(threads, [&](int64_t unit, int thread) {
    done[static_cast<size_t>(unit)] = multiply(repeats, context.scratch(thread));
  });
  return std::accumulate(done.begin(), done.end(), 0.0);
}

}  // namespace
}  // namespace trunkline

TRUNKLINE_EXPORT(limit_read, trunkline::limit_read)
TRUNKLINE_EXPORT(limit_multiply, trunkline::limit_multiply)
