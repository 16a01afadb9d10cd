// A segment of up to 16 vectors: too few for each warp to have some of its own, so warps share the work on them.
//
//      scores   warp w: all vectors x a quarter of the tile's tokens, its strip     S = Q K^T
//      softmax  peaks over the four warps through shared memory; weights P in 16 bits to shared memory
//      output   warp w: all vectors x a quarter of the head dimension               O += P V
//
// Barriers per tile:  A  this tile has arrived for everyone, and everyone is done with the tile before it
//                     B  all warps' peaks are in `peaks`
//                     C  all of P is written
// The stage that the tile before occupied is refilled after A; `peaks` is rewritten after the next A, P after the
// next B.
#pragma once

#include "attention_segment.cuh"

namespace trunkline::cuda {

template <class T, int D, bool kBytes>
class NarrowSegment : MatrixSegment<T, D, kBytes> {
  using Base = MatrixSegment<T, D, kBytes>;
  using Base::apply_rule, Base::bytes_of, Base::kSteps, Base::kStride, Base::kStrip, Base::kStripTiles,
      Base::lane_, Base::query, Base::shared_, Base::state_, Base::token_of, Base::vector, Base::warp_,
      Base::weigh;
  using typename Base::Layout;
  static constexpr int kWeightStride = Layout::kWeightStride;
  static constexpr int kQuarter = (D / 8 + kWarps - 1) / kWarps;
  // Tiles of a warp's part of O. In 8 bits they come in groups (fragments.h), so for a few head sizes some warps have
  // fewer.
  static constexpr int kColumnTiles = !kBytes || kQuarter == 2 ? kQuarter : (kQuarter + 3) / 4 * 4;
  static constexpr int kGroup = kColumnTiles % 4 == 0 ? 4 : 2;

 public:
  using Base::load_queries;

  __device__ NarrowSegment(const AttentionCall& call, const typename Base::Shared& shared,
                           typename Base::State& state)
      : Base(call, shared, state, 0, true) {}

  __device__ void attend(const TileCursor& tile, const unsigned char* stage) {
    const int tokens = tile.tokens(), first = warp_ * kStripTiles;
    const bool takes_part = token_of(first, 0) < tokens;
    float scores[kStripTiles][4] = {};
    if constexpr (kBytes) {
      const auto keys = bytes_of(tile, stage, 0);
      if (takes_part) keys.multiply_keys(scores, first, [&](int k) -> const auto& { return query(k); });
      keys.scale(scores, first);
      finish_tile(scores, bytes_of(tile, stage, 1), tokens, tile.base());
    } else {
      const T* keys = reinterpret_cast<const T*>(stage);
      if (takes_part) multiply_keys(scores, keys);
      finish_tile(scores, keys + Layout::kTensor, tokens, tile.base());
    }
  }

  // Sums over lanes and warps, in a fixed order, then the output or the partial.
  __device__ void finish() {
    // `peaks` is free: warps that read it in the last tile do so before that tile's barrier C.
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = state_.total[half][0];
      sum += shuffle_xor(sum, 1);
      sum += shuffle_xor(sum, 2);
      if ((lane_ & 3) == 0) shared_.peaks[warp_ * shared_.capacity + vector(half)] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) total += shared_.peaks[w * shared_.capacity + vector(half)];
      this->template store<kColumnTiles, kGroup>(half, warp_ * kColumnTiles, total);
    }
  }

 private:
  __device__ void multiply_keys(float (&scores)[kStripTiles][4], const T* keys) {
    const T* strip = keys + warp_ * kStrip * kStride;
    uint32_t b[4];
    if constexpr (kStripTiles == 2) {
      strip += fragment::key_pair_token(lane_) * kStride + fragment::key_pair_column(lane_);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        load_matrices(b, strip + k * 16);
        const auto& a = query(k);
        multiply_add<T>(scores[0], a, b[0], b[1]);
        multiply_add<T>(scores[1], a, b[2], b[3]);
      }
    } else {
      strip += fragment::key_single_token(lane_) * kStride + fragment::key_single_column(lane_);
#pragma unroll
      for (int k = 0; k < kSteps; k += 2) {
        load_matrices(b, strip + k * 16);
        multiply_add<T>(scores[0], query(k), b[0], b[1]);
        multiply_add<T>(scores[0], query(k + 1), b[2], b[3]);
      }
    }
  }

  template <class Values>
  __device__ void finish_tile(float (&scores)[kStripTiles][4], const Values& values, int tokens, int base) {
    apply_rule(scores, warp_ * kStripTiles, tokens, base);
    share_peaks(scores);
    __syncthreads();  // B
    weigh_all(scores, values);
    __syncthreads();  // C
    multiply_values(values, tokens);
  }

  // This warp's largest score of each vector.
  __device__ void share_peaks(const float (&scores)[kStripTiles][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float peak = kNegativeInfinity;
#pragma unroll
      for (int j = 0; j < kStripTiles; ++j)
        peak = fmaxf(peak, fmaxf(scores[j][2 * half], scores[j][2 * half + 1]));
      peak = fmaxf(peak, shuffle_xor(peak, 1));
      peak = fmaxf(peak, shuffle_xor(peak, 2));
      if ((lane_ & 3) == 0) shared_.peaks[warp_ * shared_.capacity + vector(half)] = peak;
    }
  }

  // Weights of this warp's tokens to shared memory for the other warps; older sums are scaled to the new peak.
  template <class Values>
  __device__ void weigh_all(const float (&scores)[kStripTiles][4], const Values& values) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int v = vector(half);
      float peak = state_.peak[half];
#pragma unroll
      for (int w = 0; w < kWarps; ++w) peak = fmaxf(peak, shared_.peaks[w * shared_.capacity + v]);
      const float reference = finite_peak(peak), decay = exp2_approximate(state_.peak[half] - reference);
      state_.peak[half] = peak;
      uint32_t weights[kStripTiles];
      const float sum = weigh(scores, half, reference, warp_ * kStripTiles, values, weights);
      state_.total[half][0] = __fmaf_rn(state_.total[half][0], decay, sum);
      T* to = shared_.weights + v * kWeightStride + warp_ * kStrip + fragment::c_column(lane_);
#pragma unroll
      for (int j = 0; j < kStripTiles; ++j) *reinterpret_cast<uint32_t*>(to + j * 8) = weights[j];
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
        state_.acc[n][2 * half] *= decay;
        state_.acc[n][2 * half + 1] *= decay;
      }
    }
  }

  template <class Values>
  __device__ void multiply_values(const Values& values, int tokens) {
    const T* weights = shared_.weights + fragment::a_row(lane_) * kWeightStride + fragment::a_column(lane_);
    const int first = warp_ * kColumnTiles;
#pragma unroll
    for (int k = 0; k < Layout::kTokens; k += 32) {
      if (k >= tokens) break;  // weights are zeros there
      uint32_t a[2][4];
      load_matrices(a[0], weights + k);
      load_matrices(a[1], weights + k + 16);
      if constexpr (kBytes) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          values.template multiply_values<kColumnTiles, kGroup>(state_.acc, a[i], k / 8 + 2 * i, first);
        }
      } else {
        const T* from = values + (fragment::value_token(lane_) + k) * kStride + first * 8;
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n) {
          if (first + n >= D / 8) break;
          uint32_t b[4];
          load_matrices_transposed(b, from + n * 8);
          multiply_add<T>(state_.acc[n], a[0], b[0], b[1]);
          multiply_add<T>(state_.acc[n], a[1], b[2], b[3]);
        }
      }
    }
  }
};

}  // namespace trunkline::cuda
