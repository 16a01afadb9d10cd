// Norms and gated activation: one pass over memory where torch takes several. Sums are in float32.
#include <primitives.cuh>

#include "api.h"

namespace trunkline::cuda {
namespace {

constexpr int kNormThreads = 256;
constexpr int kGateThreads = 256;

// The sum over the thread block, the same in every thread, in a fixed order.
__device__ float block_sum(float x) {
  float* sums = reinterpret_cast<float*>(dynamic_shared());
  for (int mask = kWarpLanes / 2; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
  if (threadIdx.x % kWarpLanes == 0) sums[threadIdx.x / kWarpLanes] = x;
  __syncthreads();
  float total = 0.0f;
  for (int warp = 0; warp < kNormThreads / kWarpLanes; ++warp) total += sums[warp];
  return total;
}

// A thread block per row. In the second pass a thread reads what it itself wrote in the first.
template <class T>
__global__ void __launch_bounds__(kNormThreads) norm_kernel(const NormCall call) {
  const int64_t start = static_cast<int64_t>(blockIdx.x) * call.width;
  const T* x = static_cast<const T*>(call.x) + start;
  T* residual = call.residual == nullptr ? nullptr : static_cast<T*>(call.residual) + start;
  const T* weight = static_cast<const T*>(call.weight);
  T* out = static_cast<T*>(call.out) + start;
  float sum = 0.0f;
  for (int i = static_cast<int>(threadIdx.x); i < call.width; i += kNormThreads) {
    float value = to_float(x[i]);
    if (residual != nullptr) {
      // Rounded first: the norm is of the sum that the next layers see.
      const T rounded = from_float<T>(to_float(residual[i]) + value);
      residual[i] = rounded;
      value = to_float(rounded);
    }
    sum += value * value;
  }
  const float norm = rsqrtf(block_sum(sum) / static_cast<float>(call.width) + call.eps);
  const T* normed = residual == nullptr ? x : residual;
  for (int i = static_cast<int>(threadIdx.x); i < call.width; i += kNormThreads) {
    out[i] = from_float<T>(to_float(normed[i]) * norm * to_float(weight[i]));
  }
}

__device__ __forceinline__ float activate(float x, int activation) {
  if (activation == kSilu) return x / (1.0f + expf(-x));
  if (activation == kGelu) return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
  return 0.5f * x * (1.0f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
}

template <class T>
__global__ void __launch_bounds__(kGateThreads)
    gate_kernel(const T* gate_up, T* out, int activation, int width, int64_t total) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kGateThreads + threadIdx.x;
  if (i >= total) return;
  const int64_t row = i / width, gate = i + row * width;  // row * 2 * width + column
  out[i] = from_float<T>(activate(to_float(gate_up[gate]), activation) * to_float(gate_up[gate + width]));
}

template <class T>
cudaError_t launch_norm(const NormCall& call, void* stream) {
  return launch(norm_kernel<T>, dim3(static_cast<unsigned>(call.rows)), kNormThreads,
                kNormThreads / kWarpLanes * sizeof(float), stream, call);
}

template <class T>
cudaError_t launch_gate(const void* gate_up, void* out, int activation, int width, int64_t total, void* stream) {
  const dim3 grid(static_cast<unsigned>((total + kGateThreads - 1) / kGateThreads));
  return launch(gate_kernel<T>, grid, kGateThreads, 0, stream, static_cast<const T*>(gate_up),
                static_cast<T*>(out), activation, width, total);
}

}  // namespace

extern "C" {

int32_t trunkline_rms_norm(const NormCall* call, void* stream) {
  if (call->rows == 0) return cudaSuccess;
  switch (call->dtype) {
    case kFloat32: return launch_norm<float>(*call, stream);
    case kFloat16: return launch_norm<Fp16>(*call, stream);
    case kBfloat16: return launch_norm<Bf16>(*call, stream);
    default: return cudaErrorInvalidValue;
  }
}

int32_t trunkline_gated_activation(const void* gate_up, void* out, int32_t dtype, int32_t activation, int32_t rows,
                                   int32_t width, void* stream) {
  const int64_t total = static_cast<int64_t>(rows) * width;
  if (total == 0) return cudaSuccess;
  switch (dtype) {
    case kFloat32: return launch_gate<float>(gate_up, out, activation, width, total, stream);
    case kFloat16: return launch_gate<Fp16>(gate_up, out, activation, width, total, stream);
    case kBfloat16: return launch_gate<Bf16>(gate_up, out, activation, width, total, stream);
    default: return cudaErrorInvalidValue;
  }
}

void trunkline_struct_bytes(int32_t* sizes) {
  sizes[0] = sizeof(AttentionCall);
  sizes[1] = sizeof(AttentionShape);
  sizes[2] = sizeof(WriteCall);
  sizes[3] = sizeof(MoveCall);
  sizes[4] = sizeof(NormCall);
  sizes[5] = sizeof(DrawCall);
  sizes[6] = sizeof(EditCall);
  sizes[7] = sizeof(StepRowsCall);
  sizes[8] = sizeof(Float8Call);
  sizes[9] = sizeof(GroupedCall);
}

int32_t trunkline_set_device(int32_t device) { return cudaSetDevice(device); }

const char* trunkline_error_string(int32_t error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

}  // extern "C"
}  // namespace trunkline::cuda
