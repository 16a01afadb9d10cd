#include "prefill_plan.h"

#include <algorithm>
#include <stdexcept>

#include "work_plan.h"

namespace trunkline {
namespace {

constexpr size_t kAlignedWords = 4;

// Consecutive queries of an entry, and their pieces.
struct Tile {
  int32_t start, stop;       // queries
  int32_t piece, piece_end;  // in `pieces_`
};

class Prefill {
 public:
  Prefill(const PrefillItems& items, const PrefillCut& cut) : in_(items), cut_(cut) {
    check();
    for (int32_t entry = 0; entry < in_.entries; ++entry) {
      const int32_t end = in_.query_indptr[entry + 1];
      for (int32_t start = in_.query_indptr[entry]; start < end; start += cut_.rows_per_tile) {
        tiles_.push_back({start, std::min(end, start + cut_.rows_per_tile), 0, 0});
        entry_of_tile_.push_back(entry);
      }
    }
    const int64_t count = std::max<int64_t>(1, static_cast<int64_t>(tiles_.size()));
    const int64_t pieces = (cut_.units_wanted + count - 1) / count;
    for (size_t i = 0; i < tiles_.size(); ++i) cut_tile(tiles_[i], entry_of_tile_[i], pieces);
    for (int32_t item = 0; item < in_.items; ++item) tokens_ += in_.count[item];
  }

  PrefillWork plan() {
    PrefillWork work;
    int64_t queries = 0, partials = 0;
    for (const Tile& tile : tiles_) {
      queries += tile.stop - tile.start;
      partials += partials_of(tile);
    }
    const int64_t most = partials == queries ? partials : cut_.partials_max;
    size_t first = 0;
    int64_t held = 0;
    for (size_t i = 0; i < tiles_.size(); ++i) {
      held += partials_of(tiles_[i]);
      if (i + 1 < tiles_.size() && held + partials_of(tiles_[i + 1]) <= most) continue;
      add_part(work, first, i + 1, held);
      first = i + 1, held = 0;
    }
    return work;
  }

 private:
  void check() const {
    const auto fail = [](const char* sentence) { throw std::invalid_argument(sentence); };
    if (cut_.rows_per_tile < 1 || cut_.piece_tokens_min < 1 || cut_.piece_tokens < 0)
      fail("a cut must be positive");
    if (in_.query_indptr[0] != 0 || in_.query_indptr[in_.entries] != in_.queries) fail("query_indptr is wrong");
    if (in_.item_indptr[0] != 0 || in_.item_indptr[in_.entries] != in_.items) fail("item_indptr is wrong");
    for (int32_t entry = 0; entry < in_.entries; ++entry) {
      if (in_.query_indptr[entry] > in_.query_indptr[entry + 1]) fail("query_indptr must ascend");
      if (in_.item_indptr[entry] > in_.item_indptr[entry + 1]) fail("item_indptr must ascend");
    }
  }

  static int64_t partials_of(const Tile& tile) {
    return int64_t{tile.stop - tile.start} * (tile.piece_end - tile.piece);
  }

  // Runs of equal shift, each cut where its tokens pass a multiple of the length.
  void cut_tile(Tile& tile, int32_t entry, int64_t pieces) {
    const int32_t last = *std::max_element(in_.query_position + tile.start, in_.query_position + tile.stop);
    const int32_t end = in_.item_indptr[entry + 1];
    const auto seen = [&](int32_t item) { return int64_t{in_.base[item]} + in_.shift[item] <= last; };
    int64_t tokens = 0;
    for (int32_t item = in_.item_indptr[entry]; item < end; ++item) tokens += seen(item) ? in_.count[item] : 0;
    const int64_t even = std::max<int64_t>(cut_.piece_tokens_min, (tokens + pieces - 1) / pieces);
    const int64_t length = cut_.piece_tokens > 0 ? cut_.piece_tokens : even;
    tile.piece = static_cast<int32_t>(piece_shift_.size());
    int64_t before = 0, number = 0;
    bool any = false;
    for (int32_t item = in_.item_indptr[entry]; item < end; ++item) {
      if (!seen(item)) continue;
      if (any && in_.shift[item] != piece_shift_.back()) {
        before = number = 0;
        begin_piece(in_.shift[item]);
      } else if (!any || before / length != number) {
        begin_piece(in_.shift[item]);
      }
      any = true;
      number = before / length;
      before += in_.count[item];
      items_.push_back(item);
    }
    if (!any) begin_piece(0);
    tile.piece_end = static_cast<int32_t>(piece_shift_.size());
  }

  void begin_piece(int32_t shift) {
    piece_shift_.push_back(shift);
    piece_item_.push_back(items_.size());
  }

  size_t end_of(int32_t piece) const {
    const auto next = static_cast<size_t>(piece) + 1;
    return next < piece_item_.size() ? piece_item_[next] : items_.size();
  }

