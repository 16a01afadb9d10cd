// One unit of a linear layer on one level: a block of rows times a range of panels.
//
// Per panel, the sum's dimension is cut into blocks whose part of the panel fits the first-level cache; all rows
// of the block pass over it in tiles of registers, partial sums waiting in a buffer of the stack. The epilogue
// then scales (int8 weights), adds the bias, activates and rounds from that buffer.

#include "cpu/linear_tile.h"
#include "cpu/quantised.h"

namespace trunkline::TRUNKLINE_NAMESPACE {
namespace {

// Steps of a block, of 256 bytes: this block, the next one on its way in and the sums of a few tiles share the
// first-level cache.
constexpr int kBlockSteps = 64;

int smaller(int64_t a, int64_t b) { return static_cast<int>(a < b ? a : b); }

template <class T>
void convert_row(const typename T::Storage* x, int64_t count, typename T::A* words, int64_t padded) {
  float* floats = reinterpret_cast<float*>(words);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(floats + i, T::load_floats(x + i));
  for (; i < count; ++i) floats[i] = T::to_float(x[i]);
  for (; i < padded; ++i) floats[i] = 0.0f;
}

template <class T>
int64_t row_words(int64_t in_features) {
  if (T::kPlainA && in_features % T::kStep == 0) return 0;
  return (in_features + T::kStep - 1) / T::kStep * T::kWords;
}

// Elements that an output has in its panel.
template <class T>
int64_t lane_elements(int64_t in_features) {
  return kIsInt8<T> ? int8_inputs(in_features) : (in_features + T::kStep - 1) / T::kStep;
}

// The rows in the form that the product reads: as they are where possible, else converted once per thread.
template <class T>
const typename T::A* prepare_rows(const LinearCall& call, int64_t row_begin, int64_t row_end,
                                  ConvertedRows* converted, long& lda) {
  const int64_t width = call.layer->in_features;
  const auto* x = static_cast<const typename T::Storage*>(call.x) + row_begin * width;
  const int64_t words = row_words<T>(width);
  if (words == 0) {
    lda = width / T::kStep;
    return reinterpret_cast<const typename T::A*>(x);
  }
  lda = words;
  auto* rows = static_cast<typename T::A*>(converted->words);
  if (converted->row_begin == row_begin) return rows;
  for (int64_t row = 0; row < row_end - row_begin; ++row, x += width) {
    if constexpr (T::kPlainA) {  // pairs, the last one half empty
      std::memset(rows + row * words + words - 1, 0, 4);
      std::memcpy(rows + row * words, x, static_cast<size_t>(width) * sizeof(*x));
    } else {
      convert_row<T>(x, width, rows + row * words, words);
    }
  }
  converted->row_begin = row_begin;
  return rows;
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
    if (rows > 1 && rows <= kTileRows) return multiply_few_rows<T>(rows, a, lda, b, width, steps, sums);
  }
  if (rows <= kTileRows) {
    const char* ahead = reinterpret_cast<const char*>(b) + kAheadBytes;
    return linear_rows<T, 4>(rows, a, lda, b, width, static_cast<int>(steps), sums, false, ahead);
  }
  const int tiles = (rows + kTileRows - 1) / kTileRows;
  for (int64_t start = 0; start < steps; start += kBlockSteps) {
    const int count = smaller(kBlockSteps, steps - start);
    const auto* block = b + start * width;
    const char* next = reinterpret_cast<const char*>(block + kBlockSteps * width);
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

template <class Out>
TRUNKLINE_INLINE void store_lanes(typename Out::Storage* out, Vec x, int count) {
  if (count >= kLanes) return Out::store_floats(out, x);
  typename Out::Storage lanes[kLanes];
  Out::store_floats(lanes, x);
  std::memcpy(out, lanes, static_cast<size_t>(count) * sizeof(lanes[0]));
}

// What turns a panel's sums into outputs: arrays over its lanes, null where there are none.
struct LaneConstants {
  const float* scale;
  const float* bias;

  // `lanes`: of the panels before this one.
  TRUNKLINE_INLINE LaneConstants(const LinearLayer& layer, int64_t lanes)
      : scale(layer.scale == nullptr ? nullptr : layer.scale + lanes),
        bias(layer.bias == nullptr ? nullptr : layer.bias + lanes) {}

  TRUNKLINE_INLINE Vec apply(Vec sum, int lane) const {
    if (scale != nullptr) sum = mul(sum, load(scale + lane));
    return bias != nullptr ? add(sum, load(bias + lane)) : sum;
  }
};

template <class Out>
void store_sums(int rows, const float* sums, LaneConstants constants, typename Out::Storage* out, int64_t ldo,
                int count) {
  for (int row = 0; row < rows; ++row, sums += kPanelWidth, out += ldo) {
    for (int lane = 0; lane < count; lane += kLanes) {
      store_lanes<Out>(out + lane, constants.apply(load(sums + lane), lane), count - lane);
    }
  }
}

template <class Out, Vec activate(Vec)>
void store_gated(int rows, const float* gates, const float* ups, LaneConstants constants, int width,
                 typename Out::Storage* out, int64_t ldo, int count) {
  for (int row = 0; row < rows; ++row, gates += kPanelWidth, ups += kPanelWidth, out += ldo) {
    for (int lane = 0; lane < count; lane += kLanes) {
      const Vec gate = constants.apply(load(gates + lane), lane);
      const Vec up = constants.apply(load(ups + lane), width + lane);
      store_lanes<Out>(out + lane, mul(activate(gate), up), count - lane);
    }
  }
}

template <class T>
void gated_unit(const LinearCall& call, int rows, const typename T::A* a, long lda, int64_t row_begin,
                int64_t panel_begin, int64_t panel_end) {
  const LinearLayer& layer = *call.layer;
  const int64_t steps = (layer.in_features + T::kStep - 1) / T::kStep;
  const int64_t elements = lane_elements<T>(layer.in_features);
  alignas(64) float gates[kRowsMax * kPanelWidth], ups[kRowsMax * kPanelWidth];
  for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
    const int width = panel_width(layer.out_features, panel);
    const auto* b = static_cast<const typename T::B*>(layer.panels) + 2 * panel * kPanelWidth * elements;
    multiply_panel<T>(rows, a, lda, b, width, steps, gates);
    multiply_panel<T>(rows, a, lda, b + width * elements, width, steps, ups);
    const LaneConstants constants(layer, 2 * panel * kPanelWidth);
    auto* out = static_cast<typename T::Storage*>(call.out) + row_begin * layer.out_features + panel * kPanelWidth;
    const int count = smaller(kPanelWidth, layer.out_features - panel * kPanelWidth);
    switch (layer.activation) {
      case Activation::kGelu:
        store_gated<T, gelu_erf>(rows, gates, ups, constants, width, out, layer.out_features, count);
        break;
      case Activation::kGeluTanh:
        store_gated<T, gelu_tanh>(rows, gates, ups, constants, width, out, layer.out_features, count);
        break;
      default: store_gated<T, silu>(rows, gates, ups, constants, width, out, layer.out_features, count);
    }
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
  if (layer.activation != Activation::kNone) {
    return gated_unit<T>(call, rows, a, lda, row_begin, panel_begin, panel_end);
  }
  alignas(64) float sums[kRowsMax * kPanelWidth];
  for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
    const auto* b = static_cast<const typename T::B*>(layer.panels) + panel * kPanelWidth * elements;
    multiply_panel<T>(rows, a, lda, b, panel_width(layer.out_features, panel), steps, sums);
    const LaneConstants constants(layer, panel * kPanelWidth);
    const int64_t offset = row_begin * layer.out_features + panel * kPanelWidth;
    const int count = smaller(kPanelWidth, layer.out_features - panel * kPanelWidth);
    if (call.float_out) {
      store_sums<Float32>(rows, sums, constants, static_cast<float*>(call.out) + offset, layer.out_features,
                          count);
    } else {
      auto* out = static_cast<typename T::Storage*>(call.out) + offset;
      store_sums<T>(rows, sums, constants, out, layer.out_features, count);
    }
  }
}

}  // namespace

const LinearTable kLinearTable = {
    {{linear_unit<Float32>, linear_unit<BFloat16>, linear_unit<Float16>},
     {linear_unit<Int8<Float32>>, linear_unit<Int8<BFloat16>>, linear_unit<Int8<Float16>>}},
    {{row_words<Float32>, row_words<BFloat16>, row_words<Float16>},
     {row_words<Int8<Float32>>, row_words<Int8<BFloat16>>, row_words<Int8<Float16>>}}};

}  // namespace trunkline::TRUNKLINE_NAMESPACE
