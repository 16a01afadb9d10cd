#include "live_plan.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace trunkline {

constexpr int32_t kSpanWords = 6;

void LivePlan::fail(const std::string& sentence) { throw std::invalid_argument(sentence); }

// The words of changes, none of which is read beyond their end.
class LivePlan::Reader {
 public:
  Reader(const int32_t* words, int64_t length) : at_(words), left_(length) {}

  bool done() const { return left_ == 0; }
  int32_t next() { return *take(1); }

  const int32_t* take(int64_t count) {
    if (count < 0 || count > left_) fail("changes of a plan end too early");
    const int32_t* begin = at_;
    at_ += count, left_ -= count;
    return begin;
  }

 private:
  const int32_t* at_;
  int64_t left_;
};

LivePlan::LivePlan(const WorkOptions& options, int32_t chunk_size, bool keep_changes)
    : options_(options), chunk_(chunk_size), keep_changes_(keep_changes), free_regions_(32) {
  check_options(options);
  if (chunk_size < 1) fail("chunk_size must be positive");
}

void LivePlan::apply(const int32_t* changes, int64_t length) {
  Reader in(changes, length);
  const int32_t now = in.next();
  if (now < now_) fail("steps do not go back");
  now_ = now;
  while (!in.done()) {
    switch (in.next()) {
      case kLiveRows: read_rows(in); break;
      case kLiveRow: read_row(in); break;
      case kLiveBlocks: read_blocks(in); break;
      case kLiveLength: read_length(in); break;
      case kLiveLike: read_like(in); break;
      default: fail("an unknown change of a plan");
    }
  }
  advance();
  const bool uneven = options_.workers > 1 && options_.invariant_tokens == 0 &&
                      int64_t{now_ - made_at_} * static_cast<int64_t>(order_.size()) * 8 > tokens_;
  const bool making = pieces_stale_ || uneven;
  if (making) make_pieces();
  if (layout_stale_ || static_cast<int64_t>(order_.size()) > row_capacity_ ||
      static_cast<int64_t>(pieces_.size()) > piece_capacity_) {
    lay_out();
  } else if (making) {
    write_pieces();
  }
}

int32_t LivePlan::place_of(int32_t index) const {
  if (index < 0 || index >= static_cast<int32_t>(order_.size())) {
    fail("row " + std::to_string(index) + " changes; there are " + std::to_string(order_.size()));
  }
  return order_[static_cast<size_t>(index)];
}

void LivePlan::read_rows(Reader& in) {
  const int32_t count = in.next();
  const int32_t* before = in.take(count);
  std::vector<int32_t> order(static_cast<size_t>(count), -1);
  std::vector<uint8_t> kept(order_.size(), 0);
  for (int32_t i = 0; i < count; ++i) {
    if (before[i] < 0) continue;
    const int32_t place = place_of(before[i]);
    if (kept[static_cast<size_t>(before[i])]++ != 0) fail("a row goes on as two");
    order[static_cast<size_t>(i)] = place;
  }
  for (size_t i = 0; i < order_.size(); ++i) {
    if (kept[i] != 0) continue;
    displace(order_[i]);
    release(rows_[static_cast<size_t>(order_[i])]);
    free_.push_back(order_[i]);
  }
  for (int32_t i = 0; i < count; ++i) {
    int32_t& place = order[static_cast<size_t>(i)];
    if (place < 0) {
      if (free_.empty()) {
        free_.push_back(static_cast<int32_t>(rows_.size()));
        rows_.emplace_back();
      }
      place = free_.back();
      free_.pop_back();
      rows_[static_cast<size_t>(place)] = Row();
    }
    rows_[static_cast<size_t>(place)].index = i;
  }
  order_ = std::move(order);
  pieces_stale_ = true;
}

