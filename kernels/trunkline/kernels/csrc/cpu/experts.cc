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
  float* keys;      // the same, by which experts are chosen; may be the scores
  int32_t* chosen;  // [tokens, per_token], ascending
  float* share;     // [tokens, per_token]
  int32_t* place;   // [tokens, per_token]: row among the pairs that are here, sorted by expert; -1: not here
  int32_t* stops;   // [count, kinds]: up to which row the pairs of an expert and a kind reach
  int64_t kinds;    // of tokens: those without an adapter, then those of each adapter of the step
};

char* carved(char*& at, int64_t bytes) {
  char* start = at;
  at += (bytes + 63) / 64 * 64;
  return start;
}

Routing routing_of(CpuContext& context, const ExpertsLayer& layer, int64_t tokens, int64_t kinds) {
  const int64_t all = layer.router->out_features, pairs = tokens * layer.per_token;
  const int64_t key_words = layer.has_keys() ? tokens * all : 0;
  const int64_t words = tokens * all + key_words + 3 * pairs + layer.count * kinds;
  char* at = context.routing.reserve(static_cast<size_t>(words * 4 + 6 * 64));
  Routing routing{};
  routing.scores = reinterpret_cast<float*>(carved(at, tokens * all * 4));
  routing.keys = layer.has_keys() ? reinterpret_cast<float*>(carved(at, key_words * 4)) : routing.scores;
  routing.chosen = reinterpret_cast<int32_t*>(carved(at, pairs * 4));
  routing.share = reinterpret_cast<float*>(carved(at, pairs * 4));
  routing.place = reinterpret_cast<int32_t*>(carved(at, pairs * 4));
  routing.stops = reinterpret_cast<int32_t*>(carved(at, layer.count * kinds * 4));
  routing.kinds = kinds;
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

// The sum of a group's two largest keys, or of the largest alone.
float group_score(const float* keys, int64_t size, int64_t best) {
  if (size == 1) return keys[0];
  if (best == 1) return *std::max_element(keys, keys + size);
  float first = std::max(keys[0], keys[1]), second = std::min(keys[0], keys[1]);
  for (int64_t i = 2; i < size; ++i) {
    second = std::max(second, std::min(first, keys[i]));
    first = std::max(first, keys[i]);
  }
  return first + second;
}

// Leaves the keys of a token's groups as they are, and makes those of the others the least.
void keep_groups(const ExpertsLayer& layer, float* keys, std::vector<float>& scores) {
  const int64_t size = layer.router->out_features / layer.groups;
  scores.resize(static_cast<size_t>(layer.groups));
  for (int64_t group = 0; group < layer.groups; ++group) {
    scores[static_cast<size_t>(group)] = group_score(keys + group * size, size, layer.group_best);
  }
  for (int64_t group = 0; group < layer.groups; ++group) {
    const float own = scores[static_cast<size_t>(group)];
    int64_t better = 0;
    for (int64_t other = 0; other < layer.groups; ++other) {
      const float score = scores[static_cast<size_t>(other)];
      better += score > own || (score == own && other < group);
    }
    if (better < layer.groups_per_token) continue;
    std::fill(keys + group * size, keys + (group + 1) * size, -std::numeric_limits<float>::infinity());
  }
}

void make_softmax(float* scores, int64_t count) {
  const float largest = *std::max_element(scores, scores + count);
  float total = 0.0f;
  for (int64_t i = 0; i < count; ++i) total += scores[i] = std::exp(scores[i] - largest);
  for (int64_t i = 0; i < count; ++i) scores[i] /= total;
}

// Makes keys by which a token's experts are chosen; scores become sigmoids, or a softmax if something is added to it.
// Its order is else that of the router's outputs.
void make_keys(const ExpertsLayer& layer, float* scores, float* keys) {
  if (layer.is_scored() && !layer.sigmoid) make_softmax(scores, layer.router->out_features);
  for (int64_t expert = 0; expert < layer.router->out_features; ++expert) {
    if (layer.sigmoid) scores[expert] = 1.0f / (1.0f + std::exp(-scores[expert]));
    keys[expert] = scores[expert] + (layer.choice_bias == nullptr ? 0.0f : layer.choice_bias[expert]);
  }
  if (layer.groups_per_token == layer.groups) return;
  thread_local std::vector<float> groups;
  keep_groups(layer, keys, groups);
}

// The shares of the chosen experts: of a softmax over them or over all of the scores, or the scores themselves.
void make_shares(const ExpertsLayer& layer, const float* scores, const int32_t* chosen, float largest,
                 float* share) {
  const int64_t experts = layer.router->out_features, count = layer.per_token;
  float total = layer.is_scored() ? 1e-20f : 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    share[i] = layer.is_scored() ? scores[chosen[i]] : std::exp(scores[chosen[i]] - largest);
    total += share[i];
  }
  if (!layer.normalised) total = 1.0f;
  if (!layer.normalised && !layer.is_scored()) {
    total = 0.0f;
    for (int64_t expert = 0; expert < experts; ++expert) total += std::exp(scores[expert] - largest);
  }
  for (int64_t i = 0; i < count; ++i) {
    share[i] = share[i] / total * layer.factor;
    if (layer.scale != nullptr) share[i] *= layer.scale[chosen[i]];
  }
}

