// What a core can do at best, measured beside the kernels: reading memory, and gemm.h's product from the
// first-level cache.
#include "cpu/attention.h"

#include "cpu/gemm.h"
#include "cpu/tile_product.h"

namespace trunkline::TRUNKLINE_NAMESPACE {
namespace {

// The exclusive or of all words: a sum that the compiler cannot skip, as cheap as reading can be.
uint32_t read_words(const uint32_t* words, int64_t count) {
  constexpr int kStreams = 8;
  uint32_t folded[kStreams][16] = {};
  int64_t i = 0;
  for (; i + kStreams * 16 <= count; i += kStreams * 16) {
    prefetch(words + i + 1024);
    for (int s = 0; s < kStreams; ++s) {
      for (int lane = 0; lane < 16; ++lane) folded[s][lane] ^= words[i + s * 16 + lane];
    }
  }
  uint32_t result = 0;
  for (; i < count; ++i) result ^= words[i];
  for (int s = 0; s < kStreams; ++s) {
    for (int lane = 0; lane < 16; ++lane) result ^= folded[s][lane];
  }
  return result;
}

template <class T>
double multiply(int64_t repeats, char* scratch) {
  constexpr int kRows = 4 * kMaxRows, kSteps = 64, kColumns = kMaxVectors * kLanes;
  auto* a = reinterpret_cast<typename T::A*>(scratch);
  auto* b = reinterpret_cast<typename T::B*>(scratch + kRows * kSteps * 8);
  auto* c = reinterpret_cast<float*>(scratch + kRows * kSteps * 8 + kSteps * kColumns * 4);
  const typename T::A* rows[kRows];
  for (int i = 0; i < kRows; ++i) rows[i] = a + i * kSteps * T::kWords;
  for (int64_t i = 0; i < repeats; ++i) {
    gemm_blocks<T, kMaxVectors, kMaxRows>(kRows, rows, b, kColumns, kSteps, c, kColumns, false, 0);
  }
  return 2.0 * kRows * kColumns * kSteps * T::kStep * static_cast<double>(repeats);
}

#if TRUNKLINE_LEVEL >= 4
// Squares of tiles, of numbers: over zeros the processor takes less power, so it multiplies a quarter faster.
double multiply_tiles(int64_t repeats, char* scratch) {
  constexpr int kRows = 2 * kTileRowsMax, kLaneWords = 2 * kTileLanes, kSteps = 4 * kTileSteps;
  auto* words = reinterpret_cast<uint32_t*>(scratch);
  char* b = scratch + kRows * kSteps * 4;
  for (uint32_t i = 0; i < (kRows + kLaneWords) * kSteps; ++i)
    words[i] = 0x3f003f80u ^ (i * 0x9e3779b9u & 0x807f807fu);
  settle_memory();
  Tiles tiles;
  tiles.square(kTileRowsMax, kTileRowsMax);
  const TileOperands with{scratch,        kSteps * 4, b,          kLaneWords * 4,
                          true,           kSteps,     kTileSteps, b + kLaneWords * kSteps * 4,
                          kLaneWords * 4, false};
  const Nothing nothing;
  for (int64_t i = 0; i < repeats; ++i) tile_square<true>(with, nothing);
  return 2.0 * kRows * kLaneWords * kSteps * 2 * static_cast<double>(repeats);
}
constexpr auto kMultiplyBFloat16 = multiply_tiles;
#else
constexpr auto kMultiplyBFloat16 = multiply<BFloat16>;
#endif

constexpr LimitTable kTable = {read_words, {multiply<Float32>, multiply<Float16>, kMultiplyBFloat16}};

}  // namespace

const LimitTable& limit_table() { return kTable; }

}  // namespace trunkline::TRUNKLINE_NAMESPACE
