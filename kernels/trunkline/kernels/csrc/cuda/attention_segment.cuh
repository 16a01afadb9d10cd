// What narrow and wide segments of attention on matrix units have in common: queries, the rule of scores, weights, and
// results. In both a warp's products are of 16 vectors, of which a lane has two: `c_row` and the eighth behind it.
#pragma once

#include "byte_products.cuh"
#include "matrix_loader.cuh"

namespace trunkline::cuda {

// What a warp keeps of a segment in registers: queries, and the sums so far. In a narrow segment only the fronts of the
// arrays are used, for the columns and the tokens of each warp's quarter.
template <int D>
struct SegmentState {
  static constexpr bool kKeepsQueries = D <= 128;  // in registers; larger heads have no room there
  uint32_t queries[kKeepsQueries ? D / 16 : 1][4];
  float acc[D / 8][4] = {};
  float peak[2] = {kNegativeInfinity, kNegativeInfinity};
  float total[2][kWarps] = {};  // by the strips (quarters) of tiles whose weights are summed apart
};

// Brings `padded` queries, a multiple of 16, to shared memory, rotated by their shifts.
template <class T, int D, bool kBytes>
__device__ __forceinline__ void bring_queries(const AttentionCall& call, const MatrixShared<T, D, kBytes>& shared,
                                              const TileCursor& tile, const WorkView& work, int steps,
                                              int padded) {
  constexpr int kUnits = D / 8, kStride = MatrixLayout<D, kBytes>::kQueryStride;
  __syncthreads();  // the segment before is done with Q and the row table
  shared.rows.fill(tile, work, call, steps, padded);
  // Not by way of the row table: queries would then wait for its reads of the plan.
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
  using State = SegmentState<D>;
  static constexpr int kStride = Layout::kStride, kQueryStride = Layout::kQueryStride;
  static constexpr int kSteps = D / 16;                    // k steps of the scores
  static constexpr int kStrip = Layout::kTokens / kWarps;  // tokens whose weights are summed apart
  static constexpr int kStripTiles = kStrip / 8;           // 2, or 1
  static_assert(D % 16 == 0 && (kStripTiles == 2 || (kStripTiles == 1 && kSteps % 2 == 0)));

 protected:
  // `first_vector`: the first of the 16 of this warp's products; `takes_part`: whether the segment has them.
  __device__ MatrixSegment(const AttentionCall& call, const Shared& shared, State& state, int first_vector,
                           bool takes_part)
      : call_(call),
        shared_(shared),
        state_(state),
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

  // Which token of the tile is a column of a tile of 8 scores.
  __device__ static int token_of(int tile, int column) {
    return kBytes ? fragment::byte_token(tile, column) : tile * 8 + column;
  }

  __device__ void load_queries() {
    if constexpr (State::kKeepsQueries) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) load_query(state_.queries[k], k);
    }
  }

  // The queries' fragment of a k step, until the next is asked for.
  __device__ const uint32_t (&query(int k))[4] {
    if constexpr (State::kKeepsQueries) return state_.queries[k];
    load_query(state_.queries[0], k);
    return state_.queries[0];
  }

  // Scores of 8 tokens a tile, from tile `first` on.
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

  // A tile's keys, or values, in 8 bits in a stage.
  __device__ ByteTile<T, D> bytes_of(const TileCursor& tile, const unsigned char* stage, int is_value) const {
    const auto skip = static_cast<int>(rows_before(call_, tile, is_value) * Layout::kRow % kCopyBytes);
    return {stage + is_value * Layout::kTileBytes + skip, tile.tokens(), lane_, call_.kv_dtype};
  }

  // Scores become weights of the tokens of tiles from `tile` on, which are packed in pairs, in 8 bits times the scales
  // of `values` if it is they that take them; returns the sum of the weights.
  template <class Values>
  __device__ float weigh(const float (&scores)[kStripTiles][4], int half, float reference, int tile,
                         const Values& values, uint32_t (&weights)[kStripTiles]) const {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kStripTiles; ++j) {
      float low = exp2_approximate(scores[j][2 * half] - reference);
      float high = exp2_approximate(scores[j][2 * half + 1] - reference);
      sum += low + high;
      if constexpr (kBytes && ByteTile<T, D>::kScalesWeights) {
        low = __fmul_rn(low, values.scale_of(token_of(tile + j, fragment::c_column(lane_))));
        high = __fmul_rn(high, values.scale_of(token_of(tile + j, fragment::c_column(lane_) + 1)));
      }
      weights[j] = pack2<T>(low, high);
    }
    return sum;
  }

  // The output, or a partial, of `kTiles` tiles of 8 columns from tile `first` of the row on (in 8 bits, in groups of
  // `kGroup`).
  template <int kTiles, int kGroup>
  __device__ void store(int half, int first, float total) const {
    const int v = vector(half), row = shared_.rows.row[v];
    if (row < 0) return;
    const int slot = shared_.rows.slot[v], head = shared_.rows.head[v];
    if (slot < 0) {
      T* out =
          static_cast<T*>(call_.out) + row * call_.out_row_stride + static_cast<int64_t>(head) * D + first * 8;
      const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
      each_run<kTiles, kGroup>(half, first, [&](const auto& x, int column) {
        constexpr int kPairs = sizeof(x) / sizeof(float) / 2;
        Unit<kPairs> unit;
#pragma unroll
        for (int i = 0; i < kPairs; ++i) unit.words[i] = pack2<T>(x[2 * i] * inverse, x[2 * i + 1] * inverse);
        *reinterpret_cast<Unit<kPairs>*>(out + column) = unit;
      });
      return;
    }
    const int64_t partial = static_cast<int64_t>(slot) * call_.heads + head;
    float* to = call_.partial_acc + partial * D + first * 8;
    each_run<kTiles, kGroup>(half, first, [&](const auto& x, int column) {
      constexpr int kFloats = sizeof(x) / sizeof(float), kWords = kFloats < 4 ? kFloats : 4;
#pragma unroll
      for (int i = 0; i < kFloats; i += kWords) {
        Unit<kWords> unit;
#pragma unroll
        for (int word = 0; word < kWords; ++word) unit.words[word] = bits_of(x[i + word]);
        *reinterpret_cast<Unit<kWords>*>(to + column + i) = unit;
      }
    });
    if (first == 0 && (lane_ & 3) == 0) {
      *reinterpret_cast<float2*>(call_.partial_stats + partial * 2) = make_float2(state_.peak[half], total);
    }
  }

  const AttentionCall& call_;
  const Shared& shared_;
  State& state_;
  const ScoreRule rule_;
  const int lane_, warp_, first_vector_;
  int position_[2] = {};
  float slope_[2] = {};

 private:
  // What is stored at once.
  template <int kWords>
  struct alignas(4 * kWords) Unit {
    uint32_t words[kWords];
  };

  __device__ void load_query(uint32_t (&a)[4], int k) const {
    if constexpr (kBytes) {
      const T* upper = shared_.q + vector(0) * kQueryStride + k * 16 + fragment::byte_quad(lane_);
      const auto high = *reinterpret_cast<const uint2*>(upper);
      const auto low = *reinterpret_cast<const uint2*>(upper + 8 * kQueryStride);
      a[0] = high.x, a[1] = low.x, a[2] = high.y, a[3] = low.y;
    } else {
      const T* rows = shared_.q + (first_vector_ + fragment::a_row(lane_)) * kQueryStride;
      load_matrices(a, rows + fragment::a_column(lane_) + k * 16);
    }
  }

  // `write(x, column)` for each run of neighbours that this lane holds of the sums.
  template <int kTiles, int kGroup, class Write>
  __device__ void each_run(int half, int first, const Write& write) const {
    if constexpr (kBytes) {
      each_group<D, kTiles, kGroup>(first, [&](auto size, int n) {
        constexpr int kSize = decltype(size)::value;
        float x[2 * kSize];
#pragma unroll
        for (int i = 0; i < 2 * kSize; ++i) x[i] = state_.acc[n + i % kSize][2 * half + i / kSize];
        write(x, n * 8 + fragment::byte_column(kSize, fragment::c_column(lane_)));
      });
    } else {
#pragma unroll
      for (int n = 0; n < kTiles && first + n < D / 8; ++n) {
        const float x[2] = {state_.acc[n][2 * half], state_.acc[n][2 * half + 1]};
        write(x, n * 8 + fragment::c_column(lane_));
      }
    }
  }

  // `change(score, half, token)` for each of this lane's.
  template <int kTiles, class Change>
  __device__ void each(float (&scores)[kTiles][4], int first, const Change& change) const {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        change(scores[j][i], i / 2, token_of(first + j, fragment::c_column(lane_) + i % 2));
    }
  }
};

}  // namespace trunkline::cuda
