// From a decode plan to pieces of work: the part of two-phase-partition attention that knows no hardware.
//
// Shared by the CPU and the CUDA kernels, so that its logic is tested without a GPU. Input: the items of
// `trunkline/kernels/plan.py` (token ranges of blocks, each with the rows that read it). Output: *pieces*, each
// a list of items that one worker reads in order for the same rows:
//
//      items   i0 i1 i2 i3 | i4 | i5 i6 | i7 i8 ...         rows of i0..i3: {0,1,2,3}, of i4: {0,1}, then private
//              └─ run A ─┘  run B  row 0   row 1
//      pieces  A[i0 i1] A[i2 i3] B+...                       long runs are cut, runs that do not pay are pushed
//                                                            down to the runs (or rows) below them
//
// 1. Path compression: consecutive items with the same rows and shifts are one run.
// 2. Cost rule: a run is packed (its rows' queries multiplied together) only if the bytes of KV that this saves
//    exceed the bytes of the partial results that it adds; else its items are pushed down into the runs that
//    follow it for its rows, and at last into each row's private piece, which exists anyway.
// 3. Balance: pieces are cut to about equal cost, with a minimum length (balance.h).
// Each piece is done once per KV head, or for several at once (`unit_vectors`): then it is cut along its tokens rather
// than by heads, whose tiles adjoin in memory.
// 4. Dealing (`dealt`): each worker gets a list of units of its own, longest first (deal.h). The order of pieces, in
// which partials are numbered, stays as it is.
//
// Partials: a row has one partial (O, m, n) per piece that it appears in. `entry_ordinal` numbers a row's partials
// in the order of pieces; a row with a single one needs no merge.
//
// Batch-invariant mode: a row's context is cut after each `invariant_tokens`, counted along its own context, and
// where its shift changes, and nowhere else; rows are packed only where such cuts agree as a whole. So how a
// row's partials come about does not depend on who shares its prefix; merged in the order of ordinals, which
// here is the order of the context, results are equal bit by bit.
// Where cuts agree in part only, rows may still be packed in that part (`carry_tokens`): its piece leaves each row's state
// as it is between two groups of keys, and the row's next piece goes on from it. The sums are the same in the same order,
// so they have the same bits as if the row had read its cut alone:
//
//      cut of row 0   [ 448 shared tokens ][ 40 own ]        piece A: rows 0 and 1, 448 tokens, leaves two states
//      cut of row 1   [ 448 shared tokens ][ 52 own ]        pieces B, C: each continues one of them
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace trunkline {

// The arrays of a `DecodePlan`; see plan.py for their meaning.
struct DecodeItems {
  const int32_t* block;
  const int32_t* first;
  const int32_t* count;
  const int32_t* base;
  const int32_t* row_indptr;  // [items + 1]
  const int32_t* rows;
  const int32_t* shifts;
  const int32_t* tail_item;       // [rows]
  const int32_t* query_position;  // [rows]
  int32_t items;
  int32_t shared_items;
  int32_t num_rows;
};

struct WorkOptions {
  int32_t kv_heads = 1;
  int32_t group = 1;              // query heads per KV head
  int32_t kv_token_bytes = 0;     // K and V of one token and one KV head
  int32_t partial_bytes = 0;      // moved to write, read and merge one partial of one query head
  int32_t tile_rows = 0;          // most query vectors (rows * group) of a piece; 0: no limit
  int32_t workers = 1;            // threads or thread blocks that take pieces
  int32_t pieces_per_worker = 4;  // aimed at
  int32_t piece_tokens_min = 64;  // no cut makes a piece shorter
  int32_t invariant_tokens = 0;   // 0: off
  bool share = true;              // false: every row reads all its items alone (sequence-first, the baseline)
  int32_t vectors_per_read = 16;  // query vectors whose arithmetic takes as long as reading their tokens
  int32_t unit_vectors = 0;       // most query vectors of which a worker takes several KV heads at once; 0: none
  bool dealt = false;             // the plan says which worker does which units (deal.h)
  int32_t narrow_vectors = 0;     // dealt pieces of at most so many query vectors are in lists of their own
  // What units take on a GPU (balance.h). `narrow_unit_ns` 0: costs are counted in query vectors, as on CPUs.
  int32_t narrow_unit_ns = 0;        // a unit of at most `narrow_vectors`, however few tokens it has
  int32_t wide_unit_ns = 0;          // another one
  int32_t tile_tokens = 0;           // tokens that are read at once, at most; begun tiles count whole
  int32_t narrow_tile_ns = 0;        // a tile of a narrow unit
  int32_t wide_tile_ns = 0;          // of a wide one
  int32_t partial_bytes_per_ns = 0;  // with which `partial_bytes` are moved
  // Batch-invariant mode of plans that go on: within a cut, a state may be carried on after multiples of so many tokens,
  // all in whole blocks. 0: never.
  int32_t carry_tokens = 0;
};

// Of an entry's ordinal, where states are carried on. The ordinal itself then counts the row's pieces.
constexpr int32_t kEntryContinues = 1 << 30;  // begins with the state that the row's piece before it left
constexpr int32_t kEntryLeaves = 1 << 29;     // leaves its state to the row's next piece, and is no partial yet
constexpr int32_t kEntryFirst = 1 << 28;  // belongs to the row's first partial, though it is not its first piece
constexpr int32_t kEntryOrdinal = kEntryFirst - 1;

// Little-endian int32 words, position-independent: the same buffer is read on the host and on a device.
enum WorkHeader : int32_t {
  kWorkMagic = 0,  // kWorkMagicValue
  kWorkWords,      // length of the buffer
  kWorkPieces,
  kWorkItems,  // with repetitions of pushed-down ones
  kWorkEntries,
  kWorkRows,
  kWorkPartials,
  kWorkTokens,      // read per KV head and layer, at step 0
  kWorkWidest,      // most rows of a piece
  kWorkPieceItems,  // offsets, in words, of the arrays from here on
  kWorkPieceEntries,
  kWorkItemBlock,
  kWorkItemFirst,
  kWorkItemCount,
  kWorkItemBase,
  kWorkItemTail,
  kWorkEntryRow,
  kWorkEntryShift,
  kWorkEntryOrdinal,
  kWorkRowPartials,
  kWorkQueryPosition,
  // Of a plan that goes on (live_plan.h): whether any entry has a shift, the largest block, how often pieces were made.
  kWorkShifted,
  kWorkLastBlock,
  kWorkMade,
  // Of a plan that goes on: offset of [rows], the item of each row's region in which its token lies, or one in front of
  // it (`token_slot`). 0: there is no such array.
  kWorkRowTail,
  // Of a dealt plan: workers (0: the plan is not dealt), and the offsets of `Deal::bounds` and `Deal::units`.
  kWorkWorkers,
  kWorkUnitBounds,
  kWorkUnits,
  kWorkHeaderWords = 28,
};
constexpr int32_t kWorkMagicValue = 0x54504157;

#if defined(__CUDACC__)
#define TRUNKLINE_HOST_DEVICE __host__ __device__
#else
#define TRUNKLINE_HOST_DEVICE
#endif

// The arrays inside such a buffer.
struct WorkView {
  int32_t pieces, entries, rows, partials, tokens, widest, workers;
  const int32_t* piece_items;    // [pieces, 2] into the item arrays: first, and behind the last
  const int32_t* piece_entries;  // [pieces + 1] into the entry arrays
  const int32_t* item_block;
  const int32_t* item_first;
  const int32_t* item_count;  // at step 0; may be negative where it grows
  const int32_t* item_base;
  const int32_t* item_tail;  // not 0: the count grows by one token per step, from 0 on and up to this many
  const int32_t* entry_row;  // ascending within a piece
  const int32_t* entry_shift;
  const int32_t* entry_ordinal;   // this piece makes the row's partial number ...
  const int32_t* row_partials;    // [rows + 1]: the row's partials are these slots
  const int32_t* query_position;  // [rows], at step 0
  const int32_t* unit_bounds;     // [2 * workers + 1] into the units; see `Deal`
  const int32_t* units;

  TRUNKLINE_HOST_DEVICE explicit WorkView(const int32_t* w)
      : pieces(w[kWorkPieces]),
        entries(w[kWorkEntries]),
        rows(w[kWorkRows]),
        partials(w[kWorkPartials]),
        tokens(w[kWorkTokens]),
        widest(w[kWorkWidest]),
        workers(w[kWorkWorkers]),
        piece_items(w + w[kWorkPieceItems]),
        piece_entries(w + w[kWorkPieceEntries]),
        item_block(w + w[kWorkItemBlock]),
        item_first(w + w[kWorkItemFirst]),
        item_count(w + w[kWorkItemCount]),
        item_base(w + w[kWorkItemBase]),
        item_tail(w + w[kWorkItemTail]),
        entry_row(w + w[kWorkEntryRow]),
        entry_shift(w + w[kWorkEntryShift]),
        entry_ordinal(w + w[kWorkEntryOrdinal]),
        row_partials(w + w[kWorkRowPartials]),
        query_position(w + w[kWorkQueryPosition]),
        unit_bounds(w + w[kWorkUnitBounds]),
        units(w + w[kWorkUnits]) {}
};

// How many tokens an item has at a step.
TRUNKLINE_HOST_DEVICE inline int32_t item_tokens(int32_t count, int32_t tail, int32_t steps) {
  if (tail == 0) return count;
  const int32_t grown = count + steps;
  return grown < 0 ? 0 : grown < tail ? grown : tail;
}

// Where a row's token lies in the pool at a step, as block * chunk + offset: in the first item from `tail` on, in the
// row's region, that the row has not filled before. A tail that goes on in the next block needs no word for that.
TRUNKLINE_HOST_DEVICE inline int32_t token_slot(const WorkView& work, int32_t tail, int32_t steps, int32_t chunk) {
  while (work.item_count[tail] + steps > work.item_tail[tail]) ++tail;
  return work.item_block[tail] * chunk + work.item_first[tail] + work.item_count[tail] + steps - 1;
}

// Throws std::invalid_argument for options that no plan can follow.
void check_options(const WorkOptions& options);

// Throws std::invalid_argument for items that contradict each other.
std::vector<int32_t> plan_decode_work(const DecodeItems& items, const WorkOptions& options);

}  // namespace trunkline
