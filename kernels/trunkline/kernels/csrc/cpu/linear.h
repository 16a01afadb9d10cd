// Linear layers over prepacked weights: the packed form, a call, and the table of functions per level.
//
// Packed form, the same on every level but for bfloat16 in tiles: outputs in panels of 64, the last one padded with zero rows to a multiple
// of 16. Within a panel the lanes run along the outputs, so that the product needs no horizontal sums and a panel
// is one sequential stream of memory:
//
//      float32, float16   [panel][in][width]
//      bfloat16           [panel][ceil(in / 2)][width][2], an odd `in` padded with a zero; for matrix registers
//                         [panel][tile][width / 16][16][16][2], the last tile with the steps that are left
//      int8               [panel][in][width], an odd `in` padded with a zero, whatever the type of x
//      groups             [panel][scale][group]: see `GroupForm`
//
// int8 weights are quantised per output (`trunkline/kernels/quantisation.py`): the product is taken over the
// integers, which every type of x holds exactly, and an output's scale multiplies its finished sum.
//
// A gated layer (`activation(gate) * up`) stores the up panel right after its gate panel; the epilogue has both
// in the first-level cache and the intermediate tensor of twice the width is never written.
//
// Invariant: an output element is one sum over `in` in ascending order, in one float32 accumulator (by tiles, 32 inputs
// at a time: `tile_product.h`), whatever the number of rows, threads and panels beside it. A token's result does not
// depend on its batch.
//
// Plain data only: this header is compiled once per level.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu_level.h"

namespace trunkline {

enum class DenseType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };
constexpr int kDenseTypes = 3;

// How weights are stored: in the type of x, as int8 with a scale per output, or as codes in groups. With int8 inputs
// a layer rounds its rows to int8, by 32 inputs, and multiplies integers; else codes become floats.
enum class WeightForm : int { kPlain = 0, kInt8 = 1, kGroups = 2, kGroupsInt8 = 3 };

// The last is gpt-oss's, whose gate and up are clamped (`trunkline/kernels/ops.py`).
enum class Activation : int { kNone = 0, kSilu = 1, kGelu = 2, kGeluTanh = 3, kClampedSilu = 4 };

constexpr int kPanelWidth = 64;
constexpr int kPanelQuantum = 16;  // lanes of the widest vector

// Rows that pass over a panel together: few enough that their part of the input stays in the second-level cache and
// their sums in the first, enough that a panel is used often for each time it is read.
constexpr int kRowsMax = 96;

enum class ScaleType : int { kFloat16 = 0, kBFloat16 = 1, kFloat32 = 2 };

// Codes in groups of inputs (`trunkline/kernels/grouped.py`): w = scale * (value(code) - zero) - offset. A panel is,
// for each scale (and for its groups, if there are two levels):
//
//      scales [width], offsets [width] if there are any, in their type
//      then for each of its groups:
//          second level: scales [width], offsets [width] if there are any, int8
//          codes, words of 32 bits [group * bits / 32][width]: code i of a word of 8 bits in byte i; of 4 bits in the
//          low half of byte i, codes 4 to 7 in the high halves; of 6 bits 16 codes in three words, codes 0 to 11 in
//          the low bits of their bytes, and the bits of codes 12 to 15, two by two from the lowest, above; floats of 8 bits (`float8.h`): code 1 in byte 2 and
//          code 2 in byte 1, so that the even bytes and the odd ones are pairs of neighbours
//
// So the codes of four inputs are the bytes of a lane, as products of integers take them.
struct GroupForm {
  int64_t group;             // inputs; a multiple of 16
  int64_t groups_per_scale;  // 1 on one level
  int bits;                  // 4, 6 or 8
  ScaleType scale_type;
  bool has_levels;
  bool has_offset;
  bool has_table;
  bool is_float;      // codes of 8 bits are floats (e4m3), without offsets, zero and levels
  uint8_t table[16];  // values of the codes of 4 bits; otherwise they are the codes
  int zero;           // 0 to 255

