// The first and the last node of a decode step in a graph: what each row computes follows from the plan, the step
// counter and a table, and what was drawn goes back into the table. So a replay needs nothing from the host.
#include <primitives.cuh>

#include "../common/work_plan.h"
#include "api.h"

namespace trunkline::cuda {
namespace {

constexpr int kRowThreads = 128;

// Rows of the bucket that the plan does not have store nothing, and take the largest logit of whatever they compute.
__device__ __forceinline__ int place_of(const StepRowsCall& call, int row) {
  return row < call.work[kWorkRows] ? call.table[row] : -1;
}

__device__ __forceinline__ const int32_t* words_of(const StepRowsCall& call, int place) {
  return call.table + call.places + place * kPlaceWords;
}

__global__ void begin_rows_kernel(const __grid_constant__ StepRowsCall call) {
  const int row = static_cast<int>(blockIdx.x) * kRowThreads + static_cast<int>(threadIdx.x);
  if (row >= call.rows) return;
  const int place = place_of(call, row);
  call.slots[row] = -1;
  call.ids[row] = call.positions[row] = call.seeds[row] = call.output_index[row] = 0;
  call.top_k[row] = 0;
  float* factors = call.factors + row;
  factors[0] = 0.0f, factors[call.rows] = 1.0f, factors[2 * call.rows] = -__builtin_inff();
  if (place < 0) return;
  const WorkView work(call.work);
  const int steps = *call.steps;
  const int32_t* words = words_of(call, place);
  call.ids[row] = words[kPlaceToken];
  call.positions[row] = work.query_position[row] + steps;
  call.slots[row] = token_slot(work, call.work[call.work[kWorkRowTail] + row], steps, call.chunk_size);
  const auto low = static_cast<uint32_t>(words[kPlaceSeed]), high = static_cast<uint32_t>(words[kPlaceSeed + 1]);
  call.seeds[row] = static_cast<int64_t>(static_cast<uint64_t>(high) << 32 | low);
  call.output_index[row] = words[kPlaceOutputIndex] + steps;
  call.top_k[row] = words[kPlaceTopK];
  const float* own = reinterpret_cast<const float*>(words + kPlaceFactors);
  for (int i = 0; i < 3; ++i) factors[i * call.rows] = own[i];
}

__global__ void end_rows_kernel(const __grid_constant__ StepRowsCall call) {
  const int row = static_cast<int>(blockIdx.x) * kRowThreads + static_cast<int>(threadIdx.x);
  if (row == 0) *call.steps += 1;  // which no other thread of this launch reads
  if (row >= call.rows) return;
  const int place = place_of(call, row);
  const auto token = place < 0 ? -1 : static_cast<int32_t>(call.drawn[row]);
  call.tokens[row] = token;
  if (place >= 0) call.table[call.places + place * kPlaceWords + kPlaceToken] = token;
}

int32_t launch_rows(void (*kernel)(StepRowsCall), const StepRowsCall& call, void* stream) {
  const dim3 grid(static_cast<unsigned>((call.rows + kRowThreads - 1) / kRowThreads));
  return launch(kernel, grid, kRowThreads, 0, stream, call);
}

}  // namespace

extern "C" {

int32_t trunkline_begin_rows(const StepRowsCall* call, void* stream) {
  return launch_rows(begin_rows_kernel, *call, stream);
}

int32_t trunkline_end_rows(const StepRowsCall* call, void* stream) {
  return launch_rows(end_rows_kernel, *call, stream);
}

}  // extern "C"
}  // namespace trunkline::cuda
