// Exported functions that belong to no op: levels, contexts, the work planner.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/tvm_ffi.h>

#include <cstring>
#include <new>
#include <stdexcept>
#include <system_error>

#include "common/checks.h"
#include "common/work_plan.h"
#include "context.h"

namespace trunkline {
namespace {

namespace ffi = tvm::ffi;

// To be raised, here and in native.py, with every change to the functions that Python calls: a library that was
// not rebuilt after an update must be refused, not called with other arguments than it takes.
constexpr int64_t kInterfaceVersion = 6;

int64_t interface_version() { return kInterfaceVersion; }

int64_t cpu_level() { return static_cast<int64_t>(best_cpu_level()); }

int64_t cpu_context_new(int64_t level, int64_t threads) {
  if (level < 0 || level > cpu_level()) TVM_FFI_THROW(ValueError) << "level " << level << " does not run here";
  if (threads < 1 || threads > 1024) TVM_FFI_THROW(ValueError) << threads << " threads; allowed are 1 to 1024";
  try {
    return reinterpret_cast<int64_t>(new CpuContext(static_cast<CpuLevel>(level), static_cast<int>(threads)));
  } catch (const std::system_error& error) {
    TVM_FFI_THROW(RuntimeError) << threads << " threads cannot be started: " << error.what();
  }
  return 0;  // not reached
}

void cpu_context_delete(int64_t handle) { delete reinterpret_cast<CpuContext*>(handle); }

struct HostAllocator {
  void AllocData(DLTensor* tensor) {
    size_t bytes = 4;
    for (int i = 0; i < tensor->ndim; ++i) bytes *= static_cast<size_t>(tensor->shape[i]);
    tensor->data = ::operator new(bytes, std::align_val_t{64});
  }
  void FreeData(DLTensor* tensor) { ::operator delete(tensor->data, std::align_val_t{64}); }
};

// `arrays`, one after the other: block, first, count, base, row_indptr, rows, shifts, tail_item, query_position.
// `numbers`: items, entries, rows, shared items, then the options.
ffi::Tensor plan_work(TensorView arrays, ffi::Array<int64_t> numbers) {
  require(numbers.size() == 16, "four sizes and twelve options are expected");
  const int64_t item_count = numbers[0], entries = numbers[1], rows = numbers[2], shared_items = numbers[3];
  const int32_t* next = int32_data(arrays, "arrays");
  require(item_count >= 0 && entries >= 0 && rows >= 0 && shared_items >= 0 && shared_items <= item_count &&
              arrays.numel() == 5 * item_count + 1 + 2 * entries + 2 * rows,
          "the arrays are not as long as the sizes say");
  const auto take = [&](int64_t length) {
    const int32_t* begin = next;
    next += length;
    return begin;
  };
  DecodeItems items{};
  items.block = take(item_count);
  items.first = take(item_count);
  items.count = take(item_count);
  items.base = take(item_count);
  items.row_indptr = take(item_count + 1);
  items.rows = take(entries);
  items.shifts = take(entries);
  items.tail_item = take(rows);
  items.query_position = take(rows);
  items.items = static_cast<int32_t>(item_count);
  items.shared_items = static_cast<int32_t>(shared_items);
  items.num_rows = static_cast<int32_t>(rows);
  require(items.row_indptr[item_count] == entries, "rows and shifts must be as long as row_indptr says");
  const auto option = [&](int i) { return static_cast<int32_t>(numbers[4 + i]); };
  WorkOptions chosen;
  chosen.kv_heads = option(0);
  chosen.group = option(1);
  chosen.kv_token_bytes = option(2);
  chosen.partial_bytes = option(3);
  chosen.tile_rows = option(4);
  chosen.workers = option(5);
  chosen.pieces_per_worker = option(6);
  chosen.piece_tokens_min = option(7);
  chosen.invariant_tokens = option(8);
  chosen.share = option(9) != 0;
  chosen.vectors_per_read = option(10);
  chosen.unit_vectors = option(11);
  std::vector<int32_t> words;
  try {
    words = plan_decode_work(items, chosen);
  } catch (const std::invalid_argument& error) {
    TVM_FFI_THROW(ValueError) << error.what();
  }
  const int64_t length = static_cast<int64_t>(words.size());
  ffi::Tensor result = ffi::Tensor::FromNDAlloc(HostAllocator(), ffi::ShapeView(&length, 1),
                                                DLDataType{kDLInt, 32, 1}, DLDevice{kDLCPU, 0});
  std::memcpy(result.data_ptr(), words.data(), words.size() * 4);
  return result;
}

}  // namespace
}  // namespace trunkline

TVM_FFI_DLL_EXPORT_TYPED_FUNC(interface_version, trunkline::interface_version)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cpu_level, trunkline::cpu_level)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cpu_context_new, trunkline::cpu_context_new)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cpu_context_delete, trunkline::cpu_context_delete)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan_work, trunkline::plan_work)
