// Linear layers: handles of packed layers, checks of calls, and the split of the work over the threads.

#include <tvm/ffi/function.h>
#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <new>

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

// `ConvertedRows` at the start of a thread's memory; what follows is aligned like it.
constexpr size_t kHeaderBytes = 64;
static_assert(sizeof(ConvertedRows) <= kHeaderBytes);

const LinearLayer& layer_of(int64_t handle) { return *reinterpret_cast<PackedLayer*>(handle); }

// Every thread's memory for converted rows, empty; false: none is needed.
bool prepare_conversion(CpuContext& shared, const LinearCall& call, const LinearTable& table) {
  const LinearLayer& layer = *call.layer;
  const auto row_words = table.row_words[static_cast<int>(layer.form)][static_cast<int>(layer.type)];
  const int64_t words = row_words(layer.in_features);
  if (words == 0) return false;
  shared.reserve_scratch(kHeaderBytes + static_cast<size_t>(std::min<int64_t>(call.rows, kRowsMax) * words) * 4);
  for (int thread = 0; thread < shared.pool.threads(); ++thread) {
    char* memory = shared.scratch(thread);
    new (memory) ConvertedRows{-1, memory + kHeaderBytes};
  }
  return true;
}

}  // namespace

void run_linear(CpuContext& shared, const LinearCall& call) {
  const LinearLayer& layer = *call.layer;
  const LinearTable& table = linear_table(shared.level);
  const LinearUnit unit = table.unit[static_cast<int>(layer.form)][static_cast<int>(layer.type)];
  const bool converts = prepare_conversion(shared, call, table);
  const int64_t panels = (layer.out_features + kPanelWidth - 1) / kPanelWidth;
  const int64_t threads = shared.pool.threads();
  const int64_t blocks = (call.rows + kRowsMax - 1) / kRowsMax;
  int64_t groups = 1;  // of panels, per block of rows
  if (threads > 1) {
    const int64_t columns = layer.activation == Activation::kNone ? kPanelWidth : 2 * kPanelWidth;
    const int64_t per_panel = std::max<int64_t>(1, layer.in_features * columns);
    const int64_t element_bytes = weight_bytes(layer);
    const int64_t by_bytes = kUnitBytesMin / (per_panel * element_bytes);
    const int64_t by_work = kUnitMultiplicationsMin / (per_panel * std::max<int64_t>(1, call.rows / blocks));
    const int64_t panels_min = std::max<int64_t>(1, std::min(by_bytes, by_work));
    const int64_t wanted = (threads * kUnitsPerThread + blocks - 1) / blocks;
    groups = std::clamp<int64_t>(panels / panels_min, 1, wanted);
  }
  shared.pool.run(blocks * groups, [&](int64_t index, int thread) {
    const int64_t block = index / groups, group = index % groups;
    unit(call, call.rows * block / blocks, call.rows * (block + 1) / blocks, panels * group / groups,
         panels * (group + 1) / groups,
         converts ? reinterpret_cast<ConvertedRows*>(shared.scratch(thread)) : nullptr);
  });
}

namespace {

void linear(int64_t context, int64_t handle, TensorView x, TensorView out) {
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
  const ContextUse use(context);
  run_linear(use.context(), call);
}

}  // namespace
}  // namespace trunkline

TVM_FFI_DLL_EXPORT_TYPED_FUNC(linear, trunkline::linear)
