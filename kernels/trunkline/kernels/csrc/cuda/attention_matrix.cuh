// Two-phase-partition attention on matrix units (ChunkAttention §3.2-3.3; the blocks of PagedAttention §4.1).
//
// A thread block of four warps takes a segment of the plan: 16, 32 or 64 query vectors (rows that share a run of
// items, times the query heads of a KV head) against tiles of 64 tokens (32 for head sizes over 128):
//
//      global ──cp.async──► ring of `stages` tiles of K and V in shared memory, loaded ahead across segments
//      scores   warp w: all vectors x tokens [16 w, 16 w + 16) of the tile       S = Q K^T
//      softmax  peaks over the four warps through shared memory; weights P in 16 bits to shared memory
//      output   warp w: all vectors x a quarter of the head dimension            O += P V
//
// So the output's accumulators are spread over the warps whatever the number of vectors, and a row's arithmetic,
// element by element, is the same in a tile of 16, 32 or 64 vectors: what the batch-invariant mode relies on.
//
// Two layouts of shared memory, one after the other: *wide* units with `tile_rows` vectors, then *narrow* units, of at most
// 16 vectors (what few rows read alone, most of what a step without sharing reads), with the room that the other vectors
// leave as further stages: more bytes under way where reading is all there is to do. Each has its own list of units in the
// plan, and one without units is passed over. Both are in one launch, so that thread blocks without wide units begin
// with narrow ones at once. (Kernels apart would have to wait for each other.)
//
// Barriers per tile:  A  this tile has arrived for everyone, and everyone is done with the tile before it
//                     B  all warps' peaks are in `peaks`
//                     C  all of P is written
// The stage that the tile before occupied is refilled after A; `peaks` is rewritten after the next A, P after the
// next B.
//
// Tokens that no item covers are never read: their K and V are zeros in shared memory and their scores -inf.
//
// Of K and V in 8 bits (`kBytes`) the ring has rows as they lie in the pool. Each warp makes numbers of its strip of
// tokens, in a tile that all share: first of the keys, which only this warp reads, exactly (scores are multiplied with
// their scales); then, in the same place, of the values, times their scales, which all read after C.
#pragma once

#include "matrix_loader.cuh"

namespace trunkline::cuda {

// One segment with 16 * MT vectors, padding included.
template <class T, int D, int MT, bool kBytes>
class MatrixSegment {
 public:
  using Layout = MatrixLayout<D, kBytes>;
  using Shared = MatrixShared<T, D, kBytes>;
  static constexpr int kStride = Layout::kStride, kWeightStride = Layout::kWeightStride;
  static constexpr int kTokenTiles = Layout::kTokens / (8 * kWarps);  // of a warp's strip: 2, or 1
  static constexpr int kStrip = 8 * kTokenTiles;                      // tokens
  static constexpr int kColumnTiles = (D / 8 + kWarps - 1) / kWarps;  // of a warp's part of O
  static constexpr int kSteps = D / 16;                               // k steps of the scores
  static_assert(D % 16 == 0 && (kTokenTiles == 2 || (kTokenTiles == 1 && kSteps % 2 == 0)));

  __device__ MatrixSegment(const AttentionCall& call, const Shared& shared)
      : call_(call),
        shared_(shared),
        rule_(call),
        lane_(static_cast<int>(threadIdx.x) % kWarpLanes),
        warp_(static_cast<int>(threadIdx.x) / kWarpLanes) {}

  __device__ void run(TileCursor& tile, TileLoader<T, D, kBytes>& loader, const WorkView& work, int steps) {
    __syncthreads();  // the segment before is done with Q and the row table
    shared_.rows.fill(tile, work, call_, steps, 16 * MT);
    __syncthreads();
    load_queries();
    __syncthreads();
    turn_queries(shared_.q, kStride, shared_.rows, call_, tile.vectors());
    while (tile.next_tile()) {
      const unsigned char* stage = loader.wait();
      __syncthreads();  // A
      loader.issue();
      if constexpr (kBytes) {
        attend_bytes(tile, stage);
      } else {
        const T* keys = reinterpret_cast<const T*>(stage);
        attend(tile, keys, keys + Layout::kTensor);
      }
    }
    finish();
  }

