// What narrow and wide segments of attention on matrix units have in common: queries, the rule of scores, KV in 8 bits,
// and results. In both a lane has two vectors, `c_row` and the eighth behind it, of the 16 that its products are of.
#pragma once

#include "matrix_loader.cuh"

namespace trunkline::cuda {

// What a segment has summed up so far. A narrow one uses the fronts: the columns and the tokens of each warp's quarter.
template <int D>
struct SegmentSums {
  float acc[D / 8][4] = {};
  float peak[2] = {kNegativeInfinity, kNegativeInfinity};
  float total[2][kWarps] = {};  // by strips of the tiles
};

// Brings `padded` queries to shared memory, a multiple of 16, turned as their shifts say.
template <class T, int D, bool kBytes>
__device__ __forceinline__ void bring_queries(const AttentionCall& call, const MatrixShared<T, D, kBytes>& shared,
                                              const TileCursor& tile, const WorkView& work, int steps,
                                              int padded) {
  constexpr int kUnits = D / 8, kStride = MatrixLayout<D, kBytes>::kStride;
  __syncthreads();  // the segment before is done with Q and the row table
  shared.rows.fill(tile, work, call, steps, padded);
  // Not by way of the table: reads of the plan and of queries would wait for each other.
  const T* q = static_cast<const T*>(call.q);
#pragma unroll 2
  for (int i = static_cast<int>(threadIdx.x); i < padded * kUnits; i += kThreads) {
    const int v = i / kUnits, column = (i - v * kUnits) * 8;
    uint4 x = make_uint4(0u, 0u, 0u, 0u);
    if (v < tile.vectors()) {
      const int64_t row = work.entry_row[tile.entry(v)];
      x = *reinterpret_cast<const uint4*>(q + row * call.q_row_stride + static_cast<int64_t>(tile.head(v)) * D +
                                          column);
    }
    *reinterpret_cast<uint4*>(shared.q + v * kStride + column) = x;
  }
  __syncthreads();
  turn_queries(shared.q, kStride, shared.rows, call, tile.vectors());
  __syncthreads();
}

template <class T, int D, bool kBytes>
class MatrixSegment {
 public:
  using Layout = MatrixLayout<D, kBytes>;
  using Shared = MatrixShared<T, D, kBytes>;
  using Sums = SegmentSums<D>;
  static constexpr int kStride = Layout::kStride;
  static constexpr int kSteps = D / 16;                    // k steps of the scores
  static constexpr int kStrip = Layout::kTokens / kWarps;  // tokens whose weights are summed apart
  static constexpr int kStripTiles = kStrip / 8;           // 2, or 1
  static_assert(D % 16 == 0 && (kStripTiles == 2 || (kStripTiles == 1 && kSteps % 2 == 0)));

 protected:
  // `first_vector`: of the 16 of this warp's products; `takes_part`: whether they are there.
  __device__ MatrixSegment(const AttentionCall& call, const Shared& shared, Sums& sums, int first_vector,
                           bool takes_part)
      : call_(call),
        shared_(shared),
        sums_(sums),
        rule_(call),
        lane_(static_cast<int>(threadIdx.x) % kWarpLanes),
        warp_(static_cast<int>(threadIdx.x) / kWarpLanes),
        first_vector_(first_vector) {
    if (!takes_part) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      position_[half] = shared.rows.position[vector(half)];
      slope_[half] = shared.rows.slope[vector(half)];
    }
  }

  __device__ int vector(int half) const { return first_vector_ + fragment::c_row(lane_) + 8 * half; }

  // Scores of 8 tokens a tile, of which `first` is the first.
  template <int kTiles>
  __device__ void apply_rule(float (&scores)[kTiles][4], int first, int tokens, int base) const {
    if (rule_.is_plain) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[j][i] = rule_.scaled(scores[j][i]);
      }
    } else {
      each(scores, first, [&](float& score, int half, int token) {
        score = rule_.apply(score, slope_[half], base + token - position_[half]);
      });
    }
    if (tokens < Layout::kTokens || rule_.hides_some()) {
      each(scores, first, [&](float& score, int half, int token) {
        if (token >= tokens || rule_.hides(base + token - position_[half])) score = kNegativeInfinity;
      });
    }
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

  // Scores times the scales of their keys in 8 bits.
  template <int kTiles>
  __device__ void scale(float (&scores)[kTiles][4], const unsigned char* rows, int first, int tokens) const {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int token = first + j * 8 + fragment::c_column(lane_) + c;
        if (token >= tokens) continue;
        const float own = *reinterpret_cast<const float*>(rows + token * Layout::kRow + D);
        scores[j][c] = __fmul_rn(scores[j][c], own);
        scores[j][2 + c] = __fmul_rn(scores[j][2 + c], own);
      }
    }
  }

  // The beginning of a tile's keys, or values, in 8 bits in a stage.
  __device__ const unsigned char* bytes_of(const TileCursor& tile, const unsigned char* stage,
                                           int is_value) const {
    return stage + is_value * Layout::kTileBytes + rows_before(call_, tile, is_value) * Layout::kRow % kCopyBytes;
  }

  // Scores become weights, which are packed in pairs, and are added up; `decay` scales what is from before.
  __device__ float weigh(const float (&scores)[kStripTiles][4], int half, float reference,
                         uint32_t (&weights)[kStripTiles]) const {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kStripTiles; ++j) {
      const float low = exp2_approximate(scores[j][2 * half] - reference);
      const float high = exp2_approximate(scores[j][2 * half + 1] - reference);
      sum += low + high;
      weights[j] = pack2<T>(low, high);
    }
    return sum;
  }

  // The output, or a partial, of `kTiles` tiles of 8 columns from column `first` on.
  template <int kTiles>
  __device__ void store(int half, int first, float total) const {
    const int v = vector(half), row = shared_.rows.row[v];
    if (row < 0) return;
    const int slot = shared_.rows.slot[v], head = shared_.rows.head[v];
    const int column = first + fragment::c_column(lane_), tiles = min(kTiles, D / 8 - first / 8);
    if (slot < 0) {
      T* out = static_cast<T*>(call_.out) + row * call_.out_row_stride + static_cast<int64_t>(head) * D + column;
      const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        if (n >= tiles) break;
        *reinterpret_cast<uint32_t*>(out + n * 8) =
            pack2<T>(sums_.acc[n][2 * half] * inverse, sums_.acc[n][2 * half + 1] * inverse);
      }
      return;
    }
    const int64_t partial = static_cast<int64_t>(slot) * call_.heads + head;
    float* to = call_.partial_acc + partial * D + column;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      if (n >= tiles) break;
      *reinterpret_cast<float2*>(to + n * 8) = make_float2(sums_.acc[n][2 * half], sums_.acc[n][2 * half + 1]);
    }
    if (first == 0 && (lane_ & 3) == 0) {
      *reinterpret_cast<float2*>(call_.partial_stats + partial * 2) = make_float2(sums_.peak[half], total);
    }
  }

  const AttentionCall& call_;
  const Shared& shared_;
  Sums& sums_;
  const ScoreRule rule_;
  const int lane_, warp_, first_vector_;
  int position_[2] = {};
  float slope_[2] = {};

 private:
  // `change(score, half, token)` for each of this lane's.
  template <int kTiles, class Change>
  __device__ void each(float (&scores)[kTiles][4], int first, const Change& change) const {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) change(scores[j][i], i / 2, first + j * 8 + fragment::c_column(lane_) + i % 2);
    }
  }
};

}  // namespace trunkline::cuda
