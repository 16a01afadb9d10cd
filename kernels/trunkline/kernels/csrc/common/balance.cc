#include "balance.h"

#include <algorithm>
#include <bit>
#include <tuple>

#include "work_plan.h"

namespace trunkline {
namespace {

// Of numbers that are not negative; `b` may be the largest there is.
int64_t divide_up(int64_t a, int64_t b) { return a / b + (a % b == 0 ? 0 : 1); }

// What reading a piece takes, in query vectors.
int64_t vector_cost(const WorkOptions& options, const PieceSize& piece) {
  return piece.tokens * (options.vectors_per_read + piece.rows * options.group) + 1;
}

bool is_narrow(const WorkOptions& options, int64_t rows) { return rows * options.group <= options.narrow_vectors; }

int64_t tiles_of(const WorkOptions& options, int64_t tokens) { return divide_up(tokens, options.tile_tokens); }

int64_t unit_ns(const WorkOptions& options, bool narrow) {
  return narrow ? options.narrow_unit_ns : options.wide_unit_ns;
}

int64_t tile_ns(const WorkOptions& options, bool narrow) {
  return narrow ? options.narrow_tile_ns : options.wide_tile_ns;
}

int64_t unit_cost(const WorkOptions& options, int64_t tiles, bool narrow) {
  return unit_ns(options, narrow) + tiles * tile_ns(options, narrow);
}

// Most rows of a piece that one worker takes.
int64_t rows_of_tile(const WorkOptions& options, int64_t rows) {
  return options.tile_rows == 0 ? rows : options.tile_rows / options.group;
}

int64_t most_by_tokens(const WorkOptions& options, int64_t tokens) {
  return std::max<int64_t>(1, tokens / std::max(1, options.piece_tokens_min));
}

// As many parts as let a unit of work cost about `aim`. A part reads at least twice as many bytes of KV as its partial
// results have, or cuts would cost more than they gain.
int64_t parts_by_vectors(const WorkOptions& options, const PieceSize& piece, int64_t aim) {
  constexpr int64_t kBytesPerPartialByte = 2;
  const int64_t vectors = piece.rows * options.group;
  // KV heads that a worker takes at once.
  const int64_t heads = std::clamp<int64_t>(options.unit_vectors / vectors, 1, options.kv_heads);
  const int64_t unit = aim * divide_up(piece.rows, rows_of_tile(options, piece.rows));
  const int64_t by_bytes = piece.tokens * options.kv_token_bytes /
                           std::max<int64_t>(1, kBytesPerPartialByte * vectors * options.partial_bytes);
  const int64_t most = std::max<int64_t>(1, std::min(most_by_tokens(options, piece.tokens), by_bytes));
  return std::clamp<int64_t>(divide_up(vector_cost(options, piece) * heads, unit), 1, most);
}

// Pieces with equally many tiles and equally many units of each kind: they are cut alike.
struct PieceClass {
  int64_t tiles, most_parts;
  int64_t wide, narrow;  // units of a part, over all KV heads
  int64_t vectors;       // query vectors, each of which has a partial result in each part
  int64_t count = 1;

  auto key() const { return std::tie(tiles, most_parts, wide, narrow, vectors); }
};

// What a unit should take, in ns.
struct Aims {
  int64_t wide, narrow;
};

// Chooses cuts by what units take on a GPU.
class Timing {
 public:
  Timing(const WorkOptions& options, const std::vector<PieceSize>& pieces) : options_(options) {
    std::vector<PieceClass> all;
    for (const PieceSize& piece : pieces) all.push_back(class_of(piece));
    std::sort(all.begin(), all.end(), [](const PieceClass& a, const PieceClass& b) { return a.key() < b.key(); });
    for (const PieceClass& each : all) {
      if (!classes_.empty() && classes_.back().key() == each.key()) {
        ++classes_.back().count;
      } else {
        classes_.push_back(each);
      }
    }
  }

  // The best aims that were found: first for wide units, then for narrow ones, then for wide ones again, each while the
  // other kind keeps what is best so far. A plan is good enough if its time is at most a tenth above the workers' mean.
  Aims best() const {
    int64_t total = 0, longest = 1;
    for (const PieceClass& each : classes_) {
      const int64_t wide = cost(each.tiles, false), narrow = cost(each.tiles, true);
      total += each.count * (each.wide * wide + each.narrow * narrow);
      longest = std::max({longest, wide, narrow});
    }
    const int64_t good = total / options_.workers + total / options_.workers / 10;
    Aims best{longest, longest};
    int64_t least = time_of(best);
    for (const bool wide : {true, false, true}) {
      int64_t aim = longest;
      // 1/4, 3/8, 1/2, 3/4, 1, 3/2, 2, 3, 4, … units for each worker.
      for (uint64_t eighths = 2; least > good && eighths <= 8 * static_cast<uint64_t>(options_.pieces_per_worker);
           eighths += std::bit_floor(eighths) / 2) {
        const int64_t next = least_aim(wide, static_cast<int64_t>(eighths) * options_.workers / 8, aim);
        if (next == aim) continue;
        aim = next;
        const Aims aims{wide ? aim : best.wide, wide ? best.narrow : aim};
        const int64_t time = time_of(aims);
        if (time < least) best = aims, least = time;
      }
    }
    return best;
  }

