// Products of bfloat16 in the processor's matrix registers (AMX), for the level that has them.
//
// A register is a *tile* of up to 16 rows of 64 bytes. One instruction multiplies a tile of A (rows of 32 inputs) by a
// tile of B (16 steps of 16 lanes' pairs, which is how panels are packed) and adds the products to a tile of sums. An
// element's sum over these 32 inputs is that of the even ones and that of the odd ones, added to what was there. So
// a row's result depends neither on the rows beside it nor on how many there are, as with gemm.h's product, but it
// is rounded differently.
//
// The registers have shapes, which a thread sets before it uses them. While they are in use the system keeps 8 KB
// more of the thread at each switch, so they are given back behind a unit of work.
#pragma once

#include <type_traits>

#include "simd.h"

#if TRUNKLINE_LEVEL >= 4

namespace trunkline::TRUNKLINE_NAMESPACE {
namespace {

constexpr int kTileRowsMax = 16, kTileLanes = 16;
constexpr int kTileSteps = 16;  // pairs of inputs

// The shapes of this thread's registers; from the first shape to its end they are in use.
class Tiles {
 public:
  Tiles() = default;
  ~Tiles() {
    if (key_ != 0) _tile_release();
  }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  // Sums in 0 to 3: two tiles of `upper` rows, then two of `lower`; A in 4 and 5, likewise; B in 6 and 7. `steps`: of a
  // tile of A and B.
  void square(int upper, int lower, int steps = kTileSteps) {
    set(upper << 16 | lower << 8 | steps, {{upper, upper, lower, lower, upper, lower, steps, steps}, 4, 5, steps});
  }
  // Sums of `rows` rows in 0 to 3, A in 4, B in 5 to 7.
  void wide(int rows, int steps = kTileSteps) {
    set(rows << 8 | steps, {{rows, rows, rows, rows, rows, steps, steps, steps}, 4, 4, steps});
  }

 private:
  struct Shape {
    int rows[8];
    int a_first, a_last;  // registers of A
    int steps;
  };
  struct alignas(64) Words {
    uint8_t palette, start, unused[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  };

  // `key` tells these shapes from all others.
  TRUNKLINE_INLINE void set(int key, const Shape& wanted) {
    if (key == key_) return;
    key_ = key;
    load(wanted);
  }

  static void load(const Shape& wanted) {
    Words words{};
    words.palette = 1;
    for (int i = 0; i < 8; ++i) {
      const bool is_a = i >= wanted.a_first && i <= wanted.a_last;
      words.bytes[i] = static_cast<uint16_t>(is_a ? wanted.steps * 4 : 64);
      words.rows[i] = static_cast<uint8_t>(wanted.rows[i]);
    }
    _tile_loadconfig(&words);
  }

  int key_ = 0;  // of the present shapes; 0: there are none
};

// What the loads of tiles read must be in memory: they are no reads of it to the compiler.
TRUNKLINE_INLINE void settle_memory() { asm volatile("" ::: "memory"); }

// What a product does meanwhile, once in each step: its instructions run beside those of the registers.
struct Nothing {
  TRUNKLINE_INLINE void operator()() const {}
};

// Asks for rows of lines that will be read, into the second-level cache.
struct LinesAhead {
  const char* at;
  long row;   // bytes from row to row
  int lines;  // beside each other in a row
  int rows;   // left
  int each;   // rows in a step

  TRUNKLINE_INLINE void operator()() {
    for (int i = 0; i < each && rows > 0; ++i, --rows, at += row) {
      for (int line = 0; line < lines; ++line) prefetch_second(at + line * 64);
    }
  }
};

// Operands of a product: rows of A and of C, as far from each other as `lda` and `ldc` say, in bytes, and steps of B, each
// of `ldb` bytes. B lies step by step, or (`whole_tiles`) tile by tile: lanes of 16 steps, then the next 16 lanes of these.
struct TileOperands {
  const char* a;
  long lda;
  const char* b;
  long ldb;
  bool whole_tiles;
  int steps;       // pairs of inputs, a multiple of `tile_steps`
  int tile_steps;  // of a tile of A and B: kTileSteps, or what is left behind the last whole tile
  char* c;
  long ldc;
  bool accumulate;