 private:
  __device__ void load_queries() {
    constexpr int kUnits = D / 8;
    const T* q = static_cast<const T*>(call_.q);
    for (int i = static_cast<int>(threadIdx.x); i < 16 * MT * kUnits; i += kThreads) {
      const int v = i / kUnits, column = (i - v * kUnits) * 8, row = shared_.rows.row[v];
      uint4 x = make_uint4(0u, 0u, 0u, 0u);
      if (row >= 0) {
        const int64_t at = row * call_.q_row_stride + static_cast<int64_t>(shared_.rows.head[v]) * D + column;
        x = *reinterpret_cast<const uint4*>(q + at);
      }
      *reinterpret_cast<uint4*>(shared_.q + v * kStride + column) = x;
    }
  }

  __device__ void attend(const TileCursor& tile, const T* keys, const T* values) {
    const int tokens = tile.tokens();
    float scores[MT][kTokenTiles][4] = {};
    if (warp_ * kStrip < tokens) multiply_keys(scores, keys);
    apply_rule(scores, tokens, tile.base());
    share_peaks(scores);
    __syncthreads();  // B
    weigh(scores);
    __syncthreads();  // C
    multiply_values(values, tokens);
  }

  __device__ void attend_bytes(const TileCursor& tile, const unsigned char* keys) {
    const unsigned char* values = keys + Layout::kTileBytes;
    const int tokens = tile.tokens();
    keys += rows_before(call_, tile, 0) * Layout::kRow % kCopyBytes;
    values += rows_before(call_, tile, 1) * Layout::kRow % kCopyBytes;
    float scores[MT][kTokenTiles][4] = {};
    make_numbers<false>(keys, tokens);
    sync_warp();
    if (warp_ * kStrip < tokens) multiply_keys(scores, shared_.numbers);
    sync_warp();
    make_numbers<true>(values, tokens);
    scale(scores, keys, tokens);
    apply_rule(scores, tokens, tile.base());
    share_peaks(scores);
    __syncthreads();  // B
    weigh(scores);
    __syncthreads();  // C
    multiply_values(shared_.numbers, tokens);
  }

  // This warp's strip of rows in 8 bits as numbers of type T, exactly or times their scales, as far as they are
  // multiplied. Behind the last token they are of what lies there, which is finite, and its scale is not read.
  template <bool kScaled>
  __device__ void make_numbers(const unsigned char* rows, int tokens) {
    constexpr int kQuads = D / 4;
    const int first = warp_ * kStrip;
    if (first >= (tokens + 31) / 32 * 32) return;
    with_bytes(call_.kv_dtype, [&](auto bytes) {
      using Bytes = decltype(bytes);
#pragma unroll 4
      for (int i = lane_; i < kStrip * kQuads; i += kWarpLanes) {
        const int token = first + i / kQuads, quad = i % kQuads;
        const unsigned char* row = rows + token * Layout::kRow;
        const uint32_t word = *reinterpret_cast<const uint32_t*>(row + quad * 4);
        float x[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) x[j] = Bytes::value(word, j);
        if constexpr (kScaled) {
          const float scale = token < tokens ? *reinterpret_cast<const float*>(row + D) : 0.0f;
#pragma unroll
          for (int j = 0; j < 4; ++j) x[j] = __fmul_rn(x[j], scale);
        }
        *reinterpret_cast<uint2*>(shared_.numbers + token * kStride + quad * 4) =
            make_uint2(pack2<T>(x[0], x[1]), pack2<T>(x[2], x[3]));
      }
    });
  }

  // Scores of this warp's tokens times the scales of their keys in 8 bits.
  __device__ void scale(float (&scores)[MT][kTokenTiles][4], const unsigned char* rows, int tokens) {
#pragma unroll
    for (int j = 0; j < kTokenTiles; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int token = warp_ * kStrip + j * 8 + fragment::c_column(lane_) + c;
        if (token >= tokens) continue;
        const float own = *reinterpret_cast<const float*>(rows + token * Layout::kRow + D);
#pragma unroll
        for (int m = 0; m < MT; ++m) {
          scores[m][j][c] = __fmul_rn(scores[m][j][c], own);
          scores[m][j][2 + c] = __fmul_rn(scores[m][j][2 + c], own);
        }
      }
    }
  }

