// A CUDA device of one thread, for tests: enough of the runtime's interface to compile and run the kernels' own
// source with a C++ compiler on a CPU.
//
// Every thread of a thread block is a fiber. A fiber runs until it needs others (a barrier, a warp operation), so
// that threads interleave only where the hardware promises anything about their order; which warp goes on first
// is drawn at random. What the hardware leaves undefined is made to hurt: shared memory starts as NaN, the target of an
// asynchronous copy is NaN until its group is waited for, and a barrier that not all threads reach is an error.
// Not emulated: lanes of a warp that run apart between warp operations, memory shared between thread blocks
// within a launch, and time.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __grid_constant__

using cudaStream_t = void*;
enum cudaError_t : int { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9 };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor,
  cudaDevAttrReservedSharedMemoryPerBlock,
};
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize,
  cudaFuncAttributePreferredSharedMemoryCarveout
};
constexpr int cudaSharedmemCarveoutMaxShared = 100;
struct cudaFuncAttributes {
  int maxDynamicSharedSizeBytes = 0;
};

struct dim3 {
  unsigned x, y, z;
  explicit dim3(unsigned x_, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct uint3 {
  unsigned x = 0, y = 0, z = 0;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(8) float2 {
  float x, y;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline int min(int a, int b) { return a < b ? a : b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

namespace emulation {

constexpr int kLanes = 32;

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "CUDA emulation: %s\n", what);
  std::abort();
}

enum class State { kReady, kAtBarrier, kInWarp, kDone };

struct PendingCopy {
  void* target;
  const void* source;
  int bytes;
};

struct Fiber {
  ucontext_t context;
  jmp_buf jump;
  bool has_begun = false;
  State state = State::kReady;
  int index = 0;
  std::vector<std::vector<PendingCopy>> groups;  // of asynchronous copies, the open one last
  alignas(16) unsigned char in[64];              // what it brings to a warp operation,
  alignas(16) unsigned char out[64];             // and takes from it
};

// A device: how many processors, how much shared memory (settable, to meet other machines' limits).
struct Device {
  int processors = 3;
  int shared_per_block = 232448;
  int shared_per_processor = 233472;
  int shared_reserved = 1024;
  unsigned seed = 0;
};
Device& device();

class ThreadBlock {
 public:
  ThreadBlock(int threads, size_t shared_bytes, const std::function<void()>& kernel, std::mt19937& random);
  void run();

  Fiber& current() { return *fibers_[static_cast<size_t>(current_)]; }
  unsigned char* shared() { return shared_.get(); }
  void barrier() { wait(State::kAtBarrier); }
  // All 32 lanes bring `in`; `combine` fills every lane's `out`.
  using Combine = void (*)(Fiber* lanes[kLanes]);
  void warp_operation(Combine combine) {
    combine_[static_cast<size_t>(current_ / kLanes)] = combine;
    wait(State::kInWarp);
  }

 private:
  static void enter();
  void wait(State state);
  void resume(int index);
  bool release_warps();

  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::unique_ptr<unsigned char[]> shared_memory_;
  struct NoDelete {
    void operator()(unsigned char*) const {}
  };
  std::unique_ptr<unsigned char, NoDelete> shared_;
  std::vector<Combine> combine_;
  const std::function<void()>& kernel_;
  std::mt19937& random_;
  jmp_buf scheduler_;
  int current_ = 0;
};

ThreadBlock& block();
// Refuses more shared memory than `kernel` was allowed, as the runtime does; the most recent limit counts.
cudaError_t launch(const void* kernel, dim3 grid, int threads, size_t shared_bytes,
                   const std::function<void()>& body);
uint3 thread_index();
uint3 block_index();
uint3 grid_size();

}  // namespace emulation

#define threadIdx (emulation::thread_index())
#define blockIdx (emulation::block_index())
#define gridDim (emulation::grid_size())

inline void __syncthreads() { emulation::block().barrier(); }

cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value);
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel);
const char* cudaGetErrorString(cudaError_t error);
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, size_t shared_bytes) {
  *blocks = static_cast<int>(shared_bytes) * 2 <= emulation::device().shared_per_processor ? 2 : 1;
  return cudaSuccess;
}
