// Products with a tile of keys or values in 8 bits: fragments are made in registers from the bytes as they lie in the
// pool, so that they need neither a tile of 16-bit numbers nor barriers. fragments.h says which token or column is
// where.
#pragma once

#include <type_traits>

#include "fragments.h"
#include "matrix_loader.cuh"

namespace trunkline::cuda {

// Calls `visit` for each group of `kGroup` tiles of 8 columns, from tile `first` of a row on, as far as the row goes.
// Arguments: how many tiles the group has, as a constant (the last may have half as many), and the number of its first
// one among the `kTiles`.
template <int D, int kTiles, int kGroup, class Visit>
__device__ __forceinline__ void each_group(int first, const Visit& visit) {
  static_assert(kTiles % 2 == 0 && D / 8 % (kGroup / 2) == 0);
#pragma unroll
  for (int n = 0; n < kTiles; n += kGroup) {
    const int left = D / 8 - first - n;
    if (left <= 0) break;
    if constexpr (D / 8 % kGroup != 0) {
      if (left < kGroup) {
        visit(std::integral_constant<int, kGroup / 2>{}, n);
        break;
      }
    }
    visit(std::integral_constant<int, kGroup>{}, n);
  }
}

template <class T, int D>
class ByteTile {
  static constexpr int kRow = D + kScaleBytes;

 public:
  // Whether weights, rather than values, are multiplied by the values' scales, in float32 before they are rounded. In
  // bfloat16 weights are: it holds values exactly, and loses no more at any scale. In float16 such weights would be too
  // small.
  static constexpr bool kScalesWeights = std::is_same_v<T, Bf16>;

  // `rows`: those of the keys, or of the values, for `tokens` tokens. Bytes behind them may be anything, as all are
  // finite numbers; scales behind them are not read.
  __device__ ByteTile(const unsigned char* rows, int tokens, int lane, int kv_dtype)
      : rows_(rows), tokens_(tokens), lane_(lane), kv_dtype_(kv_dtype) {}

  __device__ float scale_of(int token) const {
    return token < tokens_ ? *reinterpret_cast<const float*>(rows_ + token * kRow + D) : 0.0f;
  }

  // Scores of `kTiles` tiles from tile `first` on, without the keys' scales; `query(k)`: the queries' fragment.
  template <int kTiles, class Query>
  __device__ void multiply_keys(float (&scores)[kTiles][4], int first, const Query& query) const {
    const int token = fragment::byte_token(first, fragment::c_row(lane_));
    const unsigned char* from = rows_ + token * kRow + fragment::byte_quad(lane_);
    with_bytes(kv_dtype_, [&](auto bytes) {
      using Bytes = decltype(bytes);
#pragma unroll
      for (int k = 0; k < D / 16; ++k) {
        const auto& a = query(k);
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          const auto word = *reinterpret_cast<const uint32_t*>(from + fragment::byte_token(j, 0) * kRow + k * 16);
          multiply_add<T>(scores[j], a, pair_of<T, Bytes>(word, word, 0, 1), pair_of<T, Bytes>(word, word, 2, 3));
        }
      }
    });
  }

  // Scores times the scales of their keys.
  template <int kTiles>
  __device__ void scale(float (&scores)[kTiles][4], int first) const {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float own = scale_of(fragment::byte_token(first + j, fragment::c_column(lane_) + c));
        scores[j][c] = __fmul_rn(scores[j][c], own);
        scores[j][2 + c] = __fmul_rn(scores[j][2 + c], own);
      }
    }
  }

  // Weights (of the tokens of tiles `tile` and the next of the scores) times values; `kTiles` tiles of 8 columns from
  // tile `first` of the row on, in groups of `kGroup`.
  template <int kTiles, int kGroup, class Sums>
  __device__ void multiply_values(Sums& acc, const uint32_t (&a)[4], int tile, int first) const {
    const int token = fragment::byte_token(0, fragment::c_column(lane_));
    const unsigned char* from[4];
    float scales[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int own = token + fragment::byte_token(tile + i / 2, i % 2);
      from[i] = rows_ + own * kRow + first * 8;
      if constexpr (!kScalesWeights) scales[i] = scale_of(own);
    }
    with_bytes(kv_dtype_, [&](auto bytes) {
      using Bytes = decltype(bytes);
      each_group<D, kTiles, kGroup>(first, [&](auto size, int n) {
        constexpr int kSize = decltype(size)::value;
        using Word = std::conditional_t<kSize == 4, uint32_t, uint16_t>;
        static_assert(sizeof(Word) == kSize);
        const int column = n * 8 + fragment::byte_column(kSize, fragment::c_row(lane_));
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = *reinterpret_cast<const Word*>(from[i] + column);
#pragma unroll
        for (int c = 0; c < kSize; ++c) {
          if constexpr (kScalesWeights) {
            multiply_add<T>(acc[n + c], a, pair_of<T, Bytes>(words[0], words[1], c, 4 + c),
                            pair_of<T, Bytes>(words[2], words[3], c, 4 + c));
          } else {
            float x[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) x[i] = __fmul_rn(Bytes::value(words[i], c), scales[i]);
            multiply_add<T>(acc[n + c], a, pack2<T>(x[0], x[1]), pack2<T>(x[2], x[3]));
          }
        }
      });
    });
  }

 private:
  const unsigned char* rows_;
  const int tokens_, lane_, kv_dtype_;
};

}  // namespace trunkline::cuda
