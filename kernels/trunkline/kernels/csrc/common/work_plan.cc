#include "work_plan.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>

#include "balance.h"

namespace trunkline {
namespace {

// Items that the same rows read one after the other.
struct Run {
  std::vector<int32_t> items;
  std::vector<int32_t> rows;
  std::vector<int32_t> shifts;  // by row
  int32_t tokens = 0;
};

// One partial of a row, in the making: see the header on the invariant mode.
struct Cut {
  std::vector<int32_t> items;
  int32_t shift = 0;
};

class Planner {
 public:
  Planner(const DecodeItems& items, const WorkOptions& options) : in_(items), options_(options) {
    check();
    is_tail_.assign(static_cast<size_t>(in_.items), 0);
    for (int32_t row = 0; row < in_.num_rows; ++row) is_tail_[static_cast<size_t>(in_.tail_item[row])] = 1;
  }

  std::vector<int32_t> plan() {
    if (options_.invariant_tokens > 0) {
      plan_invariant();
    } else {
      plan_for_cost();
      balance();
    }
    tile();
    return serialize();
  }

 private:
  [[noreturn]] static void fail(const std::string& sentence) { throw std::invalid_argument(sentence); }

  void check() const {
    check_options(options_);
    if (in_.row_indptr[0] != 0) fail("row_indptr must start at 0");
    for (int32_t item = 0; item < in_.items; ++item) {
      const int32_t begin = in_.row_indptr[item], end = in_.row_indptr[item + 1];
      if (end <= begin) fail("item " + std::to_string(item) + " has no rows");
      if (end > in_.row_indptr[in_.items]) fail("row_indptr must ascend");
      if (item >= in_.shared_items && end != begin + 1) {
        fail("item " + std::to_string(item) + " has several rows, but follows the shared items");
      }
      if (in_.count[item] < 0 || in_.first[item] < 0 || in_.block[item] < 0) {
        fail("item " + std::to_string(item) + " has a negative block, first or count");
      }
      for (int32_t entry = begin; entry < end; ++entry) {
        if (in_.rows[entry] < 0 || in_.rows[entry] >= in_.num_rows) {
          fail("item " + std::to_string(item) + " names row " + std::to_string(in_.rows[entry]) + "; there are " +
               std::to_string(in_.num_rows));
        }
        if (entry > begin && in_.rows[entry] <= in_.rows[entry - 1]) {
          fail("rows of item " + std::to_string(item) + " do not ascend");
        }
      }
    }
    for (int32_t row = 0; row < in_.num_rows; ++row) {
      const int32_t item = in_.tail_item[row];
      if (item < in_.shared_items || item >= in_.items || in_.rows[in_.row_indptr[item]] != row) {
        fail("the tail of row " + std::to_string(row) + " is not a private item of it");
      }
    }
  }

  bool same_readers(int32_t a, int32_t b) const {
    const int32_t begin_a = in_.row_indptr[a], begin_b = in_.row_indptr[b];
    const int32_t width = in_.row_indptr[a + 1] - begin_a;
    if (in_.row_indptr[b + 1] - begin_b != width) return false;
    const size_t bytes = static_cast<size_t>(width) * sizeof(int32_t);
    return std::memcmp(in_.rows + begin_a, in_.rows + begin_b, bytes) == 0 &&
           std::memcmp(in_.shifts + begin_a, in_.shifts + begin_b, bytes) == 0;
  }

  Run run_of(int32_t item) const {
    Run run;
    const int32_t begin = in_.row_indptr[item], end = in_.row_indptr[item + 1];
    run.rows.assign(in_.rows + begin, in_.rows + end);
    run.shifts.assign(in_.shifts + begin, in_.shifts + end);
    append(run, item);
    return run;
  }

  void append(Run& run, int32_t item) const {
    run.items.push_back(item);
    run.tokens += in_.count[item];
  }

  bool is_worth_packing(const Run& run) const {
    const auto rows = static_cast<int64_t>(run.rows.size());
    const int64_t saved = (rows - 1) * run.tokens * options_.kv_token_bytes;
    const int64_t added = rows * options_.group * options_.partial_bytes;
    return options_.share && saved > added;
  }

  void plan_for_cost() {
    std::vector<Run> runs;
    for (int32_t item = 0; item < in_.shared_items; ++item) {
      if (item > 0 && same_readers(item - 1, item)) {
        append(runs.back(), item);
      } else {
        runs.push_back(run_of(item));
      }
    }
    std::vector<Run> alone(static_cast<size_t>(in_.num_rows));  // pushed down to the row itself, by shift
    std::vector<std::vector<Run>> others(static_cast<size_t>(in_.num_rows));
    push_down(runs, alone, others);
    for (int32_t item = in_.shared_items; item < in_.items; ++item) {
      const int32_t entry = in_.row_indptr[item];
      append_alone(in_.rows[entry], item, in_.shifts[entry], alone, others);
    }
    for (Run& run : runs) {
      if (!run.items.empty()) pieces_.push_back(std::move(run));
    }
    for (int32_t row = 0; row < in_.num_rows; ++row) {
      for (Run& run : others[static_cast<size_t>(row)]) pieces_.push_back(std::move(run));
      if (!alone[static_cast<size_t>(row)].items.empty()) {
        pieces_.push_back(std::move(alone[static_cast<size_t>(row)]));
      }
    }
  }

