// Elementwise ops and layer norms on one level.

#include "cpu/elementwise.h"

#include "cpu/linear_tile.h"

namespace trunkline::TRUNKLINE_NAMESPACE {
namespace {

// Whether an op has a second operand.
template <ElementOp op>
constexpr bool kHasOther = op == ElementOp::kAdd || op == ElementOp::kMultiply;

// What an op makes of an element. `x` is only there for ops of two.
template <ElementOp op>
TRUNKLINE_INLINE Vec made(Vec into, Vec x, Vec factor) {
  if constexpr (op == ElementOp::kAdd) return add(into, x);
  if constexpr (op == ElementOp::kScale) return mul(into, factor);
  if constexpr (op == ElementOp::kClamp) return max(min(into, factor), sub(zero(), factor));
  if constexpr (op == ElementOp::kSoftCap) return mul(tanh(div(into, factor)), factor);
  if constexpr (op == ElementOp::kRelu) return max(into, zero());
  if constexpr (op == ElementOp::kSilu) return silu(into);
  if constexpr (op == ElementOp::kGelu) return gelu_erf(into);
  if constexpr (op == ElementOp::kGeluTanh) return gelu_tanh(into);
  if constexpr (op == ElementOp::kMultiply) return mul(into, x);
  return into;
}

template <class T, ElementOp op>
void element_range(const ElementCall& call, int64_t begin, int64_t end) {
  using Storage = typename T::Storage;
  auto* into = static_cast<Storage*>(call.into);
  const auto* x = static_cast<const Storage*>(call.x);
  const Vec factor = set1(call.factor);
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) {
    const Vec other = kHasOther<op> ? T::load_floats(x + i) : zero();
    T::store_floats(into + i, made<op>(T::load_floats(into + i), other, factor));
  }
  if (i == end) return;
  Storage lanes[kLanes] = {}, others[kLanes] = {};
  const auto bytes = static_cast<size_t>(end - i) * sizeof(Storage);
  std::memcpy(lanes, into + i, bytes);
  if (kHasOther<op>) std::memcpy(others, x + i, bytes);
  T::store_floats(lanes, made<op>(T::load_floats(lanes), T::load_floats(others), factor));
  std::memcpy(into + i, lanes, bytes);
}

// Adds x into the residual; returns the sum of the row, of the rounded sums if there is a residual.
template <class T>
float sum_of_row(const typename T::Storage* x, typename T::Storage* residual, int64_t width) {
  Vec sums = zero();
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    Vec value = T::load_floats(x + i);
    if (residual != nullptr) {
      T::store_floats(residual + i, add(value, T::load_floats(residual + i)));
      value = T::load_floats(residual + i);
    }
    sums = add(sums, value);
  }
  float total = reduce_add(sums);
  for (; i < width; ++i) {
    if (residual != nullptr) residual[i] = T::from_float(T::to_float(x[i]) + T::to_float(residual[i]));
    total += T::to_float(residual != nullptr ? residual[i] : x[i]);
  }
  return total;
}

template <class T>
float sum_of_distances(const typename T::Storage* x, float mean, int64_t width) {
  Vec sums = zero();
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    const Vec apart = sub(T::load_floats(x + i), set1(mean));
    sums = fma(apart, apart, sums);
  }
  float total = reduce_add(sums);
  for (; i < width; ++i) total += (T::to_float(x[i]) - mean) * (T::to_float(x[i]) - mean);
  return total;
}

template <class T>
void layer_norm_rows(const LayerNormCall& call, int64_t row_begin, int64_t row_end) {
  using Storage = typename T::Storage;
  const int64_t width = call.width;
  const auto* weight = static_cast<const Storage*>(call.weight);
  const auto* bias = static_cast<const Storage*>(call.bias);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const Storage* x = static_cast<const Storage*>(call.x) + row * width;
    Storage* residual = call.residual == nullptr ? nullptr : static_cast<Storage*>(call.residual) + row * width;
    Storage* out = static_cast<Storage*>(call.out) + row * width;
    const float mean = sum_of_row<T>(x, residual, width) / static_cast<float>(width);
    const Storage* source = residual != nullptr ? residual : x;
    const float variance = sum_of_distances<T>(source, mean, width) / static_cast<float>(width);
    const float factor = 1.0f / __builtin_sqrtf(variance + call.eps);
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) {
      const Vec normal = mul(sub(T::load_floats(source + i), set1(mean)), set1(factor));
      const Vec shift = bias != nullptr ? T::load_floats(bias + i) : zero();
      T::store_floats(out + i, fma(normal, T::load_floats(weight + i), shift));
    }
    for (; i < width; ++i) {
      const float normal = (T::to_float(source[i]) - mean) * factor * T::to_float(weight[i]);
      out[i] = T::from_float(normal + (bias != nullptr ? T::to_float(bias[i]) : 0.0f));
    }
  }
}

