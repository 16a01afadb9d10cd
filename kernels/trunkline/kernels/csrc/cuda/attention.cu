// Attention's host side: which kernel, how many stages and thread blocks; and the merge of partials.
#include "attention_general.cuh"
#include "attention_instances.cuh"

#include <algorithm>

namespace trunkline::cuda {
namespace {

constexpr int kMatrixRows = 64;
constexpr int kStagesMax = 4;

AttentionKernel find_matrix_kernel(int32_t dtype, int32_t kv_dtype, int32_t head_dim) {
  if (dtype == kFloat32) return {};
  const bool in_bytes = kv_dtype != dtype;
  switch (head_dim) {
    case 64: return attention_d64(dtype, in_bytes);
    case 80: return attention_d80(dtype, in_bytes);
    case 96: return attention_d96(dtype, in_bytes);
    case 128: return attention_d128(dtype, in_bytes);
    case 256: return attention_d256(dtype, in_bytes);
    default: return {};
  }
}

using KernelPointer = void (*)(AttentionCall);

KernelPointer general_kernel(int32_t dtype) {
  if (dtype == kBfloat16) return attention_general_kernel<Bf16>;
  return dtype == kFloat16 ? attention_general_kernel<Fp16> : attention_general_kernel<float>;
}

struct DeviceLimits {
  int processors = 0, shared_per_block = 0, shared_per_processor = 0, shared_reserved = 0;
};

cudaError_t read_limits(DeviceLimits& limits) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  const auto read = [&](int& value, cudaDeviceAttr attribute) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, attribute, device);
  };
  read(limits.processors, cudaDevAttrMultiProcessorCount);
  read(limits.shared_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  read(limits.shared_per_processor, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  read(limits.shared_reserved, cudaDevAttrReservedSharedMemoryPerBlock);
  return error;
}

// Two thread blocks per processor hide each other's barriers, so they come before more stages; and large tiles, which
// read shared KV once for more rows, come before both. The layout for narrow pieces has further stages in the room of
// a large tile's vectors; where there is none for a stage, there is one layout.
bool choose_stages(const AttentionKernel& kernel, const DeviceLimits& limits, AttentionShape& shape) {
  for (int rows = kMatrixRows; rows >= 16; rows /= 2) {
    for (int blocks = 2; blocks >= 1; --blocks) {
      const int available =
          std::min(limits.shared_per_block, limits.shared_per_processor / blocks - limits.shared_reserved);
      const int stages = std::min(kStagesMax, (available - rows * kernel.row_bytes) / kernel.stage_bytes);
      if (stages < 2) continue;
      shape.tile_rows = rows;
      shape.narrow_rows = kNarrowRows;
      shape.stages = stages;
      shape.shared_bytes = stages * kernel.stage_bytes + rows * kernel.row_bytes;
      const int narrow_bytes = kNarrowRows * kernel.row_bytes;
      const int narrow_stages = std::min(kStagesMax, (available - narrow_bytes) / kernel.stage_bytes);
      if (narrow_stages > stages) {
        shape.narrow_stages = narrow_stages;
        shape.shared_bytes = std::max(shape.shared_bytes, narrow_stages * kernel.stage_bytes + narrow_bytes);
      }
      return true;
    }
  }
  return false;
}

constexpr int kMergeQuad = 4;
constexpr int kMergeQuads = kGeneralHeadDimMax / (kWarpLanes * kMergeQuad);
static_assert(kMergeQuads * kWarpLanes * kMergeQuad >= kGeneralHeadDimMax);

// For head sizes whose rows are not aligned to 16 bytes.
template <class T>
__device__ void merge_one_by_one(const AttentionCall& call, const float2* stats, int start, int stop,
                                 float reference, T* out, int head) {
  const int64_t heads = call.heads;
  for (int i = static_cast<int>(threadIdx.x) % kWarpLanes; i < call.head_dim; i += kWarpLanes) {
    float sum = 0.0f, total = 0.0f;
    for (int slot = start; slot < stop; ++slot) {
      const float weight = exp2f(stats[slot * heads].x - reference);
      total += stats[slot * heads].y * weight;
      sum += call.partial_acc[(slot * heads + head) * call.head_dim + i] * weight;
    }
    out[i] = from_float<T>(total == 0.0f ? 0.0f : sum * (1.0f / total));
  }
}

// One warp per (row, head): the partials of a row, weighted in the order of their slots, so always alike.
template <class T>
__global__ void merge_kernel(const __grid_constant__ AttentionCall call) {
  wait_for_launch_before();
  const WorkView work(call.work);
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpLanes;
  const int64_t row = index / call.heads;
  const int head = static_cast<int>(index - row * call.heads), d = call.head_dim;
  if (row >= work.rows) return;
  const int start = work.row_partials[row], stop = work.row_partials[row + 1];
  if (stop - start == 1) return;  // written as the output where it was computed
  // Partials of a (row, head) are `heads` apart.
  const auto* stats = reinterpret_cast<const float2*>(call.partial_stats) + head;
  const int64_t heads = call.heads;
  float peak = kNegativeInfinity;
  for (int slot = start + lane; slot < stop; slot += kWarpLanes) peak = fmaxf(peak, stats[slot * heads].x);
  for (int mask = kWarpLanes / 2; mask > 0; mask /= 2) peak = fmaxf(peak, shuffle_xor(peak, mask));
  const float reference = finite_peak(peak);
  T* out = static_cast<T*>(call.out) + row * call.out_row_stride + static_cast<int64_t>(head) * d;
  if (d % kMergeQuad != 0) {
    merge_one_by_one(call, stats, start, stop, reference, out, head);
    return;
  }
  // Each partial is read once, 16 bytes a lane; several are under way, as no load waits for another.
  float sums[kMergeQuads][kMergeQuad] = {};
  float total = 0.0f;
#pragma unroll 4
  for (int slot = start; slot < stop; ++slot) {
    const float2 of = stats[slot * heads];
    const float weight = exp2f(of.x - reference);
    total += of.y * weight;
    const float* acc = call.partial_acc + (slot * heads + head) * d;
#pragma unroll
    for (int quad = 0; quad < kMergeQuads; ++quad) {
      const int first = (quad * kWarpLanes + lane) * kMergeQuad;
      if (first >= d) break;
      const uint4 read = *reinterpret_cast<const uint4*>(acc + first);
      sums[quad][0] += float_of(read.x) * weight;
      sums[quad][1] += float_of(read.y) * weight;
      sums[quad][2] += float_of(read.z) * weight;
      sums[quad][3] += float_of(read.w) * weight;
    }
  }
  const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
  for (int quad = 0; quad < kMergeQuads; ++quad) {
    const int first = (quad * kWarpLanes + lane) * kMergeQuad;
    for (int i = 0; i < kMergeQuad && first < d; ++i) out[first + i] = from_float<T>(sums[quad][i] * inverse);
  }
}

using MergePointer = void (*)(AttentionCall);

MergePointer merge_of(int32_t dtype) {
  if (dtype == kBfloat16) return merge_kernel<Bf16>;
  return dtype == kFloat16 ? merge_kernel<Fp16> : merge_kernel<float>;
}

// Adds by a kernel and not by a copy, so that in a captured graph every replay adds.
__global__ void add_steps_kernel(int32_t* steps, int32_t delta) { *steps += delta; }

__global__ void patch_words_kernel(int32_t* words, const int32_t* changes, int32_t n) {
  const auto i = static_cast<int32_t>(blockIdx.x) * kThreads + static_cast<int32_t>(threadIdx.x);
  if (i < n) words[changes[2 * i]] = changes[2 * i + 1];
}

// Kernels are loaded at their first use, which must not be while a graph is captured.
cudaError_t load(const void* kernel) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, kernel);
}