// The experts of the largest keys, the first of equal ones, then in ascending order, and their shares. Distinct
// whatever the scores are; a score that is not a number makes no share one.
void choose(const ExpertsLayer& layer, float* scores, float* keys, int32_t* chosen, float* share) {
  const int64_t experts = layer.router->out_features, count = layer.per_token;
  const bool are_numbers = std::none_of(scores, scores + experts, [](float score) { return std::isnan(score); });
  if (layer.has_keys()) make_keys(layer, scores, keys);
  for (int64_t expert = 0; expert < experts; ++expert) {
    int64_t at = std::min(expert, count);
    if (at == count && !(keys[expert] > keys[chosen[count - 1]])) continue;
    at = std::min(at, count - 1);
    for (; at > 0 && keys[expert] > keys[chosen[at - 1]]; --at) chosen[at] = chosen[at - 1];
    chosen[at] = static_cast<int32_t>(expert);
  }
  const float largest = scores[chosen[0]];
  std::sort(chosen, chosen + count);
  make_shares(layer, scores, chosen, largest, share);
  if (!are_numbers) std::fill(share, share + count, std::numeric_limits<float>::quiet_NaN());
}

// The kind of each token (`Routing::kinds`); empty: no token has an adapter.
std::vector<int32_t> token_kinds(const OpAdapters& adapted, int64_t tokens) {
  if (adapted.rows == nullptr) return {};
  std::vector<int32_t> kinds(static_cast<size_t>(tokens), 0);
  int32_t kind = 0;
  for (const auto& group : adapted.rows->groups) {
    ++kind;
    for (int64_t i = group.start; i < group.stop; ++i) {
      kinds[static_cast<size_t>(adapted.rows->rows[static_cast<size_t>(i)])] = kind;
    }
  }
  return kinds;
}

// Fills `place` and `stops`; returns the pairs that are here.
int64_t sort_by_expert(const ExpertsLayer& layer, const Routing& routing, int64_t tokens,
                       const std::vector<int32_t>& kind) {
  const int64_t buckets = layer.count * routing.kinds;
  std::fill(routing.stops, routing.stops + buckets, 0);
  // Calls `body(pair, bucket)` for all pairs, -1 for those that are not here.
  const auto for_pairs = [&](auto&& body) {
    for (int64_t token = 0; token < tokens; ++token) {
      const int64_t own = kind.empty() ? 0 : kind[static_cast<size_t>(token)];
      for (int64_t pair = token * layer.per_token; pair < (token + 1) * layer.per_token; ++pair) {
        const int64_t expert = routing.chosen[pair] - layer.first;
        body(pair, expert >= 0 && expert < layer.count ? expert * routing.kinds + own : -1);
      }
    }
  };
  for_pairs([&](int64_t, int64_t bucket) {
    if (bucket >= 0) ++routing.stops[bucket];
  });
  int32_t before = 0;
  for (int64_t bucket = 0; bucket < buckets; ++bucket) {
    before += std::exchange(routing.stops[bucket], before);  // where it starts, until its pairs are placed
  }
  for_pairs(
      [&](int64_t pair, int64_t bucket) { routing.place[pair] = bucket >= 0 ? routing.stops[bucket]++ : -1; });
  return before;
}

// The pairs that have adapters, as rows of an expert's first layer (`side` 0) or second.
std::vector<AdaptedRun> adapted_runs(const ExpertsLayer& layer, const Routing& routing, const OpAdapters& adapted,
                                     size_t side) {
  std::vector<AdaptedRun> runs;
  for (int64_t expert = 0, start = 0; expert < layer.count; ++expert) {
    for (int64_t kind = 0; kind < routing.kinds; ++kind) {
      const int64_t stop = routing.stops[expert * routing.kinds + kind];
      if (kind > 0 && stop > start) {
        const int32_t adapter = adapted.rows->groups[static_cast<size_t>(kind - 1)].adapter;
        runs.push_back({adapter, 1 + 2 * static_cast<size_t>(expert) + side, start, stop});
      }
      start = stop;
    }
  }
  return runs;
}