void LivePlan::read_row(Reader& in) {
  const int32_t place = place_of(in.next()), length = in.next(), span_count = in.next();
  const int32_t* spans = in.take(int64_t{span_count} * kSpanWords);
  const int32_t count = in.next();
  const int32_t* blocks = in.take(count);
  Row& row = rows_[static_cast<size_t>(place)];
  displace(place);
  row.length0 = length - now_;
  build_segments(row, spans, span_count, {blocks, count});
  put_in_place(place);
}

void LivePlan::read_like(Reader& in) {
  const int32_t place = place_of(in.next()), source = place_of(in.next()), length = in.next();
  if (source == place) fail("a row cannot be like itself");
  Row& row = rows_[static_cast<size_t>(place)];
  displace(place);
  const Row& other = rows_[static_cast<size_t>(source)];
  row.segments = other.segments, row.paths = other.paths;
  row.length0 = length - now_;
  row.query0 = other.query0 + row.length0 - other.length0;
  put_in_place(place);
}

void LivePlan::read_length(Reader& in) {
  const int32_t place = place_of(in.next()), length = in.next();
  Row& row = rows_[static_cast<size_t>(place)];
  const int32_t before = row.tail;
  displace(place);
  row.query0 += length - now_ - row.length0;
  row.length0 = length - now_;
  find_tail(row);
  write_items(row, std::min(before, row.tail));
  row.used = true;
  for (size_t i = 0; i < row.paths.size(); ++i) insert({place, static_cast<int32_t>(i)});
  pieces_stale_ = true;
}

void LivePlan::read_blocks(Reader& in) {
  const int32_t place = place_of(in.next()), count = in.next();
  const int32_t* blocks = in.take(count);
  Row& row = rows_[static_cast<size_t>(place)];
  if (row.segments.empty()) fail("a row grows that has no blocks yet");
  const auto known = static_cast<int32_t>(row.segments.size());
  for (int32_t i = 0; i < count; ++i) {
    if (blocks[i] < 0) fail("a row has a negative block");
    const Segment last = row.segments.back();
    row.segments.push_back({blocks[i], 0, chunk_, last.base + last.size, last.offset + last.size});
    last_block_ = std::max(last_block_, blocks[i]);
  }
  if (known + count > row.capacity) {
    give_region(row);
    write_items(row, 0);
    pieces_stale_ = true;
    return;
  }
  write_items(row, known);
  if (!pieces_stale_) write_tail(row);
  if (options_.invariant_tokens == 0 && !pieces_stale_ && !layout_stale_) {
    extend_last_piece(row, known + count);
  }
}

// The segments of a row from its spans: table entry, first token, base position, shift, tokens, first index. In the
// invariant mode they stand in the order in which they act, as its cuts count.
void LivePlan::build_segments(Row& row, const int32_t* spans, int32_t span_count, const Table& table) {
  if (span_count < 1) fail("a row has no spans");
  row.segments.clear(), row.paths.clear();
  std::vector<const int32_t*> ordered;
  for (int32_t number = 0; number < span_count; ++number) ordered.push_back(spans + int64_t{number} * kSpanWords);
  if (options_.invariant_tokens > 0) {
    std::stable_sort(ordered.begin(), ordered.end() - 1,
                     [](const int32_t* a, const int32_t* b) { return a[2] + a[3] < b[2] + b[3]; });
  }
  for (const int32_t* span : ordered) {
    const bool open = span == ordered.back();
    const auto from = static_cast<int32_t>(row.segments.size());
    add_segments(row, span, open, table);
    const auto to = static_cast<int32_t>(row.segments.size());
    const int32_t shift = span[3];
    if (open) {
      row.query0 = span[2] - span[5] + row.length0 - 1;
      if (to == from || length(row) <= span[5]) fail("the open part of a row is empty");
    }
    if (options_.invariant_tokens > 0 && !row.paths.empty() && row.paths.back().shift == shift) {
      row.paths.back().stop = to;
    } else if (to > from) {
      row.paths.push_back({from, to, shift, 0, 0, from});
    }
  }
  key_paths(row);
}

