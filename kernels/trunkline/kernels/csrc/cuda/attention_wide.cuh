// A segment of 17 to 64 vectors: each warp has 16 of them, all the tile's tokens and the whole head dimension, so that
// scores and weights stay in its registers, where the scores' C fragments are the weights' A fragments.
//
// One barrier per tile (A of attention_narrow.cuh). With KV in 8 bits the tile of numbers, which all read, takes three
// more: keys are there; everyone is done with them; values are there. The arithmetic of a vector, element by element, is
// that of a narrow segment: weights are summed by strips of a quarter of the tile, as they are by the warps there.
#pragma once

#include "attention_segment.cuh"

namespace trunkline::cuda {

template <class T, int D, bool kBytes>
class WideSegment : MatrixSegment<T, D, kBytes> {
  using Base = MatrixSegment<T, D, kBytes>;
  using Base::apply_rule, Base::bytes_of, Base::first_vector_, Base::kSteps, Base::kStride, Base::kStripTiles,
      Base::lane_, Base::scale, Base::shared_, Base::sums_, Base::weigh;
  using typename Base::Layout;
  static constexpr int kTokenTiles = Layout::kTokens / 8;
  static constexpr int kColumnTiles = D / 8;
  static constexpr bool kKeepsQueries = D <= 128;  // in registers; larger heads have no room there

 public:
  // `padded`: its vectors and what fills up the last 16.
  __device__ WideSegment(const AttentionCall& call, const typename Base::Shared& shared, typename Base::Sums& sums,
                         int padded)
      : WideSegment(call, shared, sums, static_cast<int>(threadIdx.x) / kWarpLanes * 16, padded) {}

  __device__ void load_queries() {
    if (!takes_part_ || !kKeepsQueries) return;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) load_query(queries_[kKeepsQueries ? k : 0], k);
  }

  __device__ void attend(const TileCursor& tile, const unsigned char* stage) {
    const int tokens = tile.tokens();
    float scores[kTokenTiles][4] = {};
    if constexpr (kBytes) {
      const unsigned char* keys = bytes_of(tile, stage, 0);
      this->template make_numbers<false>(keys, tokens);
      __syncthreads();
      if (takes_part_) multiply_keys(scores, shared_.numbers);
      __syncthreads();
      this->template make_numbers<true>(bytes_of(tile, stage, 1), tokens);
      __syncthreads();
      if (!takes_part_) return;
      scale(scores, keys, 0, tokens);
      finish_tile(scores, shared_.numbers, tokens, tile.base());
    } else {
      if (!takes_part_) return;
      const T* keys = reinterpret_cast<const T*>(stage);
      multiply_keys(scores, keys);
      finish_tile(scores, keys + Layout::kTensor, tokens, tile.base());
    }
  }

  __device__ void finish() {
    if (!takes_part_) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = 0.0f;
#pragma unroll
      for (int strip = 0; strip < kWarps; ++strip) {
        float sum = sums_.total[half][strip];
        sum += shuffle_xor(sum, 1);
        sum += shuffle_xor(sum, 2);
        total += sum;
      }
      this->template store<kColumnTiles>(half, 0, total);
    }
  }

 private:
  __device__ WideSegment(const AttentionCall& call, const typename Base::Shared& shared, typename Base::Sums& sums,
                         int first_vector, int padded)
      : Base(call, shared, sums, first_vector, first_vector < padded), takes_part_(first_vector < padded) {}

  using Scores = float[kTokenTiles][4];

  __device__ void load_query(uint32_t (&a)[4], int k) const {
    load_matrices(
        a, shared_.q + (first_vector_ + fragment::a_row(lane_)) * kStride + fragment::a_column(lane_) + k * 16);
  }

  __device__ void multiply_keys(Scores& scores, const T* keys) {
    const T* from = keys + fragment::key_pair_token(lane_) * kStride + fragment::key_pair_column(lane_);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if constexpr (!kKeepsQueries) load_query(queries_[0], k);
#pragma unroll
      for (int pair = 0; pair < kTokenTiles / 2; ++pair) {
        uint32_t b[4];
        load_matrices(b, from + pair * 16 * kStride + k * 16);
        multiply_add<T>(scores[2 * pair], queries_[kKeepsQueries ? k : 0], b[0], b[1]);
        multiply_add<T>(scores[2 * pair + 1], queries_[kKeepsQueries ? k : 0], b[2], b[3]);
      }
    }
  }

  __device__ void finish_tile(Scores& scores, const T* values, int tokens, int base) {
    apply_rule(scores, 0, tokens, base);
    uint32_t weights[2][kTokenTiles];  // of both halves
#pragma unroll
    for (int half = 0; half < 2; ++half) weigh_all(scores, half, weights[half]);
    multiply_values(weights, values, tokens);
  }

  __device__ void weigh_all(const Scores& scores, int half, uint32_t (&weights)[kTokenTiles]) {
    float peak = sums_.peak[half];
#pragma unroll
    for (int j = 0; j < kTokenTiles; ++j) peak = fmaxf(peak, fmaxf(scores[j][2 * half], scores[j][2 * half + 1]));
    peak = fmaxf(peak, shuffle_xor(peak, 1));
    peak = fmaxf(peak, shuffle_xor(peak, 2));
    const float reference = finite_peak(peak), decay = exp2_approximate(sums_.peak[half] - reference);
    sums_.peak[half] = peak;
#pragma unroll
    for (int strip = 0; strip < kWarps; ++strip) {
      const auto& own = reinterpret_cast<const float (&)[kStripTiles][4]>(scores[strip * kStripTiles]);
      auto& packed = reinterpret_cast<uint32_t (&)[kStripTiles]>(weights[strip * kStripTiles]);
      sums_.total[half][strip] = __fmaf_rn(sums_.total[half][strip], decay, weigh(own, half, reference, packed));
    }
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      sums_.acc[n][2 * half] *= decay;
      sums_.acc[n][2 * half + 1] *= decay;
    }
  }

  __device__ void multiply_values(const uint32_t (&weights)[2][kTokenTiles], const T* values, int tokens) {
    const T* from = values + fragment::value_token(lane_) * kStride;
#pragma unroll
    for (int k = 0; k < Layout::kTokens; k += 32) {
      if (k >= tokens) break;  // weights and values are zeros there
      const int j = k / 8;
      const uint32_t first[4] = {weights[0][j], weights[1][j], weights[0][j + 1], weights[1][j + 1]};
      const uint32_t second[4] = {weights[0][j + 2], weights[1][j + 2], weights[0][j + 3], weights[1][j + 3]};
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
        uint32_t b[4];
        load_matrices_transposed(b, from + k * kStride + n * 8);
        multiply_add<T>(sums_.acc[n], first, b[0], b[1]);
        multiply_add<T>(sums_.acc[n], second, b[2], b[3]);
      }
    }
  }

  uint32_t queries_[kKeepsQueries ? kSteps : 1][4];
  const bool takes_part_;
};

}  // namespace trunkline::cuda
