// Of LivePlan: pieces from the sorted paths, and the words.
#include <algorithm>

#include "balance.h"
#include "live_plan.h"

namespace trunkline {
namespace {

int32_t power_of_two(int64_t needed, int32_t least) {
  int32_t capacity = least;
  while (capacity < needed) capacity *= 2;
  return capacity;
}

}  // namespace

void LivePlan::make_pieces() {
  pieces_.clear(), piece_rows_.clear();
  round_agreed();
  size_t low = 0;
  for (size_t i = 1; i <= sorted_.size(); ++i) {
    if (i < sorted_.size() && rounded_[i] > 0) continue;
    split(low, i, 0, 0);
    low = i;
  }
  if (options_.invariant_tokens > 0) {
    order_cuts();
  } else {
    add_private_pieces();
    balance();
  }
  tile();
  tokens_ = 0;
  for (const Piece& piece : pieces_) tokens_ += piece.tokens;
  pieces_stale_ = false;
  made_at_ = now_;
  ++made_;
}

// Whether a cut of the invariant mode lies in front of this segment, which is not the first one of its path.
bool LivePlan::cuts_between(const Row& row, int32_t segment) const {
  const auto at = static_cast<size_t>(segment);
  return row.segments[at - 1].offset / options_.invariant_tokens !=
         row.segments[at].offset / options_.invariant_tokens;
}

// Whether the first `segments` of a path are whole cuts.
bool LivePlan::ends_cut(const PathAt& at, int32_t segments) const {
  const Row& row = rows_[static_cast<size_t>(at.row)];
  const Path& path = row.paths[static_cast<size_t>(at.path)];
  const bool last = static_cast<size_t>(at.path) + 1 == row.paths.size();
  if (segments == 0 || (!last && path.start + segments == path.stop)) return true;
  return cuts_between(row, path.start + segments);
}

// How many segments stand between the last cut and this one, of a path that begins with `start`.
int32_t LivePlan::segments_behind_cut(const Row& row, int32_t start, int32_t segment) const {
  int32_t at = segment;
  while (at > start && !cuts_between(row, at)) --at;
  return segment - at;
}

// Whether a state may be carried on behind the first `segments` of a path: the groups of keys in front of that place, in
// its cut, are whole whether the path goes on or not.
bool LivePlan::may_carry(const PathAt& at, int32_t segments) const {
  if (options_.carry_tokens == 0) return false;
  const Row& row = rows_[static_cast<size_t>(at.row)];
  const int32_t start = path(at).start, end = start + segments;
  const int32_t behind = segments_behind_cut(row, start, end);
  for (int32_t i = end - behind; i < end; ++i) {
    const Segment& segment = row.segments[static_cast<size_t>(i)];
    if (segment.first != 0 || segment.size != chunk_) return false;
  }
  return int64_t{behind} * chunk_ % options_.carry_tokens == 0;
}

// In the invariant mode paths share whole cuts only, or whole groups of keys in front of where a state may be carried on.
void LivePlan::round_agreed() {
  rounded_ = agreed_;
  if (options_.invariant_tokens == 0) return;
  const auto may_end = [this](const PathAt& at, int32_t segments) {
    return ends_cut(at, segments) || may_carry(at, segments);
  };
  for (size_t i = 1; i < sorted_.size(); ++i) {
    int32_t& agreed = rounded_[i];
    while (agreed > 0 && !(may_end(sorted_[i - 1], agreed) && may_end(sorted_[i], agreed))) --agreed;
  }
}

// Gives out the segments of paths [low, high), which agree in the first `depth`; those before `from` are in pieces.
void LivePlan::split(size_t low, size_t high, int32_t from, int32_t depth) {
  if (high - low == 1) {
    const PathAt& at = sorted_[low];
    Row& row = rows_[static_cast<size_t>(at.row)];
    Path& path = row.paths[static_cast<size_t>(at.path)];
    path.alone = path.start + from;
    const bool last = static_cast<size_t>(at.path) + 1 == row.paths.size();
    if (options_.invariant_tokens > 0) add_cuts(low, high, from, (last ? visible(row) : path.stop) - path.start);
    return;
  }
  const int32_t agreed = *std::min_element(rounded_.begin() + static_cast<int64_t>(low) + 1,
                                           rounded_.begin() + static_cast<int64_t>(high));
  if (agreed > depth) from = take_run(low, high, from, agreed);
  for (size_t i = low + 1; i <= high; ++i) {
    if (i < high && rounded_[i] > agreed) continue;
    split(low, i, from, agreed);
    low = i;
  }
}

// Packs segments [from, to) of the paths if that pays; returns from which on they are still to be given out.
int32_t LivePlan::take_run(size_t low, size_t high, int32_t from, int32_t to) {
  if (options_.invariant_tokens > 0) return add_cuts(low, high, from, to);
  const Row& leader = rows_[static_cast<size_t>(sorted_[low].row)];
  const int32_t start = path(sorted_[low]).start;
  if (!is_worth_packing(static_cast<int64_t>(high - low), tokens_of(leader, start + from, start + to)))
    return from;
  add_piece(low, high, from, to);
  return to;
}

// The cuts of segments [from, to), or of as many first ones as pay: where only a part of the last cut is shared and is not
// worth packing, rows read it with what follows. Returns from which segment on they are still to be given out.
int32_t LivePlan::add_cuts(size_t low, size_t high, int32_t from, int32_t to) {
  const Row& leader = rows_[static_cast<size_t>(sorted_[low].row)];
  const Path& shared = path(sorted_[low]);
  int32_t ordinal = shared.ordinal;
  for (int32_t i = 1; i <= from; ++i) ordinal += cuts_between(leader, shared.start + i);
  while (from < to) {
    int32_t end = from + 1;
    while (end < to && !cuts_between(leader, shared.start + end)) ++end;
    const int32_t tokens = tokens_of(leader, shared.start + from, shared.start + end);
    const int32_t behind = segments_behind_cut(leader, shared.start, shared.start + from);
    if (high - low == 1 || is_worth_packing(static_cast<int64_t>(high - low), tokens)) {
      add_piece(low, high, from, end);
      pieces_.back().ordinal = ordinal, pieces_.back().behind = behind;
    } else if (!std::all_of(sorted_.begin() + static_cast<int64_t>(low),
                            sorted_.begin() + static_cast<int64_t>(high),
                            [&](const PathAt& at) { return ends_cut(at, end); })) {
      break;
    } else {
      for (size_t i = low; i < high; ++i) {
        add_piece(i, i + 1, from, end);
        pieces_.back().ordinal = ordinal, pieces_.back().behind = behind;
      }
    }
    from = end;
    ++ordinal;
  }
  return from;
}

void LivePlan::add_piece(size_t low, size_t high, int32_t from, int32_t to) {
  const PathAt& leader = sorted_[low];
  const Row& row = rows_[static_cast<size_t>(leader.row)];
  const int32_t start = path(leader).start;
  Piece piece{leader.row, start + from, start + to, static_cast<int32_t>(piece_rows_.size()), 0, 0, 0, 0};
  piece.entries = static_cast<int32_t>(high - low);
  piece.tokens = tokens_of(row, piece.from, piece.to);
  pieces_.push_back(piece);
  piece_rows_.insert(piece_rows_.end(), sorted_.begin() + static_cast<int64_t>(low),
                     sorted_.begin() + static_cast<int64_t>(high));
  std::sort(piece_rows_.begin() + piece.entry, piece_rows_.end(), [this](const PathAt& a, const PathAt& b) {
    return rows_[static_cast<size_t>(a.row)].index < rows_[static_cast<size_t>(b.row)].index;
  });
}

// What no run in front covers; neighbouring paths of one shift go on as one piece.
void LivePlan::add_private_pieces() {
  for (int32_t place : order_) {
    const Row& row = rows_[static_cast<size_t>(place)];
    int32_t shift = 0, end = -1;
    for (size_t i = 0; i < row.paths.size(); ++i) {
      const Path& path = row.paths[i];
      const int32_t stop = i + 1 == row.paths.size() ? visible(row) : path.stop;
      if (path.alone == stop) continue;
      if (end == path.alone && shift == path.shift) {
        pieces_.back().to = stop;
      } else {
        const auto entry = static_cast<int32_t>(piece_rows_.size());
        pieces_.push_back({place, path.alone, stop, entry, 1, 0, 0, 0});
        piece_rows_.push_back({place, static_cast<int32_t>(i)});
      }
      pieces_.back().tokens = tokens_of(row, pieces_.back().from, stop);
      shift = path.shift, end = stop;
    }
  }
}

bool LivePlan::is_worth_packing(int64_t rows, int64_t tokens) const {
  const int64_t saved = (rows - 1) * tokens * options_.kv_token_bytes;
  const int64_t added = rows * options_.group * options_.partial_bytes;
  return options_.share && saved > added;
}

int32_t LivePlan::tokens_of(const Row& row, int32_t from, int32_t to) const {
  const Segment& last = row.segments.back();
  const auto offset = [&](int32_t segment) {
    const auto at = static_cast<size_t>(segment);
    const int32_t here = at < row.segments.size() ? row.segments[at].offset : last.offset + last.size;
    return std::min(here, length(row));
  };
  return offset(to) - offset(from);
}

// Segments of a row that are in pieces. In the invariant mode a partial result of no tokens would be one too many.
int32_t LivePlan::visible(const Row& row) const {
  return options_.invariant_tokens > 0 ? row.tail + 1 : static_cast<int32_t>(row.segments.size());
}

// In the order of cuts, so that a row's partial results are in the order of its context. Of one cut, what begins it comes
// first: what continues it waits the less.
void LivePlan::order_cuts() {
  int32_t deepest = 0, most = 0;
  for (const Piece& piece : pieces_) deepest = std::max(deepest, piece.behind);
  const auto key = [&](const Piece& piece) { return piece.ordinal * (deepest + 1) + piece.behind; };
  for (const Piece& piece : pieces_) most = std::max(most, key(piece));
  std::vector<int32_t> start(static_cast<size_t>(most) + 2, 0);
  for (const Piece& piece : pieces_) ++start[static_cast<size_t>(key(piece)) + 1];
  for (size_t i = 1; i < start.size(); ++i) start[i] += start[i - 1];
  std::vector<Piece> ordered(pieces_.size());
  for (const Piece& piece : pieces_)
    ordered[static_cast<size_t>(start[static_cast<size_t>(key(piece))]++)] = piece;
  pieces_.swap(ordered);
}

// The ordinals of all entries, with what is carried on (`kEntryContinues` and so on); `partials`: pieces of each row.
std::vector<int32_t> LivePlan::entry_ordinals(std::vector<int32_t>& partials) const {
  std::vector<int32_t> words, last(partials.size(), -1), begun(partials.size(), 0);
  words.reserve(static_cast<size_t>(entries()));
  for (const Piece& piece : pieces_) {
    for (int32_t i = piece.entry; i < piece.entry + piece.entries; ++i) {
      const PathAt& at = piece_rows_[static_cast<size_t>(i)];
      const auto row = static_cast<size_t>(rows_[static_cast<size_t>(at.row)].index);
      int32_t word = partials[row]++;
      if (piece.behind > 0) {
        word |= kEntryContinues | (begun[row] == 1 ? kEntryFirst : 0);
        words[static_cast<size_t>(last[row])] |= kEntryLeaves;
      } else {
        ++begun[row];
      }
      last[row] = static_cast<int32_t>(words.size());
      words.push_back(word);
    }
  }
  return words;
}

// As `balance` in work_plan.cc: pieces are cut so that every worker has several of about equal cost to take.
void LivePlan::balance() {
  if (options_.workers == 1) return;
  std::vector<PieceSize> sizes;
  for (const Piece& piece : pieces_) sizes.push_back({piece.tokens, piece.entries});
  const std::vector<int64_t> balanced = balanced_parts(options_, sizes);
  std::vector<Piece> cut;
  for (size_t index = 0; index < pieces_.size(); ++index) {
    Piece piece = pieces_[index];
    const Row& row = rows_[static_cast<size_t>(piece.leader)];
    const int64_t tokens = piece.tokens, parts = balanced[index];
    const int32_t begin = piece.from, end = std::min(piece.to, row.tail + 1);
    for (int64_t number = 1; number < parts; ++number) {
      // The first segment in front of which there are `number` parts or more, but at least one in this part.
      const auto enough = std::partition_point(
          row.segments.begin() + piece.from + 1, row.segments.begin() + end, [&](const Segment& at) {
            return (at.offset - row.segments[static_cast<size_t>(begin)].offset) * parts < number * tokens;
          });
      const auto to = static_cast<int32_t>(enough - row.segments.begin());
      if (to >= end) break;
      Piece part = piece;
      part.to = to, part.tokens = tokens_of(row, part.from, to);
      cut.push_back(part);
      piece.from = to;
    }
    piece.tokens = tokens_of(row, piece.from, piece.to);
    cut.push_back(piece);
  }
  pieces_.swap(cut);
}

// Splits pieces with more rows than a kernel takes at once.
void LivePlan::tile() {
  if (options_.tile_rows == 0) return;
  const int32_t most = options_.tile_rows / options_.group;
  if (std::all_of(pieces_.begin(), pieces_.end(), [most](const Piece& piece) { return piece.entries <= most; }))
    return;
  std::vector<Piece> tiled;
  for (const Piece& piece : pieces_) {
    for (int32_t begin = 0; begin < piece.entries; begin += most) {
      Piece part = piece;
      part.entry += begin, part.entries = std::min(most, piece.entries - begin);
      tiled.push_back(part);
    }
  }
  pieces_.swap(tiled);
}

void LivePlan::put(int64_t at, int32_t value) {
  int32_t& word = memory_[at];
  if (word == value) return;
  word = value;
  if (keep_changes_) changed_.push_back(static_cast<int32_t>(at));
}

void LivePlan::take_changes(std::vector<int32_t>& out) {
  std::sort(changed_.begin(), changed_.end());
  changed_.erase(std::unique(changed_.begin(), changed_.end()), changed_.end());
  for (int32_t at : changed_) out.insert(out.end(), {at, memory_[at]});
  changed_.clear();
}

// Regions are powers of two; those given back are given out again.
int32_t LivePlan::allocate(int32_t capacity) {
  size_t size = 0;
  while ((int32_t{1} << size) < capacity) ++size;
  std::vector<int32_t>& given_back = free_regions_[size];
  if (!given_back.empty()) {
    const int32_t region = given_back.back();
    given_back.pop_back();
    return region;
  }
  const int32_t region = item_end_;
  item_end_ += capacity;
  if (item_end_ > item_capacity_) layout_stale_ = true;
  return region;
}

void LivePlan::release(Row& row) {
  if (row.capacity == 0) return;
  size_t size = 0;
  while ((int32_t{1} << size) < row.capacity) ++size;
  free_regions_[size].push_back(row.region);
  row.capacity = 0;
}

// New memory with room to grow, and everything written into it.
void LivePlan::lay_out() {
  row_capacity_ = power_of_two(static_cast<int64_t>(order_.size()), std::max(8, row_capacity_));
  piece_capacity_ = power_of_two(static_cast<int64_t>(pieces_.size()), std::max(16, piece_capacity_));
  entry_capacity_ = power_of_two(entries(), std::max(16, entry_capacity_));
  item_capacity_ = power_of_two(item_end_, std::max(64, item_capacity_));
  const int64_t lengths[] = {2 * int64_t{piece_capacity_},
                             int64_t{piece_capacity_} + 1,
                             item_capacity_,
                             item_capacity_,
                             item_capacity_,
                             item_capacity_,
                             item_capacity_,
                             entry_capacity_,
                             entry_capacity_,
                             entry_capacity_,
                             int64_t{row_capacity_} + 1,
                             row_capacity_};
  const int64_t bounds = options_.dealt ? 2 * int64_t{options_.workers} + 1 : 0;
  const int64_t units = options_.dealt ? int64_t{piece_capacity_} * options_.kv_heads : 0;
  words_ = kWorkHeaderWords + row_capacity_ + bounds + units;
  for (const int64_t length : lengths) words_ += length;
  if (words_ > INT32_MAX) fail("a plan of more than 2^31 words");
  memory_ = std::shared_ptr<int32_t[]>(new int32_t[static_cast<size_t>(words_)]());
  int32_t field = kWorkPieceItems, at = kWorkHeaderWords;
  for (const int64_t length : lengths) {
    memory_[field++] = at;
    at += static_cast<int32_t>(length);
  }
  memory_[kWorkRowTail] = at;
  memory_[kWorkUnitBounds] = at += row_capacity_;
  memory_[kWorkUnits] = at + static_cast<int32_t>(bounds);
  memory_[kWorkWorkers] = options_.dealt ? options_.workers : 0;
  memory_[kWorkMagic] = kWorkMagicValue;
  memory_[kWorkWords] = static_cast<int32_t>(words_);
  ++generation_;
  layout_stale_ = false;
  for (int32_t place : order_) write_items(rows_[static_cast<size_t>(place)], 0);
  write_pieces();
  changed_.clear();
}

void LivePlan::write_items(const Row& row, int32_t from) {
  if (layout_stale_) return;
  const int32_t* offsets = &memory_[kWorkItemBlock];
  for (auto i = static_cast<size_t>(from); i < row.segments.size(); ++i) {
    const Segment& segment = row.segments[i];
    const bool grows = static_cast<int32_t>(i) >= row.tail;
    const int64_t at = row.region + static_cast<int64_t>(i);
    put(offsets[0] + at, segment.block);
    put(offsets[1] + at, segment.first);
    put(offsets[2] + at, grows ? row.length0 - segment.offset : segment.size);
    put(offsets[3] + at, segment.base);
    put(offsets[4] + at, grows ? segment.size : 0);
  }
}

int64_t LivePlan::entries() const {
  int64_t total = 0;
  for (const Piece& piece : pieces_) total += piece.entries;
  return total;
}

void LivePlan::write_pieces() {
  if (entries() > entry_capacity_) return lay_out();
  const int32_t piece_items = memory_[kWorkPieceItems], piece_entries = memory_[kWorkPieceEntries];
  const int32_t query_position = memory_[kWorkQueryPosition], row_partials = memory_[kWorkRowPartials];
  const int32_t entry_row = memory_[kWorkEntryRow], entry_shift = memory_[kWorkEntryShift];
  const int32_t entry_ordinal = memory_[kWorkEntryOrdinal];
  std::vector<int32_t> partials(order_.size(), 0);
  const std::vector<int32_t> ordinals = entry_ordinals(partials);
  int32_t entry = 0, items = 0, widest = 0, shifted = 0, number = 0;
  for (const Piece& piece : pieces_) {
    Row& leader = rows_[static_cast<size_t>(piece.leader)];
    put(piece_items + 2 * number, leader.region + piece.from);
    put(piece_items + 2 * number + 1, leader.region + piece.to);
    put(piece_entries + number, entry);
    if (piece.to == visible(leader)) leader.last_piece = number;
    for (int32_t i = piece.entry; i < piece.entry + piece.entries; ++i, ++entry) {
      const PathAt& at = piece_rows_[static_cast<size_t>(i)];
      const int32_t index = rows_[static_cast<size_t>(at.row)].index, shift = path(at).shift;
      put(entry_row + entry, index);
      put(entry_shift + entry, shift);
      put(entry_ordinal + entry, ordinals[static_cast<size_t>(entry)]);
      shifted |= shift != 0;
    }
    items += piece.to - piece.from;
    widest = std::max(widest, piece.entries);
    ++number;
  }
  put(piece_entries + number, entry);
  int32_t slot = 0;
  for (size_t i = 0; i < order_.size(); ++i) {
    put(row_partials + static_cast<int64_t>(i), slot);
    put(query_position + static_cast<int64_t>(i), rows_[static_cast<size_t>(order_[i])].query0);
    write_tail(rows_[static_cast<size_t>(order_[i])]);
    slot += partials[i];
  }
  put(row_partials + static_cast<int64_t>(order_.size()), slot);
  if (options_.dealt) write_deal();
  const auto rows = static_cast<int32_t>(order_.size());
  // Each row reads one more in every step.
  const auto tokens = static_cast<int32_t>(tokens_ - int64_t{rows} * made_at_);
  const int32_t header[][2] = {{kWorkPieces, number}, {kWorkItems, items},     {kWorkEntries, entry},
                               {kWorkRows, rows},     {kWorkPartials, slot},   {kWorkTokens, tokens},
                               {kWorkWidest, widest}, {kWorkShifted, shifted}, {kWorkLastBlock, last_block_},
                               {kWorkMade, made_}};
  for (const auto& [field, value] : header) put(field, value);
}

void LivePlan::write_deal() {
  std::vector<DealtPiece> pieces;
  for (const Piece& piece : pieces_) pieces.push_back(dealt_piece(options_, {piece.tokens, piece.entries}));
  const Deal deal = deal_units(pieces, options_.kv_heads, options_.workers);
  const int64_t bounds = memory_[kWorkUnitBounds], units = memory_[kWorkUnits];
  for (size_t i = 0; i < deal.bounds.size(); ++i) put(bounds + static_cast<int64_t>(i), deal.bounds[i]);
  for (size_t i = 0; i < deal.units.size(); ++i) put(units + static_cast<int64_t>(i), deal.units[i]);
}

void LivePlan::write_tail(const Row& row) {
  if (!layout_stale_) put(memory_[kWorkRowTail] + int64_t{row.index}, row.region + row.tail);
}

void LivePlan::extend_last_piece(const Row& row, int32_t segments) {
  pieces_[static_cast<size_t>(row.last_piece)].to = segments;
  put(memory_[kWorkPieceItems] + 2 * int64_t{row.last_piece} + 1, row.region + segments);
  put(kWorkLastBlock, last_block_);
}

}  // namespace trunkline
