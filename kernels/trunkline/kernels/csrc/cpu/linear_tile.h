// The register-blocked inner loop of the linear layers and the activations of their epilogue.
//
// Differs from `gemm` in gemm.h, which attention uses on small operands in cache, in what a weight streamed from
// memory needs: one row takes a whole panel at a time, and the part of the panel that comes next is prefetched
// while the rows of a larger batch pass over this one.
#pragma once

#include "gemm.h"
#include "linear.h"

namespace trunkline::TRUNKLINE_NAMESPACE {
namespace {

// Rows in registers at most, and vectors beside each other for a number of rows: as many accumulators as the
// register file holds, so that a single row has enough independent sums to hide the latency too.
constexpr int kTileRows = 6;
#if TRUNKLINE_LEVEL >= 2
constexpr int tile_vectors(int) { return 4; }
#else
constexpr int tile_vectors(int rows) { return rows == 1 ? 8 : rows == 2 ? 4 : 2; }
#endif

// Bytes that a single pass over a panel asks for ahead of its use: as much as memory delivers in its latency.
constexpr long kAheadBytes = 8192;

// One step's factors: a vector of the weight, and a word of a row that all its lanes share. A step has as many
// parts as A has words in it. Unlike `T::step` of gemm.h this lets a tile hold a step's vectors and one broadcast
// at a time, which is what 16 registers have room for beside 12 sums. `ldb`: lanes from one row of the panel to the
// next; a step takes `kRows` of them.
template <class T>
struct Factors {
  using Lanes = Vec;
  static constexpr int kRows = 1;
  TRUNKLINE_INLINE static Lanes lanes(const typename T::B* b, long, int) { return T::load_floats(b); }
  TRUNKLINE_INLINE static Lanes broadcast(float a) { return set1(a); }
  TRUNKLINE_INLINE static Vec multiply(Lanes a, Lanes b, Vec sum) { return fma(a, b, sum); }
};

template <>
struct Factors<BFloat16> {
  static constexpr int kRows = 1;
#if TRUNKLINE_LEVEL >= 3
  using Lanes = __m512bh;
  TRUNKLINE_INLINE static Lanes lanes(const uint32_t* b, long, int) {
    return reinterpret_cast<__m512bh>(load_bits(b));
  }
  TRUNKLINE_INLINE static Lanes broadcast(uint32_t a) {
    return reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(a)));
  }
  TRUNKLINE_INLINE static Vec multiply(Lanes a, Lanes b, Vec sum) { return _mm512_dpbf16_ps(sum, a, b); }
#else
  using Lanes = Vec;
  TRUNKLINE_INLINE static Lanes lanes(const uint32_t* b, long, int part) {
    return part == 0 ? low_bf16(load_bits(b)) : high_bf16(load_bits(b));
  }
  TRUNKLINE_INLINE static Lanes broadcast(float a) { return set1(a); }
  TRUNKLINE_INLINE static Vec multiply(Lanes a, Lanes b, Vec sum) { return fma(a, b, sum); }
#endif
};

