// int8 weights in the product of the linear layers: how a panel of bytes becomes factors.
//
// A byte is converted where it is used: in the tile for the rows of a decode step, which read a quarter or half of
// the memory for it; once per block of the panel, into the first-level cache, for more rows, whose tiles then are
// those of plain weights. Both give the same bits, for an int8 is exact in every type, and sums run in order.
#pragma once

#include "linear_tile.h"

namespace trunkline::TRUNKLINE_NAMESPACE {
namespace {

// Rows and results of type T, weights int8. Multiplied as floats.
template <class T>
struct Int8 : T {
  using A = float;
  using B = int8_t;
  using Block = Float32;  // what a block of the panel is converted to
  static constexpr int kStep = 1;
  static constexpr int kWords = 1;
  static constexpr bool kPlainA = sizeof(typename T::Storage) == sizeof(float);
};

template <class T>
struct Factors<Int8<T>> : Factors<Float32> {
  TRUNKLINE_INLINE static Vec lanes(const int8_t* b, long, int) { return load_int8(b); }
};

TRUNKLINE_INLINE void convert_step(const int8_t* b, int width, float* out) {
  for (int lane = 0; lane < width; lane += kLanes) store(out + lane, load_int8(b + lane));
}

#if TRUNKLINE_LEVEL >= 3
// Multiplied in pairs by the dot-product instruction.
template <>
struct Int8<BFloat16> : BFloat16 {
  using B = int8_t;
  using Block = BFloat16;
};

template <>
struct Factors<Int8<BFloat16>> : Factors<BFloat16> {
  static constexpr int kRows = 2;
  TRUNKLINE_INLINE static __m512bh lanes(const int8_t* b, long ldb, int) {
    return reinterpret_cast<__m512bh>(load_int8_pairs(b, b + ldb));
  }
};

TRUNKLINE_INLINE void convert_step(const int8_t* b, int width, uint32_t* out) {
  for (int lane = 0; lane < width; lane += kLanes)
    store_bits(out + lane, load_int8_pairs(b + lane, b + width + lane));
}
#endif

template <class T>
constexpr bool kIsInt8 = sizeof(typename T::B) == 1;

// Up to so many rows tiles convert: each has to wait for memory or for its sums longer than the conversions take.
constexpr int kInt8TileRows = 4 * kTileRows;

// Steps of a block that several tiles pass over: it stays in the first-level cache from one to the next.
constexpr int kInt8BlockSteps = 256;

// At most kInt8TileRows rows times a panel, converted in the tiles.
template <class T>
void multiply_int8_rows(int rows, const typename T::A* a, long lda, const int8_t* b, int width, int steps,
                        float* sums) {
  constexpr int kRows = Factors<T>::kRows;
  const int tiles = (rows + kTileRows - 1) / kTileRows;
  const int block = tiles == 1 && tile_vectors(rows) * kLanes >= width ? steps : kInt8BlockSteps;
  for (int start = 0; start < steps; start += block) {
    const int8_t* begin = b + static_cast<long>(start) * kRows * width;
    const int count = steps - start < block ? steps - start : block;
    for (int tile = 0; tile < tiles; ++tile) {
      const int first = rows * tile / tiles, last = rows * (tile + 1) / tiles;
      linear_rows<T, kRows>(last - first, a + first * lda + start * T::kWords, lda, begin, width, count,
                            sums + first * kPanelWidth, start > 0,
                            reinterpret_cast<const char*>(begin) + kAheadBytes);
    }
  }
}

// Many rows times a panel, block by block of `kSteps` steps, each converted before its tiles. The conversion asks for
// the block after it, which arrives while the tiles multiply.
template <class T, int kSteps>
void multiply_int8_blocks(int rows, const typename T::A* a, long lda, const int8_t* b, int width, int steps,
                          float* sums) {
  using Block = typename T::Block;
  constexpr int kRows = Factors<T>::kRows;
  alignas(64) typename Block::B block[kSteps * kPanelWidth];
  const int tiles = (rows + kTileRows - 1) / kTileRows;
  for (int start = 0; start < steps; start += kSteps) {
    const int count = steps - start < kSteps ? steps - start : kSteps;
    for (int step = 0; step < count; ++step) {
      const int8_t* from = b + static_cast<long>(start + step) * kRows * width;
      for (int row = 0; row < kRows; ++row) prefetch(from + (kSteps * kRows + row) * width);
      convert_step(from, width, block + step * width);
    }
    for (int tile = 0; tile < tiles; ++tile) {
      const int first = rows * tile / tiles, last = rows * (tile + 1) / tiles;
      const auto* tile_a = a + first * lda + start * T::kWords;
      linear_rows<Block, 0>(last - first, tile_a, lda, block, width, count, sums + first * kPanelWidth, start > 0,
                            reinterpret_cast<const char*>(block));  // nothing to fetch
    }
  }
}

}  // namespace
}  // namespace trunkline::TRUNKLINE_NAMESPACE