  __device__ void multiply_keys(float (&scores)[MT][kTokenTiles][4], const T* keys) {
    const T* strip = keys + warp_ * 8 * kTokenTiles * kStride;
    const T* q = shared_.q + fragment::a_row(lane_) * kStride + fragment::a_column(lane_);
    uint32_t a[4], b[4];
    if constexpr (kTokenTiles == 2) {
      strip += fragment::key_pair_token(lane_) * kStride + fragment::key_pair_column(lane_);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        load_matrices(b, strip + k * 16);
#pragma unroll
        for (int m = 0; m < MT; ++m) {
          load_matrices(a, q + m * 16 * kStride + k * 16);
          multiply_add<T>(scores[m][0], a, b[0], b[1]);
          multiply_add<T>(scores[m][1], a, b[2], b[3]);
        }
      }
    } else {
      strip += fragment::key_single_token(lane_) * kStride + fragment::key_single_column(lane_);
#pragma unroll
      for (int k = 0; k < kSteps; k += 2) {
        load_matrices(b, strip + k * 16);
#pragma unroll
        for (int m = 0; m < MT; ++m) {
          load_matrices(a, q + m * 16 * kStride + k * 16);
          multiply_add<T>(scores[m][0], a, b[0], b[1]);
          load_matrices(a, q + m * 16 * kStride + (k + 1) * 16);
          multiply_add<T>(scores[m][0], a, b[2], b[3]);
        }
      }
    }
  }

  __device__ void apply_rule(float (&scores)[MT][kTokenTiles][4], int tokens, int base) {
    const bool checks = tokens < Layout::kTokens || rule_.hides_some();
#pragma unroll
    for (int m = 0; m < MT; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int v = m * 16 + fragment::c_row(lane_) + 8 * half;
        const int position = shared_.rows.position[v];
        const float slope = shared_.rows.slope[v];
#pragma unroll
        for (int j = 0; j < kTokenTiles; ++j) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int token = (warp_ * kTokenTiles + j) * 8 + fragment::c_column(lane_) + c;
            const int ahead = base + token - position;
            float& score = scores[m][j][2 * half + c];
            score = rule_.apply(score, slope, ahead);
            if (checks && (token >= tokens || rule_.hides(ahead))) score = kNegativeInfinity;
          }
        }
      }
    }
  }

  // This warp's largest score of each vector.
  __device__ void share_peaks(const float (&scores)[MT][kTokenTiles][4]) {
#pragma unroll
    for (int m = 0; m < MT; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float peak = kNegativeInfinity;
#pragma unroll
        for (int j = 0; j < kTokenTiles; ++j) {
          peak = fmaxf(peak, fmaxf(scores[m][j][2 * half], scores[m][j][2 * half + 1]));
        }
        peak = fmaxf(peak, shuffle_xor(peak, 1));
        peak = fmaxf(peak, shuffle_xor(peak, 2));
        if ((lane_ & 3) == 0) {
          shared_.peaks[warp_ * shared_.capacity + m * 16 + fragment::c_row(lane_) + 8 * half] = peak;
        }
      }
    }
  }

  // Scores become weights, in shared memory for the other warps; older sums are scaled to the new peak.
  __device__ void weigh(const float (&scores)[MT][kTokenTiles][4]) {
#pragma unroll
    for (int m = 0; m < MT; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int v = m * 16 + fragment::c_row(lane_) + 8 * half;
        float peak = peak_[m][half];
#pragma unroll
        for (int w = 0; w < kWarps; ++w) peak = fmaxf(peak, shared_.peaks[w * shared_.capacity + v]);
        const float reference = finite_peak(peak);
        const float decay = exp2_approximate(peak_[m][half] - reference);
        peak_[m][half] = peak;
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < kTokenTiles; ++j) {
          const float low = exp2_approximate(scores[m][j][2 * half] - reference);
          const float high = exp2_approximate(scores[m][j][2 * half + 1] - reference);
          sum += low + high;
          const int column = (warp_ * kTokenTiles + j) * 8 + fragment::c_column(lane_);
          *reinterpret_cast<uint32_t*>(shared_.weights + v * kWeightStride + column) = pack2<T>(low, high);
        }
        total_[m][half] = __fmaf_rn(total_[m][half], decay, sum);
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n) {
          acc_[m][n][2 * half] *= decay;
          acc_[m][n][2 * half + 1] *= decay;
        }
      }
    }
  }

  __device__ void multiply_values(const T* values, int tokens) {
    const T* weights = shared_.weights + fragment::a_row(lane_) * kWeightStride + fragment::a_column(lane_);
    const T* from = values + fragment::value_token(lane_) * kStride + warp_ * kColumnTiles * 8;
#pragma unroll
    for (int k = 0; k < Layout::kTokens; k += 32) {
      if (k >= tokens) break;  // weights and values are zeros there
      uint32_t a[MT][2][4];
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        load_matrices(a[m][0], weights + m * 16 * kWeightStride + k);
        load_matrices(a[m][1], weights + m * 16 * kWeightStride + k + 16);
      }
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
        if (warp_ * kColumnTiles + n >= D / 8) break;
        uint32_t b[4];
        load_matrices_transposed(b, from + k * kStride + n * 8);
#pragma unroll
        for (int m = 0; m < MT; ++m) {
          multiply_add<T>(acc_[m][n], a[m][0], b[0], b[1]);
          multiply_add<T>(acc_[m][n], a[m][1], b[2], b[3]);
        }
      }
    }
  }

  // Sums over lanes and warps, in a fixed order, then the output or the partial.
  __device__ void finish() {
    // `peaks` is free: warps that read it in the last tile do so before that tile's barrier C.
#pragma unroll
    for (int m = 0; m < MT; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float sum = total_[m][half];
        sum += shuffle_xor(sum, 1);
        sum += shuffle_xor(sum, 2);
        if ((lane_ & 3) == 0) {
          shared_.peaks[warp_ * shared_.capacity + m * 16 + fragment::c_row(lane_) + 8 * half] = sum;
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < MT; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int v = m * 16 + fragment::c_row(lane_) + 8 * half;
        if (shared_.rows.row[v] >= 0) store(m, half, v);
      }
    }
  }

  __device__ void store(int m, int half, int v) {
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += shared_.peaks[w * shared_.capacity + v];
    const int slot = shared_.rows.slot[v], head = shared_.rows.head[v];
    const int64_t partial = static_cast<int64_t>(slot) * call_.heads + head;
    const int first = warp_ * kColumnTiles * 8 + fragment::c_column(lane_);
    T* out =
        static_cast<T*>(call_.out) + shared_.rows.row[v] * call_.out_row_stride + static_cast<int64_t>(head) * D;
    const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      if (warp_ * kColumnTiles + n >= D / 8) break;
      const float low = acc_[m][n][2 * half], high = acc_[m][n][2 * half + 1];
      if (slot < 0) {
        *reinterpret_cast<uint32_t*>(out + first + n * 8) = pack2<T>(low * inverse, high * inverse);
      } else {
        *reinterpret_cast<float2*>(call_.partial_acc + partial * D + first + n * 8) = make_float2(low, high);
      }
    }
    if (slot >= 0 && warp_ == 0 && (lane_ & 3) == 0) {
      *reinterpret_cast<float2*>(call_.partial_stats + partial * 2) = make_float2(peak_[m][half], total);
    }
  }

  const AttentionCall& call_;
  const Shared& shared_;
  const ScoreRule rule_;
  const int lane_, warp_;
  float acc_[MT][kColumnTiles][4] = {};
  float peak_[MT][2];
  float total_[MT][2] = {};

 public:
  __device__ void clear_peaks() {
#pragma unroll
    for (int m = 0; m < MT; ++m) peak_[m][0] = peak_[m][1] = kNegativeInfinity;
  }
};

