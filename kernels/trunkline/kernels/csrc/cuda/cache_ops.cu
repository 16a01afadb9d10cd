// Moving KV: the fused write (split, norm, rotate, store; PagedAttention §5.1), block copies of token ranges in
// one launch (PagedAttention §4.3), and gathering and scattering of blocks for tier moves.
#include <primitives.cuh>

#include "api.h"
#include "quantised_kv.cuh"

#include <algorithm>

namespace trunkline::cuda {
namespace {

constexpr int kWriteThreads = 128;
constexpr int kWriteWarps = kWriteThreads / kWarpLanes;
constexpr int kMoveThreads = 256;
constexpr int kMoveBlocksMax = 1 << 16;

__device__ __forceinline__ float warp_sum(float x) {
  for (int mask = kWarpLanes / 2; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
  return x;
}

// One warp per (token, head). An element is read and written by one lane only, except in the sum of squares, whose
// shuffles every lane passes before any lane writes.
template <class T, class A>
__global__ void __launch_bounds__(kWriteThreads) write_kernel(const __grid_constant__ WriteCall call) {
  allow_next_launch();  // attention reads its plan meanwhile
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int all_heads = call.heads + 2 * call.kv_heads, d = call.head_dim, half = call.rotary_half;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kWriteWarps + threadIdx.x / kWarpLanes;
  const int64_t token = index / all_heads;
  if (token >= call.tokens) return;
  const int head = static_cast<int>(index - token * all_heads);
  const bool is_query = head < call.heads, is_value = head >= call.heads + call.kv_heads;
  T* x = static_cast<T*>(call.qkv) + index * d;

  T* stored = nullptr;               // the row as it is computed,
  unsigned char* rounded = nullptr;  // or in 8 bits
  const int slot = call.slots[token];
  if (!is_query && slot >= 0) {
    const int64_t block = slot / call.chunk_size, offset = slot - block * call.chunk_size;
    const int kv_head = head - call.heads - (is_value ? call.kv_heads : 0);
    const int64_t tile = ((block * call.layers + call.layer) * 2 + (is_value ? 1 : 0)) * call.kv_heads + kv_head;
    const int64_t row = tile * call.chunk_size + offset;
    if (call.kv_dtype == call.dtype) {
      stored = static_cast<T*>(call.pool) + row * d;
    } else {
      rounded = static_cast<unsigned char*>(call.pool) + row * (d + kScaleBytes);
    }
  }
  if (is_value) {
    if (rounded != nullptr) store_byte_row(x, d, call.kv_dtype, rounded);
    for (int i = lane; i < d && stored != nullptr; i += kWarpLanes) stored[i] = x[i];
    return;
  }

  const T* weight = static_cast<const T*>(is_query ? call.q_weight : call.k_weight);
  float norm = 1.0f;
  if (weight != nullptr) {
    float sum = 0.0f;
    for (int i = lane; i < d; i += kWarpLanes) sum += to_float(x[i]) * to_float(x[i]);
    norm = rsqrtf(warp_sum(sum) / static_cast<float>(d) + call.eps);
  }
  const auto read = [&](int i) {
    const float value = to_float(x[i]) * norm;
    return weight == nullptr ? value : value * to_float(weight[i]);
  };
  const auto write = [&](int i, float value) {
    const T own = from_float<T>(value);
    x[i] = own;
    if (stored != nullptr) stored[i] = own;
  };
  const A* cosine = static_cast<const A*>(call.cos) + token * 2 * half;
  const A* sine = static_cast<const A*>(call.sin) + token * 2 * half;
  for (int i = lane; i < half; i += kWarpLanes) {
    const float low = read(i), high = read(i + half);
    write(i, low * to_float(cosine[i]) + high * to_float(sine[i]));
    write(i + half, high * to_float(cosine[i + half]) + low * to_float(sine[i + half]));
  }
  for (int i = 2 * half + lane; i < d; i += kWarpLanes) write(i, read(i));
  if (rounded == nullptr) return;
  sync_warp();  // a pair of the rotation and a number of the row are different lanes'
  store_byte_row(x, d, call.kv_dtype, rounded);
}

// Thread block (copy, tile): a range of tokens of a (layer, K or V, head) tile is contiguous.
template <class Unit>
__global__ void __launch_bounds__(kMoveThreads)
    copy_kernel(Unit* pool, const int32_t* copies, int tiles_per_block, int chunk_units, int token_units) {
  const int copy = static_cast<int>(blockIdx.x) / tiles_per_block;
  const int tile = static_cast<int>(blockIdx.x) - copy * tiles_per_block;
  const int64_t source = copies[4 * copy], destination = copies[4 * copy + 1];
  const int first = copies[4 * copy + 2] * token_units, count = copies[4 * copy + 3] * token_units;
  const Unit* from = pool + (source * tiles_per_block + tile) * chunk_units + first;
  Unit* to = pool + (destination * tiles_per_block + tile) * chunk_units + first;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kMoveThreads) to[i] = from[i];
}

// Grid-stride over all units of all regions; several loads are under way, for host memory is far away.
template <class Unit>
__global__ void __launch_bounds__(kMoveThreads) move_kernel(const MoveCall call) {
  constexpr int64_t kSize = sizeof(Unit);
  const int64_t region_units = call.region_bytes / kSize, total = region_units * call.regions;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kMoveThreads;
#pragma unroll 4
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kMoveThreads + threadIdx.x; i < total; i += step) {
    const int64_t region = i / region_units, offset = i - region * region_units;
    const int64_t from = call.source_index == nullptr ? region : call.source_index[region];
    const int64_t to = call.destination_index == nullptr ? region : call.destination_index[region];
    static_cast<Unit*>(call.destination)[to * (call.destination_stride_bytes / kSize) + offset] =
        static_cast<const Unit*>(call.source)[from * (call.source_stride_bytes / kSize) + offset];
  }
}

// Four elements that are read or written at once.
template <class T>
struct alignas(4 * sizeof(T)) Four {
  T at[4];
};

// Of a thread block: a range's rows of one (K or V, head).
struct Range {
  int64_t from, to;  // rows of the pool, and of `out`
  int count;
  __device__ explicit Range(const GatherCall& call) {
    const int tiles = 2 * call.kv_heads, index = static_cast<int>(blockIdx.x) / tiles;
    const int tile = static_cast<int>(blockIdx.x) - index * tiles;
    const int32_t* range = call.ranges + 4 * static_cast<int64_t>(index);
    from =
        ((static_cast<int64_t>(range[0]) * call.layers + call.layer) * tiles + tile) * call.chunk_size + range[1];
    count = range[2];
    to = static_cast<int64_t>(tile) * call.tokens + range[3];
  }
};

template <class Unit>
__global__ void __launch_bounds__(kMoveThreads)
    gather_kernel(const __grid_constant__ GatherCall call, int row_units) {
  const Range range(call);
  const Unit* from = static_cast<const Unit*>(call.pool) + range.from * row_units;
  Unit* to = static_cast<Unit*>(call.out) + range.to * row_units;
  const int count = range.count * row_units;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kMoveThreads) to[i] = from[i];
}

