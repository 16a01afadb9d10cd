// Ops that look at one element, or one row, at a time: sums, products, factors, limits, plain activations, layer
// norms, sums of experts' results.
//
// Plain data only: this header is compiled once per level.
#pragma once

#include <cstdint>

#include "experts.h"
#include "linear.h"

namespace trunkline {

enum class ElementOp : int {
  kAdd = 0,      // into += x
  kScale = 1,    // into *= factor
  kClamp = 2,    // into between +- factor
  kSoftCap = 3,  // into = factor * tanh(into / factor)
  kRelu = 4,
  kSilu = 5,
  kGelu = 6,
  kGeluTanh = 7,
  kMultiply = 8,  // into *= x
};
constexpr int kElementOps = 9;

struct ElementCall {
  void* into;
  const void* x;
  float factor;
};

struct LayerNormCall : NormCall {
  const void* bias;  // null: none; weight and bias are of the type of x
};

// Sums of squares of columns `[first, first + columns)` of each row, in every second or so of `sums`.
struct SquareSumsCall {
  const void* x;
  float* sums;
  int64_t width, first, columns;  // of x
  int64_t sum_width;
};

// Multiplies these columns by their weights and by the inverse root of their sum over `count`, in place.
struct WideNormCall {
  void* x;
  const float* sums;
  const void* weight;  // [columns], of the type of x
  int64_t width, first, columns;
  int64_t sum_width;
  float count, eps;
};

// Elements [begin, end), computed in float32 and rounded once.
using ElementRange = void (*)(const ElementCall& call, int64_t begin, int64_t end);

struct ElementTable {
  ElementRange range[kElementOps][kDenseTypes];
  void (*layer_norm[kDenseTypes])(const LayerNormCall& call, int64_t row_begin, int64_t row_end);
  void (*mix[kDenseTypes])(const MixCall& call, int64_t token_begin, int64_t token_end);
  void (*square_sums[kDenseTypes])(const SquareSumsCall& call, int64_t row_begin, int64_t row_end);
  void (*wide_norm[kDenseTypes])(const WideNormCall& call, int64_t row_begin, int64_t row_end);
};

namespace portable {
extern const ElementTable kElementTable;
}
namespace avx2 {
extern const ElementTable kElementTable;
}
namespace avx512 {
extern const ElementTable kElementTable;
}
namespace avx512bf16 {
extern const ElementTable kElementTable;
}
namespace amx {
using avx512bf16::kElementTable;
}

// The function of an op, for a thread that has elements of its own.
ElementRange element_range(CpuLevel level, ElementOp op, DenseType type);

}  // namespace trunkline
