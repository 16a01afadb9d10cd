// What the kernels of sampling.cu know of one row of logits, and the arithmetic that the reference
// (`trunkline/kernels/reference_sampling.py`) defines to the bit: hashes, noise, weights, the order of tokens.
//
// Roundings are spelled out (__fmul_rn, __fadd_rn, __fdiv_rn) where a compiler could fuse a product and a sum.
#pragma once

#include <primitives.cuh>

#include "api.h"

namespace trunkline::cuda {

constexpr int kSliceTokens = 2048;  // read by a thread block at once
constexpr int kPeakTokens = 64;     // whose largest score is kept
constexpr int kQuad = 4;            // read by a thread at once
constexpr int kScanThreads = 256;
constexpr float kMinusInfinity = -__builtin_inff();
constexpr float kNoiseMax = 36.75f;  // no noise is larger: -log(-log(1 - 2^-53))
constexpr uint64_t kNoRank = ~uint64_t{0};
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;

__device__ __forceinline__ uint64_t mix_bits(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// Ascending in the order of the limits: descending scores, then ascending ids. So what limits leave is always the
// tokens whose rank is at most some number.
__device__ __forceinline__ uint64_t rank_of(float score, uint32_t id) {
  const uint32_t bits = bits_of(score + 0.0f);  // no -0
  const uint32_t ascending = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return uint64_t{~ascending} << 32 | id;
}
__device__ __forceinline__ float score_of_rank(uint64_t rank) {
  const auto ascending = ~static_cast<uint32_t>(rank >> 32);
  return float_of((ascending & 0x80000000u) != 0 ? ascending & 0x7fffffffu : ~ascending);
}
__device__ __forceinline__ int id_of_rank(uint64_t rank) { return static_cast<int>(rank & 0xffffffffu); }

// exp(d) for d <= 0 in multiples of 2^-34, as a whole number: sums of these are exact in any order.
__device__ __forceinline__ uint64_t weight_of(float d) {
  const float scaled = __fmul_rn(d, 1.44269504f);
  const float y = scaled > -64.0f ? scaled : -64.0f;                       // also where d is no number
  const float whole = __fadd_rn(__fadd_rn(y, 12582912.0f), -12582912.0f);  // 1.5 * 2^23: no fraction is left
  const float f = __fadd_rn(y, -whole);
  float p = 1.54035304e-4f;
  p = __fadd_rn(__fmul_rn(p, f), 1.33335581e-3f);
  p = __fadd_rn(__fmul_rn(p, f), 9.61812911e-3f);
  p = __fadd_rn(__fmul_rn(p, f), 5.55041087e-2f);
  p = __fadd_rn(__fmul_rn(p, f), 2.40226507e-1f);
  p = __fadd_rn(__fmul_rn(p, f), 6.93147181e-1f);
  p = __fadd_rn(__fmul_rn(p, f), 1.0f);
  const float power = float_of(static_cast<uint32_t>(static_cast<int32_t>(whole) + 127) << 23);
  return static_cast<uint64_t>(__fmul_rn(__fadd_rn(__fadd_rn(__fmul_rn(p, power), 0x1p-11f), -0x1p-11f), 0x1p34f));
}
__device__ __forceinline__ double sum_of_weights(uint64_t weights) {
  return static_cast<double>(weights) * 0x1p-34;  // exact: below 2^53 for half a million tokens
}

__device__ __forceinline__ double noise_of(uint64_t hash) {
  const double bits = static_cast<double>(hash >> 11) + 0.5;
  const double uniform = (bits < 9007199254740991.0 ? bits : 9007199254740991.0) * 0x1p-53;
  return -log(-log(uniform));
}

// At least the noise, within float32's rounding. With c = 1 - u rounded down to 24 bits, the noise -log(-log u) is at
// most -log c, and a float's bits, read as a whole number, are at most 2^23 (127 + log2 of it).
__device__ __forceinline__ float noise_bound(uint64_t hash) {
  constexpr double kLn2 = 0.6931471805599453;
  const float c = static_cast<float>(static_cast<int32_t>(~hash >> 40));
  const float log_c = static_cast<float>(static_cast<int32_t>(bits_of(c)));
  return static_cast<float>((24 + 127) * kLn2) - log_c * static_cast<float>(kLn2 / (1 << 23));
}
// A float that every sum not below `best` exceeds when it is bounded as above.
__device__ __forceinline__ float limit_below(double best) {
  return static_cast<float>(best - (1e-3 + 1e-6 * fabs(best)));
}

// The token that wins so far; of equal sums the one that comes first in the order.
struct Winner {
  double sum;
  uint64_t rank;

  __device__ void take(const Winner& other) {
    if (other.sum > sum || (other.sum == sum && other.rank < rank)) *this = other;
  }
};

// One row, and how it draws. The last quad of tokens is padded with -infinity, which also stands for what is no
// number: ids beyond the vocabulary come last in every order.
struct Row {
  const float* logits;
  int vocab_size;
  int top_k;  // 0: no limit
  float temperature, top_p, log_min_p;
  bool is_aligned;
  uint64_t hash;

  __device__ Row(const DrawCall& call, int row)
      : logits(call.logits + row * call.row_stride),
        vocab_size(call.vocab_size),
        top_k(call.top_k[row] < call.vocab_size ? call.top_k[row] : 0),
        temperature(call.temperature[row]),
        top_p(call.top_p[row]),
        log_min_p(call.log_min_p[row]),
        is_aligned(reinterpret_cast<uintptr_t>(logits) % 16 == 0),
        hash(mix_bits(mix_bits(static_cast<uint64_t>(call.seeds[row])) +
                      (static_cast<uint64_t>(call.output_index[row]) + 1) * kGolden)) {
    if (top_k < 0) top_k = 0;
  }

  __device__ bool is_greedy() const { return temperature == 0.0f; }
  __device__ bool has_top_p() const { return top_p < 1.0f; }

  __device__ float logit(int token) const {
    const float x = logits[token];
    return x == x ? x : kMinusInfinity;
  }
  __device__ float score(float logit) const {
    if (is_greedy()) return logit;
    const float x = __fdiv_rn(logit, temperature);
    return x == x ? x : kMinusInfinity;
  }
  __device__ uint64_t token_hash(int token) const {
    return mix_bits(hash ^ mix_bits((static_cast<uint64_t>(token) + 1) * kGolden));
  }
  __device__ Winner sum(float score, int token) const {
    return {static_cast<double>(score) + noise_of(token_hash(token)),
            rank_of(score, static_cast<uint32_t>(token))};
  }

  __device__ void load(int first, float (&x)[kQuad]) const {
    if (is_aligned && first + kQuad <= vocab_size) {
      const uint4 read = *reinterpret_cast<const uint4*>(logits + first);
      x[0] = float_of(read.x);
      x[1] = float_of(read.y);
      x[2] = float_of(read.z);
      x[3] = float_of(read.w);
    } else {
      for (int j = 0; j < kQuad; ++j) x[j] = first + j < vocab_size ? logits[first + j] : kMinusInfinity;
    }
    for (int j = 0; j < kQuad; ++j) x[j] = x[j] == x[j] ? x[j] : kMinusInfinity;
  }
};

// What was found in one slice of a row, or in all of it.
struct Found {
  Winner winner;    // of the scores with noise; sum -infinity: none, or not looked for
  uint64_t peak;    // rank of the largest score
  uint64_t greedy;  // rank of the largest logit

  __device__ void take(const Found& other) {
    winner.take(other.winner);
    if (other.peak < peak) peak = other.peak;
    if (other.greedy < greedy) greedy = other.greedy;
  }
};
__device__ __forceinline__ Found nothing_found() { return {{-__builtin_inf(), kNoRank}, kNoRank, kNoRank}; }

// Weights of a slice of a row, or of all of it.
struct Weights {
  uint64_t before;  // of the tokens that come before the winner
  uint64_t all;

  __device__ void take(const Weights& other) {
    before += other.before;
    all += other.all;
  }
};

// Where the kernels leave what the next one reads. Nothing needs to be cleared.
struct Scratch {
  Found* found;      // [rows, slices]
  Weights* weights;  // [rows, slices]
  float* peaks;      // [rows, blocks]
  int slices;
  int blocks;  // of kPeakTokens

  __host__ __device__ Scratch(void* memory, int64_t rows, int vocab_size)
      : slices((vocab_size + kSliceTokens - 1) / kSliceTokens),
        blocks((vocab_size + kPeakTokens - 1) / kPeakTokens) {
    found = static_cast<Found*>(memory);
    weights = reinterpret_cast<Weights*>(found + rows * slices);
    peaks = reinterpret_cast<float*>(weights + rows * slices);
  }
  static int64_t bytes(int64_t rows, int64_t vocab_size) {
    const int64_t slices = (vocab_size + kSliceTokens - 1) / kSliceTokens;
    const int64_t blocks = (vocab_size + kPeakTokens - 1) / kPeakTokens;
    return rows * (slices * static_cast<int64_t>(sizeof(Found) + sizeof(Weights)) + blocks * 4);
  }
};

template <class T>
__device__ __forceinline__ T shuffle_struct(const T& x, int mask) {
  static_assert(sizeof(T) % sizeof(uint64_t) == 0);
  constexpr int kWords = sizeof(T) / sizeof(uint64_t);
  uint64_t words[kWords];
  memcpy(words, &x, sizeof(T));
  for (int i = 0; i < kWords; ++i) words[i] = shuffle_xor(words[i], mask);
  T y;
  memcpy(&y, words, sizeof(T));
  return y;
}

// `T::take` over all threads; every thread gets the result. `shared` has room for one T per warp.
template <int Threads, class T>
__device__ T block_take(T x, T* shared) {
  for (int mask = kWarpLanes / 2; mask > 0; mask /= 2) x.take(shuffle_struct(x, mask));
  if (threadIdx.x % kWarpLanes == 0) shared[threadIdx.x / kWarpLanes] = x;
  __syncthreads();
  x = shared[0];
  for (int warp = 1; warp < Threads / kWarpLanes; ++warp) x.take(shared[warp]);
  __syncthreads();  // the next one writes there
  return x;
}

// What a row's slices have found, or weigh, together.
template <int Threads, class T>
__device__ T combine_slices(const T* slices, int count, T x, T* shared) {
  for (int i = static_cast<int>(threadIdx.x); i < count; i += Threads) x.take(slices[i]);
  return block_take<Threads>(x, shared);
}

}  // namespace trunkline::cuda
