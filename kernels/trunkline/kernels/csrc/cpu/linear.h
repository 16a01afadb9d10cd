// Linear layers over prepacked weights: the packed form, a call, and the table of functions per level.
//
// Packed form, the same on every level: outputs in panels of 64, the last one padded with zero rows to a multiple
// of 16. Within a panel the lanes run along the outputs, so that the product needs no horizontal sums and a panel
// is one sequential stream of memory:
//
//      float32, float16   [panel][in][width]
//      bfloat16           [panel][ceil(in / 2)][width][2], an odd `in` padded with a zero
//      int8               [panel][in][width], an odd `in` padded with a zero, whatever the type of x
//
// int8 weights are quantised per output (`trunkline/kernels/quantisation.py`): the product is taken over the
// integers, which every type of x holds exactly, and an output's scale multiplies its finished sum.
//
// A gated layer (`activation(gate) * up`) stores the up panel right after its gate panel; the epilogue has both
// in the first-level cache and the intermediate tensor of twice the width is never written.
//
// Invariant: an output element is one sum over `in` in ascending order, in one float32 accumulator, whatever the
// number of rows, threads and panels beside it. A token's result does not depend on its batch.
//
// Plain data only: this header is compiled once per level.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu_level.h"

namespace trunkline {

enum class DenseType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };
constexpr int kDenseTypes = 3;

// How weights are stored: in the type of x, or as int8 with a scale per output.
enum class WeightForm : int { kPlain = 0, kInt8 = 1 };
constexpr int kWeightForms = 2;

enum class Activation : int { kNone = 0, kSilu = 1, kGelu = 2, kGeluTanh = 3 };

constexpr int kPanelWidth = 64;
constexpr int kPanelQuantum = 16;  // lanes of the widest vector

// Rows that one unit of work takes through its panels: few enough that their part of the input stays in the
// second-level cache and their sums in the first, enough that a panel is used often for each time it is read.
constexpr int kRowsMax = 96;

struct LinearLayer {
  DenseType type;  // of x
  WeightForm form;
  Activation activation;  // kNone: not gated
  int64_t in_features;
  int64_t out_features;  // of the result, so half the weight's rows where gated
  const void* panels;
  const float* scale;  // of int8 panels; per panel, padded like it and interleaved like it
  const float* bias;   // likewise; null: none
};

struct LinearCall {
  const LinearLayer* layer;
  const void* x;  // [rows, in_features]
  void* out;      // [rows, out_features]
  bool float_out;
  int64_t rows;
};

// A thread's memory during one call for a block of rows in the form that the product reads, if it is another one
// than theirs: a thread that takes several panels of a block converts it once.
struct ConvertedRows {
  int64_t row_begin;  // of the block that is there; -1: none yet
  void* words;        // [rows, LinearTable::row_words]
};

// Rows [row_begin, row_end), at most kRowsMax, times panels [panel_begin, panel_end); gated ones count in pairs.
using LinearUnit = void (*)(const LinearCall& call, int64_t row_begin, int64_t row_end, int64_t panel_begin,
                            int64_t panel_end, ConvertedRows* converted);

struct LinearTable {
  LinearUnit unit[kWeightForms][kDenseTypes];
  // 32-bit words of a converted row; 0: rows are read as they are.
  int64_t (*row_words[kWeightForms][kDenseTypes])(int64_t in_features);
};

struct NormCall {
  const void* x;
  void* residual;  // x is added into it and the sum is normalised; null: x is
  const void* weight;
  bool float_weight;  // of a half type's norm
  void* out;
  int64_t width;
  float eps;
};

using NormRows = void (*)(const NormCall& call, int64_t row_begin, int64_t row_end);

struct NormTable {
  NormRows rows[kDenseTypes];
};

namespace portable {
extern const LinearTable kLinearTable;
extern const NormTable kNormTable;
}  // namespace portable
namespace avx2 {
extern const LinearTable kLinearTable;
extern const NormTable kNormTable;
}  // namespace avx2
namespace avx512 {
extern const LinearTable kLinearTable;
extern const NormTable kNormTable;
}  // namespace avx512
namespace avx512bf16 {
extern const LinearTable kLinearTable;
extern const NormTable kNormTable;
}  // namespace avx512bf16

const LinearTable& linear_table(CpuLevel level);
const NormTable& norm_table(CpuLevel level);

// Inputs that an int8 panel has for each output: an even number, so that a step may take a pair.
static constexpr int64_t int8_inputs(int64_t in_features) { return (in_features + 1) / 2 * 2; }

// Lanes of panel `panel` of a layer with `out_features` outputs.
static constexpr int panel_width(int64_t out_features, int64_t panel) {
  const int64_t left = out_features - panel * kPanelWidth;
  if (left >= kPanelWidth) return kPanelWidth;
  return static_cast<int>((left + kPanelQuantum - 1) / kPanelQuantum * kPanelQuantum);
}

}  // namespace trunkline
