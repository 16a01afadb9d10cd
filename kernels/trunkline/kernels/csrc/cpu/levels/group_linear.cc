// Units of linear layers over codes in groups: `groups.h` and `float8.h` have the products.

#include "cpu/float8.h"
#include "cpu/groups.h"

namespace trunkline::TRUNKLINE_NAMESPACE {
namespace {

// Rows and results of type T, multiplied as floats.
template <class T>
struct Exact : T {
  using A = float;
  static constexpr int kStep = 1;
  static constexpr int kWords = 1;
  static constexpr bool kPlainA = sizeof(typename T::Storage) == sizeof(float);
};

// The rows and the product of floats of 8 bits with rows of type T: as pairs of bf16 where there are products of
// those, else as floats.
template <class T>
struct WithFloat8 {
  using Rows = Exact<T>;
  using Product = Float32;
};

#if TRUNKLINE_LEVEL >= 3
template <>
struct WithFloat8<BFloat16> {
  using Rows = BFloat16;
  using Product = BFloat16;
};
#endif

template <class T>
void float8_unit(const LinearCall& call, int64_t row_begin, int64_t row_end, int64_t panel_begin,
                 int64_t panel_end, ConvertedRows* converted) {
  using Product = typename WithFloat8<T>::Product;
  const LinearLayer& layer = *call.layer;
  const GroupForm& form = *layer.groups;
  const int rows = static_cast<int>(row_end - row_begin);
  const int64_t lane_bytes = form.lane_bytes(layer.in_features);
  long lda;
  const auto* a = prepare_rows<typename WithFloat8<T>::Rows>(call, row_begin, row_end, converted, lda);
  linear_panels<T>(call, rows, row_begin, panel_begin, panel_end, [&](int64_t lanes, int width, float* sums) {
    const auto* panel = static_cast<const char*>(layer.panels) + lanes * lane_bytes;
    multiply_float8<Product>(rows, a, lda, form, panel, width, layer.in_features, sums);
  });
}

template <class T>
int64_t exact_words(const LinearLayer& layer, int64_t rows) {
  return layer.groups->is_float ? unit_words<typename WithFloat8<T>::Rows>(layer, rows)
                                : unit_words<Exact<T>>(layer, rows);
}

template <class T>
void exact_unit(const LinearCall& call, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end,
                ConvertedRows* converted) {
  const LinearLayer& layer = *call.layer;
  const GroupForm& form = *layer.groups;
  if (form.is_float) return float8_unit<T>(call, row_begin, row_end, panel_begin, panel_end, converted);
  const int rows = static_cast<int>(row_end - row_begin);
  const int64_t lane_bytes = form.lane_bytes(layer.in_features);
  long lda;
  const float* a = prepare_rows<Exact<T>>(call, row_begin, row_end, converted, lda);
  linear_panels<T>(call, rows, row_begin, panel_begin, panel_end, [&](int64_t lanes, int width, float* sums) {
    const auto* panel = static_cast<const char*>(layer.panels) + lanes * lane_bytes;
    multiply_exact(rows, a, lda, form, panel, width, layer.in_features, sums);
  });
}

template <class T>
void int8_unit(const LinearCall& call, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end,
               ConvertedRows* converted) {
  const LinearLayer& layer = *call.layer;
  const GroupForm& form = *layer.groups;
  const int rows = static_cast<int>(row_end - row_begin);
  const int64_t inputs = layer.in_features, lane_bytes = form.lane_bytes(inputs);
  const int64_t words = int8_row_words(inputs, form.unit());
  auto* rounded = static_cast<uint32_t*>(converted->words);
  if (converted->row_begin != row_begin) {
    const auto* x = static_cast<const typename T::Storage*>(call.x) + row_begin * inputs;
    for (int row = 0; row < rows; ++row) round_row<T>(form, x + row * inputs, inputs, rounded + row * words);
    converted->row_begin = row_begin;
  }
  alignas(Int8Row) char memory[kRowsMax * sizeof(Int8Row)];
  auto* views = reinterpret_cast<Int8Row*>(memory);
  for (int row = 0; row < rows; ++row) views[row] = Int8Row(rounded + row * words, inputs, inputs / form.unit());
  linear_panels<T>(call, rows, row_begin, panel_begin, panel_end, [&](int64_t lanes, int width, float* sums) {
    const auto* panel = static_cast<const char*>(layer.panels) + lanes * lane_bytes;
    multiply_int8(rows, views, form, panel, width, inputs, sums);
  });
}

int64_t int8_words(const LinearLayer& layer, int64_t rows) {
  return rows * int8_row_words(layer.in_features, layer.groups->unit());
}

}  // namespace

const LinearTable kGroupTable = {
    {{exact_unit<Float32>, exact_unit<BFloat16>, exact_unit<Float16>},
     {int8_unit<Float32>, int8_unit<BFloat16>, int8_unit<Float16>}},
    {{exact_words<Float32>, exact_words<BFloat16>, exact_words<Float16>}, {int8_words, int8_words, int8_words}},
    {}};

}  // namespace trunkline::TRUNKLINE_NAMESPACE
