// Norms and gated activation: one pass over memory where torch takes several. Sums are in float32.
//
// Rows of whole units of 16 bytes, at addresses that are multiples of 16, are read unit by unit: a thread reads all of
// its units before it computes. Other rows are read element by element.
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

constexpr int kUnitBytes = 16;
template <class T>
constexpr int kUnitCount = kUnitBytes / static_cast<int>(sizeof(T));  // elements

template <class T>
__device__ __forceinline__ void unpack(const uint4& unit, float (&x)[kUnitCount<T>]) {
  const uint32_t words[4] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      x[i] = float_of(words[i]);
    } else {
      x[2 * i] = to_float(T{static_cast<uint16_t>(words[i])});
      x[2 * i + 1] = to_float(T{static_cast<uint16_t>(words[i] >> 16)});
    }
  }
}

template <class T>
__device__ __forceinline__ uint4 pack(const float (&x)[kUnitCount<T>]) {
  if constexpr (sizeof(T) == 4) {
    return make_uint4(bits_of(x[0]), bits_of(x[1]), bits_of(x[2]), bits_of(x[3]));
  } else {
    return make_uint4(pack2<T>(x[0], x[1]), pack2<T>(x[2], x[3]), pack2<T>(x[4], x[5]), pack2<T>(x[6], x[7]));
  }
}

// A thread block per row, which it keeps in registers: up to `kUnits` units a thread.
template <class T, int kUnits>
__global__ void __launch_bounds__(kNormThreads) norm_units_kernel(const NormCall call) {
  constexpr int kCount = kUnitCount<T>;
  const int units = call.width / kCount, thread = static_cast<int>(threadIdx.x);
  const int64_t start = static_cast<int64_t>(blockIdx.x) * units;
  const uint4* x = static_cast<const uint4*>(call.x) + start;
  uint4* residual = call.residual == nullptr ? nullptr : static_cast<uint4*>(call.residual) + start;
  const uint4* weight = static_cast<const uint4*>(call.weight);
  uint4* out = static_cast<uint4*>(call.out) + start;
  uint4 read[kUnits], before[kUnits], factors[kUnits];
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const int i = u * kNormThreads + thread;
    read[u] = before[u] = factors[u] = make_uint4(0u, 0u, 0u, 0u);
    if (i >= units) continue;
    read[u] = x[i];
    factors[u] = weight[i];
    if (residual != nullptr) before[u] = residual[i];
  }
  float values[kUnits][kCount];
  float sum = 0.0f;
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const int i = u * kNormThreads + thread;
    unpack<T>(read[u], values[u]);
    if (residual != nullptr) {
      float old[kCount];
      unpack<T>(before[u], old);
#pragma unroll
      for (int j = 0; j < kCount; ++j) values[u][j] = old[j] + values[u][j];
      // Rounded first: the norm is of the sum that the next layers see.
      const uint4 rounded = pack<T>(values[u]);
      if (i < units) residual[i] = rounded;
      unpack<T>(rounded, values[u]);
    }
#pragma unroll
    for (int j = 0; j < kCount; ++j) sum += values[u][j] * values[u][j];
  }
  const float norm = rsqrtf(block_sum(sum) / static_cast<float>(call.width) + call.eps);
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const int i = u * kNormThreads + thread;
    if (i >= units) continue;
    float factor[kCount];
    unpack<T>(factors[u], factor);
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[u][j] = values[u][j] * norm * factor[j];
    out[i] = pack<T>(values[u]);
  }
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

// A unit of the result per thread; rows one below the other in `grid.x`.
template <class T>
__global__ void __launch_bounds__(kGateThreads)
    gate_units_kernel(const uint4* gate_up, uint4* out, int activation, int units) {
  const int unit = static_cast<int>(blockIdx.y) * kGateThreads + static_cast<int>(threadIdx.x);
  if (unit >= units) return;
  const int64_t row = blockIdx.x, at = row * 2 * units + unit;
  const uint4 left = gate_up[at], right = gate_up[at + units];
  float gate[kUnitCount<T>], up[kUnitCount<T>];
  unpack<T>(left, gate);
  unpack<T>(right, up);
#pragma unroll
  for (int i = 0; i < kUnitCount<T>; ++i) gate[i] = activate(gate[i], activation) * up[i];
  out[row * units + unit] = pack<T>(gate);
}

template <class T, class... Pointers>
bool in_units(int width, Pointers... pointers) {
  return width % kUnitCount<T> == 0 && ((reinterpret_cast<uintptr_t>(pointers) % kUnitBytes == 0) && ...);
}

template <class T>
cudaError_t launch_norm(const NormCall& call, void* stream) {
  void (*kernel)(NormCall) = norm_kernel<T>;
  const int threads_units = kNormThreads * kUnitCount<T>;  // elements of a unit for every thread
  if (in_units<T>(call.width, call.x, call.residual, call.weight, call.out)) {
    if (call.width <= threads_units) {
      kernel = norm_units_kernel<T, 1>;
    } else if (call.width <= 2 * threads_units) {
      kernel = norm_units_kernel<T, 2>;
    } else if (call.width <= 4 * threads_units) {
      kernel = norm_units_kernel<T, 4>;
    }
  }
  return launch(kernel, dim3(static_cast<unsigned>(call.rows)), kNormThreads,
                kNormThreads / kWarpLanes * sizeof(float), stream, call);
}

template <class T>
cudaError_t launch_gate(const void* gate_up, void* out, int activation, int rows, int width, void* stream) {
  if (in_units<T>(width, gate_up, out)) {
    const int units = width / kUnitCount<T>;
    const dim3 grid(static_cast<unsigned>(rows), static_cast<unsigned>((units + kGateThreads - 1) / kGateThreads));
    return launch(gate_units_kernel<T>, grid, kGateThreads, 0, stream, static_cast<const uint4*>(gate_up),
                  static_cast<uint4*>(out), activation, units);
  }
  const int64_t total = static_cast<int64_t>(rows) * width;
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
  if (rows == 0 || width == 0) return cudaSuccess;
  switch (dtype) {
    case kFloat32: return launch_gate<float>(gate_up, out, activation, rows, width, stream);
    case kFloat16: return launch_gate<Fp16>(gate_up, out, activation, rows, width, stream);
    case kBfloat16: return launch_gate<Bf16>(gate_up, out, activation, rows, width, stream);
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
  sizes[10] = sizeof(GatherCall);
  sizes[11] = sizeof(JoinCall);
}

int32_t trunkline_set_device(int32_t device) { return cudaSetDevice(device); }

const char* trunkline_error_string(int32_t error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

}  // extern "C"
}  // namespace trunkline::cuda