// The last call for a kernel and device counts, so every caller must give the same `shared_bytes`.
cudaError_t allow_shared(const void* kernel, int shared_bytes) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  // A hint: the L1 cache has nothing to keep, for tiles are read once, past it.
  return error != cudaSuccess ? error
                              : cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                                     cudaSharedmemCarveoutMaxShared);
}

}  // namespace

extern "C" {

int32_t trunkline_attention_shape(int32_t dtype, int32_t kv_dtype, int32_t head_dim, AttentionShape* shape) {
  if (head_dim < 1 || head_dim > kGeneralHeadDimMax || dtype < kFloat32 || dtype > kBfloat16) {
    return cudaErrorInvalidValue;
  }
  if (kv_dtype != dtype && kv_dtype != kInt8 && kv_dtype != kFloat8) return cudaErrorInvalidValue;
  DeviceLimits limits;
  cudaError_t error = read_limits(limits);
  if (error != cudaSuccess) return error;
  const AttentionKernel matrix = find_matrix_kernel(dtype, kv_dtype, head_dim);
  KernelPointer kernel = matrix.kernel;
  int shared_allowed = 0;
  *shape = {};
  if (kernel != nullptr && choose_stages(matrix, limits, *shape)) {
    shape->tile_tokens = matrix.tile_tokens;
    shape->is_matrix = 1;
    shared_allowed = shape->shared_bytes;
  } else {
    kernel = general_kernel(dtype);
    shape->tile_rows = kGeneralRows;
    shape->tile_tokens = kGeneralTokens;
    shape->stages = 1;
    shape->shared_bytes = general_floats(head_dim) * static_cast<int>(sizeof(float));
    if (shape->shared_bytes > limits.shared_per_block) return cudaErrorInvalidConfiguration;
    // One kernel for all head sizes: the limit of the largest, or that for a smaller one would undo it.
    shared_allowed =
        std::min(general_floats(kGeneralHeadDimMax) * static_cast<int>(sizeof(float)), limits.shared_per_block);
  }
  error = allow_shared(reinterpret_cast<const void*>(kernel), shared_allowed);
  if (error == cudaSuccess) error = load(reinterpret_cast<const void*>(merge_of(dtype)));
  if (error == cudaSuccess) error = load(reinterpret_cast<const void*>(add_steps_kernel));
  if (error == cudaSuccess) error = load(reinterpret_cast<const void*>(patch_words_kernel));
  int blocks = 0;
  if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads,
                                                          static_cast<size_t>(shape->shared_bytes));
  }
  shape->grid = std::max(1, blocks) * limits.processors;
  return error;
}

