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
    if (now_.rows[0] != 0) _tile_release();
  }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  // Sums in 0 to 3: two tiles of `upper` rows, then two of `lower`; A in 4 and 5, likewise; B in 6 and 7. `steps`: of a
  // tile of A and B.
  void square(int upper, int lower, int steps = kTileSteps) {
    shape({{upper, upper, lower, lower, upper, lower, steps, steps}, 4, 5, steps});
  }
  // Sums of `rows` rows in 0 to 3, A in 4, B in 5 to 7.
  void wide(int rows) {
    shape({{rows, rows, rows, rows, rows, kTileSteps, kTileSteps, kTileSteps}, 4, 4, kTileSteps});
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

  void shape(const Shape& wanted) {
    if (std::memcmp(&wanted, &now_, sizeof(wanted)) == 0) return;
    now_ = wanted;
    Words words{};
    words.palette = 1;
    for (int i = 0; i < 8; ++i) {
      const bool is_a = i >= wanted.a_first && i <= wanted.a_last;
      words.bytes[i] = static_cast<uint16_t>(is_a ? wanted.steps * 4 : 64);
      words.rows[i] = static_cast<uint8_t>(wanted.rows[i]);
    }
    _tile_loadconfig(&words);
  }

  Shape now_{};
};

// What the loads of tiles read must be in memory: they are no reads of it to the compiler.
TRUNKLINE_INLINE void settle_memory() { asm volatile("" ::: "memory"); }

// What a product fetches to the second-level cache meanwhile: in each step, of the rows of B that are as far from its
// own as `bytes` says, every `every`-th from the `first` on. 0: none.
struct PanelAhead {
  long bytes;
  int first, every;
};

// Operands of a product: bytes, and bytes from row to row. `steps`: pairs, a multiple of a tile's.
struct TileOperands {
  const char* a;
  long lda;
  const char* b;
  long ldb;
  int steps;
  char* c;
  long ldc;
};

// Two tiles' height and, with kRight, width of sums: C (+)= A B. `tile_steps`: of a tile of A and B.
template <bool kRight>
TRUNKLINE_INLINE void tile_square(const TileOperands& with, bool accumulate, PanelAhead ahead,
                                  int tile_steps = kTileSteps) {
  const char *a = with.a, *below = a + kTileRowsMax * with.lda, *b = with.b;
  char *c = with.c, *c_below = c + kTileRowsMax * with.ldc;
  if (accumulate) {
    _tile_loadd(0, c, with.ldc);
    _tile_loadd(2, c_below, with.ldc);
    if constexpr (kRight) _tile_loadd(1, c + 64, with.ldc);
    if constexpr (kRight) _tile_loadd(3, c_below + 64, with.ldc);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int step = 0; step < with.steps; step += tile_steps) {
    if (ahead.bytes != 0) {
      for (int row = ahead.first; row < tile_steps; row += ahead.every) {
        prefetch_second(b + ahead.bytes + row * with.ldb);
        if constexpr (kRight) prefetch_second(b + ahead.bytes + row * with.ldb + 64);
      }
    }
    _tile_loadd(4, a, with.lda);
    _tile_loadd(6, b, with.ldb);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, below, with.lda);
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (kRight) {
      _tile_loadd(7, b + 64, with.ldb);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
    a += 64, below += 64, b += tile_steps * with.ldb;
  }
  _tile_stored(0, c, with.ldc);
  _tile_stored(2, c_below, with.ldc);
  if constexpr (kRight) _tile_stored(1, c + 64, with.ldc);
  if constexpr (kRight) _tile_stored(3, c_below + 64, with.ldc);
}

// One tile's height and, with kRight, two tiles' width, in the registers of a square's upper half.
template <bool kRight>
TRUNKLINE_INLINE void tile_upper(const TileOperands& with, bool accumulate, int tile_steps) {
  const char *a = with.a, *b = with.b;
  if (accumulate) {
    _tile_loadd(0, with.c, with.ldc);
    if constexpr (kRight) _tile_loadd(1, with.c + 64, with.ldc);
  } else {
    _tile_zero(0);
    _tile_zero(1);
  }
  for (int step = 0; step < with.steps; step += tile_steps, a += 64, b += tile_steps * with.ldb) {
    _tile_loadd(4, a, with.lda);
    _tile_loadd(6, b, with.ldb);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kRight) {
      _tile_loadd(7, b + 64, with.ldb);
      _tile_dpbf16ps(1, 4, 7);
    }
  }
  _tile_stored(0, with.c, with.ldc);
  if constexpr (kRight) _tile_stored(1, with.c + 64, with.ldc);
}

