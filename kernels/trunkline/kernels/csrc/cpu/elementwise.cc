// Elementwise ops: the functions of a level, and the split of the work over the threads.

#include "elementwise.h"

#include <algorithm>

#include "ops.h"

namespace trunkline {
namespace {

const ElementTable& element_table(CpuLevel level) { TRUNKLINE_RETURN_AT(level, kElementTable); }

// Calls `body(begin, end)` for parts of [0, count) of `each` elements.
template <class Body>
void run_parts(CpuContext& context, int64_t count, int64_t each, Body&& body) {
  const int64_t per_unit = std::max<int64_t>(1, kUnitElements / std::max<int64_t>(1, each));
  if (count <= per_unit || context.pool.threads() == 1) return body(0, count);
  context.pool.run((count + per_unit - 1) / per_unit,
                   [&](int64_t unit, int) { body(unit * per_unit, std::min(count, (unit + 1) * per_unit)); });
}

}  // namespace

ElementRange element_range(CpuLevel level, ElementOp op, DenseType type) {
  return element_table(level).range[static_cast<int>(op)][static_cast<int>(type)];
}

void run_elements(CpuContext& context, ElementOp op, DenseType type, const ElementCall& call, int64_t count) {
  const auto range = element_range(context.level, op, type);
  run_parts(context, count, 1, [&](int64_t begin, int64_t end) { range(call, begin, end); });
}

void run_layer_norm(CpuContext& context, const LayerNormCall& call, DenseType type, int64_t rows) {
  const auto norm = element_table(context.level).layer_norm[static_cast<int>(type)];
  run_parts(context, rows, call.width, [&](int64_t begin, int64_t end) { norm(call, begin, end); });
}

void run_mix(CpuContext& context, const MixCall& call, DenseType type, int64_t tokens) {
  const auto mix = element_table(context.level).mix[static_cast<int>(type)];
  run_parts(context, tokens, call.width * call.per_token,
            [&](int64_t begin, int64_t end) { mix(call, begin, end); });
}

void run_square_sums(CpuContext& context, const SquareSumsCall& call, DenseType type, int64_t rows) {
  const auto sums = element_table(context.level).square_sums[static_cast<int>(type)];
  run_parts(context, rows, call.columns, [&](int64_t begin, int64_t end) { sums(call, begin, end); });
}

void run_wide_norm(CpuContext& context, const WideNormCall& call, DenseType type, int64_t rows) {
  const auto norm = element_table(context.level).wide_norm[static_cast<int>(type)];
  run_parts(context, rows, call.columns, [&](int64_t begin, int64_t end) { norm(call, begin, end); });
}

}  // namespace trunkline