  void add_part(PrefillWork& work, size_t first, size_t stop, int64_t partials) const {
    const int32_t row_start = tiles_[first].start, row_stop = tiles_[stop - 1].stop;
    const size_t rows = static_cast<size_t>(row_stop - row_start);
    const int32_t piece_start = tiles_[first].piece, piece_stop = tiles_[stop - 1].piece_end;
    const size_t pieces = static_cast<size_t>(piece_stop - piece_start);
    const size_t item_start = pieces == 0 ? 0 : piece_item_[static_cast<size_t>(piece_start)];
    const size_t items = pieces == 0 ? 0 : end_of(piece_stop - 1) - item_start;
    const auto entries = static_cast<size_t>(partials);
    const size_t begin = work.words.size();
    const size_t lengths[] = {2 * pieces, pieces + 1, items,   items,   items,    items,
                              items,      entries,    entries, entries, rows + 1, rows};
    size_t words = kWorkHeaderWords;
    for (const size_t length : lengths) words += length;
    work.words.resize(begin + (words + kAlignedWords - 1) / kAlignedWords * kAlignedWords);
    int32_t* out = work.words.data() + begin;
    int32_t field = kWorkPieceItems;
    size_t at = kWorkHeaderWords;
    for (const size_t length : lengths) {
      out[field++] = static_cast<int32_t>(at);
      at += length;
    }
    out[kWorkWidest] = write_pieces(out, first, stop, item_start);
    write_items(out, item_start, items);
    write_rows(out, first, stop);
    const size_t header[] = {kWorkMagicValue, words, pieces,  items,
                             entries,         rows,  entries, static_cast<size_t>(tokens_)};
    for (size_t i = 0; i < 8; ++i) out[i] = static_cast<int32_t>(header[i]);
    work.parts.push_back({row_start, row_stop, piece_start, piece_stop, static_cast<int32_t>(partials),
                          static_cast<int64_t>(begin)});
  }

  // Returns the most rows of a piece.
  int32_t write_pieces(int32_t* out, size_t first, size_t stop, size_t item_start) const {
    int32_t *items = out + out[kWorkPieceItems], *entries = out + out[kWorkPieceEntries];
    int32_t *row = out + out[kWorkEntryRow], *shift = out + out[kWorkEntryShift];
    int32_t *ordinal = out + out[kWorkEntryOrdinal], entry = 0, widest = 0;
    for (size_t i = first; i < stop; ++i) {
      const Tile& tile = tiles_[i];
      widest = std::max(widest, tile.piece_end > tile.piece ? tile.stop - tile.start : 0);
      for (int32_t piece = tile.piece; piece < tile.piece_end; ++piece) {
        *items++ = static_cast<int32_t>(piece_item_[static_cast<size_t>(piece)] - item_start);
        *items++ = static_cast<int32_t>(end_of(piece) - item_start);
        *entries++ = entry;
        for (int32_t query = tile.start; query < tile.stop; ++query, ++entry) {
          *row++ = query - tiles_[first].start;
          *shift++ = piece_shift_[static_cast<size_t>(piece)];
          *ordinal++ = piece - tile.piece;
        }
      }
    }
    *entries = entry;
    return widest;
  }

  // Counts do not grow: the words that say so stay 0.
  void write_items(int32_t* out, size_t start, size_t count) const {
    int32_t *block = out + out[kWorkItemBlock], *first = out + out[kWorkItemFirst];
    int32_t *tokens = out + out[kWorkItemCount], *base = out + out[kWorkItemBase];
    for (size_t i = 0; i < count; ++i) {
      const int32_t item = items_[start + i];
      block[i] = in_.block[item];
      first[i] = in_.first[item];
      tokens[i] = in_.count[item];
      base[i] = in_.base[item];
    }
  }

  void write_rows(int32_t* out, size_t first, size_t stop) const {
    int32_t *partials = out + out[kWorkRowPartials], *position = out + out[kWorkQueryPosition], slot = 0;
    for (size_t i = first; i < stop; ++i) {
      for (int32_t query = tiles_[i].start; query < tiles_[i].stop; ++query) {
        *partials++ = slot;
        *position++ = in_.query_position[query];
        slot += tiles_[i].piece_end - tiles_[i].piece;
      }
    }
    *partials = slot;
  }

  const PrefillItems& in_;
  const PrefillCut& cut_;
  std::vector<Tile> tiles_;
  std::vector<int32_t> entry_of_tile_;
  std::vector<int32_t> piece_shift_;
  std::vector<size_t> piece_item_;  // first in `items_`
  std::vector<int32_t> items_;      // of each piece, one after the other
  int64_t tokens_ = 0;
};

}  // namespace

PrefillWork plan_prefill_work(const PrefillItems& items, const PrefillCut& cut) {
  return Prefill(items, cut).plan();
}

}  // namespace trunkline