template <class T, int D, int MT, bool kBytes>
__device__ __forceinline__ void run_segment(const AttentionCall& call, const MatrixShared<T, D, kBytes>& shared,
                                            TileCursor& tile, TileLoader<T, D, kBytes>& loader,
                                            const WorkView& work, int steps) {
  MatrixSegment<T, D, MT, kBytes> segment(call, shared);
  segment.clear_peaks();
  segment.run(tile, loader, work, steps);
}

template <class T, int D, bool kBytes>
__device__ __forceinline__ void run_units(const AttentionCall& call, const WorkView& work, int steps,
                                          const UnitList& units, int stages, int tile_rows) {
  const MatrixShared<T, D, kBytes> shared(dynamic_shared(), stages, tile_rows);
  TileCursor tile(work, call, steps, units, tile_rows, MatrixLayout<D, kBytes>::kTokens);
  TileLoader<T, D, kBytes> loader(call, tile, shared.stages, stages);
  while (tile.next_segment()) {
    const int vectors = tile.vectors();
    if (vectors <= 16) {
      run_segment<T, D, 1>(call, shared, tile, loader, work, steps);
    } else if (vectors <= 32) {
      run_segment<T, D, 2>(call, shared, tile, loader, work, steps);
    } else {
      run_segment<T, D, 4>(call, shared, tile, loader, work, steps);
    }
  }
  copy_async_wait<0>();
}

template <class T, int D, bool kBytes>
__global__ void __launch_bounds__(kThreads) attention_matrix_kernel(const __grid_constant__ AttentionCall call) {
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
