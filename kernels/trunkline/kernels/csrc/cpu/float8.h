// Codes in groups that are floats of 8 bits (e4m3): the product over their panels (`GroupForm` in linear.h).
//
// A group's sum is over the values of its codes times 2^-8, which are floats and pairs of bf16 after a shift
// (`simd_integers.h`); it is multiplied with 2^8 times the group's scale and added to the sum of the groups before.
// Nothing of a weight is rounded. Few rows make values of codes in registers; for more, a block of them is put into
// the first-level cache once. Both add in the same order.
#pragma once

#include "linear_unit.h"
#include "simd_integers.h"

namespace trunkline::TRUNKLINE_NAMESPACE {
namespace {

// Inputs of a block of values in the first-level cache.
constexpr int kFloat8Inputs = 64;

// How many steps of a product a word of four codes has, and what the step is multiplied with.
template <class T>
struct Float8Steps;

template <>
struct Float8Steps<Float32> {
  static constexpr int kCount = 4;
  TRUNKLINE_INLINE static Vec lanes(Bits codes, int step) {
    const int byte = step == 1 ? 2 : step == 2 ? 1 : step;
    return floats_of_float8(shift_left(codes, 24 - 8 * byte));
  }
  TRUNKLINE_INLINE static void put(float* out, Vec lanes) { store(out, lanes); }
};

#if TRUNKLINE_LEVEL >= 3
template <>
struct Float8Steps<BFloat16> {
  static constexpr int kCount = 2;
  TRUNKLINE_INLINE static __m512bh lanes(Bits codes, int step) {
    return reinterpret_cast<__m512bh>(pairs_of_float8(step == 0 ? shift_left(codes, 8) : codes));
  }
  TRUNKLINE_INLINE static void put(uint32_t* out, __m512bh lanes) {
    store_words(out, reinterpret_cast<Bits>(lanes));
  }
};
#endif

// Rows and vectors of a tile, as many as there are registers for beside the codes and their values.
#if TRUNKLINE_LEVEL >= 2
constexpr int kFloat8Rows = 6;
constexpr int float8_vectors(int rows) { return rows <= 3 ? 4 : 2; }
#else
constexpr int kFloat8Rows = 4;
constexpr int float8_vectors(int rows) { return rows <= 2 ? 2 : 1; }
#endif

TRUNKLINE_INLINE Vec plus_group(Vec sum, Vec scale, const float* before, bool accumulate) {
  return fma(sum, mul(scale, set1(0x1p8f)), accumulate ? load(before) : zero());
}

// MR rows times NV vectors of lanes of a group: values are made of codes in registers.
template <class T, int MR, int NV>
[[gnu::noinline]] void float8_tile(const typename T::A* a, long lda, const uint8_t* codes, int words, int width,
                                   const float* scale, float* c, bool accumulate) {
  using Steps = Float8Steps<T>;
  const typename T::A* rows[MR];
  for (int m = 0; m < MR; ++m) rows[m] = a + m * lda;
  Vec acc[MR][NV];
  for (int m = 0; m < MR; ++m) {
    for (int v = 0; v < NV; ++v) acc[m][v] = zero();
  }
  for (int word = 0; word < words; ++word, codes += width * 4) {
    Bits four[NV];
    for (int v = 0; v < NV; ++v) {
      const uint8_t* from = codes + v * kLanes * 4;
      four[v] = load_words(from);
      if (kLanes == 16 || v % 2 == 0) prefetch_once(from + kAheadBytes);
    }
    for (int step = 0; step < Steps::kCount; ++step) {
      typename Factors<T>::Lanes lanes[NV];
      for (int v = 0; v < NV; ++v) lanes[v] = Steps::lanes(four[v], step);
      for (int m = 0; m < MR; ++m) {
        const auto x = Factors<T>::broadcast(rows[m][word * Steps::kCount + step]);
        for (int v = 0; v < NV; ++v) acc[m][v] = Factors<T>::multiply(x, lanes[v], acc[m][v]);
      }
    }
  }
  for (int m = 0; m < MR; ++m) {
    for (int v = 0; v < NV; ++v) {
      float* to = c + m * kPanelWidth + v * kLanes;
      store(to, plus_group(acc[m][v], load(scale + v * kLanes), to, accumulate));
    }
  }
}

// One tile of rows over all lanes of a panel.
template <class T, int MR>
void float8_lanes(const typename T::A* a, long lda, const uint8_t* codes, int words, int width, const float* scale,
                  float* c, bool accumulate) {
  constexpr int kVectors = float8_vectors(MR);
  int lane = 0;
  for (; lane + kVectors * kLanes <= width; lane += kVectors * kLanes) {
    float8_tile<T, MR, kVectors>(a, lda, codes + lane * 4, words, width, scale + lane, c + lane, accumulate);
  }
  for (; lane < width; lane += kLanes) {
    float8_tile<T, MR, 1>(a, lda, codes + lane * 4, words, width, scale + lane, c + lane, accumulate);
  }
}

template <class T>
void few_rows(int rows, const typename T::A* a, long lda, const uint8_t* codes, int words, int width,
              const float* scale, float* c, bool accumulate) {
  switch (rows) {
    case 1: return float8_lanes<T, 1>(a, lda, codes, words, width, scale, c, accumulate);
    case 2: return float8_lanes<T, 2>(a, lda, codes, words, width, scale, c, accumulate);
    case 3: return float8_lanes<T, 3>(a, lda, codes, words, width, scale, c, accumulate);
    case 4: return float8_lanes<T, 4>(a, lda, codes, words, width, scale, c, accumulate);
#if TRUNKLINE_LEVEL >= 2
    case 5: return float8_lanes<T, 5>(a, lda, codes, words, width, scale, c, accumulate);
#endif
    default: return float8_lanes<T, kFloat8Rows>(a, lda, codes, words, width, scale, c, accumulate);
  }
}

// The values of some words of codes as the product reads them, step by step.
template <class T>
void put_values(const uint8_t* codes, int words, int width, typename T::B* out) {
  using Steps = Float8Steps<T>;
  for (int word = 0; word < words; ++word, out += Steps::kCount * width) {
    for (int lane = 0; lane < width; lane += kLanes) {
      const uint8_t* from = codes + (word * width + lane) * 4;
      const Bits four = load_words(from);
      prefetch(from + kAheadBytes);
      for (int step = 0; step < Steps::kCount; ++step) {
        Steps::put(out + step * width + lane, Steps::lanes(four, step));
      }
    }
  }
}

// Rows times the codes of a group, block by block.
template <class T>
void many_rows(int rows, const typename T::A* a, long lda, const uint8_t* codes, int inputs, int width,
               const float* scale, float* c, bool accumulate) {
  alignas(64) typename T::B block[kFloat8Inputs / 4 * Float8Steps<T>::kCount * kPanelWidth];
  alignas(64) float part[kRowsMax * kPanelWidth];
  const int tiles = (rows + kTileRows - 1) / kTileRows;
  for (int start = 0; start < inputs; start += kFloat8Inputs) {
    const int count = smaller(kFloat8Inputs, inputs - start), steps = count / 4 * Float8Steps<T>::kCount;
    put_values<T>(codes + static_cast<long>(start) * width, count / 4, width, block);
    const typename T::A* from = a + start / 4 * Float8Steps<T>::kCount;
    for (int tile = 0; tile < tiles; ++tile) {
      const int first = rows * tile / tiles, last = rows * (tile + 1) / tiles;
      linear_rows<T, 0>(last - first, from + first * lda, lda, block, width, steps, part + first * kPanelWidth,
                        start > 0, reinterpret_cast<const char*>(block));
    }
  }
  for (int row = 0; row < rows; ++row) {
    for (int lane = 0; lane < width; lane += kLanes) {
      float* to = c + row * kPanelWidth + lane;
      store(to, plus_group(load(part + row * kPanelWidth + lane), load(scale + lane), to, accumulate));
    }
  }
}

// Rows times a panel, group by group.
template <class T>
void multiply_float8(int rows, const typename T::A* a, long lda, const GroupForm& form, const void* panel,
                     int width, int64_t inputs, float* sums) {
  const auto* at = static_cast<const uint8_t*>(panel);
  const int group = static_cast<int>(form.group);
  for (int64_t first = 0; first < inputs; first += group, a += group / 4 * Float8Steps<T>::kCount) {
    const auto* scale = reinterpret_cast<const float*>(at);
    // The products ask for what comes behind the codes; no line may be left out.
    for (int line = 0; line < width; line += 16) prefetch(at + line * 4 + kAheadBytes);
    at += width * 4;
    if (rows <= kFloat8Rows) {
      few_rows<T>(rows, a, lda, at, group / 4, width, scale, sums, first > 0);
    } else {
      many_rows<T>(rows, a, lda, at, group, width, scale, sums, first > 0);
    }
    at += static_cast<long>(group) * width;
  }
}

}  // namespace
}  // namespace trunkline::TRUNKLINE_NAMESPACE