// MR rows times NV vectors, C in rows of a panel's width. Each step asks for `kLines` lines of memory at `ahead`,
// which moves on by as much as the panel does: lines that are read in one pass, or in several.
template <class T, int MR, int NV, int kLines, int kPasses>
[[gnu::noinline]] void linear_tile(const typename T::A* a, long lda, const typename T::B* b, long ldb, int steps,
                                   float* c, bool accumulate, const char* ahead) {
  const typename T::A* rows[MR];
  TRUNKLINE_UNROLL for (int m = 0; m < MR; ++m) rows[m] = a + m * lda;
  Vec acc[MR][NV];
  TRUNKLINE_UNROLL for (int m = 0; m < MR; ++m) {
    TRUNKLINE_UNROLL for (int v = 0; v < NV; ++v) {
      acc[m][v] = accumulate ? load(c + m * kPanelWidth + v * kLanes) : zero();
    }
  }
  for (int k = 0; k < steps; ++k) {
    for (int line = 0; line < kLines; ++line)
      __builtin_prefetch(ahead + line * 64, 0, kPasses == 1 ? kOnce : kSecondLevel);
    for (int part = 0; part < T::kWords; ++part) {
      typename Factors<T>::Lanes lanes[NV];
      TRUNKLINE_UNROLL for (int v = 0; v < NV; ++v) lanes[v] = Factors<T>::lanes(b + v * kLanes, ldb, part);
      TRUNKLINE_UNROLL for (int m = 0; m < MR; ++m) {
        const auto word = Factors<T>::broadcast(rows[m][k * T::kWords + part]);
        TRUNKLINE_UNROLL for (int v = 0; v < NV; ++v) acc[m][v] = Factors<T>::multiply(word, lanes[v], acc[m][v]);
      }
    }
    b += ldb * Factors<T>::kRows;
    ahead += ldb * Factors<T>::kRows * static_cast<long>(sizeof(*b));
  }
  TRUNKLINE_UNROLL for (int m = 0; m < MR; ++m) {
    TRUNKLINE_UNROLL for (int v = 0; v < NV; ++v) store(c + m * kPanelWidth + v * kLanes, acc[m][v]);
  }
}

// One tile of rows over all lanes of a panel.
template <class T, int MR, int kLines, int kPasses>
TRUNKLINE_INLINE void linear_rows(const typename T::A* a, long lda, const typename T::B* b, int width, int steps,
                                  float* c, bool accumulate, const char* ahead) {
  constexpr int kVectors = tile_vectors(MR);
  int left = width / kLanes;
  for (; left >= kVectors; left -= kVectors, b += kVectors * kLanes, c += kVectors * kLanes) {
    linear_tile<T, MR, kVectors, kLines, kPasses>(a, lda, b, width, steps, c, accumulate, ahead);
  }
  if constexpr (kVectors >= 8) {
    if (left >= 4) {
      linear_tile<T, MR, 4, 0, 1>(a, lda, b, width, steps, c, accumulate, ahead);
      left -= 4, b += 4 * kLanes, c += 4 * kLanes;
    }
  }
  if constexpr (kVectors == 4 && kLanes == kPanelQuantum) {
    if (left == 3) return linear_tile<T, MR, 3, kLines, kPasses>(a, lda, b, width, steps, c, accumulate, ahead);
  }
  if constexpr (kVectors >= 4) {
    if (left >= 2) {
      linear_tile<T, MR, 2, 0, 1>(a, lda, b, width, steps, c, accumulate, ahead);
      left -= 2, b += 2 * kLanes, c += 2 * kLanes;
    }
  }
  if (left == 1) linear_tile<T, MR, 1, 0, 1>(a, lda, b, width, steps, c, accumulate, ahead);
}

template <class T, int kLines, int kPasses = 1>
void linear_rows(int rows, const typename T::A* a, long lda, const typename T::B* b, int width, int steps,
                 float* c, bool accumulate, const char* ahead) {
  switch (rows) {
    case 1: return linear_rows<T, 1, kLines, kPasses>(a, lda, b, width, steps, c, accumulate, ahead);
    case 2: return linear_rows<T, 2, kLines, kPasses>(a, lda, b, width, steps, c, accumulate, ahead);
    case 3: return linear_rows<T, 3, kLines, kPasses>(a, lda, b, width, steps, c, accumulate, ahead);
    case 4: return linear_rows<T, 4, kLines, kPasses>(a, lda, b, width, steps, c, accumulate, ahead);
    case 5: return linear_rows<T, 5, kLines, kPasses>(a, lda, b, width, steps, c, accumulate, ahead);
    default: return linear_rows<T, 6, kLines, kPasses>(a, lda, b, width, steps, c, accumulate, ahead);
  }
}

