// Rows rounded to floats of 8 bits (e4m3), with a factor for each row or for groups of its inputs: in one launch what
// `scaled_products.float8_rows` defines, to the bit.
//
// The factor is the largest magnitude over 448. Magnitudes are compared as integers: their order is that of the
// numbers, and NaN is above infinity, so a group without a number gets a factor that is none. Roundings are spelled
// out, because codes are compared bit by bit.
#include <primitives.cuh>

#include "api.h"

namespace trunkline::cuda {
namespace {

constexpr int kRoundThreads = 256;
constexpr int kRoundWarps = kRoundThreads / kWarpLanes;
constexpr int kVector = 4;  // inputs that a thread takes at once
constexpr int kWarpGroup = kVector * kWarpLanes;
constexpr float kInverseLargest = static_cast<float>(1.0 / 448.0);
constexpr float kLeastFactor = 0x1p-100f;
constexpr uint32_t kMagnitude = 0x7fffffffu;
constexpr uint32_t kInfinity = 0x7f800000u;

__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

// The nearest float of 8 bits, ties to even, 448 for all that is larger.
__device__ __forceinline__ uint32_t float8_code(float x) {
  constexpr uint32_t kLargest = 0x43e00000u;      // 448
  constexpr uint32_t kLeastNormal = 0x3c800000u;  // 2^-6
  constexpr uint32_t kSixteenK = 0x46800000u;     // 2^14, whose neighbours are 2^-9 apart, as the least codes are
  const uint32_t sign = bits_of(x) >> 24 & 0x80u;
  const uint32_t size = bits_of(x) & kMagnitude;
  if (size > kInfinity) return 0x7fu;
  if (size >= kLargest) return sign | 0x7eu;
  if (size < kLeastNormal) return sign | (bits_of(__fadd_rn(float_of(size), 16384.0f)) - kSixteenK);
  // Of 23 bits of fraction three are kept; exponents are biased by 127 there and by 7 here.
  return sign | (((size + 0x7ffffu + (size >> 20 & 1u)) >> 20) - (120u << 3));
}

__device__ __forceinline__ float factor_of(uint32_t largest) {
  const float factor = __fmul_rn(float_of(largest), kInverseLargest);
  return factor < kLeastFactor ? kLeastFactor : factor;  // NaN stays
}

template <class T>
__device__ __forceinline__ void read4(const Float8Call& call, int row, int column, float (&x)[kVector]) {
  uint64_t bits = 0;
  if (row < call.rows) {
    bits = *reinterpret_cast<const uint64_t*>(static_cast<const T*>(call.x) +
                                              static_cast<int64_t>(row) * call.width + column);
  }
  for (int i = 0; i < kVector; ++i) x[i] = to_float(T{static_cast<uint16_t>(bits >> (16 * i))});
}

__device__ __forceinline__ uint32_t largest4(const float (&x)[kVector], uint32_t largest) {
  for (int i = 0; i < kVector; ++i) largest = larger(largest, bits_of(x[i]) & kMagnitude);
  return largest;
}

__device__ __forceinline__ void write4(const Float8Call& call, int row, int column, const float (&x)[kVector],
                                       float factor) {
  uint32_t codes = 0;
  for (int i = 0; i < kVector; ++i) codes |= float8_code(__fdiv_rn(x[i], factor)) << (8 * i);
  *reinterpret_cast<uint32_t*>(call.codes + static_cast<int64_t>(row) * call.width + column) = codes;
}

__device__ __forceinline__ uint32_t warp_largest(uint32_t largest) {
  for (int mask = kWarpLanes / 2; mask > 0; mask /= 2) largest = larger(largest, shuffle_xor(largest, mask));
  return largest;
}

// A warp for each group of 128 inputs, which are read once.
template <class T>
__global__ void __launch_bounds__(kRoundThreads) group_kernel(const Float8Call call) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes, groups = call.width / kWarpGroup;
  const int64_t index =
      static_cast<int64_t>(blockIdx.x) * kRoundWarps + static_cast<int>(threadIdx.x) / kWarpLanes;
  if (index >= static_cast<int64_t>(call.padded) * groups) return;
  const int row = static_cast<int>(index / groups), group = static_cast<int>(index % groups);
  const int column = group * kWarpGroup + lane * kVector;
  float x[kVector];
  read4<T>(call, row, column, x);
  const float factor = factor_of(warp_largest(largest4(x, 0)));
  write4(call, row, column, x, factor);
  if (lane == 0) call.factor[static_cast<int64_t>(group) * call.padded + row] = factor;
}

// A thread block for each row. In the second pass it finds the row in the caches.
template <class T>
__global__ void __launch_bounds__(kRoundThreads) row_kernel(const Float8Call call) {
  uint32_t* of_warps = reinterpret_cast<uint32_t*>(dynamic_shared());
  const int row = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  uint32_t largest = 0;
  float x[kVector];
  for (int column = thread * kVector; column < call.width; column += kRoundThreads * kVector) {
    read4<T>(call, row, column, x);
    largest = largest4(x, largest);
  }
  largest = warp_largest(largest);
  if (thread % kWarpLanes == 0) of_warps[thread / kWarpLanes] = largest;
  __syncthreads();
  for (int warp = 0; warp < kRoundWarps; ++warp) largest = larger(largest, of_warps[warp]);
  const float factor = factor_of(largest);
  if (thread == 0) call.factor[row] = factor;
  for (int column = thread * kVector; column < call.width; column += kRoundThreads * kVector) {
    read4<T>(call, row, column, x);
    write4(call, row, column, x, factor);
  }
}

template <class T>
cudaError_t launch_rounding(const Float8Call& call, void* stream) {
  if (call.group == call.width) {
    return launch(row_kernel<T>, dim3(static_cast<unsigned>(call.padded)), kRoundThreads,
                  kRoundWarps * sizeof(uint32_t), stream, call);
  }
  const int64_t groups = static_cast<int64_t>(call.padded) * (call.width / kWarpGroup);
  return launch(group_kernel<T>, dim3(static_cast<unsigned>((groups + kRoundWarps - 1) / kRoundWarps)),
                kRoundThreads, 0, stream, call);
}

}  // namespace

extern "C" {

int32_t trunkline_round_float8(const Float8Call* call, void* stream) {
  if (call->padded == 0 || call->width == 0) return cudaSuccess;
  const bool by_row = call->group == call->width && call->width % kVector == 0;
  if (call->padded < call->rows || (!by_row && (call->group != kWarpGroup || call->width % kWarpGroup != 0))) {
    return cudaErrorInvalidValue;
  }
  switch (call->dtype) {
    case kFloat16: return launch_rounding<Fp16>(*call, stream);
    case kBfloat16: return launch_rounding<Bf16>(*call, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // extern "C"
}  // namespace trunkline::cuda