// Of rows in 8 bits: one warp per row, one word of it per lane.
template <class T>
__global__ void __launch_bounds__(kMoveThreads) widen_kernel(const __grid_constant__ GatherCall call) {
  const Range range(call);
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes, d = call.head_dim;
  with_bytes(call.kv_dtype, [&](auto bytes) {
    for (int row = static_cast<int>(threadIdx.x) / kWarpLanes; row < range.count;
         row += kMoveThreads / kWarpLanes) {
      const unsigned char* from =
          static_cast<const unsigned char*>(call.pool) + (range.from + row) * (d + kScaleBytes);
      T* to = static_cast<T*>(call.out) + (range.to + row) * d;
      const float scale = load_scale(from + d);
      for (int i = 4 * lane; i < d; i += 4 * kWarpLanes) {
        const uint32_t word = *reinterpret_cast<const uint32_t*>(from + i);
        Four<T> numbers;
#pragma unroll
        for (int j = 0; j < 4; ++j) numbers.at[j] = from_float<T>(decltype(bytes)::value(word, j) * scale);
        *reinterpret_cast<Four<T>*>(to + i) = numbers;
      }
    }
  });
}

// One warp per (row, head). A part without a key has the share 0, as has one that is NaN, whose numbers make it seen.
template <class A, class T, class Out>
__global__ void __launch_bounds__(kMoveThreads) join_kernel(const __grid_constant__ JoinCall call) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * (kMoveThreads / kWarpLanes) + threadIdx.x / kWarpLanes;
  const int64_t row = index / call.heads, head = index - row * call.heads;
  if (row >= call.rows) return;
  const int64_t place = head * call.rows + row;
  const float s = call.a_lse[place], t = call.b_lse[place];
  const float weight = 1.0f / (1.0f + expf(s - t)), share = weight >= 0.0f ? weight : 0.0f;
  const A* a = static_cast<const A*>(call.a) + row * call.a_row_stride + head * call.a_head_stride;
  const T* b = static_cast<const T*>(call.b) + row * call.b_row_stride + head * call.b_head_stride;
  Out* out = static_cast<Out*>(call.out) + row * call.out_row_stride + head * call.out_head_stride;
  for (int i = 4 * lane; i < call.head_dim; i += 4 * kWarpLanes) {
    const Four<A> x = *reinterpret_cast<const Four<A>*>(a + i);
    const Four<T> y = *reinterpret_cast<const Four<T>*>(b + i);
    Four<Out> sum;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sum.at[j] = from_float<Out>(to_float(x.at[j]) * (1.0f - share) + to_float(y.at[j]) * share);
    }
    *reinterpret_cast<Four<Out>*>(out + i) = sum;
  }
  const float apart = s == t ? 0.0f : fabsf(s - t);  // also of two infinities
  if (lane == 0) call.out_lse[place] = (s > t ? s : t) + log1pf(expf(-apart));
}

