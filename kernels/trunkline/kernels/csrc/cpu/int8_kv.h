// Keys and values kept as int8 with a scale for each head and token: their layouts, and what multiplies them.
//
// A tile in plain order is `chunk` rows of `d` int8 and a float32. Packed, the scales come first, so that a tile is
// read in one sweep, then words of four x + 128, which lie along the sum of the product that reads them:
//
//      K   scale [token], word [quad of d][token]        V   scale [token], word [quad of tokens][j of d]
//
// Two ways to multiply. In floats: a byte becomes a float in the tile, exactly. Or in integers, for bfloat16 where
// there are dot products of bytes: the other factor, a query or the weights of a group of keys times the values'
// scales, is rounded to 16 bits of its largest magnitude, which is finer than bfloat16, and taken as two bytes:
//
//      a ≈ unit * (256 high + low)       sum a * x = unit * (256 sum high * (x + 128) + sum low * (x + 128)
//                                                            - 128 * sum of the 16-bit integers)
//
// Every sum of integers is exact modulo 2^32, and the total lies within it for up to 512 terms. Integers are never
// NaN: what slots hold that were never written costs nothing as long as their scale is not read.
#pragma once

#include <cstddef>

#include "gemm.h"
#include "kv_layout.h"

namespace trunkline::TRUNKLINE_NAMESPACE {
namespace {

constexpr long kScaleBytes = 4;
constexpr uint32_t kZeroBytes = 0x80808080u;  // four zeros

// Queries and results of type T, keys and values int8.
template <class T>
struct Int8Kv : T {
  using A = float;
  using B = uint32_t;  // four bytes
  static constexpr int kStep = 4;
  static constexpr int kWords = 4;
  static constexpr bool kPlainA = false;
  template <int MR>
  TRUNKLINE_INLINE static void step(Vec (&acc)[MR], const A* const (&a)[MR], int k, const B* b) {
    const Bits quads = load_bits(b);
    const Vec x0 = byte_lanes<0>(quads), x1 = byte_lanes<1>(quads);
    const Vec x2 = byte_lanes<2>(quads), x3 = byte_lanes<3>(quads);
    for (int m = 0; m < MR; ++m) {
      const A* own = a[m] + 4 * k;
      acc[m] = fma(set1(own[0]), x0, acc[m]);
      acc[m] = fma(set1(own[1]), x1, acc[m]);
      acc[m] = fma(set1(own[2]), x2, acc[m]);
      acc[m] = fma(set1(own[3]), x3, acc[m]);
    }
  }
};

template <class T>
constexpr bool kIsInt8Kv = false;
template <class T>
constexpr bool kIsInt8Kv<Int8Kv<T>> = true;
template <class T>
constexpr bool kMultipliesBytes = false;

#if TRUNKLINE_LEVEL >= 3
template <>
struct Int8Kv<BFloat16> : BFloat16 {
  using A = uint32_t;  // four bytes with a sign
  using B = uint32_t;
  static constexpr int kStep = 4;
  static constexpr int kWords = 1;
  static constexpr bool kPlainA = false;
  // Lanes are integers here.
  template <int MR>
  TRUNKLINE_INLINE static void step(Vec (&acc)[MR], const A* const (&a)[MR], int k, const B* b) {
    const Bits quads = load_bits(b);
    for (int m = 0; m < MR; ++m) acc[m] = dot_bytes(acc[m], quads, a[m][k]);
  }
};
template <>
constexpr bool kMultipliesBytes<Int8Kv<BFloat16>> = true;
#endif

// --- layouts

TRUNKLINE_INLINE float scale_of(const char* row, long d) {
  float scale;
  std::memcpy(&scale, row + d, kScaleBytes);
  return scale;
}

TRUNKLINE_INLINE uint32_t quad_of(const uint8_t* x, long count) {
  uint32_t word = kZeroBytes;
  for (long j = 0; j < count; ++j) word ^= uint32_t{x[j]} << (8 * j);
  return word;
}

// Keys of `tokens` rows to words along the head, `stride` words from quad to quad.
inline void pack_key_rows(const char* rows, long row_bytes, long tokens, long d, uint32_t* to, long stride) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(rows);
  if (d % 4 == 0 && reinterpret_cast<uintptr_t>(rows) % 4 == 0) {
    transpose(reinterpret_cast<const uint32_t*>(rows), tokens, d / 4, row_bytes / 4, to, stride);
    for (long quad = 0; quad < d / 4; ++quad) {
      for (long token = 0; token < tokens; ++token) to[quad * stride + token] ^= kZeroBytes;
    }
    return;
  }
  for (long token = 0; token < tokens; ++token) {
    for (long j = 0; j < d; j += 4) {
      to[j / 4 * stride + token] = quad_of(bytes + token * row_bytes + j, d - j < 4 ? d - j : 4);
    }
  }
}

// Values of `tokens` rows to words along the tokens, `stride` words from quad to quad; what is missing is zero.
inline void pack_value_rows(const char* rows, long row_bytes, long tokens, long d, uint32_t* to, long stride) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(rows);
  for (long token = 0; token < tokens; token += 4, to += stride) {
    const uint8_t *a = bytes + token * row_bytes, *b = a + row_bytes, *c = b + row_bytes, *e = c + row_bytes;
    if (tokens - token >= 4) {
      for (long j = 0; j < d; ++j) {
        const uint32_t word =
            uint32_t{a[j]} | (uint32_t{b[j]} << 8) | (uint32_t{c[j]} << 16) | (uint32_t{e[j]} << 24);
        to[j] = word ^ kZeroBytes;
      }
    } else {
      for (long j = 0; j < d; ++j) to[j] = kZeroBytes ^ a[j];
      for (long i = 1; i < tokens - token; ++i) {
        for (long j = 0; j < d; ++j) to[j] ^= uint32_t{a[i * row_bytes + j]} << (8 * i);
      }
    }
  }
}

