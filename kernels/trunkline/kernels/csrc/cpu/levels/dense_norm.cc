// RMS norm of rows on one level, optionally of a sum that is also stored: each row is read from memory once.
//
// In half types the normalised value is rounded before the weight multiplies it, as the models were trained.

#include "cpu/gemm.h"
#include "cpu/linear.h"

namespace trunkline::TRUNKLINE_NAMESPACE {
namespace {

template <class T>
TRUNKLINE_INLINE Vec rounded(Vec x) {
  if constexpr (sizeof(typename T::Storage) == 4) {
    return x;
  } else {
    typename T::Storage lanes[kLanes];
    T::store_floats(lanes, x);
    return T::load_floats(lanes);
  }
}

// The sum of squares of a row; with a residual, of the rounded sum, which replaces it.
template <class T>
float sum_of_squares(const typename T::Storage* x, typename T::Storage* residual, int64_t width) {
  constexpr int kSums = 4;  // hide the latency of the additions
  Vec sums[kSums] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + kSums * kLanes <= width; i += kSums * kLanes) {
    for (int s = 0; s < kSums; ++s) {
      Vec value = T::load_floats(x + i + s * kLanes);
      if (residual != nullptr) {
        typename T::Storage* place = residual + i + s * kLanes;
        T::store_floats(place, add(value, T::load_floats(place)));
        value = T::load_floats(place);
      }
      sums[s] = fma(value, value, sums[s]);
    }
  }
  float total = reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
  for (; i < width; ++i) {
    if (residual != nullptr) residual[i] = T::from_float(T::to_float(x[i]) + T::to_float(residual[i]));
    const float value = T::to_float(residual != nullptr ? residual[i] : x[i]);
    total += value * value;
  }
  return total;
}

template <class T, class Weight>
void scale_row(const typename T::Storage* x, float factor, const typename Weight::Storage* weight,
               typename T::Storage* out, int64_t width) {
  const Vec factors = set1(factor);
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    const Vec normal = rounded<T>(mul(T::load_floats(x + i), factors));
    T::store_floats(out + i, mul(normal, Weight::load_floats(weight + i)));
  }
  for (; i < width; ++i) {
    const float normal = T::to_float(T::from_float(T::to_float(x[i]) * factor));
    out[i] = T::from_float(normal * Weight::to_float(weight[i]));
  }
}

template <class T>
void norm_rows(const NormCall& call, int64_t row_begin, int64_t row_end) {
  using Storage = typename T::Storage;
  const int64_t width = call.width;
  for (int64_t row = row_begin; row < row_end; ++row) {
    const Storage* x = static_cast<const Storage*>(call.x) + row * width;
    Storage* residual = call.residual == nullptr ? nullptr : static_cast<Storage*>(call.residual) + row * width;
    Storage* out = static_cast<Storage*>(call.out) + row * width;
    const float mean = sum_of_squares<T>(x, residual, width) / static_cast<float>(width);
    const float factor = 1.0f / __builtin_sqrtf(mean + call.eps);
    const Storage* source = residual != nullptr ? residual : x;
    if (call.float_weight) {
      scale_row<T, Float32>(source, factor, static_cast<const float*>(call.weight), out, width);
    } else {
      scale_row<T, T>(source, factor, static_cast<const Storage*>(call.weight), out, width);
    }
  }
}

}  // namespace

const NormTable kNormTable = {{norm_rows<Float32>, norm_rows<BFloat16>, norm_rows<Float16>}};

}  // namespace trunkline::TRUNKLINE_NAMESPACE
