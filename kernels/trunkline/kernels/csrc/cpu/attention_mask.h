// What a rule does to the scores of a group of keys beyond scaling: caps, biases by distance, and what is hidden.
#pragma once

#include "attention.h"
#include "attention_group.h"

namespace trunkline::TRUNKLINE_NAMESPACE {
namespace {

// What is done to the scores of a group beyond scaling.
struct Adjustment {
  bool any;
  bool scales;         // scores come out scaled; else only masked, so that a mask that hides nothing of a row
                       // leaves its bits alone
  bool bias;           // slopes
  bool by_reach;       // the lower limit is each query's own
  float lower, upper;  // distances key - query in [lower, upper) are visible
};

// What of a query vector decides what it sees; each as in UnitMemory.
struct MaskedQuery {
  float slope, position, reach;
};

template <class T>
TRUNKLINE_INLINE Adjustment adjustment_of(const ScoreRule& rule, const Group<T>& group, bool causal,
                                          int32_t query_lowest, int32_t query_highest) {
  Adjustment how{};
  how.bias = rule.slopes != nullptr;
  how.lower = kMinusInfinity, how.upper = __builtin_inff();
  if (causal && group.highest > query_lowest) how.upper = 1.0f;
  const int64_t before_window = static_cast<int64_t>(query_highest) - rule.window;
  if (rule.window > 0 && group.lowest <= before_window) how.lower = 1.0f - static_cast<float>(rule.window);
  how.scales = how.bias || rule.soft_cap != 0.0f;
  how.by_reach = rule.span > 0;
  how.any = how.scales || how.by_reach || how.upper == 1.0f || how.lower > kMinusInfinity || !group.all_valid;
  return how;
}

// Scores become -inf where hidden; where the rule has more than a scale, what it says, times log2(e).
template <class T>
void adjust(float* scores, const ScoreRule& rule, const Group<T>& group, const Adjustment& how, MaskedQuery by) {
  const bool capped = rule.soft_cap != 0.0f;
  const float factor = capped ? rule.scale / rule.soft_cap : how.scales ? rule.scale * kLog2E : 1.0f;
  const Vec scale = set1(factor);
  const Vec cap = set1(rule.soft_cap * kLog2E), hidden = set1(kMinusInfinity);
  const Vec slope = set1(how.bias ? by.slope : 0.0f), query = set1(by.position);
  const Vec lower = set1(how.by_reach ? -by.reach : how.lower), upper = set1(how.upper);
  const bool by_position = how.bias || how.by_reach || how.upper == 1.0f || how.lower > kMinusInfinity;
  for (int c = 0; c < group.columns; c += kLanes) {
    Vec x = mul(load(scores + c), scale);
    if (capped) x = mul(tanh(x), cap);
    if (by_position) {
      const Vec distance = sub(load(group.position + c), query);
      if (how.bias) x = fma(slope, distance, x);
      x = keep_between(x, distance, lower, upper, hidden);
    }
    if (!group.all_valid) x = keep_between(x, load(group.valid + c), set1(0.5f), set1(2.0f), hidden);
    store(scores + c, x);
  }
}

}  // namespace
}  // namespace trunkline::TRUNKLINE_NAMESPACE