void LivePlan::add_segments(Row& row, const int32_t* span, bool open, const Table& table) {
  const int32_t first = span[1], base = span[2];
  if (span[0] < 0 || first < 0) fail("a span of a row has a negative place");
  const int64_t end = open ? INT64_MAX : int64_t{first} + span[4];
  int32_t offset = row.segments.empty() ? 0 : row.segments.back().offset + row.segments.back().size;
  for (int64_t begin = first / chunk_ * int64_t{chunk_}; begin < end; begin += chunk_) {
    const int64_t entry = span[0] + begin / chunk_;
    if (entry >= table.count && open) break;
    if (entry >= table.count) fail("a row needs block-table entry " + std::to_string(entry));
    if (table.blocks[entry] < 0) fail("a row has a negative block");
    const auto lower = static_cast<int32_t>(std::max<int64_t>(begin, first));
    const auto upper = static_cast<int32_t>(std::min<int64_t>(begin + chunk_, end));
    const auto within = lower - static_cast<int32_t>(begin);
    row.segments.push_back({table.blocks[entry], within, upper - lower, base + lower - first, offset});
    offset += upper - lower;
    last_block_ = std::max(last_block_, table.blocks[entry]);
  }
}

// Paths that share a beginning must be cut alike in the invariant mode: they begin with the same cut (`ordinal`),
// equally far behind a multiple of its length (`phase`). Otherwise `ordinal` counts the readings of the same tokens
// by one row, which must not be in one piece.
void LivePlan::key_paths(Row& row) {
  int32_t cuts = 0;
  for (size_t i = 0; i < row.paths.size(); ++i) {
    Path& path = row.paths[i];
    const Segment& first = row.segments[static_cast<size_t>(path.start)];
    if (options_.invariant_tokens > 0) {
      path.ordinal = cuts++;
      path.phase = first.offset % options_.invariant_tokens;
      for (int32_t at = path.start + 1; at < path.stop; ++at) cuts += cuts_between(row, at);
      continue;
    }
    path.ordinal = path.phase = 0;
    for (size_t j = 0; j < i; ++j) {
      const Segment& other = row.segments[static_cast<size_t>(row.paths[j].start)];
      path.ordinal += other.block == first.block && other.first == first.first && other.size == first.size;
    }
  }
}

void LivePlan::find_tail(Row& row) const {
  const int32_t seen = length(row);
  const auto behind = std::partition_point(row.segments.begin(), row.segments.end(),
                                           [seen](const Segment& segment) { return segment.offset < seen; });
  row.tail = static_cast<int32_t>(behind - row.segments.begin()) - 1;
  if (row.tail < row.paths.back().start) fail("the open part of a row is empty");
  row.paths.back().stop = row.tail;
}

void LivePlan::put_in_place(int32_t place) {
  Row& row = rows_[static_cast<size_t>(place)];
  find_tail(row);
  row.used = true;
  if (static_cast<int32_t>(row.segments.size()) > row.capacity) give_region(row);
  write_items(row, 0);
  for (size_t i = 0; i < row.paths.size(); ++i) insert({place, static_cast<int32_t>(i)});
  pieces_stale_ = true;
}

void LivePlan::displace(int32_t place) {
  Row& row = rows_[static_cast<size_t>(place)];
  if (!row.used) return;
  for (size_t i = 0; i < row.paths.size(); ++i) remove({place, static_cast<int32_t>(i)});
  row.used = false;
}

void LivePlan::give_region(Row& row) {
  release(row);
  const auto segments = static_cast<int32_t>(row.segments.size());
  row.capacity = 16;
  while (row.capacity < segments + segments / 8) row.capacity *= 2;  // room to grow
  row.region = allocate(row.capacity);
}

