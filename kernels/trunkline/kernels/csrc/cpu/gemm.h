// The one matrix product of the CPU kernels: C[m][n] (+)= sum over k of A[m][k] * B[k][n], small and in registers.
//
// Scores (queries times packed keys), outputs (probabilities times packed values) and linear layers (tokens times
// packed weights) are all this product with another B. B is packed so that its lanes run along n:
//
//      float32   B[k][n]                      one multiplication per step and lane
//      bfloat16  B[k / 2][n][2]               pairs, for the dot-product instruction; without it, the two halves
//                                             of each 32-bit lane become floats by a shift and a mask
//      float16   B[k][n], 2 bytes each        converted as loaded; A is float
//
// A is one pointer per row, broadcast word by word. Sums run over k in order in one accumulator per element, so
// a row's result does not depend on the rows beside it: what batch invariance rests on.
#pragma once

#include "simd.h"

namespace trunkline::TRUNKLINE_NAMESPACE {
namespace {

struct Float32 {
  using Storage = float;  // in memory, of queries, keys, weights
  using A = float;
  using B = float;
  static constexpr int kStep = 1;        // elements of k per step
  static constexpr int kWords = 1;       // words of A per step
  static constexpr bool kPlainA = true;  // A has the form of Storage
  TRUNKLINE_INLINE static float to_float(float x) { return x; }
  TRUNKLINE_INLINE static float from_float(float x) { return x; }
  TRUNKLINE_INLINE static Vec load_floats(const Storage* p) { return load(p); }
  TRUNKLINE_INLINE static void store_floats(Storage* p, Vec x) { store(p, x); }
  template <int MR>
  TRUNKLINE_INLINE static void step(Vec (&acc)[MR], const A* const (&a)[MR], int k, const B* b) {
    const Vec lanes = load(b);
    TRUNKLINE_UNROLL for (int m = 0; m < MR; ++m) acc[m] = fma(set1(a[m][k]), lanes, acc[m]);
  }
};

struct Float16 {
  using Storage = uint16_t;
  using A = float;
  using B = uint16_t;
  static constexpr int kStep = 1;
  static constexpr int kWords = 1;
  static constexpr bool kPlainA = false;
  TRUNKLINE_INLINE static float to_float(uint16_t x) { return float_of_f16(x); }
  TRUNKLINE_INLINE static uint16_t from_float(float x) { return f16_of_float(x); }
  TRUNKLINE_INLINE static Vec load_floats(const Storage* p) { return load_f16(p); }
  TRUNKLINE_INLINE static void store_floats(Storage* p, Vec x) { store_f16(p, x); }
  template <int MR>
  TRUNKLINE_INLINE static void step(Vec (&acc)[MR], const A* const (&a)[MR], int k, const B* b) {
    const Vec lanes = load_f16(b);
    TRUNKLINE_UNROLL for (int m = 0; m < MR; ++m) acc[m] = fma(set1(a[m][k]), lanes, acc[m]);
  }
};

struct BFloat16 {
  using Storage = uint16_t;
  using B = uint32_t;  // a pair
  static constexpr int kStep = 2;
  TRUNKLINE_INLINE static float to_float(uint16_t x) { return float_of_bf16(x); }
  TRUNKLINE_INLINE static uint16_t from_float(float x) { return bf16_of_float(x); }
  TRUNKLINE_INLINE static Vec load_floats(const Storage* p) { return load_bf16(p); }
  TRUNKLINE_INLINE static void store_floats(Storage* p, Vec x) { store_bf16(p, x); }
#if TRUNKLINE_LEVEL >= 3
  using A = uint32_t;
  static constexpr int kWords = 1;
  static constexpr bool kPlainA = true;
  template <int MR>
  TRUNKLINE_INLINE static void step(Vec (&acc)[MR], const A* const (&a)[MR], int k, const B* b) {
    const __m512bh lanes = reinterpret_cast<__m512bh>(load_bits(b));
    TRUNKLINE_UNROLL for (int m = 0; m < MR; ++m) {
      const __m512bh pair = reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(a[m][k])));
      acc[m] = _mm512_dpbf16_ps(acc[m], pair, lanes);
    }
  }
#else
  using A = float;
  static constexpr int kWords = 2;
  static constexpr bool kPlainA = false;
  template <int MR>
  TRUNKLINE_INLINE static void step(Vec (&acc)[MR], const A* const (&a)[MR], int k, const B* b) {
    const Bits pairs = load_bits(b);
    const Vec low = low_bf16(pairs), high = high_bf16(pairs);
    TRUNKLINE_UNROLL for (int m = 0; m < MR; ++m) {
      acc[m] = fma(set1(a[m][2 * k]), low, acc[m]);
      acc[m] = fma(set1(a[m][2 * k + 1]), high, acc[m]);
    }
  }
#endif
};

