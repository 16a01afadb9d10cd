// A segment of 17 to 64 vectors: each warp has 16 of them, all the tile's tokens and the whole head dimension, so that
// scores and weights stay in its registers, where the scores' C fragments are the weights' A fragments.
//
// One barrier per tile (A of attention_narrow.cuh). The arithmetic of a vector, element by element, is
// that of a narrow segment: weights are summed by strips of a quarter of the tile, as they are by the warps there.
#pragma once

#include "attention_segment.cuh"

namespace trunkline::cuda {

template <class T, int D, bool kBytes>
class WideSegment : MatrixSegment<T, D, kBytes> {
  using Base = MatrixSegment<T, D, kBytes>;
  using Base::apply_rule, Base::bytes_of, Base::kSteps, Base::kStride, Base::kStripTiles, Base::lane_, Base::query,
      Base::shared_, Base::state_, Base::weigh;
  using typename Base::Layout;
  static constexpr int kTokenTiles = Layout::kTokens / 8;
  static constexpr int kColumnTiles = D / 8;

 public:
  // `padded`: its vectors and what fills up the last 16.
  __device__ WideSegment(const AttentionCall& call, const typename Base::Shared& shared,
                         typename Base::State& state, int padded)
      : WideSegment(call, shared, state, static_cast<int>(threadIdx.x) / kWarpLanes * 16, padded) {}

  __device__ void load_queries() {
    if (takes_part_) Base::load_queries();
  }

  __device__ void attend(const TileCursor& tile, const unsigned char* stage) {
    if (!takes_part_) return;
    const int tokens = tile.tokens(), base = tile.base();
    float scores[kTokenTiles][4] = {};
    if constexpr (kBytes) {
      const auto keys = bytes_of(tile, stage, 0);
      keys.multiply_keys(scores, 0, [&](int k) -> const auto& { return query(k); });
      keys.scale(scores, 0);
      finish_tile(scores, bytes_of(tile, stage, 1), tokens, base);
    } else {
      const T* keys = reinterpret_cast<const T*>(stage);
      multiply_keys(scores, keys);
      finish_tile(scores, keys + Layout::kTensor, tokens, base);
    }
  }

  __device__ void finish() {
    if (!takes_part_) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = 0.0f;
#pragma unroll
      for (int strip = 0; strip < kWarps; ++strip) {
        float sum = state_.total[half][strip];
        sum += shuffle_xor(sum, 1);
        sum += shuffle_xor(sum, 2);
        total += sum;
      }
      this->template store<kColumnTiles, 4>(half, 0, total);
    }
  }

 private:
  __device__ WideSegment(const AttentionCall& call, const typename Base::Shared& shared,
                         typename Base::State& state, int first_vector, int padded)
      : Base(call, shared, state, first_vector, first_vector < padded), takes_part_(first_vector < padded) {}

  using Scores = float[kTokenTiles][4];

  __device__ void multiply_keys(Scores& scores, const T* keys) {
    const T* from = keys + fragment::key_pair_token(lane_) * kStride + fragment::key_pair_column(lane_);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const auto& a = query(k);
#pragma unroll
      for (int pair = 0; pair < kTokenTiles / 2; ++pair) {
        uint32_t b[4];
        load_matrices(b, from + pair * 16 * kStride + k * 16);
        multiply_add<T>(scores[2 * pair], a, b[0], b[1]);
        multiply_add<T>(scores[2 * pair + 1], a, b[2], b[3]);
      }
    }
  }

  template <class Values>
  __device__ void finish_tile(Scores& scores, const Values& values, int tokens, int base) {
    apply_rule(scores, 0, tokens, base);
    uint32_t weights[2][kTokenTiles];  // of both halves
#pragma unroll
    for (int half = 0; half < 2; ++half) weigh_all(scores, half, values, weights[half]);
    multiply_values(weights, values, tokens);
  }

  template <class Values>
  __device__ void weigh_all(const Scores& scores, int half, const Values& values,
                            uint32_t (&weights)[kTokenTiles]) {
    float peak = state_.peak[half];
#pragma unroll
    for (int j = 0; j < kTokenTiles; ++j) peak = fmaxf(peak, fmaxf(scores[j][2 * half], scores[j][2 * half + 1]));
    peak = fmaxf(peak, shuffle_xor(peak, 1));
    peak = fmaxf(peak, shuffle_xor(peak, 2));
    const float reference = finite_peak(peak), decay = exp2_approximate(state_.peak[half] - reference);
    state_.peak[half] = peak;
#pragma unroll
    for (int strip = 0; strip < kWarps; ++strip) {
      const auto& own = reinterpret_cast<const float (&)[kStripTiles][4]>(scores[strip * kStripTiles]);
      auto& packed = reinterpret_cast<uint32_t (&)[kStripTiles]>(weights[strip * kStripTiles]);
      const float sum = weigh(own, half, reference, strip * kStripTiles, values, packed);
      state_.total[half][strip] = __fmaf_rn(state_.total[half][strip], decay, sum);
    }
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      state_.acc[n][2 * half] *= decay;
      state_.acc[n][2 * half + 1] *= decay;
    }
  }

  template <class Values>
  __device__ void multiply_values(const uint32_t (&weights)[2][kTokenTiles], const Values& values, int tokens) {
#pragma unroll
    for (int k = 0; k < Layout::kTokens; k += 32) {
      if (k >= tokens) break;  // weights are zeros there
      const int j = k / 8;
      const uint32_t a[2][4] = {{weights[0][j], weights[1][j], weights[0][j + 1], weights[1][j + 1]},
                                {weights[0][j + 2], weights[1][j + 2], weights[0][j + 3], weights[1][j + 3]}};
      if constexpr (kBytes) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          values.template multiply_values<kColumnTiles, 4>(state_.acc, a[i], j + 2 * i, 0);
        }
      } else {
        const T* from = values + (fragment::value_token(lane_) + k) * kStride;
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n) {
          uint32_t b[4];
          load_matrices_transposed(b, from + n * 8);
          multiply_add<T>(state_.acc[n], a[0], b[0], b[1]);
          multiply_add<T>(state_.acc[n], a[1], b[2], b[3]);
        }
      }
    }
  }

  const bool takes_part_;
};

}  // namespace trunkline::cuda
