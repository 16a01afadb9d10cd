// Which worker does which units of work: longest first.
//
// A *unit* is a piece for one KV head. Thread blocks of a GPU start together and each goes through its own units, so a
// step takes as long as the worker with the most. Units are dealt in the order of their cost, the longest first, each
// to the worker that has least so far (Graham, 1969). With `mean` the cost of all units divided by the workers, the
// worker with the most has
//
//      at most mean + (1 - 1 / workers) * longest, and at most 4/3 of the least that any dealing reaches
//
// and never more than if units were taken in turns (unit u by worker u % workers): where turns happen to be better,
// they are kept.
//
// Units are *wide* or *narrow*, and a worker does its wide ones first: a kernel may have another layout for each kind.
#pragma once

#include <cstdint>
#include <vector>

namespace trunkline {

struct DealtPiece {
  int64_t cost;  // of one unit, positive
  bool is_narrow;
};

struct Deal {
  std::vector<int32_t> bounds;  // [2 * workers + 1]: worker w does units [bounds[2 w], bounds[2 w + 1]), which are
                                // wide, then those up to bounds[2 w + 2], which are narrow
  std::vector<int32_t> units;   // piece * kv_heads + KV head; each is there once
};

// Units that cost the same.
struct EqualUnits {
  int64_t cost, count;
};

// How much the worker with the most has if units are dealt longest first.
int64_t busiest(std::vector<EqualUnits> units, int32_t workers);

Deal deal_units(const std::vector<DealtPiece>& pieces, int32_t kv_heads, int32_t workers);

}  // namespace trunkline
