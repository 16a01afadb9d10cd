// Exported functions of the shared-memory collectives. A group is a handle; errors have kinds of their own, which
// `trunkline/kernels/shared_group.py` registers. Calls wait without the interpreter's lock: tvm-ffi releases it.
#include <tvm/ffi/optional.h>
#include <tvm/ffi/string.h>

#include <map>
#include <memory>
#include <mutex>
#include <system_error>

#include "common/checks.h"
#include "common/exports.h"
#include "cpu/cpu_level.h"
#include "cpu/shared_group.h"
#include "cpu/shared_group_handles.h"

namespace trunkline {
namespace {

namespace ffi = tvm::ffi;

// Open groups. Never destroyed, so that a process that just ends does so as a rank that died.
struct Groups {
  std::mutex mutex;
  std::map<int64_t, std::shared_ptr<SharedGroup>> by_handle;
  int64_t last = 0;

  static Groups& all() {
    static Groups* const groups = new Groups;
    return *groups;
  }
};

void require_plain(const TensorView& tensor, const char* name) {
  if (tensor.device().device_type != kDLCPU || !tensor.IsContiguous() || tensor.dtype().lanes != 1) {
    TVM_FFI_THROW(ValueError) << name << " must be a contiguous tensor in the memory of the CPU";
  }
}

std::byte* data_of(const TensorView& tensor) {
  return static_cast<std::byte*>(tensor.data_ptr()) + tensor.byte_offset();
}

int64_t bytes_of(const TensorView& tensor) { return tensor.numel() * ((tensor.dtype().bits + 7) / 8); }

ElementType element_type(const TensorView& tensor) {
  if (is_float32(tensor)) return ElementType::kFloat32;
  if (is_bfloat16(tensor)) return ElementType::kBFloat16;
  if (is_float16(tensor)) return ElementType::kFloat16;
  if (has_dtype(tensor, kDLFloat, 64)) return ElementType::kFloat64;
  TVM_FFI_THROW(ValueError) << "sums are of float32, bfloat16, float16 or float64";
}

}  // namespace

std::shared_ptr<SharedGroup> group_of(int64_t handle) {
  Groups& groups = Groups::all();
  const std::lock_guard lock(groups.mutex);
  const auto found = groups.by_handle.find(handle);
  if (found == groups.by_handle.end()) TVM_FFI_THROW(ValueError) << "the group is closed";
  return found->second;
}

namespace {

void shared_group_create(const ffi::String& path, int64_t size, int64_t slot_bytes) {
  translated([&] { SharedGroup::create(path, static_cast<int>(size), slot_bytes); });
}

int64_t shared_group_join(const ffi::String& path, int64_t rank, int64_t size, int64_t level, int64_t timeout_ms) {
  if (!runs_here(level)) {
    TVM_FFI_THROW(ValueError) << "level " << level << " does not run here";
  }
  auto group = translated([&] {
    return std::make_shared<SharedGroup>(path, static_cast<int>(rank), static_cast<int>(size),
                                         static_cast<CpuLevel>(level), std::chrono::milliseconds(timeout_ms));
  });
  Groups& groups = Groups::all();
  const std::lock_guard lock(groups.mutex);
  groups.by_handle.emplace(++groups.last, std::move(group));
  return groups.last;
}

void shared_group_close(int64_t handle) {
  std::shared_ptr<SharedGroup> group;
  Groups& groups = Groups::all();
  {
    const std::lock_guard lock(groups.mutex);
    const auto found = groups.by_handle.find(handle);
    if (found == groups.by_handle.end()) return;
    group = std::move(found->second);
    groups.by_handle.erase(found);
  }
  group->leave();
}

void shared_group_all_reduce(int64_t handle, TensorView tensor) {
  require_plain(tensor, "the tensor to sum");
  const ElementType type = element_type(tensor);
  const auto group = group_of(handle);
  translated([&] { group->all_reduce(data_of(tensor), tensor.numel(), type); });
}

void shared_group_all_gather(int64_t handle, TensorView part, TensorView all) {
  require_plain(part, "part");
  require_plain(all, "all");
  const auto group = group_of(handle);
  require(bytes_of(all) == bytes_of(part) * group->size(), "all must hold every rank's part");
  translated([&] { group->all_gather(data_of(part), bytes_of(part), data_of(all)); });
}

// `all` on rank 0: [rows, size * columns]; on the others anything.
void shared_group_gather_columns(int64_t handle, TensorView part, TensorView all) {
  require_plain(part, "part");
  require_plain(all, "all");
  require(part.ndim() == 2, "part must be a matrix");
  const auto group = group_of(handle);
  const bool receives = group->rank() == 0;
  require(!receives || bytes_of(all) == bytes_of(part) * group->size(), "all must hold every rank's columns");
  const int64_t row_bytes = part.size(0) == 0 ? 0 : bytes_of(part) / part.size(0);
  translated(
      [&] { group->gather_columns(data_of(part), part.size(0), row_bytes, receives ? data_of(all) : nullptr); });
}

void shared_group_broadcast(int64_t handle, TensorView tensor) {
  require_plain(tensor, "the tensor to broadcast");
  const auto group = group_of(handle);
  translated([&] { group->broadcast(data_of(tensor), bytes_of(tensor)); });
}

}  // namespace
}  // namespace trunkline

TRUNKLINE_EXPORT(shared_group_create, trunkline::shared_group_create)
TRUNKLINE_EXPORT(shared_group_join, trunkline::shared_group_join)
TRUNKLINE_EXPORT(shared_group_close, trunkline::shared_group_close)
TRUNKLINE_EXPORT(shared_group_all_reduce, trunkline::shared_group_all_reduce)
TRUNKLINE_EXPORT(shared_group_all_gather, trunkline::shared_group_all_gather)
TRUNKLINE_EXPORT(shared_group_gather_columns, trunkline::shared_group_gather_columns)
TRUNKLINE_EXPORT(shared_group_broadcast, trunkline::shared_group_broadcast)
