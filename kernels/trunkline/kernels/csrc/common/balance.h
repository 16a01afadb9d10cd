// What pieces of work cost, and into how many parts they are cut so that workers have about equally much.
//
// There are two models. On a CPU (`narrow_unit_ns` 0) a piece costs its tokens times (`vectors_per_read` + its query vectors).
// Threads take pieces when they are free, so a few of about equal cost for each thread are enough. Cuts are charged
// for the bytes of the partial results that they add. On a GPU a unit costs nanoseconds: a fixed part and whole tiles,
//
//      narrow_unit_ns + ceil(tokens / tile_tokens) * narrow_tile_ns      or, of a wide unit,
//      wide_unit_ns   + ceil(tokens / tile_tokens) * wide_tile_ns
//
// because a unit of one token takes about as long as a unit of one tile, and the queries of a wide unit take a while.
// Thread blocks start together, so the one with the most work counts. Which cuts are best depends on how units add up
// (17 units take 16 workers as long as 32), so several are tried, by how many units they leave each worker. The best one
// has the least sum of two times: that of the busiest worker, and that of merging the partial results.
#pragma once

#include <cstdint>
#include <vector>

#include "deal.h"

namespace trunkline {

struct WorkOptions;

struct PieceSize {
  int64_t tokens, rows;
};

// Into how many parts each piece is cut along its tokens, in front of the cut by rows (`tile_rows`).
std::vector<int64_t> balanced_parts(const WorkOptions& options, const std::vector<PieceSize>& pieces);

// The kind and cost of the units of a piece, for dealing. Costs are rounded up to five binary digits, by a sixteenth at
// most: pieces that differ little are dealt alike, so that few words change when rows join or leave.
DealtPiece dealt_piece(const WorkOptions& options, const PieceSize& piece);

}  // namespace trunkline
