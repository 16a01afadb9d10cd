// Mixtures of experts: routing, tokens sorted by expert, products only of the experts that have tokens.
//
//      router -> the per_token largest scores of each token -> rows of x, those of an expert adjoining
//             -> all gated layers (one list of units) -> all second layers -> sums by shares
//
// A token's result does not depend on its batch: its experts and shares are its own, a row of a product is the same
// bits beside any other rows, and its sum runs over its experts in ascending order.

#include "experts.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "elementwise.h"
#include "linear_pack.h"
#include "ops.h"

namespace trunkline {
namespace {

constexpr int64_t kTokensPerUnit = 32;

// Where each token goes, in memory of the context. A pair is a token and one of its experts.
struct Routing {
  float* scores;    // [tokens, experts of the layer]
  int32_t* chosen;  // [tokens, per_token], ascending
  float* share;     // [tokens, per_token]
  int32_t* place;   // [tokens, per_token]: row among the pairs that are here, sorted by expert; -1: not here
  int32_t* stops;   // [count]: up to which row an expert's pairs reach
};

char* carved(char*& at, int64_t bytes) {
  char* start = at;
  at += (bytes + 63) / 64 * 64;
  return start;
}

Routing routing_of(CpuContext& context, const ExpertsLayer& layer, int64_t tokens) {
  const int64_t all = layer.router->out_features, pairs = tokens * layer.per_token;
  const int64_t words = tokens * all + 3 * pairs + layer.count;
  char* at = context.routing.reserve(static_cast<size_t>(words * 4 + 5 * 64));
  Routing routing{};
  routing.scores = reinterpret_cast<float*>(carved(at, tokens * all * 4));
  routing.chosen = reinterpret_cast<int32_t*>(carved(at, pairs * 4));
  routing.share = reinterpret_cast<float*>(carved(at, pairs * 4));
  routing.place = reinterpret_cast<int32_t*>(carved(at, pairs * 4));
  routing.stops = reinterpret_cast<int32_t*>(carved(at, layer.count * 4));
  return routing;
}

// Calls `body(token)` for all tokens, on all threads.
template <class Body>
void for_tokens(CpuContext& context, int64_t tokens, Body&& body) {
  context.pool.run((tokens + kTokensPerUnit - 1) / kTokensPerUnit, [&](int64_t unit, int) {
    const int64_t stop = std::min(tokens, (unit + 1) * kTokensPerUnit);
    for (int64_t token = unit * kTokensPerUnit; token < stop; ++token) body(token);
  });
}

// The `count` experts of the largest scores, the first of equal ones, then in ascending order; shares are the
// softmax over them. Distinct whatever the scores are; a score that is not a number makes no share one.
void choose(const float* scores, int64_t experts, int64_t count, int32_t* chosen, float* share) {
  bool are_numbers = true;
  for (int64_t expert = 0; expert < experts; ++expert) {
    are_numbers = are_numbers && !std::isnan(scores[expert]);
    int64_t at = std::min(expert, count);
    if (at == count && !(scores[expert] > scores[chosen[count - 1]])) continue;
    at = std::min(at, count - 1);
    for (; at > 0 && scores[expert] > scores[chosen[at - 1]]; --at) chosen[at] = chosen[at - 1];
    chosen[at] = static_cast<int32_t>(expert);
  }
  const float largest = are_numbers ? scores[chosen[0]] : std::numeric_limits<float>::quiet_NaN();
  std::sort(chosen, chosen + count);
  float total = 0.0f;
  for (int64_t i = 0; i < count; ++i) total += share[i] = std::exp(scores[chosen[i]] - largest);
  for (int64_t i = 0; i < count; ++i) share[i] /= total;
}

// Fills `place` and `stops`; returns the pairs that are here.
int64_t sort_by_expert(const ExpertsLayer& layer, const Routing& routing, int64_t tokens) {
  const int64_t pairs = tokens * layer.per_token;
  const auto local = [&](int64_t pair) { return routing.chosen[pair] - layer.first; };
  const auto here = [&](int64_t expert) { return expert >= 0 && expert < layer.count; };
  std::fill(routing.stops, routing.stops + layer.count, 0);
  for (int64_t pair = 0; pair < pairs; ++pair) {
    if (here(local(pair))) ++routing.stops[local(pair)];
  }
  int32_t before = 0;
  for (int64_t expert = 0; expert < layer.count; ++expert) {
    before += std::exchange(routing.stops[expert], before);  // where it starts, until its pairs are placed
  }
  for (int64_t pair = 0; pair < pairs; ++pair) {
    routing.place[pair] = here(local(pair)) ? routing.stops[local(pair)]++ : -1;
  }
  return before;
}

}  // namespace

void run_experts(CpuContext& context, const ExpertsLayer& layer, const void* x, void* out, int64_t tokens) {
  const LinearLayer& router = *layer.router;
  const Routing routing = routing_of(context, layer, tokens);
  LinearCall scores{};
  scores.layer = &router, scores.x = x, scores.out = routing.scores, scores.float_out = true, scores.rows = tokens;
  run_linear(context, scores);
  for_tokens(context, tokens, [&](int64_t token) {
    choose(routing.scores + token * router.out_features, router.out_features, layer.per_token,
           routing.chosen + token * layer.per_token, routing.share + token * layer.per_token);
  });
  const int64_t pairs = sort_by_expert(layer, routing, tokens);
  const int64_t element_bytes = router.type == DenseType::kFloat32 ? 4 : 2;
  const int64_t row_bytes = router.in_features * element_bytes;
  const int64_t inner_bytes = layer.count == 0 ? 0 : layer.experts[0].up->out_features * element_bytes;
  char* at = context.experts.reserve(static_cast<size_t>(pairs * (2 * row_bytes + inner_bytes) + 3 * 64));
  char* rows = carved(at, pairs * row_bytes);
  char* inner = carved(at, pairs * inner_bytes);
  char* made = carved(at, pairs * row_bytes);
  for_tokens(context, tokens, [&](int64_t token) {
    for (int64_t i = 0; i < layer.per_token; ++i) {
      const int64_t place = routing.place[token * layer.per_token + i];
      if (place < 0) continue;
      const auto bytes = static_cast<size_t>(row_bytes);
      std::memcpy(rows + place * row_bytes, static_cast<const char*>(x) + token * row_bytes, bytes);
    }
  });
  std::vector<LinearCall> ups, downs;
  for (int64_t expert = 0, start = 0; expert < layer.count; start = routing.stops[expert++]) {
    const int64_t own = routing.stops[expert] - start;
    if (own == 0) continue;
    const auto& [up, down] = layer.experts[expert];
    ups.push_back({up, rows + start * row_bytes, inner + start * inner_bytes, false, own});
    downs.push_back({down, inner + start * inner_bytes, made + start * row_bytes, false, own});
  }
  run_linears(context, ups.data(), ups.size());
  run_linears(context, downs.data(), downs.size());
  const MixCall mix{made, routing.place, routing.share, out, layer.per_token, router.in_features};
  run_mix(context, mix, router.type, tokens);
}

}  // namespace trunkline