#if TRUNKLINE_LEVEL >= 2
constexpr int kMaxRows = 6, kMaxVectors = 4;  // 24 of 32 registers accumulate
#else
constexpr int kMaxRows = 4, kMaxVectors = 2;
#endif
constexpr int kWideRows = (kMaxRows + 1) / 2, kWideVectors = 2 * kMaxVectors;

constexpr long kLineBytes = 64;

// MR rows times NV vectors. `ldb`: lanes from one step of B to the next. `ahead`: bytes from the first vector of B to
// what will be read next, of which kAhead vectors are fetched in each step, at the pace of this product. kLines:
// what is fetched is one line from `lines` on in each step instead.
template <class T, int MR, int NV, int kAhead, bool kLines = false>
TRUNKLINE_INLINE void gemm_tile(const typename T::A* const* rows, const typename T::B* b, long ldb, int steps,
                                float* c, long ldc, bool accumulate, long ahead, const char* lines = nullptr) {
  const typename T::A* a[MR];
  TRUNKLINE_UNROLL for (int m = 0; m < MR; ++m) a[m] = rows[m];
  Vec acc[NV][MR];
  TRUNKLINE_UNROLL for (int v = 0; v < NV; ++v) {
    TRUNKLINE_UNROLL for (int m = 0; m < MR; ++m) acc[v][m] = accumulate ? load(c + m * ldc + v * kLanes) : zero();
  }
  for (int k = 0; k < steps; ++k) {
    if constexpr (kLines) prefetch_second(lines + k * kLineBytes);
    TRUNKLINE_UNROLL for (int v = 0; v < NV; ++v) {
      if (v < kAhead) prefetch_second(reinterpret_cast<const char*>(b + v * kLanes) + ahead);
      T::template step<MR>(acc[v], a, k, b + v * kLanes);
    }
    b += ldb;
  }
  TRUNKLINE_UNROLL for (int v = 0; v < NV; ++v) {
    TRUNKLINE_UNROLL for (int m = 0; m < MR; ++m) store(c + m * ldc + v * kLanes, acc[v][m]);
  }
}

template <class T, int NV, int kAhead, int kRows>
TRUNKLINE_INLINE void gemm_block(int m, const typename T::A* const* a, const typename T::B* b, long ldb, int steps,
                                 float* c, long ldc, bool accumulate, long ahead) {
  if constexpr (kRows > 1) {
    if (m < kRows) return gemm_block<T, NV, kAhead, kRows - 1>(m, a, b, ldb, steps, c, ldc, accumulate, ahead);
  }
  gemm_tile<T, kRows, NV, kAhead>(a, b, ldb, steps, c, ldc, accumulate, ahead);
}

// Under sanitizers nothing is fetched ahead, which changes no result: a third of the code, and of the time to compile it.
#ifdef TRUNKLINE_NO_PREFETCH
constexpr bool kFetchesAhead = false;
#else
constexpr bool kFetchesAhead = true;
#endif

