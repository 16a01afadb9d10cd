// Two-phase-partition attention on matrix units (ChunkAttention §3.2-3.3; the blocks of PagedAttention §4.1).
//
// A thread block of four warps takes a segment of the plan: up to 64 query vectors (rows that share a run of items,
// times the query heads of a KV head) against tiles of 64 tokens (32 for head sizes over 128), which come
//
//      global ──cp.async──► ring of `stages` tiles of K and V in shared memory, loaded ahead across segments
//
// Segments of up to 16 vectors are narrow: warps share the work on all vectors (attention_narrow.cuh). In wider ones
// each warp has vectors of its own (attention_wide.cuh). A row's arithmetic, element by element, is the same in both,
// whatever else is in the tile. The batch-invariant mode relies on that.
//
// Shared memory has two layouts, one after the other. The first is for *wide* units, of up to `tile_rows` vectors. The
// second is for *narrow* units, of up to 16 vectors: what few rows read alone, which is most of what a step without
// sharing reads. The room of the other vectors holds further stages there, so that more bytes are under way where
// reading is all there is to do. Each layout has its own list of units in the plan; one without units is passed over.
// One launch does both, so that thread blocks without wide units begin with narrow ones at once. (Of two kernels the
// second would have to wait for the first.)
//
// Tokens that no item covers are never read: their K and V are zeros in shared memory and their scores -inf.
//
// Of K and V in 8 bits (`kBytes`) the ring has rows as they lie in the pool. Each warp makes numbers of them in its
// registers (byte_products.cuh): exactly those of keys, whose scales multiply the scores; those of values times their
// scales.
#pragma once

#include "attention_narrow.cuh"
#include "attention_wide.cuh"

namespace trunkline::cuda {

template <class T, int D, bool kBytes>
__device__ __forceinline__ void run_units(const AttentionCall& call, const WorkView& work, int steps,
                                          const UnitList& units, int stages, int tile_rows) {
  const MatrixShared<T, D, kBytes> shared(dynamic_shared(), stages, tile_rows);
  TileCursor tile(work, call, steps, units, tile_rows, MatrixLayout<D, kBytes>::kTokens);
  TileLoader<T, D, kBytes> loader(call, tile, shared.stages, stages);
  while (tile.next_segment()) {
    const bool is_narrow = tile.vectors() <= kNarrowRows;
    const int padded = is_narrow ? kNarrowRows : (tile.vectors() + 15) / 16 * 16;
    bring_queries(call, shared, tile, work, steps, padded);
    SegmentState<D> state;
    NarrowSegment<T, D, kBytes> narrow(call, shared, state);
    WideSegment<T, D, kBytes> wide(call, shared, state, padded);
    if (is_narrow) {
      narrow.load_queries();
    } else {
      wide.load_queries();
    }
    // One loop for both, so that the code which walks the plan and loads tiles is there once.
    while (tile.next_tile()) {
      const unsigned char* stage = loader.wait();
      __syncthreads();  // A
      loader.issue();
      if (is_narrow) {
        narrow.attend(tile, stage);
      } else {
        wide.attend(tile, stage);
      }
    }
    if (is_narrow) {
      narrow.finish();
    } else {
      wide.finish();
    }
  }
  copy_async_wait<0>();
}

template <class T, int D, bool kBytes>
__global__ void __launch_bounds__(kThreads) attention_matrix_kernel(const __grid_constant__ AttentionCall call) {
  allow_next_launch();  // the merge waits for all of this
  const WorkView work(call.work);
  const int steps = call.steps == nullptr ? 0 : *call.steps;
  const bool apart = call.narrow_stages > 0;
  // A loop, so that the code of a layout is there once.
#pragma unroll 1
  for (int layout = 0; layout <= (apart ? 1 : 0); ++layout) {
    const bool narrow = layout == 1;
    if (narrow) __syncthreads();  // the memory is laid out anew
    const UnitList units(work, call.kv_heads,
                         !apart   ? UnitList::kAll
                         : narrow ? UnitList::kNarrow
                                  : UnitList::kWide);
    run_units<T, D, kBytes>(call, work, steps, units, narrow ? call.narrow_stages : call.stages,
                            narrow ? kNarrowRows : call.tile_rows);
  }
}

}  // namespace trunkline::cuda