  int64_t scale_bytes() const { return scale_type == ScaleType::kFloat32 ? 4 : 2; }
  int64_t numbers() const { return has_offset ? 2 : 1; }
  // Bytes of a lane, for a group and for a scale with its groups.
  int64_t group_bytes() const { return (has_levels ? numbers() : 0) + group * bits / 8; }
  int64_t lane_bytes() const { return scale_bytes() * numbers() + groups_per_scale * group_bytes(); }
  int64_t lane_bytes(int64_t in_features) const { return in_features / (group * groups_per_scale) * lane_bytes(); }
  // Inputs that are taken at a time: of one group, and of one factor where inputs are int8.
  int unit() const { return group % 32 == 0 ? 32 : 16; }
};

struct LinearLayer {
  DenseType type;  // of x
  WeightForm form;
  Activation activation;  // kNone: not gated
  int64_t in_features;
  int64_t out_features;  // of the result, so half the weight's rows where gated
  const void* panels;
  const GroupForm* groups;  // of codes in groups, else null
  bool in_tiles;            // how plain bfloat16 panels are laid out
  const float* scale;       // of int8 panels; per panel, padded like it and interleaved like it
  const float* bias;        // likewise; null: none
};

// What is added to some rows' sums before they are activated and rounded: what adapters add (`adapters.h`).
struct Addend {
  const float* values = nullptr;   // [rows of it, width], and a vector's lanes behind the last; null: none
  const int32_t* place = nullptr;  // for each row of the call its row of `values`; -1: nothing is added
  int64_t width = 0;               // outputs; of a gated layer twice as many, those of the gate first
};

struct LinearCall {
  const LinearLayer* layer;
  const void* x;  // [rows, in_features]
  void* out;      // [rows, out_features]
  bool float_out;
  int64_t rows;
  Addend addend = {};
};

// A thread's memory during one call for a block of rows in the form that the product reads, if it is another one
// than theirs: a thread that takes several panels of a block converts it once. Behind it, where LinearTable::words counts
// them, is room for int8 panels in the form of the matrix registers.
struct ConvertedRows {
  int64_t row_begin;  // of the block that is there; -1: none yet
  void* words;        // as many as LinearTable::words says
};

// Rows [row_begin, row_end), at most LinearTable::rows_max, times panels [panel_begin, panel_end); gated ones count in pairs.
using LinearUnit = void (*)(const LinearCall& call, int64_t row_begin, int64_t row_end, int64_t panel_begin,
                            int64_t panel_end, ConvertedRows* converted);

// Of plain and int8 weights, or of codes in groups without and with int8 inputs.
struct LinearTable {
  LinearUnit unit[2][kDenseTypes];
  // 32-bit words of a thread's memory for a unit of `rows` rows; 0: none, rows are read as they are.
  int64_t (*words[2][kDenseTypes])(const LinearLayer& layer, int64_t rows);
  // Rows of a unit of work at most; null: kRowsMax.
  int64_t (*rows_max[2][kDenseTypes])(const LinearLayer& layer);
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
extern const LinearTable kLinearTable, kGroupTable;
extern const NormTable kNormTable;
}  // namespace portable
namespace avx2 {
extern const LinearTable kLinearTable, kGroupTable;
extern const NormTable kNormTable;
}  // namespace avx2
namespace avx512 {
extern const LinearTable kLinearTable, kGroupTable;
extern const NormTable kNormTable;
}  // namespace avx512
namespace avx512bf16 {
extern const LinearTable kLinearTable, kGroupTable;
extern const NormTable kNormTable;
}  // namespace avx512bf16
namespace amx {
extern const LinearTable kLinearTable;
using avx512bf16::kGroupTable;
using avx512bf16::kNormTable;
}  // namespace amx

// The functions of a layer, by its form and type.
struct LinearFunctions {
  LinearUnit unit;
  int64_t (*words)(const LinearLayer& layer, int64_t rows);
  int64_t rows_max;
};
LinearFunctions linear_functions(CpuLevel level, const LinearLayer& layer);
// Whether a level's panels of a layer are in tiles.
bool packs_tiles(CpuLevel level, const LinearLayer& layer);
// Throws if the layer's panels are not as the level reads them.
void require_level(CpuLevel level, const LinearLayer& layer);
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
