// Attention for what the matrix units do not take: float32, and head sizes without an instance there (up to 256).
//
// The same plan, tiles and rules as attention_matrix.cuh, in float32 throughout and without its speed: 16 query
// vectors, tiles of 32 tokens, copied without overlap. Warp w owns vectors w, w + 4, w + 8, w + 12; in the scores
// a lane is a token, in the output it is a column.
#pragma once

#include "quantised_kv.cuh"
#include "tiles.cuh"

namespace trunkline::cuda {

constexpr int kGeneralRows = 16;
constexpr int kGeneralTokens = kWarpLanes;
constexpr int kGeneralHeadDimMax = 256;

// Floats of shared memory. Rows of K are one float longer than the head: 32 lanes on 32 tokens hit 32 banks.
constexpr int general_floats(int d) {
  return kGeneralRows * d                 // Q
         + kGeneralTokens * (d + 1)       // K
         + kGeneralTokens * d             // V
         + kGeneralRows * d               // O
         + kGeneralRows * kGeneralTokens  // P
         + kGeneralRows * 3               // peak, total, decay
         + kGeneralRows * RowTable::kArrays;
}

template <class T>
class GeneralSegment {
 public:
  __device__ GeneralSegment(const AttentionCall& call, unsigned char* memory)
      : call_(call),
        rule_(call),
        d_(call.head_dim),
        q_(reinterpret_cast<float*>(memory)),
        keys_(q_ + kGeneralRows * d_),
        values_(keys_ + kGeneralTokens * (d_ + 1)),
        acc_(values_ + kGeneralTokens * d_),
        weights_(acc_ + kGeneralRows * d_),
        peak_(weights_ + kGeneralRows * kGeneralTokens),
        total_(peak_ + kGeneralRows),
        decay_(total_ + kGeneralRows),
        rows_(reinterpret_cast<unsigned char*>(decay_ + kGeneralRows), kGeneralRows),
        lane_(static_cast<int>(threadIdx.x) % kWarpLanes),
        warp_(static_cast<int>(threadIdx.x) / kWarpLanes) {}

  __device__ void run(TileCursor& tile, const WorkView& work, int steps) {
    const int vectors = tile.vectors();
    __syncthreads();  // the segment before is done
    rows_.fill(tile, work, call_, steps, kGeneralRows);
    __syncthreads();
    start(vectors);
    __syncthreads();
    turn_queries(q_, d_, rows_, call_, vectors);
    while (tile.next_tile()) {
      __syncthreads();  // everyone is done with the tile before; at first: queries are turned
      load(tile);
      __syncthreads();
      for (int v = warp_; v < vectors; v += kWarps) weigh(v, tile.tokens(), tile.base());
      __syncthreads();
      for (int v = warp_; v < vectors; v += kWarps) accumulate(v, tile.tokens());
    }
    __syncthreads();
    for (int v = warp_; v < vectors; v += kWarps) store(v);
  }

 private:
  __device__ void start(int vectors) {
    for (int v = warp_; v < vectors; v += kWarps) {
      const T* q = static_cast<const T*>(call_.q) + rows_.row[v] * call_.q_row_stride +
                   static_cast<int64_t>(rows_.head[v]) * d_;
      for (int i = lane_; i < d_; i += kWarpLanes) {
        q_[v * d_ + i] = to_float(q[i]);
        acc_[v * d_ + i] = 0.0f;
      }
      if (lane_ == 0) {
        peak_[v] = kNegativeInfinity;
        total_[v] = 0.0f;
      }
    }
  }

  __device__ void load(const TileCursor& tile) {
    if (call_.kv_dtype == call_.dtype) {
      const T* pool = static_cast<const T*>(call_.pool);
      load_rows(tile, [&](int64_t row, float* to) {
        const T* from = pool + row * d_;
        for (int i = lane_; i < d_; i += kWarpLanes) to[i] = to_float(from[i]);
      });
      return;
    }
    const auto* pool = static_cast<const unsigned char*>(call_.pool);
    with_bytes(call_.kv_dtype, [&](auto bytes) {
      load_rows(tile, [&](int64_t row, float* to) {
        const unsigned char* from = pool + row * (d_ + kScaleBytes);
        const float scale = load_scale(from + d_);
        for (int i = lane_; i < d_; i += kWarpLanes) to[i] = decltype(bytes)::value(from[i], 0) * scale;
      });
    });
  }

