// Linear layers: handles of packed layers, checks of calls, and the split of the work over the threads.

#include <algorithm>
#include <cmath>
#include <new>
#include <span>

#include "common/exports.h"
#include "context.h"
#include "dense_checks.h"
#include "linear_pack.h"
#include "ops.h"

namespace trunkline {
namespace {

// A unit for another thread has to be worth the few microseconds of handing it over.
constexpr int64_t kUnitBytesMin = 64 * 1024;
constexpr int64_t kUnitMultiplicationsMin = 1 << 18;
constexpr int64_t kUnitsPerThread = 4;

// Rows whose multiplications take about as long as reading the weights.
constexpr int64_t kReadingRows = 16;

// At the start of a thread's memory; what follows is aligned like it.
struct ThreadRows {
  ConvertedRows rows;
  const LinearCall* call;  // whose rows they are
};
constexpr size_t kHeaderBytes = 64;
static_assert(sizeof(ThreadRows) <= kHeaderBytes);

const LinearLayer& layer_of(int64_t handle) { return *reinterpret_cast<PackedLayer*>(handle); }

// A call's units: each a block of rows times a group of panels.
struct Split {
  int64_t panels, blocks, groups;
  int64_t stop;  // units of this call and those before it
  LinearUnit unit;

  void run(const LinearCall& call, int64_t index, ConvertedRows* converted) const {
    const int64_t block = index / groups, group = index % groups;
    unit(call, call.rows * block / blocks, call.rows * (block + 1) / blocks, panels * group / groups,
         panels * (group + 1) / groups, converted);
  }
};

// Multiplications and reads of a call, in multiplications.
int64_t cost_of(const LinearCall& call) {
  return call.layer->in_features * call.layer->out_features * (call.rows + kReadingRows);
}

// `cost`: of all calls whose units are in one list.
Split split_of(const LinearCall& call, CpuLevel level, int64_t threads, int64_t cost) {
  const LinearLayer& layer = *call.layer;
  Split split{};
  const LinearFunctions functions = linear_functions(level, layer);
  split.unit = functions.unit;
  split.panels = (layer.out_features + kPanelWidth - 1) / kPanelWidth;
  split.blocks = (call.rows + functions.rows_max - 1) / functions.rows_max;
  split.groups = 1;
  if (threads == 1) return split;
  const int64_t columns = layer.activation == Activation::kNone ? kPanelWidth : 2 * kPanelWidth;
  const int64_t per_panel = std::max<int64_t>(1, layer.in_features * columns);
  const int64_t by_bytes = 8 * kUnitBytesMin / (per_panel * weight_bits(layer));
  const int64_t by_work = kUnitMultiplicationsMin / (per_panel * std::max<int64_t>(1, call.rows / split.blocks));
  const int64_t panels_min = std::max<int64_t>(1, std::min(by_bytes, by_work));
  const double share = static_cast<double>(cost_of(call)) / static_cast<double>(cost * split.blocks);
  const auto wanted = static_cast<int64_t>(std::ceil(static_cast<double>(threads * kUnitsPerThread) * share));
  split.groups = std::clamp<int64_t>(split.panels / panels_min, 1, wanted);
  return split;
}

// Every thread's memory for a unit, without converted rows yet; false: none is needed.
bool prepare_conversion(CpuContext& shared, const LinearCall* calls, size_t count) {
  int64_t words = 0;
  for (const LinearCall& call : std::span(calls, count)) {
    const LinearLayer& layer = *call.layer;
    const LinearFunctions functions = linear_functions(shared.level, layer);
    words = std::max(words, functions.words(layer, std::min(call.rows, functions.rows_max)));
  }
  if (words == 0) return false;
  shared.reserve_scratch(kHeaderBytes + static_cast<size_t>(words) * 4);
  for (int thread = 0; thread < shared.pool.threads(); ++thread) {
    char* memory = shared.scratch(thread);
    new (memory) ThreadRows{{-1, memory + kHeaderBytes}, nullptr};
  }
  return true;
}

}  // namespace

void run_linears(CpuContext& shared, const LinearCall* calls, size_t count) {
  const bool converts = prepare_conversion(shared, calls, count);
  int64_t cost = 0, units = 0;
  for (size_t i = 0; i < count; ++i) cost += cost_of(calls[i]);
  auto* splits = reinterpret_cast<Split*>(shared.lists.reserve(count * sizeof(Split)));
  for (size_t i = 0; i < count; ++i) {
    new (splits + i) Split(split_of(calls[i], shared.level, shared.pool.threads(), cost));
    splits[i].stop = units += splits[i].blocks * splits[i].groups;
  }
  shared.pool.run(units, [&](int64_t index, int thread) {
    const auto is_before = [](int64_t value, const Split& split) { return value < split.stop; };
    const Split& split = *std::upper_bound(splits, splits + count, index, is_before);
    const LinearCall& call = calls[&split - splits];
    ConvertedRows* converted = nullptr;
    if (converts) {
      auto* own = reinterpret_cast<ThreadRows*>(shared.scratch(thread));
      if (own->call != &call) own->call = &call, own->rows.row_begin = -1;
      converted = &own->rows;
    }
    split.run(call, index - (split.stop - split.blocks * split.groups), converted);
  });
}

void run_linear(CpuContext& shared, const LinearCall& call) { run_linears(shared, &call, 1); }

namespace {

void check_addend(const LinearLayer& layer, const TensorView& values, const TensorView& place, int64_t rows,
                  Addend& addend) {
  const int64_t width = layer.activation == Activation::kNone ? layer.out_features : 2 * layer.out_features;
  const int64_t slack = kPanelQuantum, count = std::max<int64_t>(0, values.numel() - slack) / width;
  require(is_float32(values) && values.IsContiguous() && values.numel() == count * width + slack &&
              has_dtype(place, kDLInt, 32) && place.IsContiguous() && place.numel() == rows,
          "an addend is float32, a row after the other and 16 numbers behind them, and int32 per row of x");
  addend = {static_cast<const float*>(values.data_ptr()), static_cast<const int32_t*>(place.data_ptr()), width};
  const bool fits =
      std::all_of(addend.place, addend.place + rows, [&](int32_t at) { return at >= -1 && at < count; });
  require(fits, "a row of x names no row of the addend");
}

// `values`, `place`: an `Addend`; empty: nothing is added.
void linear(int64_t context, int64_t handle, TensorView x, TensorView out, TensorView values, TensorView place) {
  const LinearLayer& layer = layer_of(handle);
  const DenseType type = dense_type(x, "x"), out_type = dense_type(out, "out");
  if (type != layer.type || x.ndim() != 2 || x.size(1) != layer.in_features) {
    TVM_FFI_THROW(ValueError) << "x is " << described(x) << "; the packed weight takes "
                              << dense_type_name(layer.type) << " [tokens, " << layer.in_features << "]";
  }
  const bool widened = out_type == DenseType::kFloat32 && layer.activation == Activation::kNone;
  const bool typed = out_type == type || widened;
  if (!typed || out.ndim() != 2 || out.size(0) != x.size(0) || out.size(1) != layer.out_features) {
    TVM_FFI_THROW(ValueError) << "out is " << described(out) << " for x " << described(x)
                              << "; the packed weight gives [tokens, " << layer.out_features
                              << "] in the type of x or, not gated, float32";
  }
  if (x.size(0) == 0) return;
  LinearCall call{};
  call.layer = &layer;
  call.x = x.data_ptr();
  call.out = out.data_ptr();
  call.float_out = out_type == DenseType::kFloat32;
  call.rows = x.size(0);
  if (values.numel() > 0) check_addend(layer, values, place, call.rows, call.addend);
  const ContextUse use(context);
  run_linear(use.context(), call);
}

}  // namespace
}  // namespace trunkline

TRUNKLINE_EXPORT(linear, trunkline::linear)