// Rows in blocks of about equal height: a last block of one or two would not fill the pipelines. If there are several,
// the first two share what is fetched ahead, so that memory is busy for longer.
template <class T, int NV, int kRows>
[[gnu::noinline]] void gemm_blocks(int m, const typename T::A* const* a, const typename T::B* b, long ldb,
                                   int steps, float* c, long ldc, bool accumulate, long ahead) {
  constexpr int kHalf = (NV + 1) / 2;
  int blocks = (m + kRows - 1) / kRows;
  for (int turn = ahead == 0 ? 2 : blocks > 1 ? 0 : -1; blocks > 0; --blocks, ++turn) {
    const int height = (m + blocks - 1) / blocks;
    if constexpr (!kFetchesAhead) {
      gemm_block<T, NV, 0, kRows>(height, a, b, ldb, steps, c, ldc, accumulate, 0);
    } else if (turn < 0) {
      gemm_block<T, NV, NV, kRows>(height, a, b, ldb, steps, c, ldc, accumulate, ahead);
    } else if (turn < 2) {
      const long fetch = ahead + turn * static_cast<long>((NV - kHalf) * kLanes * sizeof(typename T::B));
      gemm_block<T, NV, kHalf, kRows>(height, a, b, ldb, steps, c, ldc, accumulate, fetch);
    } else {
      gemm_block<T, NV, 0, kRows>(height, a, b, ldb, steps, c, ldc, accumulate, 0);
    }
    a += height, c += height * ldc, m -= height;
  }
}

// C `[m, kMaxVectors * kLanes]` (+)= A B for at least kFetchingRows rows; each block of rows fetches a line in each step,
// from where `fetch` says for it. So many rows have blocks of kMaxRows or one less.
constexpr int kFetchingRows = 4 * kMaxRows;

template <class T>
[[gnu::noinline]] void gemm_fetching(int m, const typename T::A* const* a, const typename T::B* b, long ldb,
                                     int steps, float* c, long ldc, bool accumulate, const char* const* fetch) {
  for (int blocks = (m + kMaxRows - 1) / kMaxRows; blocks > 0; --blocks, ++fetch) {
    const int height = (m + blocks - 1) / blocks;
    if (height == kMaxRows) {
      gemm_tile<T, kMaxRows, kMaxVectors, 0, true>(a, b, ldb, steps, c, ldc, accumulate, 0, *fetch);
    } else {
      gemm_tile<T, kMaxRows - 1, kMaxVectors, 0, true>(a, b, ldb, steps, c, ldc, accumulate, 0, *fetch);
    }
    a += height, c += height * ldc, m -= height;
  }
}

// C `[m, n]` (+)= A `[m, steps * kStep]` B; n is a multiple of kLanes, `ldc` in floats. `ahead`: bytes from B to
// memory of the same shape that is to be fetched meanwhile; 0: none.
template <class T>
TRUNKLINE_INLINE void gemm(int m, int n, int steps, const typename T::A* const* a, const typename T::B* b,
                           long ldb, float* c, long ldc, bool accumulate, long ahead = 0) {
  // Low and wide blocks have as many accumulators, but rows of B are read in one sweep, as they lie in memory. What
  // has to be converted is read by as many rows at a time as there are registers for.
  constexpr bool kConverts = T::kWords > 1 || sizeof(typename T::A) != sizeof(typename T::B);
  int vectors = n / kLanes;
  while (vectors >= kWideVectors && (!kConverts || m <= kWideRows)) {
    gemm_blocks<T, kWideVectors, kWideRows>(m, a, b, ldb, steps, c, ldc, accumulate, ahead);
    b += kWideVectors * kLanes, c += kWideVectors * kLanes, vectors -= kWideVectors;
  }
  while (vectors >= kMaxVectors) {
    gemm_blocks<T, kMaxVectors, kMaxRows>(m, a, b, ldb, steps, c, ldc, accumulate, ahead);
    b += kMaxVectors * kLanes, c += kMaxVectors * kLanes, vectors -= kMaxVectors;
  }
  switch (vectors) {
    case 1: return gemm_blocks<T, 1, kMaxRows>(m, a, b, ldb, steps, c, ldc, accumulate, ahead);
    case 2:
      if constexpr (kMaxVectors > 2)
        return gemm_blocks<T, 2, kMaxRows>(m, a, b, ldb, steps, c, ldc, accumulate, ahead);
      break;
    case 3:
      if constexpr (kMaxVectors > 3)
        return gemm_blocks<T, 3, kMaxRows>(m, a, b, ldb, steps, c, ldc, accumulate, ahead);
      break;
    default: break;
  }
}

}  // namespace
}  // namespace trunkline::TRUNKLINE_NAMESPACE