int32_t trunkline_attention(const AttentionCall* call, void* stream) {
  const AttentionKernel matrix = find_matrix_kernel(call->dtype, call->kv_dtype, call->head_dim);
  // stages > 1 is what attention_shape says of the matrix kernels.
  const bool is_matrix = matrix.kernel != nullptr && call->stages > 1;
  const KernelPointer kernel = is_matrix ? matrix.kernel : general_kernel(call->dtype);
  const cudaError_t error =
      launch_with(call->plan_is_there != 0 && launches_early(), kernel, dim3(static_cast<unsigned>(call->grid)),
                  kThreads, static_cast<size_t>(call->shared_bytes), stream, *call);
  if (error != cudaSuccess || call->partial_acc == nullptr) return error;
  const int64_t pairs = static_cast<int64_t>(call->rows) * call->heads;
  const dim3 grid(static_cast<unsigned>((pairs + kWarps - 1) / kWarps));
  return launch_early(merge_of(call->dtype), grid, kThreads, size_t{0}, stream, *call);
}

int32_t trunkline_add_steps(int32_t* steps, int32_t delta, void* stream) {
  return launch(add_steps_kernel, dim3(1), 1, 0, stream, steps, delta);
}

int32_t trunkline_patch_words(int32_t* words, const int32_t* changes, int32_t n, void* stream) {
  const dim3 grid(static_cast<unsigned>((n + kThreads - 1) / kThreads));
  return launch(patch_words_kernel, grid, kThreads, 0, stream, words, changes, n);
}

}  // extern "C"
}  // namespace trunkline::cuda
