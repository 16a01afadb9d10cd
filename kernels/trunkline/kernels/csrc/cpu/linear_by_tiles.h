// One unit of a linear layer in bfloat16 by matrix registers (`tile_product.h`), over weights in bfloat16 or int8.
//
// As many panels as half a second-level cache holds make a group. Rows pass over a group in squares of 32, so that rows
// are read from farther away once per group, and their outputs, which lie in no cache, are written in long runs. Meanwhile a
// pass over a panel turns the sums of the pass before into outputs. Few passes are through a panel before the next
// one has arrived, so these ask for it, each for its share, and a group is one panel.
//
// Bytes become pairs of bfloat16, which holds them exactly: for a single pass block by block, in the first-level cache,
// for more rows once per group. Both give the same bits.
#pragma once

#include <optional>

#include "linear_unit.h"
#include "quantised.h"
#include "tile_product.h"

#if TRUNKLINE_LEVEL >= 4

namespace trunkline::TRUNKLINE_NAMESPACE {
namespace {

constexpr int kPassRows = 2 * kTileRowsMax;

// Passes of which each asks for its share of what the next panel's will read.
constexpr int kAskingPasses = 7;

// Bytes of a group of panels: half a second-level cache.
constexpr int64_t kGroupBytes = 1000 * 1024;

// A pass of at most 32 rows over all lanes of a panel, or of some steps of it.
template <class Meanwhile>
TRUNKLINE_INLINE void multiply_pass(Tiles& tiles, int rows, int width, const TileOperands& with,
                                    Meanwhile& meanwhile) {
  over_steps(with, [&](const TileOperands& part) {
    if (rows > kTileRowsMax) {
      tiles.square(kTileRowsMax, rows - kTileRowsMax, part.tile_steps);
      over_lanes(part, width, [&](auto right, const TileOperands& at) { tile_square<right()>(at, meanwhile); });
      return;
    }
    tiles.wide(rows, part.tile_steps);
    over_strips(part, width,
                [&](auto tiles_wide, const TileOperands& at) { tile_strip<tiles_wide()>(at, meanwhile); });
  });
}

// Some steps of an int8 panel, from a whole tile on, as tiles, a tile a call; asks for what is behind them.
struct Widening {
  const int8_t* from;
  int width;
  int64_t steps;  // left
  uint32_t* to;

  TRUNKLINE_INLINE void operator()() {
    if (steps <= 0) return;
    const int count = smaller(kTileSteps, steps);
    for (int step = 0; step < count; ++step, from += 2 * width) {
      prefetch_second(from + kAheadBytes);
      prefetch_second(from + kAheadBytes + width);
      for (int lane = 0; lane < width; lane += kTileLanes) {
        store_bits(to + lane * count + step * kTileLanes, load_int8_pairs(from + lane, from + width + lane));
      }
    }
    to += count * width, steps -= count;
  }
  TRUNKLINE_INLINE void finish() {
    while (steps > 0) (*this)();
  }
};

// A single pass over an int8 panel, in blocks of which two fit the first-level cache beside the rows. While one is
// multiplied the next one is widened: vectors and matrix registers work at the same time, and what is read from
// memory is asked for evenly.
template <class Meanwhile>
TRUNKLINE_INLINE void multiply_bytes(Tiles& tiles, int rows, int width, const TileOperands& with,
                                     Meanwhile& meanwhile) {
  constexpr int kBlockSteps = 2 * kTileSteps;
  alignas(64) uint32_t blocks[2][kBlockSteps * kPanelWidth];
  Widening next{reinterpret_cast<const int8_t*>(with.b), width, smaller(kBlockSteps, with.steps), blocks[0]};
  next.finish();
  TileOperands part = with;
  for (int start = 0; start < with.steps; start += kBlockSteps) {
    const int turn = start / kBlockSteps % 2, stop = start + kBlockSteps;
    part.b = reinterpret_cast<const char*>(blocks[turn]);
    part.steps = smaller(kBlockSteps, with.steps - start);
    next.steps = smaller(kBlockSteps, with.steps - stop), next.to = blocks[1 - turn];
    const auto beside = [&] { next(), meanwhile(); };
    settle_memory();
    multiply_pass(tiles, rows, width, part, beside);
    next.finish();
    part.a += kBlockSteps * 4, part.accumulate = true;
  }
}

// What happens during a pass's products.
struct PassMeanwhile {
  LinesAhead lines{};
  const PanelOutputs* outputs = nullptr;  // of the pass before
  StoreRows store = nullptr;
  int next = 0, rows = 0, each = 0;  // of its rows: the next one, all, and how many in a step

