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
      Base::lane_, Base::scale, Base::shared_, Base::sums_, Base::vector, Base::warp_, Base::weigh;
  using typename Base::Layout;
  static constexpr int kWeightStride = Layout::kWeightStride;
  static constexpr int kColumnTiles = (D / 8 + kWarps - 1) / kWarps;  // of a warp's part of O

 public:
  __device__ NarrowSegment(const AttentionCall& call, const typename Base::Shared& shared,
                           typename Base::Sums& sums)
      : Base(call, shared, sums, 0, true) {}

  __device__ void attend(const TileCursor& tile, const unsigned char* stage) {
    const int tokens = tile.tokens(), first = warp_ * kStrip;
    const T* keys = reinterpret_cast<const T*>(stage);
    const T* values = keys + Layout::kTensor;
    float scores[kStripTiles][4] = {};
    if constexpr (kBytes) {
      // Of each warp's own strip of tokens numbers are made, of the keys, which only this warp reads, exactly (scores
      // are multiplied with their scales); then, in the same place, of the values, times theirs, which all read after C.
      keys = values = shared_.numbers;
      const unsigned char* key_bytes = bytes_of(tile, stage, 0);
      this->template make_numbers<false>(key_bytes, tokens);
      sync_warp();
      if (first < tokens) multiply_keys(scores, keys);
      sync_warp();
      this->template make_numbers<true>(bytes_of(tile, stage, 1), tokens);
      scale(scores, key_bytes, first, tokens);
    } else if (first < tokens) {
      multiply_keys(scores, keys);
    }
    apply_rule(scores, first, tokens, tile.base());
    share_peaks(scores);
    __syncthreads();  // B
    weigh_all(scores);
    __syncthreads();  // C
    multiply_values(values, tokens);
  }

  // Sums over lanes and warps, in a fixed order, then the output or the partial.
  __device__ void finish() {
    // `peaks` is free: warps that read it in the last tile do so before that tile's barrier C.
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = sums_.total[half][0];
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
      this->template store<kColumnTiles>(half, warp_ * kColumnTiles * 8, total);
    }
  }

 private:
  __device__ void multiply_keys(float (&scores)[kStripTiles][4], const T* keys) {
    const T* strip = keys + warp_ * kStrip * kStride;
    const T* q = shared_.q + fragment::a_row(lane_) * kStride + fragment::a_column(lane_);
    uint32_t a[4], b[4];
    if constexpr (kStripTiles == 2) {
      strip += fragment::key_pair_token(lane_) * kStride + fragment::key_pair_column(lane_);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        load_matrices(b, strip + k * 16);
        load_matrices(a, q + k * 16);
        multiply_add<T>(scores[0], a, b[0], b[1]);
        multiply_add<T>(scores[1], a, b[2], b[3]);
      }
    } else {
      strip += fragment::key_single_token(lane_) * kStride + fragment::key_single_column(lane_);
#pragma unroll
      for (int k = 0; k < kSteps; k += 2) {
        load_matrices(b, strip + k * 16);
        load_matrices(a, q + k * 16);
        multiply_add<T>(scores[0], a, b[0], b[1]);
        load_matrices(a, q + (k + 1) * 16);
        multiply_add<T>(scores[0], a, b[2], b[3]);
      }
    }
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
  __device__ void weigh_all(const float (&scores)[kStripTiles][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int v = vector(half);
      float peak = sums_.peak[half];
#pragma unroll
      for (int w = 0; w < kWarps; ++w) peak = fmaxf(peak, shared_.peaks[w * shared_.capacity + v]);
      const float reference = finite_peak(peak), decay = exp2_approximate(sums_.peak[half] - reference);
      sums_.peak[half] = peak;
      uint32_t weights[kStripTiles];
      sums_.total[half][0] = __fmaf_rn(sums_.total[half][0], decay, weigh(scores, half, reference, weights));
      T* to = shared_.weights + v * kWeightStride + warp_ * kStrip + fragment::c_column(lane_);
#pragma unroll
      for (int j = 0; j < kStripTiles; ++j) *reinterpret_cast<uint32_t*>(to + j * 8) = weights[j];
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
        sums_.acc[n][2 * half] *= decay;
        sums_.acc[n][2 * half + 1] *= decay;
      }
    }
  }

  __device__ void multiply_values(const T* values, int tokens) {
    const T* weights = shared_.weights + fragment::a_row(lane_) * kWeightStride + fragment::a_column(lane_);
    const T* from = values + fragment::value_token(lane_) * kStride + warp_ * kColumnTiles * 8;
#pragma unroll
    for (int k = 0; k < Layout::kTokens; k += 32) {
      if (k >= tokens) break;  // weights and values are zeros there
      uint32_t a[2][4];
      load_matrices(a[0], weights + k);
      load_matrices(a[1], weights + k + 16);
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
        if (warp_ * kColumnTiles + n >= D / 8) break;
        uint32_t b[4];
        load_matrices_transposed(b, from + k * kStride + n * 8);
        multiply_add<T>(sums_.acc[n], a[0], b[0], b[1]);
        multiply_add<T>(sums_.acc[n], a[1], b[2], b[3]);
      }
    }
  }
};

}  // namespace trunkline::cuda