bool divides(int64_t unit, const MoveCall& call) {
  const auto source = reinterpret_cast<uintptr_t>(call.source);
  const auto destination = reinterpret_cast<uintptr_t>(call.destination);
  const auto all = static_cast<int64_t>(source | destination) | call.region_bytes | call.source_stride_bytes |
                   call.destination_stride_bytes;
  return all % unit == 0;
}

template <class T>
cudaError_t launch_gather(const GatherCall& call, void* stream) {
  const dim3 grid(static_cast<unsigned>(call.count) * 2u * static_cast<unsigned>(call.kv_heads));
  if (call.kv_dtype != call.dtype) return launch(widen_kernel<T>, grid, kMoveThreads, 0, stream, call);
  const int bytes = call.head_dim * static_cast<int>(sizeof(T));
  if (bytes % 16 == 0) return launch(gather_kernel<uint4>, grid, kMoveThreads, 0, stream, call, bytes / 16);
  return launch(gather_kernel<T>, grid, kMoveThreads, 0, stream, call, call.head_dim);
}

template <class T>
cudaError_t launch_join(const JoinCall& call, void* stream) {
  const bool wide = call.a_dtype != call.b_dtype, widens = call.out_dtype != call.b_dtype;
  if ((wide && call.a_dtype != kFloat32) || (widens && call.out_dtype != kFloat32)) return cudaErrorInvalidValue;
  const int64_t warps = static_cast<int64_t>(call.rows) * call.heads, each = kMoveThreads / kWarpLanes;
  const dim3 grid(static_cast<unsigned>((warps + each - 1) / each));
  const auto run = [&](auto kernel) { return launch(kernel, grid, kMoveThreads, 0, stream, call); };
  if (wide) return widens ? run(join_kernel<float, T, float>) : run(join_kernel<float, T, T>);
  return widens ? run(join_kernel<T, T, float>) : run(join_kernel<T, T, T>);
}

template <class T, class A>
cudaError_t launch_write(const WriteCall& call, void* stream) {
  const int64_t pairs = static_cast<int64_t>(call.tokens) * (call.heads + 2 * call.kv_heads);
  const dim3 grid(static_cast<unsigned>((pairs + kWriteWarps - 1) / kWriteWarps));
  return launch(write_kernel<T, A>, grid, kWriteThreads, 0, stream, call);
}