  // `load_row(row of the pool, place)` for the tile's keys and values, a warp for each.
  template <class LoadRow>
  __device__ void load_rows(const TileCursor& tile, const LoadRow& load_row) {
    const int64_t keys = rows_before(call_, tile, 0), values = rows_before(call_, tile, 1);
    for (int token = warp_; token < tile.tokens(); token += kWarps) {
      load_row(keys + token, keys_ + token * (d_ + 1));
      load_row(values + token, values_ + token * d_);
    }
  }

  __device__ void weigh(int v, int tokens, int base) {
    float score = kNegativeInfinity;
    const int ahead = base + lane_ - rows_.position[v];
    if (lane_ < tokens && !rule_.hides(ahead)) {
      float product = 0.0f;
      for (int i = 0; i < d_; ++i) product = fmaf(q_[v * d_ + i], keys_[lane_ * (d_ + 1) + i], product);
      score = rule_.apply(product, rows_.slope[v], ahead);
    }
    const float before = peak_[v];
    float peak = fmaxf(before, score);
    for (int mask = kWarpLanes / 2; mask > 0; mask /= 2) peak = fmaxf(peak, shuffle_xor(peak, mask));
    const float weight = exp2f(score - finite_peak(peak));
    float sum = weight;
    for (int mask = kWarpLanes / 2; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
    weights_[v * kGeneralTokens + lane_] = weight;
    sync_warp();  // every lane has read peak_[v]
    if (lane_ == 0) {
      decay_[v] = exp2f(before - finite_peak(peak));
      total_[v] = __fmaf_rn(total_[v], decay_[v], sum);
      peak_[v] = peak;
    }
  }

  __device__ void accumulate(int v, int tokens) {
    for (int i = lane_; i < d_; i += kWarpLanes) {
      float sum = acc_[v * d_ + i] * decay_[v];
      for (int token = 0; token < tokens; ++token) {
        sum = fmaf(weights_[v * kGeneralTokens + token], values_[token * d_ + i], sum);
      }
      acc_[v * d_ + i] = sum;
    }
  }

  __device__ void store(int v) {
    const int slot = rows_.slot[v], head = rows_.head[v];
    const int64_t partial = static_cast<int64_t>(slot) * call_.heads + head;
    const float inverse = total_[v] == 0.0f ? 0.0f : 1.0f / total_[v];
    T* out = static_cast<T*>(call_.out) + rows_.row[v] * call_.out_row_stride + static_cast<int64_t>(head) * d_;
    for (int i = lane_; i < d_; i += kWarpLanes) {
      if (slot < 0) {
        out[i] = from_float<T>(acc_[v * d_ + i] * inverse);
      } else {
        call_.partial_acc[partial * d_ + i] = acc_[v * d_ + i];
      }
    }
    if (slot >= 0 && lane_ == 0) {
      call_.partial_stats[partial * 2] = peak_[v];
      call_.partial_stats[partial * 2 + 1] = total_[v];
    }
  }

  const AttentionCall& call_;
  const ScoreRule rule_;
  const int d_;
  float *q_, *keys_, *values_, *acc_, *weights_, *peak_, *total_, *decay_;
  const RowTable rows_;
  const int lane_, warp_;
};

template <class T>
__global__ void __launch_bounds__(kThreads) attention_general_kernel(const __grid_constant__ AttentionCall call) {
  wait_for_launch_before();
  const WorkView work(call.work);
  const int steps = call.steps == nullptr ? 0 : *call.steps;
  TileCursor tile(work, call, steps, UnitList(work, call.kv_heads, UnitList::kAll), call.tile_rows,
                  kGeneralTokens);
  GeneralSegment<T> segment(call, dynamic_shared());
  while (tile.next_segment()) segment.run(tile, work, steps);
}

}  // namespace trunkline::cuda