template <class T>
void mix_tokens(const MixCall& call, int64_t token_begin, int64_t token_end) {
  using Storage = typename T::Storage;
  const int64_t width = call.width, count = call.per_token;
  for (int64_t token = token_begin; token < token_end; ++token) {
    const int32_t* place = call.place + token * count;
    const float* share = call.share + token * count;
    Storage* out = static_cast<Storage*>(call.out) + token * width;
    int64_t lane = 0;
    for (; lane + kLanes <= width; lane += kLanes) {
      Vec sum = zero();
      for (int64_t i = 0; i < count; ++i) {
        if (place[i] < 0) continue;
        sum = fma(T::load_floats(static_cast<const Storage*>(call.made) + place[i] * width + lane), set1(share[i]),
                  sum);
      }
      T::store_floats(out + lane, sum);
    }
    for (; lane < width; ++lane) {
      float sum = 0.0f;
      for (int64_t i = 0; i < count; ++i) {
        if (place[i] >= 0)
          sum += T::to_float(static_cast<const Storage*>(call.made)[place[i] * width + lane]) * share[i];
      }
      out[lane] = T::from_float(sum);
    }
  }
}

template <class T>
void square_sums_rows(const SquareSumsCall& call, int64_t row_begin, int64_t row_end) {
  const auto* x = static_cast<const typename T::Storage*>(call.x) + call.first;
  for (int64_t row = row_begin; row < row_end; ++row) {
    call.sums[row * call.sum_width] = sum_of_distances<T>(x + row * call.width, 0.0f, call.columns);
  }
}

template <class T>
void wide_norm_rows(const WideNormCall& call, int64_t row_begin, int64_t row_end) {
  using Storage = typename T::Storage;
  const auto* weight = static_cast<const Storage*>(call.weight);
  for (int64_t row = row_begin; row < row_end; ++row) {
    Storage* x = static_cast<Storage*>(call.x) + row * call.width + call.first;
    const float factor = 1.0f / __builtin_sqrtf(call.sums[row * call.sum_width] / call.count + call.eps);
    int64_t i = 0;
    for (; i + kLanes <= call.columns; i += kLanes) {
      T::store_floats(x + i, mul(mul(T::load_floats(x + i), set1(factor)), T::load_floats(weight + i)));
    }
    for (; i < call.columns; ++i) x[i] = T::from_float(T::to_float(x[i]) * factor * T::to_float(weight[i]));
  }
}

}  // namespace

#define TRUNKLINE_ELEMENTS(op) \
  {element_range<Float32, op>, element_range<BFloat16, op>, element_range<Float16, op>}

const ElementTable kElementTable = {
    {TRUNKLINE_ELEMENTS(ElementOp::kAdd), TRUNKLINE_ELEMENTS(ElementOp::kScale),
     TRUNKLINE_ELEMENTS(ElementOp::kClamp), TRUNKLINE_ELEMENTS(ElementOp::kSoftCap),
     TRUNKLINE_ELEMENTS(ElementOp::kRelu), TRUNKLINE_ELEMENTS(ElementOp::kSilu),
     TRUNKLINE_ELEMENTS(ElementOp::kGelu), TRUNKLINE_ELEMENTS(ElementOp::kGeluTanh),
     TRUNKLINE_ELEMENTS(ElementOp::kMultiply)},
    {layer_norm_rows<Float32>, layer_norm_rows<BFloat16>, layer_norm_rows<Float16>},
    {mix_tokens<Float32>, mix_tokens<BFloat16>, mix_tokens<Float16>},
    {square_sums_rows<Float32>, square_sums_rows<BFloat16>, square_sums_rows<Float16>},
    {wide_norm_rows<Float32>, wide_norm_rows<BFloat16>, wide_norm_rows<Float16>}};

#undef TRUNKLINE_ELEMENTS

}  // namespace trunkline::TRUNKLINE_NAMESPACE