template <class T>
cudaError_t launch_write_of(const WriteCall& call, void* stream) {
  return call.angle_dtype == call.dtype ? launch_write<T, T>(call, stream) : launch_write<T, float>(call, stream);
}

}  // namespace

extern "C" {

int32_t trunkline_write_kv(const WriteCall* call, void* stream) {
  if (call->tokens == 0) return cudaSuccess;
  if (call->angle_dtype != call->dtype && call->angle_dtype != kFloat32) return cudaErrorInvalidValue;
  if (call->kv_dtype != call->dtype && call->kv_dtype != kInt8 && call->kv_dtype != kFloat8) {
    return cudaErrorInvalidValue;
  }
  switch (call->dtype) {
    case kFloat32: return launch_write<float, float>(*call, stream);
    case kFloat16: return launch_write_of<Fp16>(*call, stream);
    case kBfloat16: return launch_write_of<Bf16>(*call, stream);
    default: return cudaErrorInvalidValue;
  }
}

int32_t trunkline_gather_rows(const GatherCall* call, void* stream) {
  const bool kept = call->kv_dtype == call->dtype, rounded = call->kv_dtype == kInt8 || call->kv_dtype == kFloat8;
  if (!kept && (!rounded || call->head_dim % 4 != 0)) return cudaErrorInvalidValue;
  if (call->count == 0) return cudaSuccess;
  switch (call->dtype) {
    case kFloat32: return launch_gather<float>(*call, stream);
    case kFloat16: return launch_gather<Fp16>(*call, stream);
    case kBfloat16: return launch_gather<Bf16>(*call, stream);
    default: return cudaErrorInvalidValue;
  }
}

int32_t trunkline_join_parts(const JoinCall* call, void* stream) {
  if (call->rows == 0) return cudaSuccess;
  switch (call->b_dtype) {
    case kFloat32: return launch_join<float>(*call, stream);
    case kFloat16: return launch_join<Fp16>(*call, stream);
    case kBfloat16: return launch_join<Bf16>(*call, stream);
    default: return cudaErrorInvalidValue;
  }
}

int32_t trunkline_copy_blocks(void* pool, const int32_t* copies, int32_t n, int32_t tiles_per_block,
                              int32_t chunk_size, int32_t token_bytes, void* stream) {
  if (n == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(n) * static_cast<unsigned>(tiles_per_block));
  // The pool's own address is aligned to 16 bytes (the caller checks), so tokens decide.
  const auto copy_by = [&]<class Unit>(Unit* units) {
    const int token_units = token_bytes / static_cast<int>(sizeof(Unit));
    return launch(copy_kernel<Unit>, grid, kMoveThreads, 0, stream, units, copies, tiles_per_block,
                  chunk_size * token_units, token_units);
  };
  if (token_bytes % 16 == 0) return copy_by(static_cast<uint4*>(pool));
  if (token_bytes % 4 == 0) return copy_by(static_cast<uint32_t*>(pool));
  return copy_by(static_cast<unsigned char*>(pool));
}

int32_t trunkline_move_regions(const MoveCall* call, void* stream) {
  if (call->regions == 0 || call->region_bytes == 0) return cudaSuccess;
  const bool wide = divides(16, *call);
  if (!wide && !divides(2, *call)) return cudaErrorInvalidValue;
  const int64_t units = call->region_bytes / (wide ? 16 : 2) * call->regions;
  const int64_t most = call->blocks_max > 0 ? call->blocks_max : kMoveBlocksMax;
  const int64_t blocks = std::min<int64_t>((units + kMoveThreads - 1) / kMoveThreads, most);
  const dim3 grid(static_cast<unsigned>(blocks));
  return wide ? launch(move_kernel<uint4>, grid, kMoveThreads, 0, stream, *call)
              : launch(move_kernel<uint16_t>, grid, kMoveThreads, 0, stream, *call);
}

}  // extern "C"
}  // namespace trunkline::cuda
