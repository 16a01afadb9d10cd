// What units to come read first, fetched while this one multiplies.
//
// A unit of many query vectors works for long on what it has read, and memory is idle meanwhile; the units of few behind
// it wait for memory. So the one fetches the tiles of the others, a line in each step of its products: there it costs
// nothing, while the same lines, asked for between two products of vectors, cost as much as they save. In front of
// a product of matrix registers 12 or 32 lines are asked for at once.
#pragma once

#include "attention.h"
#include "attention_group.h"

namespace trunkline::TRUNKLINE_NAMESPACE {
namespace {

// Of two kinds: the unit's own next tile, which comes first, and those of pieces of other units.
class TilesAhead {
 public:
  // Those of pieces [first, last), all heads, in the order in which they are read.
  TRUNKLINE_INLINE TilesAhead(const DecodeCall& call, int first, int last)
      : call_(call), piece_(first), last_(last) {
    enter_piece();
  }

  // These bytes come before all others.
  TRUNKLINE_INLINE void begin_with(const char* bytes, long count) { urgent_ = bytes, urgent_end_ = bytes + count; }

  // Where the next `bytes` begin, of which the last may be too many; null: there are none.
  TRUNKLINE_INLINE const char* next(long bytes) {
    if (urgent_ < urgent_end_) return advance(urgent_, bytes);
    if (at_ >= end_ && !next_tile()) return nullptr;
    return advance(at_, bytes);
  }

 private:
  TRUNKLINE_INLINE static const char* advance(const char*& at, long bytes) {
    const char* begin = at;
    at += bytes;
    return begin;
  }

  TRUNKLINE_INLINE void enter_piece() {
    if (piece_ >= last_) return;
    item_ = call_.work.piece_items[2 * piece_], item_end_ = call_.work.piece_items[2 * piece_ + 1];
  }

  bool next_tile() {
    const WorkView& work = call_.work;
    const PoolView& pool = call_.pool;
    while (piece_ < last_) {
      if (item_ == item_end_) {
        ++piece_;
        enter_piece();
        continue;
      }
      const long rows = item_tokens(work.item_count[item_], work.item_tail[item_], call_.steps);
      const long band = tile_ / pool.kv_heads, head = tile_ % pool.kv_heads;
      at_ =
          tile_of(pool, work.item_block[item_], call_.layer, band, head) + work.item_first[item_] * pool.row_bytes;
      end_ = at_ + rows * pool.row_bytes;
      if (++tile_ == pool.bands * pool.kv_heads) tile_ = 0, ++item_;
      if (rows > 0) return true;
    }
    return false;
  }

  const DecodeCall& call_;
  const char *urgent_ = nullptr, *urgent_end_ = nullptr;
  const char *at_ = nullptr, *end_ = nullptr;
  int piece_, last_;
  int item_ = 0, item_end_ = 0;
  long tile_ = 0;  // of the item: band and head
};

}  // namespace
}  // namespace trunkline::TRUNKLINE_NAMESPACE
