// From the state of a query vector to its result.
#pragma once

#include "attention.h"
#include "gemm.h"

namespace trunkline::TRUNKLINE_NAMESPACE {
namespace {

// The factor that makes a result of the sum of weighted values; 0: nothing was seen. A sink joins the weights here,
// once, when all parts of a context have been merged.
TRUNKLINE_INLINE float result_factor(const ScoreRule& rule, int64_t query_head, float total, float peak) {
  if (total == 0.0f) return 0.0f;
  if (rule.sinks == nullptr) return 1.0f / total;
  const float sink = rule.sinks[query_head] * kLog2E;
  const float highest = sink > peak ? sink : peak;
  float weights[2 * kLanes];
  store(weights, exp2(set1(peak - highest))), store(weights + kLanes, exp2(set1(sink - highest)));
  return weights[0] / (total * weights[0] + weights[kLanes]);
}

// A vector's sum of weighted values, times `factor`, in the form of T's memory.
template <class T>
TRUNKLINE_INLINE void write_scaled(const float* acc, float factor, int d, char* out) {
  auto* to = reinterpret_cast<typename T::Storage*>(out);
  int j = 0;
  for (; j + kLanes <= d; j += kLanes) T::store_floats(to + j, mul(load(acc + j), set1(factor)));
  for (; j < d; ++j) to[j] = T::from_float(acc[j] * factor);
}

}  // namespace
}  // namespace trunkline::TRUNKLINE_NAMESPACE
