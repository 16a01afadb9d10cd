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

// The addend of a unit's rows at the outputs of a panel.
struct PanelAddend {
  const Addend& addend;
  int64_t row_begin, first;  // output

  TRUNKLINE_INLINE const float* row(int row) const {
    if (addend.values == nullptr || addend.place[row_begin + row] < 0) return nullptr;
    return addend.values + addend.place[row_begin + row] * addend.width + first;
  }
};

TRUNKLINE_INLINE Vec plus_lanes(Vec sum, const float* addend, int64_t lane) {
  return addend == nullptr ? sum : add(sum, load(addend + lane));
}

// `kFetches`: rows are so wide that the next panel's place in them is in no cache, and is asked for.
template <class Out, bool kFetches>
void store_sums(int rows, const float* sums, LaneConstants constants, PanelAddend addend,
                typename Out::Storage* out, int64_t ldo, int count) {
  for (int row = 0; row < rows; ++row, sums += kPanelWidth, out += ldo) {
    const float* added = addend.row(row);
    for (int lane = 0; lane < count; lane += kLanes) {
      const Vec sum = plus_lanes(constants.apply(load(sums + lane), lane), added, lane);
      store_lanes<Out>(out + lane, sum, count - lane);
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
void store_gated(int rows, const float* gates, const float* ups, LaneConstants constants, PanelAddend addend,
                 int width, typename Out::Storage* out, int64_t ldo, int count) {
  for (int row = 0; row < rows; ++row, gates += kPanelWidth, ups += kPanelWidth, out += ldo) {
    const float* added = addend.row(row);
    for (int lane = 0; lane < count; lane += kLanes) {
      const Vec gate = plus_lanes(constants.apply(load(gates + lane), lane), added, lane);
      const Vec up = plus_lanes(constants.apply(load(ups + lane), width + lane), added, ldo + lane);
      store_lanes<Out>(out + lane, Join::of(gate, up), count - lane);
    }
  }
}

// Panels [panel_begin, panel_end) of a gated layer; `multiply(lanes, width, sums)` computes the sums of the lanes
// behind the first `lanes` of the layer.
template <class T, class Multiply>
void gated_panels(const LinearCall& call, int rows, int64_t row_begin, int64_t panel_begin, int64_t panel_end,
                  const Multiply& multiply) {
  const LinearLayer& layer = *call.layer;
  alignas(64) float gates[kRowsMax * kPanelWidth], ups[kRowsMax * kPanelWidth];
  for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
    const int width = panel_width(layer.out_features, panel);
    const int64_t lanes = 2 * panel * kPanelWidth;
    multiply(lanes, width, gates);
    multiply(lanes + width, width, ups);
    const LaneConstants constants(layer, lanes);
    auto* out = static_cast<typename T::Storage*>(call.out) + row_begin * layer.out_features + panel * kPanelWidth;
    const int count = smaller(kPanelWidth, layer.out_features - panel * kPanelWidth);
    const PanelAddend addend{call.addend, row_begin, panel * kPanelWidth};
    switch (layer.activation) {
      case Activation::kGelu:
        store_gated<T, Gated<gelu_erf>>(rows, gates, ups, constants, addend, width, out, layer.out_features,
                                        count);
        break;
      case Activation::kGeluTanh:
        store_gated<T, Gated<gelu_tanh>>(rows, gates, ups, constants, addend, width, out, layer.out_features,
                                         count);
        break;
      case Activation::kClampedSilu:
        store_gated<T, ClampedGated>(rows, gates, ups, constants, addend, width, out, layer.out_features, count);
        break;
      default:
        store_gated<T, Gated<silu>>(rows, gates, ups, constants, addend, width, out, layer.out_features, count);
    }
  }
}

// Panels [panel_begin, panel_end) of a layer, gated or not; `multiply` as above.
template <class T, class Multiply>
void linear_panels(const LinearCall& call, int rows, int64_t row_begin, int64_t panel_begin, int64_t panel_end,
                   const Multiply& multiply) {
  const LinearLayer& layer = *call.layer;
  if (layer.activation != Activation::kNone) {
    return gated_panels<T>(call, rows, row_begin, panel_begin, panel_end, multiply);
  }
  alignas(64) float sums[kRowsMax * kPanelWidth];
  for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
    const int64_t lanes = panel * kPanelWidth;
    multiply(lanes, panel_width(layer.out_features, panel), sums);
    const LaneConstants constants(layer, lanes);
    const int64_t offset = row_begin * layer.out_features + lanes;
    const int count = smaller(kPanelWidth, layer.out_features - lanes);
    const PanelAddend addend{call.addend, row_begin, lanes};
    if (call.float_out) {
      store_sums<Float32, true>(rows, sums, constants, addend, static_cast<float*>(call.out) + offset,
                                layer.out_features, count);
    } else {
      auto* out = static_cast<typename T::Storage*>(call.out) + offset;
      store_sums<T, false>(rows, sums, constants, addend, out, layer.out_features, count);
    }
  }
}

}  // namespace
}  // namespace trunkline::TRUNKLINE_NAMESPACE
