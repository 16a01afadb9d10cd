// Exported functions that make plans: of decode steps from nothing (common/work_plan.h) and going on
// (common/live_plan.h), of prefill (common/prefill_plan.h).

#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <vector>

#include "common/checks.h"
#include "common/exports.h"
#include "common/live_plan.h"
#include "common/prefill_plan.h"
#include "common/work_plan.h"

namespace trunkline {
namespace {

namespace ffi = tvm::ffi;

constexpr int kOptions = 21;

struct HostAllocator {
  void AllocData(DLTensor* tensor) {
    size_t bytes = 4;
    for (int i = 0; i < tensor->ndim; ++i) bytes *= static_cast<size_t>(tensor->shape[i]);
    tensor->data = ::operator new(bytes, std::align_val_t{64});
  }
  void FreeData(DLTensor* tensor) { ::operator delete(tensor->data, std::align_val_t{64}); }
};

// Memory that a plan and the tensors that were made of it hold together.
struct SharedWords {
  std::shared_ptr<int32_t[]> memory;

  void AllocData(DLTensor* tensor) { tensor->data = memory.get(); }
  void FreeData(DLTensor*) { memory.reset(); }
};

ffi::Tensor tensor_of(const std::vector<int32_t>& words) {
  const auto length = static_cast<int64_t>(words.size());
  ffi::Tensor result = ffi::Tensor::FromNDAlloc(HostAllocator(), ffi::ShapeView(&length, 1),
                                                DLDataType{kDLInt, 32, 1}, DLDevice{kDLCPU, 0});
  std::memcpy(result.data_ptr(), words.data(), words.size() * 4);
  return result;
}

// The fields of `WorkOptions` in plan.py, in order, from number `first` on.
WorkOptions read_options(const ffi::Array<int64_t>& numbers, int64_t first) {
  const auto option = [&](int64_t i) { return static_cast<int32_t>(numbers[first + i]); };
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
  chosen.dealt = option(12) != 0;
  chosen.narrow_vectors = option(13);
  chosen.narrow_unit_ns = option(14);
  chosen.wide_unit_ns = option(15);
  chosen.tile_tokens = option(16);
  chosen.narrow_tile_ns = option(17);
  chosen.wide_tile_ns = option(18);
  chosen.partial_bytes_per_ns = option(19);
  chosen.carry_tokens = option(20);
  return chosen;
}

// `arrays`, one after the other: block, first, count, base, row_indptr, rows, shifts, tail_item, query_position.
// `numbers`: items, entries, rows, shared items, then the options.
ffi::Tensor plan_work(TensorView arrays, ffi::Array<int64_t> numbers) {
  require(numbers.size() == 4 + kOptions, "four sizes and the options are expected");
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
  std::vector<int32_t> words;
  try {
    words = plan_decode_work(items, read_options(numbers, 4));
  } catch (const std::invalid_argument& error) {
    TVM_FFI_THROW(ValueError) << error.what();
  }
  return tensor_of(words);
}

// `arrays`, one after the other: query_indptr, item_indptr, query_position, block, first, count, base, shift.
// `numbers`: entries, queries, items, then the fields of `PrefillCut`. Returns the words, and six numbers for each
// part: rows, pieces (both from and to), partials, first word.
ffi::Array<ffi::Tensor> plan_prefill(TensorView arrays, ffi::Array<int64_t> numbers) {
  require(numbers.size() == 8, "three sizes and five options are expected");
  const int64_t entries = numbers[0], queries = numbers[1], count = numbers[2];
  const int32_t* next = int32_data(arrays, "arrays");
  require(entries >= 0 && queries >= 0 && count >= 0 && arrays.numel() == 2 * (entries + 1) + queries + 5 * count,
          "the arrays are not as long as the sizes say");
  const auto take = [&](int64_t length) {
    const int32_t* begin = next;
    next += length;
    return begin;
  };
  PrefillItems items{};
  items.query_indptr = take(entries + 1);
  items.item_indptr = take(entries + 1);
  items.query_position = take(queries);
  items.block = take(count);
  items.first = take(count);
  items.count = take(count);
  items.base = take(count);
  items.shift = take(count);
  items.entries = static_cast<int32_t>(entries);
  items.queries = static_cast<int32_t>(queries);
  items.items = static_cast<int32_t>(count);
  const PrefillCut cut{static_cast<int32_t>(numbers[3]), numbers[4], static_cast<int32_t>(numbers[5]),
                       static_cast<int32_t>(numbers[6]), numbers[7]};
  std::vector<int32_t> parts;
  PrefillWork work;
  try {
    work = plan_prefill_work(items, cut);
  } catch (const std::invalid_argument& error) {
    TVM_FFI_THROW(ValueError) << error.what();
  }
  require(work.words.size() <= INT32_MAX, "a plan of more than 2^31 words");
  for (const PrefillPart& part : work.parts) {
    parts.insert(parts.end(), {part.row_start, part.row_stop, part.piece_start, part.piece_stop, part.partials,
                               static_cast<int32_t>(part.word)});
  }
  return {tensor_of(work.words), tensor_of(parts)};
}

// `numbers`: the options, tokens per block, whether changes are kept.
int64_t live_plan_new(ffi::Array<int64_t> numbers) {
  require(numbers.size() == kOptions + 2, "the options and two numbers are expected");
  try {
    return reinterpret_cast<int64_t>(new LivePlan(
        read_options(numbers, 0), static_cast<int32_t>(numbers[kOptions]), numbers[kOptions + 1] != 0));
  } catch (const std::invalid_argument& error) {
    TVM_FFI_THROW(ValueError) << error.what();
  }
  return 0;  // not reached
}

void live_plan_delete(int64_t handle) { delete reinterpret_cast<LivePlan*>(handle); }

// Carries out changes; returns the generation of the words.
int64_t live_plan_apply(int64_t handle, TensorView changes) {
  LivePlan& plan = *reinterpret_cast<LivePlan*>(handle);
  try {
    plan.apply(int32_data(changes, "changes"), changes.numel());
  } catch (const std::invalid_argument& error) {
    TVM_FFI_THROW(ValueError) << error.what();
  }
  return plan.generation();
}

// The words of the present generation, which later changes are written into.
ffi::Tensor live_plan_words(int64_t handle) {
  const LivePlan& plan = *reinterpret_cast<LivePlan*>(handle);
  const int64_t length = plan.words();
  return ffi::Tensor::FromNDAlloc(SharedWords{plan.memory()}, ffi::ShapeView(&length, 1),
                                  DLDataType{kDLInt, 32, 1}, DLDevice{kDLCPU, 0});
}

// Index and value of each word that was written since the last call, one after the other.
ffi::Tensor live_plan_changes(int64_t handle) {
  std::vector<int32_t> changes;
  reinterpret_cast<LivePlan*>(handle)->take_changes(changes);
  return tensor_of(changes);
}

}  // namespace
}  // namespace trunkline

TRUNKLINE_EXPORT(plan_work, trunkline::plan_work)
TRUNKLINE_EXPORT(plan_prefill, trunkline::plan_prefill)
TRUNKLINE_EXPORT(live_plan_new, trunkline::live_plan_new)
TRUNKLINE_EXPORT(live_plan_delete, trunkline::live_plan_delete)
TRUNKLINE_EXPORT(live_plan_apply, trunkline::live_plan_apply)
TRUNKLINE_EXPORT(live_plan_words, trunkline::live_plan_words)
TRUNKLINE_EXPORT(live_plan_changes, trunkline::live_plan_changes)
