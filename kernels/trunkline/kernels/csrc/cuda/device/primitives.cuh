// The few hardware operations that the kernels are made of, and nothing else: every line of PTX is here.
//
// Included as <primitives.cuh>, so that the tests can put an emulation of the same functions on the include path
// and run the kernels' own source on a CPU, thread by thread (tests/kernels/cuda_emulation).
//
// Needs sm_80: cp.async, and mma.sync with bfloat16.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace trunkline::cuda {

constexpr int kWarpLanes = 32;

// 16-bit floats as bits: no vendor header is needed to move them.
struct Fp16 {
  uint16_t bits;
};
struct Bf16 {
  uint16_t bits;
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(Bf16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }
__device__ __forceinline__ float to_float(Fp16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}

// Two values rounded to nearest even, `low` in the lower half: neighbours in memory order.
template <class T>
__device__ __forceinline__ uint32_t pack2(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack2<Bf16>(float low, float high) {
  uint32_t y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
template <>
__device__ __forceinline__ uint32_t pack2<Fp16>(float low, float high) {
  uint32_t y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

template <class T>
__device__ __forceinline__ T from_float(float x) {
  return T{static_cast<uint16_t>(pack2<T>(x, 0.0f))};
}
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}

__device__ __forceinline__ unsigned char* dynamic_shared() {
  extern __shared__ __align__(16) unsigned char trunkline_shared[];
  return trunkline_shared;
}

__device__ __forceinline__ uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// Start copying the first `bytes` of 16 aligned bytes to shared memory, the others become zeros. No more is read.
__device__ __forceinline__ void copy_async_16(void* shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(bytes)
               : "memory");
}
// Close this thread's group of copies; an empty group is allowed and counts.
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Wait until at most the `Pending` latest groups of this thread are unfinished.
template <int Pending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// Four 8 x 8 matrices of 16-bit elements: lane i gives the address of row i % 8 of matrix i / 8 (16 bytes) and
// gets, of each matrix, row lane / 4, columns 2 * (lane % 4) and the next.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], const void* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(shared))
               : "memory");
}
// The same of the transposed matrices: of each, rows 2 * (lane % 4) and the next, column lane / 4.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], const void* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(shared))
               : "memory");
}

// c += a * b: m16n8k16, float32 sums; see fragments.h for who holds what.
template <class T>
__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void multiply_add<Bf16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                   uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void multiply_add<Fp16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                   uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The value of lane (own lane ^ mask); all 32 lanes must take part.
template <class T>
__device__ __forceinline__ T shuffle_xor(T x, int mask) {
  return __shfl_xor_sync(0xffffffffu, x, mask);
}

// The value of a lane; all 32 lanes must take part.
template <class T>
__device__ __forceinline__ T shuffle(T x, int lane) {
  return __shfl_sync(0xffffffffu, x, lane);
}

// All lanes have arrived, and see what the others have written before.
__device__ __forceinline__ void sync_warp() { __syncwarp(); }

__device__ __forceinline__ uint32_t bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ float float_of(uint32_t bits) { return __uint_as_float(bits); }

// Of the eight bytes of `low` and `high`, counted from 0, those that the four digits of `chosen` name.
__device__ __forceinline__ uint32_t byte_perm(uint32_t low, uint32_t high, uint32_t chosen) {
  return __byte_perm(low, high, chosen);
}

// a * b + c of two pairs of 16-bit floats, rounded once.
template <class T>
__device__ __forceinline__ uint32_t multiply_add_pairs(uint32_t a, uint32_t b, uint32_t c);
template <>
__device__ __forceinline__ uint32_t multiply_add_pairs<Bf16>(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t y;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
}
template <>
__device__ __forceinline__ uint32_t multiply_add_pairs<Fp16>(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t y;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
}

// Add to a word of shared memory that other threads of the block add to as well.
__device__ __forceinline__ void atomic_add_shared(uint32_t* word, uint32_t value) { atomicAdd(word, value); }

// 2^x, to 2 units in the last place; 0 for -inf, NaN for NaN.
__device__ __forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, to a unit in the last place.
__device__ __forceinline__ float reciprocal_approximate(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Of angles between -pi and pi, to about 4e-7 absolute.
__device__ __forceinline__ void sine_cosine(float x, float& sine, float& cosine) { __sincosf(x, &sine, &cosine); }

// Programmatic dependent launches, on devices of compute capability 9.x, which have machine code of their own. A kernel
// that was launched by `launch_early` may begin once all thread blocks of the kernel before it allow that or have
// ended. It has to wait before it touches what that kernel reads or writes. When the wait returns, all kernels before
// have ended, too, since each kernel that is launched early waits.
__device__ __forceinline__ void allow_next_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void wait_for_launch_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

inline bool launches_early() {
  static const bool answer = [] {
    int device = 0, major = 0;
    return cudaGetDevice(&device) == cudaSuccess &&
           cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major == 9;
  }();
  return answer;
}

template <class... Parameters, class... Arguments>
cudaError_t launch_with(bool early, void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared_bytes,
                        void* stream, const Arguments&... arguments) {
  // The launch's own result, not cudaGetLastError(): that may be of a call long before.
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
  if (error != cudaSuccess) static_cast<void>(cudaGetLastError());  // reported here, so not to anyone else
  return error;
}

template <class Kernel, class... Arguments>
cudaError_t launch(Kernel kernel, const Arguments&... arguments) {
  return launch_with(false, kernel, arguments...);
}

template <class Kernel, class... Arguments>
cudaError_t launch_early(Kernel kernel, const Arguments&... arguments) {
  return launch_with(launches_early(), kernel, arguments...);
}

}  // namespace trunkline::cuda
