// What units of linear layers have in common, whatever form their weights have: rows in the form that a product
// reads, and the epilogue, which turns a panel's sums into outputs.
#pragma once

#include "linear_tile.h"

namespace trunkline::TRUNKLINE_NAMESPACE {
namespace {

TRUNKLINE_INLINE int smaller(int64_t a, int64_t b) { return static_cast<int>(a < b ? a : b); }

template <class T>
void convert_row(const typename T::Storage* x, int64_t count, typename T::A* words, int64_t padded) {
  float* floats = reinterpret_cast<float*>(words);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(floats + i, T::load_floats(x + i));
  for (; i < count; ++i) floats[i] = T::to_float(x[i]);
  for (; i < padded; ++i) floats[i] = 0.0f;
}

template <class T>
int64_t row_words(const LinearLayer& layer) {
  if (T::kPlainA && layer.in_features % T::kStep == 0) return 0;
  return (layer.in_features + T::kStep - 1) / T::kStep * T::kWords;
}

// Words of memory for a unit of `rows` rows.
template <class T>
int64_t unit_words(const LinearLayer& layer, int64_t rows) {
  return rows * row_words<T>(layer);
}

// The rows in the form that the product reads: as they are where possible, else converted once per thread.
template <class T>
const typename T::A* prepare_rows(const LinearCall& call, int64_t row_begin, int64_t row_end,
                                  ConvertedRows* converted, long& lda) {
  const int64_t width = call.layer->in_features;
  const auto* x = static_cast<const typename T::Storage*>(call.x) + row_begin * width;
  const int64_t words = row_words<T>(*call.layer);
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

template <class Out>
TRUNKLINE_INLINE void store_lanes(typename Out::Storage* out, Vec x, int count) {
  if (count >= kLanes) return Out::store_floats(out, x);
  typename Out::Storage lanes[kLanes];
  Out::store_floats(lanes, x);
  std::memcpy(out, lanes, static_cast<size_t>(count) * sizeof(lanes[0]));
}

TRUNKLINE_INLINE const float* moved(const float* values, int64_t by) {
  return values == nullptr ? nullptr : values + by;
}

// How a panel's sums become outputs.
struct PanelOutputs {
  const float *sums, *ups;    // [rows, kPanelWidth]; `ups`: of the second part of a gated layer
  const float *scale, *bias;  // over the panel's lanes, a gated layer's second part behind its first; null: none
  Addend addend;              // its `values` from the panel's first output on, its `place` from the first row on
  int64_t lanes;              // of the panels before
  int width;                  // lanes of a part
  int count;                  // outputs
  char* out;                  // of the first row
  int64_t out_features;

  TRUNKLINE_INLINE PanelOutputs(const LinearCall& call, int64_t row_begin, int64_t panel, const float* sums,
                                const float* ups)
      : sums(sums), ups(ups), addend(call.addend), out_features(call.layer->out_features) {
    const LinearLayer& layer = *call.layer;
    const int64_t first = panel * kPanelWidth;
    const bool is_float = call.float_out || layer.type == DenseType::kFloat32;
    lanes = layer.activation == Activation::kNone ? first : 2 * first;
    width = panel_width(out_features, panel), count = smaller(kPanelWidth, out_features - first);
    scale = moved(layer.scale, lanes), bias = moved(layer.bias, lanes);
    addend.values = moved(addend.values, first);
    if (addend.values != nullptr) addend.place += row_begin;
    out = static_cast<char*>(call.out) + (row_begin * out_features + first) * (is_float ? 4 : 2);
  }

  // Whether sums of a whole panel are outputs as they are.
  TRUNKLINE_INLINE bool is_plain() const {
    return count == kPanelWidth && scale == nullptr && bias == nullptr && addend.values == nullptr;
  }

  // Sums of a row at a lane of the panel, whose output is as far from the panel's first one as `output` says.
  TRUNKLINE_INLINE Vec finished(Vec sum, int row, int lane, int64_t output) const {
    if (scale != nullptr) sum = mul(sum, load(scale + lane));
    if (bias != nullptr) sum = add(sum, load(bias + lane));
    if (addend.values == nullptr || addend.place[row] < 0) return sum;
    return add(sum, load(addend.values + addend.place[row] * addend.width + output));
  }
};

// Rows [first, stop) of it.
using StoreRows = void (*)(const PanelOutputs& of, int first, int stop);

// `kFetches`: rows are so wide that the next panel's place in them is in no cache, and is asked for.
template <class Out, bool kFetches>
void store_sums(const PanelOutputs& of, int first, int stop) {
  if (of.is_plain()) {
    auto* out = reinterpret_cast<typename Out::Storage*>(of.out) + first * of.out_features;
    for (const float* sums = of.sums + first * kPanelWidth; first < stop; ++first, out += of.out_features) {
      TRUNKLINE_UNROLL for (int lane = 0; lane < kPanelWidth; lane += kLanes, sums += kLanes) {
        Out::store_floats(out + lane, load(sums));
        if constexpr (kFetches) prefetch_second(out + kPanelWidth + lane);
      }
    }
    return;
  }
  for (int row = first; row < stop; ++row) {
    auto* out = reinterpret_cast<typename Out::Storage*>(of.out) + row * of.out_features;
    for (int lane = 0; lane < of.count; lane += kLanes) {
      const Vec sum = of.finished(load(of.sums + row * kPanelWidth + lane), row, lane, lane);
      store_lanes<Out>(out + lane, sum, of.count - lane);
      if constexpr (kFetches) prefetch_second(out + kPanelWidth + lane);
    }
  }
}

// What a gate and an up are joined to.
template <Vec activate(Vec)>
struct Gated {
  TRUNKLINE_INLINE static Vec of(Vec gate, Vec up) { return mul(activate(gate), up); }
};

struct ClampedGated {
  TRUNKLINE_INLINE static Vec of(Vec gate, Vec up) {
    const Vec limit = set1(7.0f), one = set1(1.0f);
    const Vec low = min(limit, gate), bounded = max(sub(zero(), limit), min(limit, up));  // this order keeps NaN
    // silu(a * x) / a = x * sigmoid(a * x)
    return mul(mul(silu(mul(low, set1(1.702f))), set1(1.0f / 1.702f)), add(bounded, one));
  }
};

template <class Out, class Join>
void store_gated(const PanelOutputs& of, int first, int stop) {
  for (int row = first; row < stop; ++row) {
    auto* out = reinterpret_cast<typename Out::Storage*>(of.out) + row * of.out_features;
    const float *gates = of.sums + row * kPanelWidth, *ups = of.ups + row * kPanelWidth;
    for (int lane = 0; lane < of.count; lane += kLanes) {
      const Vec gate = of.finished(load(gates + lane), row, lane, lane);
      const Vec up = of.finished(load(ups + lane), row, of.width + lane, of.out_features + lane);
      store_lanes<Out>(out + lane, Join::of(gate, up), of.count - lane);
    }
  }
}

// The epilogue of a call.
template <class T>
StoreRows store_rows(const LinearCall& call) {
  switch (call.layer->activation) {
    case Activation::kNone: return call.float_out ? store_sums<Float32, true> : store_sums<T, false>;
    case Activation::kGelu: return store_gated<T, Gated<gelu_erf>>;
    case Activation::kGeluTanh: return store_gated<T, Gated<gelu_tanh>>;
    case Activation::kClampedSilu: return store_gated<T, ClampedGated>;
    default: return store_gated<T, Gated<silu>>;
  }
}

// Parts of a panel: of a gated layer the gate and the up.
TRUNKLINE_INLINE int panel_parts(const LinearLayer& layer) {
  return layer.activation == Activation::kNone ? 1 : 2;
}

// Panels [panel_begin, panel_end) of a layer, gated or not; `multiply(lanes, width, sums)` computes the sums of the lanes
// behind the first `lanes` of the layer.
template <class T, class Multiply>
void linear_panels(const LinearCall& call, int rows, int64_t row_begin, int64_t panel_begin, int64_t panel_end,
                   const Multiply& multiply) {
  alignas(64) float sums[2][kRowsMax * kPanelWidth];
  const StoreRows store = store_rows<T>(call);
  for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
    const PanelOutputs outputs(call, row_begin, panel, sums[0], sums[1]);
    for (int part = 0; part < panel_parts(*call.layer); ++part) {
      multiply(outputs.lanes + part * outputs.width, outputs.width, sums[part]);
    }
    store(outputs, 0, rows);
  }
}

}  // namespace
}  // namespace trunkline::TRUNKLINE_NAMESPACE