  // A row's own piece grows as long as the shift stays the same; another shift begins another piece.
  void append_alone(int32_t row, int32_t item, int32_t shift, std::vector<Run>& alone,
                    std::vector<std::vector<Run>>& others) const {
    Run& run = alone[static_cast<size_t>(row)];
    if (!run.items.empty() && run.shifts[0] != shift) {
      others[static_cast<size_t>(row)].push_back(std::move(run));
      run = Run();
    }
    if (run.items.empty()) {
      run.rows = {row};
      run.shifts = {shift};
    }
    append(run, item);
  }

  // Empties the runs that are not worth packing. In ascending order, so that a run knows what it was given
  // before it is judged.
  void push_down(std::vector<Run>& runs, std::vector<Run>& alone, std::vector<std::vector<Run>>& others) const {
    std::vector<std::vector<int32_t>> runs_of_row(static_cast<size_t>(in_.num_rows));
    for (size_t index = 0; index < runs.size(); ++index) {
      for (int32_t row : runs[index].rows)
        runs_of_row[static_cast<size_t>(row)].push_back(static_cast<int32_t>(index));
    }
    for (size_t index = 0; index < runs.size(); ++index) {
      if (is_worth_packing(runs[index])) continue;
      Run run = std::move(runs[index]);
      runs[index] = Run();
      std::map<int32_t, std::vector<size_t>> by_next;
      for (size_t i = 0; i < run.rows.size(); ++i) {
        const std::vector<int32_t>& path = runs_of_row[static_cast<size_t>(run.rows[i])];
        const auto next = std::upper_bound(path.begin(), path.end(), static_cast<int32_t>(index));
        by_next[next == path.end() ? -1 : *next].push_back(i);
      }
      for (const auto& [next, members] : by_next) {
        if (next >= 0 && takes_over(runs[static_cast<size_t>(next)], run, members)) {
          Run& heir = runs[static_cast<size_t>(next)];
          heir.items.insert(heir.items.begin(), run.items.begin(), run.items.end());
          heir.tokens += run.tokens;
          continue;
        }
        for (size_t i : members) {
          for (int32_t item : run.items) append_alone(run.rows[i], item, run.shifts[i], alone, others);
        }
      }
    }
  }

  // Whether these members of `run` are exactly the rows of `heir`, with its shifts.
  static bool takes_over(const Run& heir, const Run& run, const std::vector<size_t>& members) {
    if (heir.rows.size() != members.size()) return false;
    for (size_t i = 0; i < members.size(); ++i) {
      if (heir.rows[i] != run.rows[members[i]] || heir.shifts[i] != run.shifts[members[i]]) return false;
    }
    return true;
  }

  void plan_invariant() {
    std::map<std::pair<int32_t, std::vector<int32_t>>, Run> shared;  // by ordinal and items
    for (int32_t row = 0; row < in_.num_rows; ++row) {
      const std::vector<Cut> cuts = cuts_of(row);
      for (size_t ordinal = 0; ordinal < cuts.size(); ++ordinal) {
        Run& run = shared[{static_cast<int32_t>(ordinal), cuts[ordinal].items}];
        run.rows.push_back(row);
        run.shifts.push_back(cuts[ordinal].shift);
        if (run.items.empty()) {
          for (int32_t item : cuts[ordinal].items) append(run, item);
        }
      }
    }
    for (auto& [key, run] : shared) {
      if (run.rows.size() == 1 || is_worth_packing(run)) {
        pieces_.push_back(std::move(run));
        continue;
      }
      for (size_t i = 0; i < run.rows.size(); ++i) {
        Run single = run;
        single.rows = {run.rows[i]};
        single.shifts = {run.shifts[i]};
        pieces_.push_back(std::move(single));
      }
    }
  }

  // A row's partials in the invariant mode, in the order of its context.
  std::vector<Cut> cuts_of(int32_t row) {
    if (entries_of_row_.empty()) index_rows();
    std::vector<Cut> cuts;
    int32_t offset = 0, cut_number = -1;
    for (const auto& [position, item, shift] : entries_of_row_[static_cast<size_t>(row)]) {
      const int32_t number = offset / options_.invariant_tokens;
      if (cuts.empty() || number != cut_number || shift != cuts.back().shift) cuts.push_back({{}, shift});
      cuts.back().items.push_back(item);
      cut_number = number;
      offset += in_.count[item];
    }
    return cuts;
  }

