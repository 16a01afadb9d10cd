// One unit of a linear layer on one level: a block of rows times a range of panels. By matrix registers it is another
// one, see linear_by_tiles.h; by vectors:
//
// Per panel, the sum's dimension is cut into blocks whose part of the panel stays in a cache; all rows of the block
// of rows pass over it in tiles of registers, partial sums waiting in a buffer of the stack. The epilogue
// then scales (int8 weights), adds the bias, activates and rounds from that buffer.

#include <type_traits>

#include "cpu/linear_by_tiles.h"
#include "cpu/linear_unit.h"
#include "cpu/quantised.h"

namespace trunkline::TRUNKLINE_NAMESPACE {
namespace {

// Steps of a block, of 256 bytes, where a tile takes some of its lanes: this block, the next one on its way in and the
// sums of a few tiles share the first-level cache.
constexpr int kBlockSteps = 64;

// Steps at most of a block over which tiles of all lanes pass. Their pace is that at which the second-level cache
// delivers, so what counts is how seldom a tile begins, which costs it as much as 70 cycles of its products, and that
// two blocks and the rows, 560 KB at most, fit this cache.
constexpr int kWideBlockSteps = tile_vectors(kTileRows) * kLanes < kPanelWidth ? kBlockSteps : 640;

// Elements that an output has in its panel.
template <class T>
int64_t lane_elements(int64_t in_features) {
  return kIsInt8<T> ? int8_inputs(in_features) : (in_features + T::kStep - 1) / T::kStep;
}

// One tile of rows that cannot take all lanes of a panel at a time: block by block, so that the sweeps over a block
// after the first find it in a cache.
template <class T>
void multiply_few_rows(int rows, const typename T::A* a, long lda, const typename T::B* b, int width,
                       int64_t steps, float* sums) {
  for (int64_t start = 0; start < steps; start += kBlockSteps) {
    const auto* block = b + start * width;
    const char* next = reinterpret_cast<const char*>(block + kBlockSteps * width);
    linear_sweeps<T>(rows, a + start * T::kWords, lda, block, width, smaller(kBlockSteps, steps - start), sums,
                     start > 0, next);
  }
}

// While the rows of a batch pass over a block, its tiles share the lines of the next block among themselves and
// ask for them: reading memory and multiplying overlap, which neither the processor's prefetching (it sees no
// stream while a block is reused) nor its window (it is shorter than a tile) does. A step has four lines. They go to
// the second-level cache: two blocks and the sums do not fit a first-level one of 32 KB.
template <class T>
void multiply_plain_panel(int rows, const typename T::A* a, long lda, const typename T::B* b, int width,
                          int64_t steps, float* sums) {
  if constexpr (tile_vectors(kTileRows) * kLanes < kPanelWidth) {
    // Two rows take half a panel's lanes at a time. In float32 a pass over them is long enough to stream, as
    // one row's is.
    constexpr int kStreamed = std::is_same_v<T, Float32> ? 2 : 1;
    if (rows > kStreamed && rows <= kTileRows) return multiply_few_rows<T>(rows, a, lda, b, width, steps, sums);
  }
  if (rows <= kTileRows) {
    const char* ahead = reinterpret_cast<const char*>(b) + kAheadBytes;
    return linear_rows<T, 4>(rows, a, lda, b, width, static_cast<int>(steps), sums, false, ahead);
  }
  const int tiles = (rows + kTileRows - 1) / kTileRows;
  // Few tiles wait for memory, which long blocks make no better. Long ones are of equal length: each is as long as
  // what is fetched during it.
  int64_t length = kBlockSteps;
  if (kWideBlockSteps > kBlockSteps && tiles >= 4) {
    const int64_t blocks = (steps + kWideBlockSteps - 1) / kWideBlockSteps;
    length = (steps + blocks - 1) / blocks;
  }
  for (int64_t start = 0; start < steps; start += length) {
    const int count = smaller(length, steps - start);
    const auto* block = b + start * width;
    const char* next = reinterpret_cast<const char*>(block + length * width);
    for (int tile = 0; tile < tiles; ++tile) {
      const int first = rows * tile / tiles, last = rows * (tile + 1) / tiles;
      const auto* tile_a = a + first * lda + start * T::kWords;
      float* tile_sums = sums + first * kPanelWidth;
      if (tiles < 4) {
        const char* ahead = next + (tile & 1) * 128;
        linear_rows<T, 2, 2>(last - first, tile_a, lda, block, width, count, tile_sums, start > 0, ahead);
      } else {
        const char* ahead = next + (tile & 3) * 64;
        linear_rows<T, 1, 2>(last - first, tile_a, lda, block, width, count, tile_sums, start > 0, ahead);
      }
    }
  }
}

template <class T>
void multiply_panel(int rows, const typename T::A* a, long lda, const typename T::B* b, int width, int64_t steps,
                    float* sums) {
  if constexpr (kIsInt8<T>) {
    if (rows <= kInt8TileRows) return multiply_int8_rows<T>(rows, a, lda, b, width, static_cast<int>(steps), sums);
    return multiply_int8_blocks<T, kBlockSteps>(rows, a, lda, b, width, static_cast<int>(steps), sums);
  } else {
    multiply_plain_panel<T>(rows, a, lda, b, width, steps, sums);
  }
}

template <class T>
void linear_unit(const LinearCall& call, int64_t row_begin, int64_t row_end, int64_t panel_begin,
                 int64_t panel_end, ConvertedRows* converted) {
  const LinearLayer& layer = *call.layer;
  const int64_t steps = (layer.in_features + T::kStep - 1) / T::kStep;
  const int64_t elements = lane_elements<T>(layer.in_features);
  const int rows = static_cast<int>(row_end - row_begin);
  long lda;
  const typename T::A* a = prepare_rows<T>(call, row_begin, row_end, converted, lda);
  linear_panels<T>(call, rows, row_begin, panel_begin, panel_end, [&](int64_t lanes, int width, float* sums) {
    const auto* b = static_cast<const typename T::B*>(layer.panels) + lanes * elements;
    multiply_panel<T>(rows, a, lda, b, width, steps, sums);
  });
}

#if TRUNKLINE_LEVEL >= 4
// Rows for which a group of panels is read once. More would leave several threads too few units.
int64_t rows_of_tiles(const LinearLayer&) { return 1024; }

constexpr LinearUnit kBFloat16Unit = tile_unit<false>, kInt8Unit = tile_unit<true>;
constexpr auto kBFloat16Words = tile_words<false>, kInt8Words = tile_words<true>;
constexpr auto kBFloat16Rows = rows_of_tiles;
#else
constexpr LinearUnit kBFloat16Unit = linear_unit<BFloat16>, kInt8Unit = linear_unit<Int8<BFloat16>>;
constexpr auto kBFloat16Words = unit_words<BFloat16>, kInt8Words = unit_words<Int8<BFloat16>>;
constexpr int64_t (*kBFloat16Rows)(const LinearLayer&) = nullptr;
#endif

}  // namespace

const LinearTable kLinearTable = {{{linear_unit<Float32>, kBFloat16Unit, linear_unit<Float16>},
                                   {linear_unit<Int8<Float32>>, kInt8Unit, linear_unit<Int8<Float16>>}},
                                  {{unit_words<Float32>, kBFloat16Words, unit_words<Float16>},
                                   {unit_words<Int8<Float32>>, kInt8Words, unit_words<Int8<Float16>>}},
                                  {{nullptr, kBFloat16Rows, nullptr}, {nullptr, kBFloat16Rows, nullptr}}};

}  // namespace trunkline::TRUNKLINE_NAMESPACE