// A whole tile and back, both `chunk * (d + 4)` bytes; chunk and d are multiples of 16.
inline void pack_int8_tile(const char* plain, bool is_value, long chunk, long d, char* to) {
  const long row_bytes = d + kScaleBytes;
  auto* words = reinterpret_cast<uint32_t*>(to + chunk * kScaleBytes);
  if (is_value) {
    pack_value_rows(plain, row_bytes, chunk, d, words, d);
  } else {
    pack_key_rows(plain, row_bytes, chunk, d, words, chunk);
  }
  for (long token = 0; token < chunk; ++token) {
    std::memcpy(to + token * kScaleBytes, plain + token * row_bytes + d, kScaleBytes);
  }
}

inline void unpack_int8_tile(const char* tile, bool is_value, long chunk, long d, char* to) {
  const long row_bytes = d + kScaleBytes;
  const auto* words = reinterpret_cast<const uint32_t*>(tile + chunk * kScaleBytes);
  if (is_value) {
    for (long token = 0; token < chunk; ++token) {
      auto* row = reinterpret_cast<uint8_t*>(to) + token * row_bytes;
      const uint32_t* from = words + token / 4 * d;
      const int shift = 8 * static_cast<int>(token % 4);
      for (long j = 0; j < d; ++j) row[j] = static_cast<uint8_t>((from[j] >> shift) ^ 0x80u);
    }
  } else {
    transpose(words, d / 4, chunk, chunk, reinterpret_cast<uint32_t*>(to), row_bytes / 4);
    for (long token = 0; token < chunk; ++token) {
      auto* row = reinterpret_cast<uint32_t*>(to + token * row_bytes);
      for (long j = 0; j < d / 4; ++j) row[j] ^= kZeroBytes;
    }
  }
  for (long token = 0; token < chunk; ++token) {
    std::memcpy(to + token * row_bytes + d, tile + token * kScaleBytes, kScaleBytes);
  }
}

// --- rounding

// One head's key or value to a row: the largest magnitude becomes 127. NaN and infinity make the scale NaN.
template <class T>
inline void store_int8_row(const typename T::Storage* x, long d, char* row) {
  Vec top = zero(), poison = zero();
  long i = 0;
  for (; i + kLanes <= d; i += kLanes) {
    const Vec v = T::load_floats(x + i);
    top = max(top, max(v, sub(zero(), v)));
    poison = fma(v, zero(), poison);
  }
  float largest = reduce_max(top), wrong = reduce_add(poison);
  for (long j = i; j < d; ++j) {
    const float v = T::to_float(x[j]);
    largest = v > largest ? v : -v > largest ? -v : largest;
    wrong += v * 0.0f;
  }
  constexpr float kTiny = 0x1p-126f;
  float scale = largest / 127.0f + wrong;
  if (scale < kTiny) scale = kTiny;
  auto* to = reinterpret_cast<int8_t*>(row);
  if (scale == scale) {
    float whole[kLanes];
    for (i = 0; i + kLanes <= d; i += kLanes) {
      store(whole, round_to_integer(div(T::load_floats(x + i), set1(scale))));
      for (int lane = 0; lane < kLanes; ++lane) to[i + lane] = static_cast<int8_t>(whole[lane]);
    }
    for (; i < d; ++i) {
      store(whole, round_to_integer(set1(T::to_float(x[i]) / scale)));
      to[i] = static_cast<int8_t>(whole[0]);
    }
  } else {
    std::memset(row, 0, static_cast<size_t>(d));
  }
  std::memcpy(row + d, &scale, kScaleBytes);
}

constexpr int kSplitRows = kMaxRows;  // vectors that are multiplied as bytes at a time

// A row of 16-bit integers as two rows of bytes.
struct SplitRow {
  float unit;
  int32_t offset;  // 128 times the sum of the integers
};

#if TRUNKLINE_LEVEL >= 3
constexpr float kInt16Largest = 32512.0f;  // 127 * 256, so that both bytes have a sign

// `n` floats, a multiple of 16 of them, times `factors` (null: 1) to 16-bit integers and these to two rows of bytes.
TRUNKLINE_INLINE SplitRow split_row(const float* x, const float* factors, int n, int8_t* high, int8_t* low) {
  Vec top = zero(), poison = zero();
  const auto value = [&](int i) { return factors == nullptr ? load(x + i) : mul(load(x + i), load(factors + i)); };
  for (int i = 0; i < n; i += kLanes) {
    const Vec v = value(i);
    top = max(top, max(v, sub(zero(), v)));
    poison = fma(v, zero(), poison);
  }
  const float largest = reduce_max(top);
  const Vec inverse = set1(largest > 0x1p-100f ? kInt16Largest / largest : 0.0f);
  Bits sum = zero_bits();
  for (int i = 0; i < n; i += kLanes) sum = split_lanes(mul(value(i), inverse), high + i, low + i, sum);
  return {largest / kInt16Largest + reduce_add(poison),
          static_cast<int32_t>(128u * static_cast<uint32_t>(reduce_add_bits(sum)))};
}

// `sums`: of the high and of the low bytes, as bits of integers; the total times `unit`.
TRUNKLINE_INLINE Vec joined_lanes(const float* high, const float* low, int32_t offset, Vec unit) {
  return mul(joined_bytes(load(high), load(low), offset), unit);
}
#endif

}  // namespace
}  // namespace trunkline::TRUNKLINE_NAMESPACE