  int64_t parts(const PieceSize& piece, const Aims& aims) const { return parts(class_of(piece), aims); }

 private:
  int64_t cost(int64_t tiles, bool narrow) const { return unit_cost(options_, tiles, narrow); }

  PieceClass class_of(const PieceSize& piece) const {
    const int64_t rows = rows_of_tile(options_, piece.rows), heads = options_.kv_heads;
    const int64_t whole = piece.rows / rows, rest = piece.rows % rows;
    PieceClass found{tiles_of(options_, piece.tokens), most_by_tokens(options_, piece.tokens), 0, 0,
                     piece.rows * options_.group * heads};
    (is_narrow(options_, rows) ? found.narrow : found.wide) += whole * heads;
    if (rest > 0) (is_narrow(options_, rest) ? found.narrow : found.wide) += heads;
    return found;
  }

  // About the least aim with which pieces of one kind become at most `most` units; `high` if none below it does.
  int64_t least_aim(bool wide, int64_t most, int64_t high) const {
    for (int64_t low = unit_ns(options_, !wide); high - low > high / 64;) {
      const int64_t aim = low + (high - low) / 2;
      int64_t units = 0;
      for (const PieceClass& each : classes_) {
        if ((each.wide > 0) == wide) units += parts(each, {aim, aim}) * each.count * (each.wide + each.narrow);
      }
      if (units <= most) {
        high = aim;
      } else {
        low = aim + 1;
      }
    }
    return high;
  }

  int64_t parts(const PieceClass& like, const Aims& aims) const {
    const bool narrow = like.wide == 0;
    const int64_t tile = tile_ns(options_, narrow), aim = narrow ? aims.narrow : aims.wide;
    return std::clamp<int64_t>(divide_up(like.tiles * tile, std::max(aim - unit_ns(options_, narrow), tile)), 1,
                               like.most_parts);
  }

  // The time of the busiest worker and of merging. The parts of a piece differ by a tile at most.
  int64_t time_of(const Aims& aims) const {
    std::vector<EqualUnits> units;
    int64_t partials = 0;
    for (const PieceClass& each : classes_) {
      const int64_t count = parts(each, aims), longer = each.tiles % count, tiles = each.tiles / count;
      const auto add = [&](int64_t length, int64_t times) {
        if (times * each.wide > 0) units.push_back({cost(length, false), times * each.wide});
        if (times * each.narrow > 0) units.push_back({cost(length, true), times * each.narrow});
      };
      add(tiles + 1, longer * each.count);
      add(tiles, (count - longer) * each.count);
      partials += count * each.vectors * each.count;
    }
    return busiest(std::move(units), options_.workers) +
           partials * options_.partial_bytes / options_.partial_bytes_per_ns;
  }

  const WorkOptions& options_;
  std::vector<PieceClass> classes_;
};

}  // namespace

std::vector<int64_t> balanced_parts(const WorkOptions& options, const std::vector<PieceSize>& pieces) {
  std::vector<int64_t> parts;
  if (options.narrow_unit_ns > 0) {
    const Timing timing(options, pieces);
    const Aims aims = timing.best();
    for (const PieceSize& piece : pieces) parts.push_back(timing.parts(piece, aims));
    return parts;
  }
  int64_t total = 0;
  for (const PieceSize& piece : pieces) total += vector_cost(options, piece);
  const int64_t units = int64_t{options.workers} * options.pieces_per_worker;
  const int64_t aim = std::max<int64_t>(1, total * options.kv_heads / units);
  for (const PieceSize& piece : pieces) parts.push_back(parts_by_vectors(options, piece, aim));
  return parts;
}

DealtPiece dealt_piece(const WorkOptions& options, const PieceSize& piece) {
  constexpr int kBits = 5;
  const bool narrow = is_narrow(options, piece.rows);
  const int64_t cost = options.narrow_unit_ns == 0 ? vector_cost(options, piece)
                                                   : unit_cost(options, tiles_of(options, piece.tokens), narrow);
  const int dropped = std::max(0, static_cast<int>(std::bit_width(static_cast<uint64_t>(cost))) - kBits);
  const int64_t rounded = ((cost + (int64_t{1} << dropped) - 1) >> dropped) << dropped;
  return {rounded, narrow};
}

}  // namespace trunkline