  struct Entry {
    int32_t position;  // at which the item's first token acts
    int32_t item;
    int32_t shift;
  };

  // Items are numbered in the order in which the batch names them; a row's context is in the order of positions.
  void index_rows() {
    entries_of_row_.resize(static_cast<size_t>(in_.num_rows));
    for (int32_t item = 0; item < in_.items; ++item) {
      for (int32_t entry = in_.row_indptr[item]; entry < in_.row_indptr[item + 1]; ++entry) {
        const int32_t shift = in_.shifts[entry];
        entries_of_row_[static_cast<size_t>(in_.rows[entry])].push_back({in_.base[item] + shift, item, shift});
      }
    }
    for (int32_t row = 0; row < in_.num_rows; ++row) {
      const int32_t tail = in_.tail_item[row];
      std::vector<Entry>& entries = entries_of_row_[static_cast<size_t>(row)];
      std::sort(entries.begin(), entries.end(), [this, tail](const Entry& a, const Entry& b) {
        // The tail may be empty, at the position of the next token: it stays last.
        if ((a.item == tail) != (b.item == tail)) return b.item == tail;
        if (a.position != b.position) return a.position < b.position;
        if (in_.block[a.item] != in_.block[b.item]) return in_.block[a.item] < in_.block[b.item];
        return in_.first[a.item] < in_.first[b.item];
      });
    }
  }

  // Cuts pieces so that every worker has several of about equal cost to take.
  void balance() {
    if (options_.workers == 1) return;
    std::vector<PieceSize> sizes;
    for (const Run& run : pieces_) sizes.push_back({run.tokens, static_cast<int64_t>(run.rows.size())});
    const std::vector<int64_t> balanced = balanced_parts(options_, sizes);
    std::vector<Run> cut;
    for (size_t index = 0; index < pieces_.size(); ++index) {
      Run& run = pieces_[index];
      const int64_t parts = balanced[index];
      if (parts == 1) {
        cut.push_back(std::move(run));
        continue;
      }
      Run part;
      int64_t done = 0, number = 1;
      for (int32_t item : run.items) {
        if (!part.items.empty() && done * parts >= number * run.tokens) {
          cut.push_back(std::move(part));
          part = Run();
          ++number;
        }
        if (part.items.empty()) part.rows = run.rows, part.shifts = run.shifts;
        append(part, item);
        done += in_.count[item];
      }
      cut.push_back(std::move(part));
    }
    pieces_ = std::move(cut);
  }

  // Splits pieces with more rows than a kernel takes at once.
  void tile() {
    if (options_.tile_rows == 0) return;
    const auto most = static_cast<size_t>(options_.tile_rows / options_.group);
    std::vector<Run> tiled;
    for (Run& run : pieces_) {
      if (run.rows.size() <= most) {
        tiled.push_back(std::move(run));
        continue;
      }
      for (size_t begin = 0; begin < run.rows.size(); begin += most) {
        const size_t end = std::min(run.rows.size(), begin + most);
        Run part;
        part.items = run.items;
        part.tokens = run.tokens;
        part.rows.assign(run.rows.begin() + static_cast<long>(begin), run.rows.begin() + static_cast<long>(end));
        part.shifts.assign(run.shifts.begin() + static_cast<long>(begin),
                           run.shifts.begin() + static_cast<long>(end));
        tiled.push_back(std::move(part));
      }
    }
    pieces_ = std::move(tiled);
  }