// Runs one layer of each expert that has pairs, and adds what adapters add.
void run_side(CpuContext& context, std::vector<LinearCall>& calls, const ExpertsLayer& layer,
              const Routing& routing, const OpAdapters& adapted, size_t side, const void* x, int64_t pairs) {
  std::vector<int32_t> place;
  if (routing.kinds > 1 && !calls.empty()) {
    const LinearLayer& own = *calls[0].layer;
    const int64_t width = own.activation == Activation::kNone ? own.out_features : 2 * own.out_features;
    const std::vector<AdaptedRun> runs = adapted_runs(layer, routing, adapted, side);
    Addend addend = adapter_addend(context, adapted, runs, width, own.type, x, pairs, place);
    for (LinearCall& call : calls) {
      if (addend.values == nullptr) break;
      call.addend = addend;
      addend.place += call.rows;  // calls are in the order of the pairs
    }
  }
  run_linears(context, calls.data(), calls.size());
}

}  // namespace

void run_experts(CpuContext& context, const ExpertsLayer& layer, const void* router_x, const void* x, void* out,
                 int64_t tokens, const OpAdapters& adapted) {
  const LinearLayer& router = *layer.router;
  const int64_t kinds = adapted.rows == nullptr ? 1 : 1 + static_cast<int64_t>(adapted.rows->groups.size());
  const Routing routing = routing_of(context, layer, tokens, kinds);
  LinearCall scores{};
  scores.layer = &router, scores.x = router_x, scores.out = routing.scores, scores.float_out = true,
  scores.rows = tokens;
  scores.addend = adapter_addend(context, router, adapted, 0, router_x);
  run_linear(context, scores);
  for_tokens(context, tokens, [&](int64_t token) {
    const int64_t first = token * router.out_features, own = token * layer.per_token;
    choose(layer, routing.scores + first, routing.keys + first, routing.chosen + own, routing.share + own);
  });
  const int64_t pairs = sort_by_expert(layer, routing, tokens, token_kinds(adapted, tokens));
  const int64_t element_bytes = router.type == DenseType::kFloat32 ? 4 : 2;
  const int64_t row_bytes = router.in_features * element_bytes;
  const int64_t inner_bytes = layer.count == 0 ? 0 : layer.experts[0].up->out_features * element_bytes;
  char* at = context.experts.reserve(static_cast<size_t>(pairs * (2 * row_bytes + inner_bytes) + 3 * 64));
  char* rows = carved(at, pairs * row_bytes);
  char* inner = carved(at, pairs * inner_bytes);
  char* made = carved(at, pairs * row_bytes);
  const auto scale = element_range(context.level, ElementOp::kScale, router.type);
  for_tokens(context, tokens, [&](int64_t token) {
    for (int64_t pair = token * layer.per_token; pair < (token + 1) * layer.per_token; ++pair) {
      const int64_t place = routing.place[pair];
      if (place < 0) continue;
      const auto bytes = static_cast<size_t>(row_bytes);
      std::memcpy(rows + place * row_bytes, static_cast<const char*>(x) + token * row_bytes, bytes);
      if (!layer.scales_inputs) continue;
      scale({rows + place * row_bytes, nullptr, routing.share[pair]}, 0, router.in_features);
      routing.share[pair] = 1.0f;
    }
  });
  std::vector<LinearCall> ups, downs;
  for (int64_t expert = 0, start = 0, stop = 0; expert < layer.count; ++expert, start = stop) {
    stop = routing.stops[(expert + 1) * kinds - 1];
    const int64_t own = stop - start;
    if (own == 0) continue;
    const auto& [up, down] = layer.experts[expert];
    ups.push_back({up, rows + start * row_bytes, inner + start * inner_bytes, false, own});
    downs.push_back({down, inner + start * inner_bytes, made + start * row_bytes, false, own});
  }
  run_side(context, ups, layer, routing, adapted, 0, rows, pairs);
  run_side(context, downs, layer, routing, adapted, 1, inner, pairs);
  const MixCall mix{made, routing.place, routing.share, out, layer.per_token, router.in_features};
  run_mix(context, mix, router.type, tokens);
}

}  // namespace trunkline