  TRUNKLINE_INLINE const char* a_below() const { return a + kTileRowsMax * lda; }
  TRUNKLINE_INLINE char* c_below() const { return c + kTileRowsMax * ldc; }
  // Bytes from row to row of a tile of B, to the tile at its right, and to that of the next steps.
  TRUNKLINE_INLINE long b_row() const { return whole_tiles ? 64 : ldb; }
  TRUNKLINE_INLINE long b_right() const { return whole_tiles ? tile_steps * 64 : 64; }
  TRUNKLINE_INLINE long b_next() const { return tile_steps * ldb; }
};

// Two tiles' height and, with kRight, width of sums: C (+)= A B.
template <bool kRight, class Meanwhile>
TRUNKLINE_INLINE void tile_square(const TileOperands& with, Meanwhile& meanwhile) {
  const char *a = with.a, *below = with.a_below(), *b = with.b;
  char *c = with.c, *c_below = with.c_below();
  const long lda = with.lda, ldb = with.b_row(), right = with.b_right(), next = with.b_next(), ldc = with.ldc;
  if (with.accumulate) {
    _tile_loadd(0, c, ldc);
    _tile_loadd(2, c_below, ldc);
    if constexpr (kRight) _tile_loadd(1, c + 64, ldc);
    if constexpr (kRight) _tile_loadd(3, c_below + 64, ldc);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int step = 0; step < with.steps; step += with.tile_steps) {
    _tile_loadd(4, a, lda);
    _tile_loadd(6, b, ldb);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, below, lda);
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (kRight) {
      _tile_loadd(7, b + right, ldb);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
    meanwhile();
    a += 64, below += 64, b += next;
  }
  _tile_stored(0, c, ldc);
  _tile_stored(2, c_below, ldc);
  if constexpr (kRight) _tile_stored(1, c + 64, ldc);
  if constexpr (kRight) _tile_stored(3, c_below + 64, ldc);
}

// One tile's height and, with kRight, two tiles' width, in the registers of a square's upper half. Registers are parts of
// instructions, so no parameter can choose them.
template <bool kRight>
TRUNKLINE_INLINE void tile_upper(const TileOperands& with) {
  const char *a = with.a, *b = with.b;
  const long ldb = with.b_row(), right = with.b_right(), next = with.b_next();
  if (with.accumulate) {
    _tile_loadd(0, with.c, with.ldc);
    if constexpr (kRight) _tile_loadd(1, with.c + 64, with.ldc);
  } else {
    _tile_zero(0);
    _tile_zero(1);
  }
  for (int step = 0; step < with.steps; step += with.tile_steps) {
    _tile_loadd(4, a, with.lda);
    _tile_loadd(6, b, ldb);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kRight) {
      _tile_loadd(7, b + right, ldb);
      _tile_dpbf16ps(1, 4, 7);
    }
    a += 64, b += next;
  }
  _tile_stored(0, with.c, with.ldc);
  if constexpr (kRight) _tile_stored(1, with.c + 64, with.ldc);
}

// One tile's height and kTiles tiles' width.
template <int kTiles, class Meanwhile>
TRUNKLINE_INLINE void tile_strip(const TileOperands& with, Meanwhile& meanwhile) {
  const char *a = with.a, *b = with.b;
  const long lda = with.lda, ldb = with.b_row(), right = with.b_right(), next = with.b_next(), ldc = with.ldc;
  char* c = with.c;
  if (with.accumulate) {
    _tile_loadd(0, c, ldc);
    if constexpr (kTiles > 1) _tile_loadd(1, c + 64, ldc);
    if constexpr (kTiles > 2) _tile_loadd(2, c + 128, ldc);
    if constexpr (kTiles > 3) _tile_loadd(3, c + 192, ldc);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int step = 0; step < with.steps; step += with.tile_steps) {
    _tile_loadd(4, a, lda);
    _tile_loadd(5, b, ldb);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (kTiles > 1) {
      _tile_loadd(6, b + right, ldb);
      _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (kTiles > 2) {
      _tile_loadd(7, b + 2 * right, ldb);
      _tile_dpbf16ps(2, 4, 7);
    }
    if constexpr (kTiles > 3) {
      _tile_loadd(5, b + 3 * right, ldb);
      _tile_dpbf16ps(3, 4, 5);
    }
    meanwhile();
    a += 64, b += next;
  }
  _tile_stored(0, c, ldc);
  if constexpr (kTiles > 1) _tile_stored(1, c + 64, ldc);
  if constexpr (kTiles > 2) _tile_stored(2, c + 128, ldc);
  if constexpr (kTiles > 3) _tile_stored(3, c + 192, ldc);
}

// One tile's height, over one or two tiles of steps and over nothing that was there: A's stay in registers.
template <int kTiles>
TRUNKLINE_INLINE void tile_held(const TileOperands& with, int lanes) {
  const char* b = with.b;
  const long ldb = with.b_row(), right = with.b_right(), next = with.b_next(), ldc = with.ldc;
  char* c = with.c;
  _tile_loadd(1, with.a, with.lda);
  if constexpr (kTiles > 1) _tile_loadd(2, with.a + 64, with.lda);
  for (int lane = 0; lane < lanes; lane += kTileLanes, b += right, c += 64) {
    _tile_zero(0);
    _tile_loadd(5, b, ldb);
    _tile_dpbf16ps(0, 1, 5);
    if constexpr (kTiles > 1) {
      _tile_loadd(6, b + next, ldb);
      _tile_dpbf16ps(0, 2, 6);
    }
    _tile_stored(0, c, ldc);
  }
}

// Lanes two tiles at a time, and one that is left: `product(kRight)` of operands moved to there.
template <class Product>
TRUNKLINE_INLINE void over_lanes(const TileOperands& with, int lanes, const Product& product) {
  TileOperands at = with;
  int lane = 0;
  for (; lane + 2 * kTileLanes <= lanes; lane += 2 * kTileLanes, at.b += 2 * at.b_right(), at.c += 128) {
    product(std::true_type{}, at);
  }
  if (lane < lanes) product(std::false_type{}, at);
}

// Rows of one tile, lanes four tiles at a time, and those that are left: `product(tiles)` of operands moved to there.
template <class Product>
TRUNKLINE_INLINE void over_strips(const TileOperands& with, int lanes, const Product& product) {
  TileOperands at = with;
  int left = lanes / kTileLanes;
  for (; left >= 4; left -= 4, at.b += 4 * at.b_right(), at.c += 256) {
    product(std::integral_constant<int, 4>{}, at);
  }
  switch (left) {
    case 3: return product(std::integral_constant<int, 3>{}, at);
    case 2: return product(std::integral_constant<int, 2>{}, at);
    case 1: return product(std::integral_constant<int, 1>{}, at);
    default: return;
  }
}

// Whole tiles of steps, and what is left behind them as tiles of a shape of its own, whose sums are those of a tile with
// zeros for the other inputs: `product` of the operands of either, of any number of steps together.
template <class Product>
TRUNKLINE_INLINE void over_steps(const TileOperands& with, const Product& product) {
  TileOperands part = with;
  part.steps = with.steps / kTileSteps * kTileSteps;
  if (part.steps > 0) product(part);
  const int tiles = part.steps / kTileSteps, left = with.steps - part.steps;
  if (left == 0) return;
  part.accumulate = with.accumulate || tiles > 0;
  part.a += tiles * 64, part.b += part.steps * part.ldb;
  part.steps = part.tile_steps = left;
  product(part);
}

// C `[rows, lanes]` (+)= A B, as gemm.h's product, for at most 48 rows; lanes are a multiple of 16. Rows of one tile are
// strips; of more, the last two tiles make squares, so that all products of as many rows have the same shapes. `ahead`:
// as of gemm.h.
TRUNKLINE_INLINE void tile_gemm(Tiles& tiles, int rows, int lanes, const TileOperands& with, long ahead) {
  const int above = (rows - 1) / kTileRowsMax * kTileRowsMax, last = rows - above;
  const auto fetch_beside = [&](const TileOperands& at, int width) {
    return LinesAhead{at.b + ahead, at.ldb, width, ahead == 0 ? 0 : at.steps, at.tile_steps};
  };
  settle_memory();
  over_steps(with, [&](const TileOperands& part) {
    if (above == 0) {
      tiles.wide(rows, part.tile_steps);
      over_strips(part, lanes, [&](auto width, const TileOperands& at) {
        LinesAhead fetch = fetch_beside(at, width());
        tile_strip<width()>(at, fetch);
      });
      return;
    }
    tiles.square(kTileRowsMax, last, part.tile_steps);
    TileOperands end = part;
    end.a += (above - kTileRowsMax) * with.lda, end.c += (above - kTileRowsMax) * with.ldc;
    over_lanes(end, lanes, [&](auto right, const TileOperands& at) {
      LinesAhead fetch = fetch_beside(at, right() ? 2 : 1);
      tile_square<right()>(at, fetch);
    });
    if (above > kTileRowsMax) {
      over_lanes(part, lanes, [&](auto right, const TileOperands& at) { tile_upper<right()>(at); });
    }
  });
}

// The same for at most 16 rows where B is in a cache, with as few instructions as can be: B is not read in the order in
// which it lies in memory. Returns whether there is such a product, of some shapes only.
TRUNKLINE_INLINE bool tile_gemm_cached(Tiles& tiles, int rows, int lanes, const TileOperands& with) {
  if (with.steps % kTileSteps != 0) return false;
  settle_memory();
  tiles.wide(rows);
  if (with.accumulate) {
    Nothing nothing;
    if (lanes == 4 * kTileLanes) tile_strip<4>(with, nothing);
    return lanes == 4 * kTileLanes;
  }
  switch (with.steps / kTileSteps) {
    case 1: return tile_held<1>(with, lanes), true;
    case 2: return tile_held<2>(with, lanes), true;
    default: return false;
  }
}

}  // namespace
}  // namespace trunkline::TRUNKLINE_NAMESPACE

#else

namespace trunkline::TRUNKLINE_NAMESPACE {
namespace {
struct Tiles {};
}  // namespace
}  // namespace trunkline::TRUNKLINE_NAMESPACE

#endif