  TRUNKLINE_INLINE void operator()() {
    lines();
    if (next < rows) give(each);
  }
  TRUNKLINE_INLINE void give(int count) {
    const int stop = smaller(next + count, rows);
    store(*outputs, next, stop);
    next = stop;
  }
  void finish() {
    if (next < rows) give(rows);
  }
  void follow(const PanelOutputs& own, int count) { outputs = &own, next = 0, rows = count; }
};

// Panels [begin, end) in groups of about equal size.
struct PanelGroups {
  int64_t begin, end, count;

  TRUNKLINE_INLINE PanelGroups(int64_t begin, int64_t end, int64_t panel_bytes) : begin(begin), end(end) {
    const int64_t wanted = ((end - begin) * panel_bytes + kGroupBytes - 1) / kGroupBytes;
    count = wanted < end - begin ? wanted : end - begin;
  }
  TRUNKLINE_INLINE int64_t start(int64_t group) const { return begin + (end - begin) * group / count; }
  // Panels of any group at most.
  TRUNKLINE_INLINE static int64_t largest(int64_t panel_bytes) {
    return (kGroupBytes + panel_bytes - 1) / panel_bytes;
  }
};

TRUNKLINE_INLINE int64_t pair_steps(const LinearLayer& layer) { return (layer.in_features + 1) / 2; }

// Bytes of a panel, of a gated layer of two, in bfloat16.
TRUNKLINE_INLINE int64_t panel_bytes(const LinearLayer& layer) {
  return panel_parts(layer) * pair_steps(layer) * kPanelWidth * 4;
}

// Words of rows, before what is aligned to a line.
TRUNKLINE_INLINE int64_t row_area(int64_t words) { return (words + 15) / 16 * 16; }

// 32-bit words of memory for a unit of `rows` rows: rows in pairs if the last pair is half empty, and a widened group.
template <bool kBytes>
int64_t tile_words(const LinearLayer& layer, int64_t rows) {
  const int64_t words = unit_words<BFloat16>(layer, rows);
  if (!kBytes || rows <= kPassRows) return words;
  const int64_t bytes = panel_bytes(layer), panels = (layer.out_features + kPanelWidth - 1) / kPanelWidth;
  const int64_t largest = PanelGroups::largest(bytes);
  return row_area(words) + (largest < panels ? largest : panels) * bytes / 4;
}

// A unit's rows times panels. `kBytes`: of int8 weights.
template <bool kBytes>
class TileUnit {
 public:
  TileUnit(const LinearCall& call, int64_t row_begin, int64_t row_end, ConvertedRows* converted)
      : call_(call),
        layer_(*call.layer),
        row_begin_(row_begin),
        rows_(static_cast<int>(row_end - row_begin)),
        passes_((rows_ + kPassRows - 1) / kPassRows),
        parts_(panel_parts(layer_)),
        steps_(static_cast<int>(pair_steps(layer_))) {
    long words;
    a_ = reinterpret_cast<const char*>(prepare_rows<BFloat16>(call, row_begin, row_end, converted, words));
    lda_ = words * 4;
    if (kBytes && passes_ > 1) {
      widened_ = static_cast<char*>(converted->words) + row_area(unit_words<BFloat16>(layer_, rows_)) * 4;
    }
    meanwhile_.store = store_rows<BFloat16>(call);
    settle_memory();
  }

  void multiply(int64_t panel_begin, int64_t panel_end) {
    const bool asks = !kBytes && passes_ <= kAskingPasses;
    const PanelGroups groups(panel_begin, panel_end, asks ? kGroupBytes : panel_bytes(layer_));
    for (int64_t group = 0; group < groups.count; ++group) {
      const int64_t start = groups.start(group), stop = groups.start(group + 1);
      if (widened_ != nullptr) widen(start, stop);
      for (int pass = 0; pass < passes_; ++pass) {
        for (int64_t panel = start; panel < stop; ++panel) multiply_panel(pass, panel, start);
      }
    }
    meanwhile_.finish();
  }

