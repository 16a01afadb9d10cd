// Mixtures of experts: a token goes to a few of many gated layers, whose results are summed by its shares of them.
//
// Plain data only: this header is compiled once per level.
#pragma once

#include <cstdint>

#include "linear.h"

namespace trunkline {

struct Expert {
  const LinearLayer* up;  // gated
  const LinearLayer* down;
};

// A layer's experts, as far as they are here.
struct ExpertsLayer {
  const LinearLayer* router;  // one output per expert of the layer
  const Expert* experts;      // [count], of the type and width of the router's x
  int64_t first;              // among the layer's experts, of `experts[0]`
  int64_t count;
  int64_t per_token;  // experts that a token goes to
  // How the router's outputs become shares (`trunkline/kernels/routing.py`).
  bool sigmoid;              // else a softmax
  bool normalised;           // shares are divided by their sum
  bool scales_inputs;        // shares multiply what experts read, not what they make
  float factor;              // of the shares, behind that
  const float* choice_bias;  // one per expert of the layer, for the choice alone; null: none
  const float* scale;        // one per expert of the layer, factor of its shares; null: none
  int64_t groups;            // of neighbouring experts
  int64_t groups_per_token;  // those whose best scores have the largest sum
  int64_t group_best;        // how many of a group's scores: 2, or 1, as always where nothing is scored

  // Whether the router's outputs become scores before the choice; else a softmax need not be computed for it.
  bool is_scored() const { return sigmoid || choice_bias != nullptr; }
  // Whether experts are not simply chosen by the router's outputs.
  bool has_keys() const { return is_scored() || groups_per_token < groups; }
};

// Sums results by shares: out[token] = sum over i of share[token, i] * made[place[token, i]], in this order.
struct MixCall {
  const void* made;      // [pairs, width]
  const int32_t* place;  // [tokens, per_token]; -1: that expert is not here
  const float* share;    // [tokens, per_token]
  void* out;             // [tokens, width]
  int64_t per_token, width;
};

}  // namespace trunkline