  std::vector<int32_t> serialize() const {
    size_t num_items = 0, num_entries = 0, widest = 0;
    for (const Run& run : pieces_) {
      num_items += run.items.size();
      num_entries += run.rows.size();
      widest = std::max(widest, run.rows.size());
    }
    const size_t pieces = pieces_.size(), rows = static_cast<size_t>(in_.num_rows);
    const Deal deal = deal_pieces();
    const size_t words = kWorkHeaderWords + 3 * pieces + 1 + 5 * num_items + 3 * num_entries + (rows + 1) + rows +
                         deal.bounds.size() + deal.units.size();
    std::vector<int32_t> out(words, 0);
    size_t at = kWorkHeaderWords;
    const auto reserve = [&](WorkHeader field, size_t length) {
      out[field] = static_cast<int32_t>(at);
      int32_t* begin = out.data() + at;
      at += length;
      return begin;
    };
    int32_t* piece_items = reserve(kWorkPieceItems, 2 * pieces);
    int32_t* piece_entries = reserve(kWorkPieceEntries, pieces + 1);
    int32_t* block = reserve(kWorkItemBlock, num_items);
    int32_t* first = reserve(kWorkItemFirst, num_items);
    int32_t* count = reserve(kWorkItemCount, num_items);
    int32_t* base = reserve(kWorkItemBase, num_items);
    int32_t* tail = reserve(kWorkItemTail, num_items);
    int32_t* row = reserve(kWorkEntryRow, num_entries);
    int32_t* shift = reserve(kWorkEntryShift, num_entries);
    int32_t* ordinal = reserve(kWorkEntryOrdinal, num_entries);
    int32_t* row_partials = reserve(kWorkRowPartials, rows + 1);
    int32_t* query_position = reserve(kWorkQueryPosition, rows);
    std::copy(deal.bounds.begin(), deal.bounds.end(), reserve(kWorkUnitBounds, deal.bounds.size()));
    std::copy(deal.units.begin(), deal.units.end(), reserve(kWorkUnits, deal.units.size()));
    std::vector<int32_t> partials(rows, 0);
    int32_t item_at = 0, entry_at = 0, tokens = 0;
    for (size_t piece = 0; piece < pieces; ++piece) {
      const Run& run = pieces_[piece];
      piece_items[2 * piece] = item_at;
      piece_entries[piece] = entry_at;
      tokens += run.tokens;
      for (int32_t item : run.items) {
        block[item_at] = in_.block[item];
        first[item_at] = in_.first[item];
        count[item_at] = in_.count[item];
        base[item_at] = in_.base[item];
        tail[item_at] = is_tail_[static_cast<size_t>(item)] != 0 ? INT32_MAX : 0;  // checked to have room
        ++item_at;
      }
      piece_items[2 * piece + 1] = item_at;
      for (size_t i = 0; i < run.rows.size(); ++i) {
        row[entry_at] = run.rows[i];
        shift[entry_at] = run.shifts[i];
        ordinal[entry_at] = partials[static_cast<size_t>(run.rows[i])]++;
        ++entry_at;
      }
    }
    piece_entries[pieces] = entry_at;
    for (size_t i = 0; i < rows; ++i) {
      row_partials[i + 1] = row_partials[i] + partials[i];
      query_position[i] = in_.query_position[i];
    }
    out[kWorkMagic] = kWorkMagicValue;
    out[kWorkWords] = static_cast<int32_t>(words);
    out[kWorkPieces] = static_cast<int32_t>(pieces);
    out[kWorkItems] = item_at;
    out[kWorkEntries] = entry_at;
    out[kWorkRows] = in_.num_rows;
    out[kWorkPartials] = row_partials[rows];
    out[kWorkTokens] = tokens;
    out[kWorkWidest] = static_cast<int32_t>(widest);
    out[kWorkWorkers] = options_.dealt ? options_.workers : 0;
    return out;
  }

  Deal deal_pieces() const {
    if (!options_.dealt) return {};
    std::vector<DealtPiece> pieces;
    for (const Run& run : pieces_) {
      pieces.push_back(dealt_piece(options_, {run.tokens, static_cast<int64_t>(run.rows.size())}));
    }
    return deal_units(pieces, options_.kv_heads, options_.workers);
  }

  const DecodeItems& in_;
  const WorkOptions& options_;
  std::vector<uint8_t> is_tail_;
  std::vector<std::vector<Entry>> entries_of_row_;
  std::vector<Run> pieces_;
};

}  // namespace

void check_options(const WorkOptions& options) {
  const auto fail = [](const char* sentence) { throw std::invalid_argument(sentence); };
  if (options.kv_heads < 1 || options.group < 1) fail("kv_heads and group must be positive");
  if (options.workers < 1 || options.pieces_per_worker < 1) fail("workers and pieces_per_worker must be positive");
  if (options.unit_vectors < 0 || options.narrow_vectors < 0) {
    fail("unit_vectors and narrow_vectors must not be negative");
  }
  if (options.narrow_unit_ns < 0 ||
      (options.narrow_unit_ns > 0 && std::min({options.wide_unit_ns, options.tile_tokens, options.narrow_tile_ns,
                                               options.wide_tile_ns, options.partial_bytes_per_ns}) < 1)) {
    fail(
        "with narrow_unit_ns, wide_unit_ns, tile_tokens, narrow_tile_ns, wide_tile_ns and partial_bytes_per_ns "
        "must be "
        "positive");
  }
  if (options.carry_tokens < 0 || (options.carry_tokens > 0 && options.invariant_tokens < 1)) {
    fail("states are carried on in the batch-invariant mode only, behind a positive number of tokens");
  }
  if (options.tile_rows != 0 && options.tile_rows < options.group) {
    fail("tile_rows must hold at least the group of one row");
  }
}

std::vector<int32_t> plan_decode_work(const DecodeItems& items, const WorkOptions& options) {
  return Planner(items, options).plan();
}

}  // namespace trunkline
