// Where attention on matrix units keeps everything in shared memory, and how tiles of K and V get there.
//
// K and V come as they are computed, in rows that are apart by 16 bytes more than they are long (fragments.h), or in
// 8 bits (`kBytes`), then as they lie in the pool: one copy of all of a tile's rows.
#pragma once

#include "fragments.h"
#include "quantised_kv.cuh"
#include "tiles.cuh"

namespace trunkline::cuda {

constexpr int kNarrowRows = 16;
constexpr int kCopyBytes = 16;  // of an asynchronous copy

// Where everything lies in dynamic shared memory, in bytes; the host computes the size from it.
template <int D, bool kBytes>
struct MatrixLayout {
  static constexpr int kTokens = D > 128 ? 32 : 64;
  static constexpr int kStride = fragment::row_stride(D);  // of Q, K and V
  // Of Q. Beside bytes its rows are read by 8 bytes a lane: eight rows of four lanes meet no bank twice.
  static constexpr int kQueryStride = kBytes ? D + 16 : kStride;
  static constexpr int kWeightStride = fragment::row_stride(kTokens);  // of P
  static constexpr int kTensor = kTokens * kStride;                    // elements of one K or V tile
  static constexpr int kRow = D + kScaleBytes;                         // bytes, in 8 bits
  // Of K or of V in a stage. Rows in 8 bits begin up to 12 bytes behind the first that is copied.
  static constexpr int kTileBytes = kBytes ? kTokens * kRow + kCopyBytes : kTensor * 2;
  static constexpr int kStageBytes = 2 * kTileBytes;
  static constexpr int kRowBytes = kQueryStride * 2 + kWeightStride * 2 + kWarps * 4 + RowTable::kArrays * 4;

  static_assert(kTileBytes % kCopyBytes == 0);
};

template <class T, int D, bool kBytes>
struct MatrixShared {
  using Layout = MatrixLayout<D, kBytes>;
  unsigned char* stages;
  T* q;
  T* weights;
  float* peaks;  // [warps][capacity]
  RowTable rows;
  int capacity;

  __device__ MatrixShared(unsigned char* memory, int stage_count, int tile_rows)
      : stages(memory),
        q(reinterpret_cast<T*>(stages + stage_count * Layout::kStageBytes)),
        weights(q + tile_rows * Layout::kQueryStride),
        peaks(reinterpret_cast<float*>(weights + tile_rows * Layout::kWeightStride)),
        rows(reinterpret_cast<unsigned char*>(peaks + kWarps * tile_rows), tile_rows),
        capacity(tile_rows) {}
};

// Keeps `stages - 1` tiles under way. Every step closes exactly one group of copies, an empty one once there is
// nothing left, so that the number of pending groups always tells which tile has arrived.
template <class T, int D, bool kBytes>
class TileLoader {
 public:
  using Layout = MatrixLayout<D, kBytes>;

  __device__ TileLoader(const AttentionCall& call, const TileCursor& cursor, unsigned char* memory, int stages)
      : call_(call), cursor_(cursor), memory_(memory), stages_(stages) {
    more_ = cursor_.next_segment();
    wait_for_launch_before();  // which writes queries, keys and values, but no plan
#pragma unroll 1
    for (int i = 0; i < stages_ - 1; ++i) issue();
  }

  // The oldest tile under way: wait for this thread's part of it. A barrier must follow.
  __device__ const unsigned char* wait() {
    if (stages_ == 2) {
      copy_async_wait<0>();
    } else if (stages_ == 3) {
      copy_async_wait<1>();
    } else {
      copy_async_wait<2>();
    }
    const unsigned char* stage = memory_ + read_ * Layout::kStageBytes;
    read_ = read_ + 1 == stages_ ? 0 : read_ + 1;
    return stage;
  }

  __device__ void issue() {
    while (more_ && !cursor_.next_tile()) more_ = cursor_.next_segment();
    if (more_) copy();
    copy_async_commit();
    write_ = write_ + 1 == stages_ ? 0 : write_ + 1;
  }

 private:
  __device__ void copy() {
    unsigned char* stage = memory_ + write_ * Layout::kStageBytes;
    if constexpr (kBytes) {
      copy_bytes(stage, 0);
      copy_bytes(stage + Layout::kTileBytes, 1);
    } else {
      copy_rows(reinterpret_cast<T*>(stage));
    }
  }

  __device__ void copy_rows(T* stage) {
    constexpr int kUnits = D / 8;  // of 16 bytes in a row
    const T* pool = static_cast<const T*>(call_.pool);
    const T* keys = pool + rows_before(call_, cursor_, 0) * D;
    const T* values = pool + rows_before(call_, cursor_, 1) * D;
    const int tokens = cursor_.tokens();
    if (kThreads % kUnits == 0 && tokens == Layout::kTokens) {
      // A whole tile, as most are: every copy is a fixed way behind the first.
      constexpr int kTokenStep = kThreads / kUnits;
      const int token = static_cast<int>(threadIdx.x) / kUnits,
                column = static_cast<int>(threadIdx.x) % kUnits * 8;
      T* target = stage + token * Layout::kStride + column;
      keys += token * D + column;
      values += token * D + column;
#pragma unroll
      for (int i = 0; i < Layout::kTokens / kTokenStep; ++i) {
        T* to = target + i * kTokenStep * Layout::kStride;
        copy_async_16(to, keys + i * kTokenStep * D, kCopyBytes);
        copy_async_16(to + Layout::kTensor, values + i * kTokenStep * D, kCopyBytes);
      }
      return;
    }
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < Layout::kTokens * kUnits; i += kThreads) {
      const int token = i / kUnits, column = (i - token * kUnits) * 8;
      const bool present = token < tokens;
      const int source = present ? token * D + column : 0;
      T* target = stage + token * Layout::kStride + column;
      copy_async_16(target, keys + source, present ? kCopyBytes : 0);
      copy_async_16(target + Layout::kTensor, values + source, present ? kCopyBytes : 0);
    }
  }

  // The tile's rows as they lie, from the last multiple of 16 bytes on (the pool begins at one): up to 12 bytes of
  // what is before them come along, and nothing of what is behind.
  __device__ void copy_bytes(unsigned char* target, int is_value) {
    const int64_t start = rows_before(call_, cursor_, is_value) * Layout::kRow;
    const int skip = static_cast<int>(start % kCopyBytes), count = skip + cursor_.tokens() * Layout::kRow;
    const unsigned char* from = static_cast<const unsigned char*>(call_.pool) + (start - skip);
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x) * kCopyBytes; i < count; i += kThreads * kCopyBytes) {
      copy_async_16(target + i, from + i, min(kCopyBytes, count - i));
    }
  }

  const AttentionCall& call_;
  TileCursor cursor_;
  unsigned char* memory_;
  int stages_, read_ = 0, write_ = 0;
  bool more_;
};

}  // namespace trunkline::cuda