// The same in those of the lower half. Registers are parts of instructions, so no parameter can choose them.
template <bool kRight>
TRUNKLINE_INLINE void tile_lower(const TileOperands& with, bool accumulate, int tile_steps) {
  const char *a = with.a, *b = with.b;
  if (accumulate) {
    _tile_loadd(2, with.c, with.ldc);
    if constexpr (kRight) _tile_loadd(3, with.c + 64, with.ldc);
  } else {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int step = 0; step < with.steps; step += tile_steps, a += 64, b += tile_steps * with.ldb) {
    _tile_loadd(5, a, with.lda);
    _tile_loadd(6, b, with.ldb);
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (kRight) {
      _tile_loadd(7, b + 64, with.ldb);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(2, with.c, with.ldc);
  if constexpr (kRight) _tile_stored(3, with.c + 64, with.ldc);
}

// One tile's height and kTiles tiles' width, likewise.
template <int kTiles>
TRUNKLINE_INLINE void tile_strip(const TileOperands& with, PanelAhead ahead) {
  const char *a = with.a, *b = with.b;
  const long lda = with.lda, ldb = with.ldb, ldc = with.ldc;
  char* c = with.c;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int step = 0; step < with.steps; step += kTileSteps) {
    if (ahead.bytes != 0) {
      for (int row = ahead.first; row < kTileSteps; row += ahead.every) {
        for (int tile = 0; tile < kTiles; ++tile) prefetch_second(b + ahead.bytes + row * ldb + tile * 64);
      }
    }
    _tile_loadd(4, a, lda);
    _tile_loadd(5, b, ldb);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (kTiles > 1) {
      _tile_loadd(6, b + 64, ldb);
      _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (kTiles > 2) {
      _tile_loadd(7, b + 128, ldb);
      _tile_dpbf16ps(2, 4, 7);
    }
    if constexpr (kTiles > 3) {
      _tile_loadd(5, b + 192, ldb);
      _tile_dpbf16ps(3, 4, 5);
    }
    a += 64, b += kTileSteps * ldb;
  }
  _tile_stored(0, c, ldc);
  if constexpr (kTiles > 1) _tile_stored(1, c + 64, ldc);
  if constexpr (kTiles > 2) _tile_stored(2, c + 128, ldc);
  if constexpr (kTiles > 3) _tile_stored(3, c + 192, ldc);
}

// Lanes two tiles at a time, and one that is left: `product(kRight)` of operands moved to there.
template <class Product>
TRUNKLINE_INLINE void over_lanes(const TileOperands& with, int lanes, const Product& product) {
  TileOperands at = with;
  int lane = 0;
  for (; lane + 2 * kTileLanes <= lanes; lane += 2 * kTileLanes, at.b += 128, at.c += 128) {
    product(std::true_type{}, at);
  }
  if (lane < lanes) product(std::false_type{}, at);
}

// C `[rows, lanes]` (+)= A B, as gemm.h's product, for at most 48 rows; lanes are a multiple of 16. The last two tiles of
// rows make squares, so that all products of as many rows have the same shapes. Steps behind the last whole tile of
// them have shapes of their own: the sums are those of a tile whose other inputs are zero. `ahead`: as of gemm.h.
TRUNKLINE_INLINE void tile_gemm(Tiles& tiles, int rows, int lanes, const TileOperands& with, bool accumulate,
                                long ahead) {
  const int above = (rows - 1) / kTileRowsMax * kTileRowsMax, last = rows - above;
  const int whole = with.steps / kTileSteps * kTileSteps;
  settle_memory();
  for (int begin = 0; begin < with.steps; begin = whole) {
    const bool is_whole = begin < whole;
    const int tile_steps = is_whole ? kTileSteps : with.steps - whole;
    TileOperands part = with;
    part.steps = is_whole ? whole : tile_steps;
    part.a += begin * 4, part.b += begin * with.ldb;
    const bool adds = accumulate || begin > 0;
    tiles.square(kTileRowsMax, last, tile_steps);
    TileOperands end = part;
    end.a += above * with.lda, end.c += above * with.ldc;
    if (above == 0) {
      over_lanes(end, lanes,
                 [&](auto right, const TileOperands& at) { tile_lower<right()>(at, adds, tile_steps); });
    } else {
      end.a -= kTileRowsMax * with.lda, end.c -= kTileRowsMax * with.ldc;
      const PanelAhead fetch{ahead, 0, 1};
      over_lanes(end, lanes,
                 [&](auto right, const TileOperands& at) { tile_square<right()>(at, adds, fetch, tile_steps); });
    }
    if (above > kTileRowsMax) {
      over_lanes(part, lanes,
                 [&](auto right, const TileOperands& at) { tile_upper<right()>(at, adds, tile_steps); });
    }
    if (whole == with.steps || !is_whole) break;
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
