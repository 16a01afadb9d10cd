// From a prefill plan to pieces of work, with the words of decode's (work_plan.h), so that one kernel serves both.
//
// A piece is a tile of consecutive queries of an entry and a run of items with equal shift; its rows see keys up to
// their own position. Plans whose partials do not fit the workspace are in parts, executed one after the other; each
// has some of the rows, which count from 0, with the same pieces in the same order as the whole plan.
#pragma once

#include <cstdint>
#include <vector>

namespace trunkline {

// The arrays of a `PrefillPlan`; see plan.py for their meaning.
struct PrefillItems {
  const int32_t* query_indptr;    // [entries + 1]
  const int32_t* query_position;  // [queries]
  const int32_t* item_indptr;     // [entries + 1]
  const int32_t* block;           // these [items]
  const int32_t* first;
  const int32_t* count;
  const int32_t* base;
  const int32_t* shift;
  int32_t entries;
  int32_t queries;
  int32_t items;
};

struct PrefillCut {
  int32_t rows_per_tile = 1;
  int64_t units_wanted = 1;          // pieces below which long contexts are cut
  int32_t piece_tokens_min = 1;      // no cut makes a piece shorter
  int32_t piece_tokens = 0;          // tokens of every piece, whatever the batch; 0: as the batch is
  int64_t partials_max = INT64_MAX;  // of one part, unless a single tile has more
};

struct PrefillPart {
  int32_t row_start, row_stop;
  int32_t piece_start, piece_stop;
  int32_t partials;
  int64_t word;  // where its words begin: at a multiple of 4
};

struct PrefillWork {
  std::vector<int32_t> words;
  std::vector<PrefillPart> parts;
};

// Throws std::invalid_argument for arrays that contradict each other.
PrefillWork plan_prefill_work(const PrefillItems& items, const PrefillCut& cut);

}  // namespace trunkline