 private:
  const char* panel_at(int64_t lanes) const {
    return static_cast<const char*>(layer_.panels) + lanes * steps_ * (kBytes ? 2 : 4);
  }

  void widen(int64_t start, int64_t stop) {
    char* to = widened_;
    for (int64_t panel = start; panel < stop; ++panel) {
      const PanelOutputs outputs(call_, row_begin_, panel, nullptr, nullptr);
      for (int part = 0; part < parts_; ++part, to += steps_ * outputs.width * 4L) {
        const char* from = panel_at(outputs.lanes + part * outputs.width);
        Widening{reinterpret_cast<const int8_t*>(from), outputs.width, steps_, reinterpret_cast<uint32_t*>(to)}
            .finish();
      }
    }
    settle_memory();
  }

  // `group_start`: the first panel of its group.
  void multiply_panel(int pass, int64_t panel, int64_t group_start) {
    const int first = pass * kPassRows, count = smaller(kPassRows, rows_ - first);
    const PanelOutputs& own =
        outputs_[turn_].emplace(call_, row_begin_ + first, panel, sums_[turn_][0], sums_[turn_][1]);
    // Steps of a part's products, in which what happens meanwhile gets its turn.
    const int turns = (steps_ + kTileSteps - 1) / kTileSteps * (count > kTileRowsMax ? (own.width + 31) / 32 : 1);
    meanwhile_.each = (meanwhile_.rows + parts_ * turns - 1) / (parts_ * turns);
    for (int part = 0; part < parts_; ++part) {
      const int64_t lanes = own.lanes + part * own.width;
      const char* b = panel_at(lanes);
      if (widened_ != nullptr) b = widened_ + (lanes - group_start * parts_ * kPanelWidth) * steps_ * 4;
      const TileOperands with{a_ + first * lda_,
                              lda_,
                              b,
                              own.width * 4,
                              true,
                              steps_,
                              kTileSteps,
                              reinterpret_cast<char*>(sums_[turn_][part]),
                              kPanelWidth * 4,
                              false};
      if (kBytes && widened_ == nullptr) {
        multiply_bytes(tiles_, count, own.width, with, meanwhile_);
        continue;
      }
      if (!kBytes && passes_ <= kAskingPasses) ask(pass, b, own.width, turns);
      multiply_pass(tiles_, count, own.width, with, meanwhile_);
    }
    meanwhile_.finish();
    meanwhile_.follow(own, count);
    turn_ = 1 - turn_;
  }

  // Rows of one tile read a panel once, in order, so they ask for what they read a little later. Squares read it in two
  // sweeps: a single pass asks for what it will read next, of a gated layer's gate the other part; several passes, which
  // read both parts in turn, for the same part of the next panel.
  void ask(int pass, const char* b, int width, int turns) {
    const int lines = steps_ * width / kTileLanes, share = (lines + passes_ - 1) / passes_;
    const int next = passes_ > 1 ? parts_ * lines : lines;
    const char* from = rows_ <= kTileRowsMax ? b + kAheadBytes : b + (next + pass * share) * 64L;
    meanwhile_.lines = {from, 64, 1, share, (share + turns - 1) / turns};
  }

  const LinearCall& call_;
  const LinearLayer& layer_;
  const int64_t row_begin_;
  const int rows_, passes_, parts_, steps_;
  const char* a_;
  long lda_;
  char* widened_ = nullptr;
  alignas(64) float sums_[2][2][kPassRows * kPanelWidth];  // of a pass and of the one before, by parts
  std::optional<PanelOutputs> outputs_[2];
  int turn_ = 0;
  PassMeanwhile meanwhile_;
  Tiles tiles_;
};

template <bool kBytes>
void tile_unit(const LinearCall& call, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end,
               ConvertedRows* converted) {
  TileUnit<kBytes>(call, row_begin, row_end, converted).multiply(panel_begin, panel_end);
}

}  // namespace
}  // namespace trunkline::TRUNKLINE_NAMESPACE

#endif