// Lets the tails of rows that have filled theirs go on in the next segment.
void LivePlan::advance() {
  for (int32_t place : order_) {
    const Row& row = rows_[static_cast<size_t>(place)];
    if (!row.used) fail("row " + std::to_string(row.index) + " is new and was not told");
    const int32_t seen = length(row);
    while (true) {
      const Segment& tail = row.segments[static_cast<size_t>(row.tail)];
      if (seen <= tail.offset + tail.size) break;
      if (row.tail + 1 == static_cast<int32_t>(row.segments.size())) {
        fail("row " + std::to_string(row.index) + " needs another block");
      }
      cross(place);
    }
  }
}

void LivePlan::cross(int32_t place) {
  Row& row = rows_[static_cast<size_t>(place)];
  Path& path = row.paths.back();
  const PathAt at{place, static_cast<int32_t>(row.paths.size()) - 1};
  const size_t index = find(at);
  const int32_t segments = path.stop - path.start;
  const bool may_share_more =
      agreed_[index] == segments || (index + 1 < sorted_.size() && agreed_[index + 1] == segments);
  if (may_share_more) remove(at);
  path.stop = ++row.tail;
  if (may_share_more) {
    insert(at);
    pieces_stale_ = true;
  }
  if (options_.invariant_tokens == 0) return;
  if (cuts_between(row, row.tail)) {
    pieces_stale_ = true;
  } else if (!pieces_stale_ && !layout_stale_) {
    extend_last_piece(row, row.tail + 1);
  }
}

// Returns with how many segments two paths begin alike, and whether `a` comes first.
int32_t LivePlan::shared_segments(const PathAt& a, const PathAt& b, bool* before) const {
  const Path &left = path(a), &right = path(b);
  if (left.ordinal != right.ordinal || left.phase != right.phase) {
    *before = left.ordinal != right.ordinal ? left.ordinal < right.ordinal : left.phase < right.phase;
    return 0;
  }
  const int32_t lengths[2] = {left.stop - left.start, right.stop - right.start};
  const Segment* x = rows_[static_cast<size_t>(a.row)].segments.data() + left.start;
  const Segment* y = rows_[static_cast<size_t>(b.row)].segments.data() + right.start;
  const int32_t both = std::min(lengths[0], lengths[1]);
  for (int32_t i = 0; i < both; ++i) {
    if (x[i].block == y[i].block && x[i].first == y[i].first && x[i].size == y[i].size) continue;
    if (x[i].block != y[i].block) {
      *before = x[i].block < y[i].block;
    } else {
      *before = x[i].first != y[i].first ? x[i].first < y[i].first : x[i].size < y[i].size;
    }
    return i;
  }
  *before = lengths[0] != lengths[1] ? lengths[0] < lengths[1] : a.row < b.row;
  return both;
}

void LivePlan::insert(const PathAt& at) {
  size_t low = 0, high = sorted_.size();
  while (low < high) {
    const size_t middle = (low + high) / 2;
    bool before = false;
    shared_segments(sorted_[middle], at, &before);
    if (before) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  bool unused = false;
  const int32_t with_previous = low > 0 ? shared_segments(sorted_[low - 1], at, &unused) : 0;
  if (low < sorted_.size()) agreed_[low] = shared_segments(at, sorted_[low], &unused);
  sorted_.insert(sorted_.begin() + static_cast<int64_t>(low), at);
  agreed_.insert(agreed_.begin() + static_cast<int64_t>(low), with_previous);
}

size_t LivePlan::find(const PathAt& at) const {
  size_t index = 0;
  while (sorted_[index].row != at.row || sorted_[index].path != at.path) ++index;
  return index;
}

void LivePlan::remove(const PathAt& at) {
  const size_t index = find(at);
  if (index + 1 < sorted_.size()) agreed_[index + 1] = std::min(agreed_[index], agreed_[index + 1]);
  sorted_.erase(sorted_.begin() + static_cast<int64_t>(index));
  agreed_.erase(agreed_.begin() + static_cast<int64_t>(index));
}

}  // namespace trunkline