// One tile of rows over all lanes of a block of a panel, in sweeps of a few lanes that share the lines of memory at
// `ahead` among themselves.
template <class T, int MR>
TRUNKLINE_INLINE void linear_sweeps(const typename T::A* a, long lda, const typename T::B* b, int width, int steps,
                                    float* c, bool accumulate, const char* ahead) {
  constexpr int kVectors = tile_vectors(MR);
  constexpr int kBytes = kVectors * kLanes * static_cast<int>(sizeof(typename T::B));
  int left = width / kLanes;
  for (; left >= kVectors; left -= kVectors, b += kVectors * kLanes, c += kVectors * kLanes, ahead += kBytes) {
    linear_tile<T, MR, kVectors, (kBytes + 63) / 64, 2>(a, lda, b, width, steps, c, accumulate, ahead);
  }
  if constexpr (kVectors == 4) {  // panels are multiples of kPanelQuantum wide
    if (left > 0) linear_tile<T, MR, 2, 0, 1>(a, lda, b, width, steps, c, accumulate, ahead);
  }
}

template <class T>
void linear_sweeps(int rows, const typename T::A* a, long lda, const typename T::B* b, int width, int steps,
                   float* c, bool accumulate, const char* ahead) {
  switch (rows) {
    case 2: return linear_sweeps<T, 2>(a, lda, b, width, steps, c, accumulate, ahead);
    case 3: return linear_sweeps<T, 3>(a, lda, b, width, steps, c, accumulate, ahead);
    case 4: return linear_sweeps<T, 4>(a, lda, b, width, steps, c, accumulate, ahead);
    case 5: return linear_sweeps<T, 5>(a, lda, b, width, steps, c, accumulate, ahead);
    default: return linear_sweeps<T, 6>(a, lda, b, width, steps, c, accumulate, ahead);
  }
}

// 1 / (1 + 2^-y).
TRUNKLINE_INLINE Vec sigmoid_base2(Vec y) {
  const Vec power = exp2(min(sub(zero(), y), set1(126.0f)));
  return div(set1(1.0f), add(set1(1.0f), power));
}

TRUNKLINE_INLINE Vec silu(Vec x) { return mul(x, sigmoid_base2(mul(x, set1(kLog2E)))); }

// 0.5 x (1 + tanh(u)) = x sigmoid(2 u): nothing cancels for negative x.
TRUNKLINE_INLINE Vec gelu_tanh(Vec x) {
  const Vec cube = mul(mul(x, x), x);
  const Vec u = mul(fma(cube, set1(0.044715f), x), set1(0.7978845608028654f));
  return mul(x, sigmoid_base2(mul(u, set1(2.0f * kLog2E))));
}

// x Phi(x) with Phi(-t) = erfc(t / sqrt 2) / 2. erfc(z) exp(z^2) is a polynomial in k = 1 / (1 + p z) without
// constant term; coefficients fitted for the least largest error of the result, 2e-8 before rounding.
TRUNKLINE_INLINE Vec gelu_erf(Vec x) {
  const Vec t = max(x, sub(zero(), x));
  const Vec k = div(set1(1.0f), fma(t, set1(0.29f * 0.7071067811865476f), set1(1.0f)));
  Vec p = set1(1.411675744301422f);
  p = fma(p, k, set1(-2.9278307796800522f));
  p = fma(p, k, set1(3.4418904217070914f));
  p = fma(p, k, set1(-1.7667589851176002f));
  p = fma(p, k, set1(0.7517497853873802f));
  p = fma(p, k, set1(0.08927377208204626f));
  const Vec tail = mul(mul(p, k), exp2(mul(mul(x, x), set1(-0.5f * kLog2E))));
  return sub(max(x, zero()), mul(t, mul(set1(0.5f), tail)));
}

}  // namespace
}  // namespace trunkline::TRUNKLINE_NAMESPACE
