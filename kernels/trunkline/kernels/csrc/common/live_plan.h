// The decode plan that goes on from step to step: rows join, leave and grow, and only words that differ are written.
//
// `plan_decode_work` (work_plan.h) makes the same buffer from nothing, from items grouped elsewhere; it defines what
// a plan computes. Here every row has a region of the item arrays that holds its whole context in order, blocks
// that it will fill later included. So a piece is a range of one row's region: of its only row, or of one of the
// rows that share these tokens. What changes costs:
//
//      a step                          nothing: counts grow by the step, a tail goes on in the item behind it
//      a block more for a row          one item, and the end of the row's last piece
//      rows join, leave, change        their own items; the pieces anew, from where neighbours part
//
// Sharing: each part of a row's context that acts at one shift is a *path*, its blocks in order. Paths are kept
// sorted, with the number of segments that each has in common with the one before it; two paths share exactly their
// common beginning (a prefix tree without nodes: ChunkAttention §3.1). So no caller says which rows share what,
// and rows may be in any order. Cost rule, balance and invariant mode are those of work_plan.h, with two differences:
// a row's private tokens in front of and behind a packed run are two pieces, and a cut of the balance stays where it
// was until rows change or contexts have grown by an eighth.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "work_plan.h"

namespace trunkline {

class LivePlan {
 public:
  LivePlan(const WorkOptions& options, int32_t chunk_size, bool keep_changes);

  // Carries out changes, which take effect at step `now`; see `LiveChange`. `now` never decreases.
  // Throws std::invalid_argument for changes that contradict the plan, which is unusable from then on.
  void apply(const int32_t* changes, int64_t length);

  // The buffer that `WorkView` reads. It stays where it is until `generation` changes.
  const std::shared_ptr<int32_t[]>& memory() const { return memory_; }
  int64_t words() const { return words_; }
  int64_t generation() const { return generation_; }
  // Appends (index, value) of every word written since the last call, if changes are kept. Words of another
  // generation have to be taken whole.
  void take_changes(std::vector<int32_t>& out);

 private:
  struct Segment {
    int32_t block, first, size, base;
    int32_t offset;  // tokens of the row's context in front of it
  };
  struct Path {
    int32_t start, stop;  // segments; of the last path `stop` is the tail
    int32_t shift;
    int32_t ordinal, phase;  // paths with others share nothing; see `key_paths`
    int32_t alone;           // first segment that no packed run in front of it covers
  };
  struct Row {
    bool used = false;
    int32_t index = 0;                 // in the batch
    int32_t region = 0, capacity = 0;  // in the item arrays
    int32_t tail = 0;                  // segment that grows; those behind it come later
    int32_t length0 = 0, query0 = 0;   // tokens that the query sees, its position: at step 0
    int32_t last_piece = 0;            // the one with its tail
    std::vector<Segment> segments;
    std::vector<Path> paths;
  };
  struct PathAt {
    int32_t row, path;
  };
  struct Piece {
    int32_t leader, from, to;  // segments of a row
    int32_t entry, entries;    // in `piece_rows_`
    int32_t tokens;
    int32_t ordinal;  // of the cut, in the invariant mode
    int32_t behind;   // segments of the cut in front of it, whose state it continues
  };

  struct Table {
    const int32_t* blocks;
    int32_t count;
  };
  class Reader;
  [[noreturn]] static void fail(const std::string& sentence);

  // Rows (live_plan.cc).
  void read_rows(Reader& in);
  void read_row(Reader& in);
  void read_blocks(Reader& in);
  void read_length(Reader& in);
  void read_like(Reader& in);
  int32_t place_of(int32_t index) const;
  void build_segments(Row& row, const int32_t* spans, int32_t span_count, const Table& table);
  void add_segments(Row& row, const int32_t* span, bool open, const Table& table);
  void key_paths(Row& row);
  void put_in_place(int32_t place);
  void displace(int32_t place);
  void give_region(Row& row);
  void find_tail(Row& row) const;
  void cross(int32_t place);
  int32_t length(const Row& row) const { return row.length0 + now_; }
  void advance();

  // The sorted paths (live_plan.cc).
  int32_t shared_segments(const PathAt& a, const PathAt& b, bool* before) const;
  void insert(const PathAt& at);
  void remove(const PathAt& at);
  size_t find(const PathAt& at) const;
  const Path& path(const PathAt& at) const { return rows_[at.row].paths[at.path]; }

  // Pieces (live_pieces.cc).
  void make_pieces();
  void round_agreed();
  bool ends_cut(const PathAt& at, int32_t segments) const;
  void split(size_t low, size_t high, int32_t from, int32_t depth);
  int32_t take_run(size_t low, size_t high, int32_t from, int32_t depth);
  void add_piece(size_t low, size_t high, int32_t from, int32_t to);
  int32_t add_cuts(size_t low, size_t high, int32_t from, int32_t to);
  void add_private_pieces();
  bool is_worth_packing(int64_t rows, int64_t tokens) const;
  int32_t tokens_of(const Row& row, int32_t from, int32_t to) const;
  int32_t visible(const Row& row) const;
  bool cuts_between(const Row& row, int32_t segment) const;
  int32_t segments_behind_cut(const Row& row, int32_t start, int32_t segment) const;
  bool may_carry(const PathAt& at, int32_t segments) const;
  void order_cuts();
  void balance();
  void tile();

  // Words (live_pieces.cc).
  void put(int64_t at, int32_t value);
  void lay_out();
  int32_t allocate(int32_t capacity);
  void release(Row& row);
  void write_items(const Row& row, int32_t from);
  void write_pieces();
  void write_deal();
  int64_t entries() const;
  std::vector<int32_t> entry_ordinals(std::vector<int32_t>& partials) const;
  void write_tail(const Row& row);
  void extend_last_piece(const Row& row, int32_t segments);

  const WorkOptions options_;
  const int32_t chunk_;
  const bool keep_changes_;
  int32_t now_ = 0;
  std::vector<Row> rows_;       // by place; places of rows that left are taken again
  std::vector<int32_t> free_;   // places
  std::vector<int32_t> order_;  // place of each row of the batch
  std::vector<PathAt> sorted_;
  std::vector<int32_t> agreed_;  // segments shared with the path before
  std::vector<int32_t> rounded_;
  std::vector<Piece> pieces_;
  std::vector<PathAt> piece_rows_;
  bool pieces_stale_ = true, layout_stale_ = true;
  int64_t tokens_ = 0;   // read at the step in which pieces were made
  int32_t made_at_ = 0;  // that step
  int32_t made_ = 0;     // how often pieces were made
  int32_t last_block_ = -1;

  std::shared_ptr<int32_t[]> memory_;
  int64_t words_ = 0, generation_ = 0;
  int32_t row_capacity_ = 0, piece_capacity_ = 0, entry_capacity_ = 0, item_capacity_ = 0;
  int32_t item_end_ = 0;                            // items from here on were never given to a row
  std::vector<std::vector<int32_t>> free_regions_;  // by the logarithm of their size
  std::vector<int32_t> changed_;
};

// Changes are words: the step, then any number of these with their arguments.
enum LiveChange : int32_t {
  kLiveRows =
      1,        // n, then for each row of the batch its index before, or -1: it is told with kLiveRow or kLiveLike
  kLiveRow,     // row, tokens seen, n, n spans of six words (`ContextLayout.spans`), m, m blocks
  kLiveBlocks,  // row, m, m further blocks
  kLiveLength,  // row, tokens seen
  kLiveLike,    // row, row whose table it has, too, tokens seen
};

}  // namespace trunkline
