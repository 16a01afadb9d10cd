// Keys and values kept in 8 bits with a scale for each head and token: their layouts, and what multiplies them.
//
// A tile in plain order is `chunk` rows of `d` bytes, int8 or floats of 8 bits (e4m3), and a float32. Packed, the
// scales come first, so that a tile is read in one sweep, then words of four bytes, which lie along the sum of the
// product that reads them (`Int8Bytes`, `Float8Bytes`):
//
//      K   scale [token], word [quad of d][token]        V   scale [token], word [quad of tokens][j of d]
//
// Both can be multiplied in floats: a byte becomes a float in the tile, exactly. With the instructions for bfloat16
// there are two faster ways for queries of that type. Floats of 8 bits become pairs of bfloat16, exactly; a query is
// taken as it is, and weights times the values' scales are rounded to bfloat16, as without 8 bits. With int8 the
// other factor, a query or the weights of a group of keys times the values' scales, is rounded to 16 bits of its
// largest magnitude, which is finer than bfloat16, and taken as two bytes:
//
//      a ≈ unit * (256 high + low)       sum a * x = unit * (256 sum high * (x + 128) + sum low * (x + 128)
//                                                            - 128 * sum of the 16-bit integers)
//
// A row of a latent is its rotary part's high bytes, their low bytes, the latent's bytes, and two scales, the rotary
// part's first; int8 only. The rotary part is rounded to 16 bits, `256 high + low` times its scale, and multiplied as
// two bytes, too: by a query that stands there twice, once times 256. So all of a row are bytes, in two sums.
//
// Every sum of integers is exact modulo 2^32, and the total lies within it for up to 512 terms. No byte becomes NaN
// (the two that stand for it among floats of 8 bits, which are never written, are read as +-480): what slots hold
// that were never written costs nothing as long as their scale is not read.
#pragma once

#include <cstddef>

#include "gemm.h"
#include "kv_layout.h"
#include "simd_integers.h"

namespace trunkline::TRUNKLINE_NAMESPACE {
namespace {

constexpr long kScaleBytes = 4;

// How four int8 are a word of a packed tile: x + 128, unsigned.
struct Int8Bytes {
  static constexpr uint32_t kZero = 0x80808080u;  // four zeros
  static constexpr float kLargest = 127.0f;
  static constexpr float kUnit = 1.0f;                 // what scales are multiplied with
  static constexpr int place(int j) { return 8 * j; }  // of the j-th byte, in bits
  // Four bytes in order to a word, and back.
  TRUNKLINE_INLINE static uint32_t word(uint32_t bytes) { return bytes ^ kZero; }
  // The first bytes of some words to floats, the second ones, and so on.
  TRUNKLINE_INLINE static void floats(const uint32_t* words, Vec (&to)[4]) {
    const Bits quads = load_bits(words);
    to[0] = byte_lanes<0>(quads), to[1] = byte_lanes<1>(quads);
    to[2] = byte_lanes<2>(quads), to[3] = byte_lanes<3>(quads);
  }
  TRUNKLINE_INLINE static void round(Vec x, int8_t* to) {
    float whole[kLanes];
    store(whole, round_to_integer(x));
    for (int lane = 0; lane < kLanes; ++lane) to[lane] = static_cast<int8_t>(whole[lane]);
  }
};

// Four floats of 8 bits: the first and third, the second and fourth, since pairs are made of bytes two apart. Their
// values are read times 2^-8.
struct Float8Bytes {
  static constexpr uint32_t kZero = 0;
  static constexpr float kLargest = 448.0f;
  static constexpr float kUnit = 0x1p8f;
  static constexpr int place(int j) { return j == 1 ? 16 : j == 2 ? 8 : 8 * j; }
  TRUNKLINE_INLINE static uint32_t word(uint32_t bytes) {
    return (bytes & 0xff0000ffu) | ((bytes & 0xff00u) << 8) | ((bytes >> 8) & 0xff00u);
  }
  TRUNKLINE_INLINE static void floats(const uint32_t* words, Vec (&to)[4]) {
    const Bits quads = load_words(words);
    to[0] = floats_of_float8(shift_left(quads, 24)), to[1] = floats_of_float8(shift_left(quads, 8));
    to[2] = floats_of_float8(shift_left(quads, 16)), to[3] = floats_of_float8(quads);
  }
  // Magnitudes up to 448 to the nearest, ties to even. A power of two that is 2^20 times that of x leaves three bits
  // of x's fraction when it is added; below the normal numbers steps are all 2^-9.
  TRUNKLINE_INLINE static void round(Vec x, int8_t* to) {
    const Vec power = max(as_floats(bits_and(as_words(x), set1_word(0x7f800000u))), set1(0x1p-6f));
    const Vec large = mul(power, set1(0x1.8p20f));
    const Vec nearest = sub(add(x, large), large);
    uint32_t words[kLanes], own[kLanes];
    float values[kLanes];
    store_words(words, as_words(nearest)), store_words(own, as_words(x)), store(values, nearest);
    for (int lane = 0; lane < kLanes; ++lane) {
      const uint32_t magnitude = words[lane] & 0x7fffffffu;
      const float subnormal = values[lane] < 0.0f ? -values[lane] : values[lane];
      const uint32_t code = magnitude >= 0x3c800000u
                                ? (magnitude >> 20) - 960u
                                : static_cast<uint32_t>(static_cast<int32_t>(subnormal * 512.0f));
      to[lane] = static_cast<int8_t>(code | (own[lane] >> 24 & 0x80u));
    }
  }
};

// Queries and results of type T, keys and values in 8 bits.
template <class T, class BytesOfKv>
struct ByteKv : T {
  using Bytes = BytesOfKv;
  using A = float;
  using B = uint32_t;  // four bytes
  static constexpr int kStep = 4;
  static constexpr int kWords = 4;
  static constexpr bool kPlainA = false;
  template <int MR>
  TRUNKLINE_INLINE static void step(Vec (&acc)[MR], const A* const (&a)[MR], int k, const B* b) {
    Vec x[4];
    Bytes::floats(b, x);
    for (int m = 0; m < MR; ++m) {
      const A* own = a[m] + 4 * k;
      acc[m] = fma(set1(own[0]), x[0], acc[m]);
      acc[m] = fma(set1(own[1]), x[1], acc[m]);
      acc[m] = fma(set1(own[2]), x[2], acc[m]);
      acc[m] = fma(set1(own[3]), x[3], acc[m]);
    }
  }
};
template <class T>
struct Int8Kv : ByteKv<T, Int8Bytes> {};
template <class T>
struct Float8Kv : ByteKv<T, Float8Bytes> {};

template <class T>
constexpr bool kIsQuantisedKv = requires { typename T::Bytes; };
template <class T>
constexpr bool kMultipliesBytes = false;
// Whether bytes become pairs of bfloat16.
template <class T>
constexpr bool kMultipliesPairs = false;

#if TRUNKLINE_LEVEL >= 3
template <>
struct Float8Kv<BFloat16> : BFloat16 {
  using Bytes = Float8Bytes;
  using A = uint32_t;  // a pair
  using B = uint32_t;  // four bytes
  static constexpr int kStep = 4;
  static constexpr int kWords = 2;
  static constexpr bool kPlainA = false;  // rows end with zeros, as far as whole words of bytes go
  template <int MR>
  TRUNKLINE_INLINE static void step(Vec (&acc)[MR], const A* const (&a)[MR], int k, const B* b) {
    const Bits quads = load_bits(b);
    Bits even, odd;
    all_pairs_of_float8<(MR > 1)>(quads, even, odd);
    const auto first = reinterpret_cast<__m512bh>(even), second = reinterpret_cast<__m512bh>(odd);
    for (int m = 0; m < MR; ++m) {
      const A* own = a[m] + 2 * k;
      acc[m] = _mm512_dpbf16_ps(acc[m], reinterpret_cast<__m512bh>(set1_word(own[0])), first);
      acc[m] = _mm512_dpbf16_ps(acc[m], reinterpret_cast<__m512bh>(set1_word(own[1])), second);
    }
  }
};
template <>
constexpr bool kMultipliesPairs<Float8Kv<BFloat16>> = true;

template <>
struct Int8Kv<BFloat16> : BFloat16 {
  using Bytes = Int8Bytes;
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

// The type as which queries of type T attend. Once they are floats, what they were before is the same to keys and
// values in 8 bits, so that the code for these is there, and compiled, once.
template <class T>
struct AttendingType {
  using Type = T;
};
// Not where it costs speed: at the highest level, what is compiled for it then takes 6 to 9 % longer for prefill over
// floats of 8 bits. Under sanitizers that does not matter.
#if TRUNKLINE_LEVEL < 3 || defined(TRUNKLINE_NO_PREFETCH)
template <class T>
  requires(kIsQuantisedKv<T> && !kMultipliesBytes<T> && !kMultipliesPairs<T>)
struct AttendingType<T> {
  using Type = ByteKv<Float32, typename T::Bytes>;
};
#endif
template <class T>
using Attending = typename AttendingType<T>::Type;

// --- layouts

// The `which`-th scale behind a row's `d` integers.
TRUNKLINE_INLINE float scale_of(const char* row, long d, long which) {
  float scale;
  std::memcpy(&scale, row + d + which * kScaleBytes, kScaleBytes);
  return scale;
}

template <class Bytes>
TRUNKLINE_INLINE uint32_t quad_of(const uint8_t* x, long count) {
  uint32_t word = Bytes::kZero;
  for (int j = 0; j < count; ++j) word ^= uint32_t{x[j]} << Bytes::place(j);
  return word;
}

// Keys of `tokens` rows to words along the head, `stride` words from quad to quad.
template <class Bytes>
inline void pack_key_rows(const char* rows, long row_bytes, long tokens, long d, uint32_t* to, long stride) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(rows);
  if (d % 4 == 0 && reinterpret_cast<uintptr_t>(rows) % 4 == 0) {
    transpose(reinterpret_cast<const uint32_t*>(rows), tokens, d / 4, row_bytes / 4, to, stride);
    for (long quad = 0; quad < d / 4; ++quad) {
      for (long token = 0; token < tokens; ++token) {
        to[quad * stride + token] = Bytes::word(to[quad * stride + token]);
      }
    }
    return;
  }
  for (long token = 0; token < tokens; ++token) {
    for (long j = 0; j < d; j += 4) {
      to[j / 4 * stride + token] = quad_of<Bytes>(bytes + token * row_bytes + j, d - j < 4 ? d - j : 4);
    }
  }
}

// Values of `tokens` rows to words along the tokens, `stride` words from quad to quad; what is missing is zero.
template <class Bytes>
inline void pack_value_rows(const char* rows, long row_bytes, long tokens, long d, uint32_t* to, long stride) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(rows);
  for (long token = 0; token < tokens; token += 4, to += stride) {
    const uint8_t *a = bytes + token * row_bytes, *b = a + row_bytes, *c = b + row_bytes, *e = c + row_bytes;
    if (tokens - token >= 4) {
      for (long j = 0; j < d; ++j) {
        const uint32_t word =
            uint32_t{a[j]} | (uint32_t{b[j]} << 8) | (uint32_t{c[j]} << 16) | (uint32_t{e[j]} << 24);
        to[j] = Bytes::word(word);
      }
    } else {
      for (long j = 0; j < d; ++j) to[j] = Bytes::kZero ^ a[j];
      for (int i = 1; i < tokens - token; ++i) {
        for (long j = 0; j < d; ++j) to[j] ^= uint32_t{a[i * row_bytes + j]} << Bytes::place(i);
      }
    }
  }
}

// A whole tile and back, both `chunk * (d + 4)` bytes; chunk and d are multiples of 16.
template <class Bytes>
inline void pack_byte_tile(const char* plain, bool is_value, long chunk, long d, char* to) {
  const long row_bytes = d + kScaleBytes;
  auto* words = reinterpret_cast<uint32_t*>(to + chunk * kScaleBytes);
  if (is_value) {
    pack_value_rows<Bytes>(plain, row_bytes, chunk, d, words, d);
  } else {
    pack_key_rows<Bytes>(plain, row_bytes, chunk, d, words, chunk);
  }
  for (long token = 0; token < chunk; ++token) {
    std::memcpy(to + token * kScaleBytes, plain + token * row_bytes + d, kScaleBytes);
  }
}

template <class Bytes>
inline void unpack_byte_tile(const char* tile, bool is_value, long chunk, long d, char* to) {
  const long row_bytes = d + kScaleBytes;
  const auto* words = reinterpret_cast<const uint32_t*>(tile + chunk * kScaleBytes);
  if (is_value) {
    for (long token = 0; token < chunk; ++token) {
      auto* row = reinterpret_cast<uint8_t*>(to) + token * row_bytes;
      const uint32_t* from = words + token / 4 * d;
      const int shift = Bytes::place(static_cast<int>(token % 4));
      for (long j = 0; j < d; ++j) row[j] = static_cast<uint8_t>((from[j] ^ Bytes::kZero) >> shift);
    }
  } else {
    transpose(words, d / 4, chunk, chunk, reinterpret_cast<uint32_t*>(to), row_bytes / 4);
    for (long token = 0; token < chunk; ++token) {
      auto* row = reinterpret_cast<uint32_t*>(to + token * row_bytes);
      for (long j = 0; j < d / 4; ++j) row[j] = Bytes::word(row[j]);
    }
  }
  for (long token = 0; token < chunk; ++token) {
    std::memcpy(to + token * row_bytes + d, tile + token * kScaleBytes, kScaleBytes);
  }
}

// --- rounding

// The scale that makes the largest of `d` magnitudes `most`; NaN where there is NaN or infinity.
template <class T>
float largest_scale(const typename T::Storage* x, long d, float most) {
  Vec top = zero(), poison = zero();
  long i = 0;
  for (; i + kLanes <= d; i += kLanes) {
    const Vec v = T::load_floats(x + i);
    top = max(top, max(v, sub(zero(), v)));
    poison = fma(v, zero(), poison);
  }
  float largest = reduce_max(top), wrong = reduce_add(poison);
  for (; i < d; ++i) {
    const float v = T::to_float(x[i]);
    largest = v > largest ? v : -v > largest ? -v : largest;
    wrong += v * 0.0f;
  }
  constexpr float kTiny = 0x1p-126f;
  const float scale = largest / most + wrong;
  return scale < kTiny ? kTiny : scale;
}

// `d` numbers over a scale to as many bytes; zeros if the scale is NaN.
template <class T>
inline void round_bytes(const typename T::Storage* x, long d, float scale, char* row) {
  auto* to = reinterpret_cast<int8_t*>(row);
  if (scale != scale) {
    std::memset(row, 0, static_cast<size_t>(d));
    return;
  }
  long i = 0;
  for (; i + kLanes <= d; i += kLanes) T::Bytes::round(div(T::load_floats(x + i), set1(scale)), to + i);
  for (; i < d; ++i) {
    int8_t same[kLanes];
    T::Bytes::round(set1(T::to_float(x[i]) / scale), same);
    to[i] = same[0];
  }
}

// One head's key or value to a row: the largest magnitude becomes that of a byte. NaN and infinity make the scale NaN.
template <class T>
inline void store_byte_row(const typename T::Storage* x, long d, char* row) {
  const float scale = largest_scale<T>(x, d, T::Bytes::kLargest);
  round_bytes<T>(x, d, scale, row);
  std::memcpy(row + d, &scale, kScaleBytes);
}

constexpr float kInt16Largest = 32512.0f;  // 127 * 256, so that both bytes have a sign

// A rotary part and a latent to a row.
template <class T>
inline void store_latent_row(const typename T::Storage* x, long rotary, long latent, char* row) {
  const float most = T::Bytes::kLargest;
  const float scales[2] = {largest_scale<T>(x, rotary, kInt16Largest), largest_scale<T>(x + rotary, latent, most)};
  for (long i = 0; i < rotary; ++i) {
    float whole[kLanes];
    store(whole, round_to_integer(set1(T::to_float(x[i]) / scales[0])));
    const int number = scales[0] == scales[0] ? static_cast<int>(whole[0]) : 0, high = (number + 128) >> 8;
    row[i] = static_cast<char>(high), row[rotary + i] = static_cast<char>(number - 256 * high);
  }
  char* to = row + 2 * rotary;
  round_bytes<T>(x + rotary, latent, scales[1], to);
  std::memcpy(to + latent, scales, sizeof(scales));
}

constexpr int kSplitRows = kMaxRows;  // vectors that are multiplied as bytes at a time

// A row of 16-bit integers as two rows of bytes.
struct SplitRow {
  float unit;
  int32_t offset;  // 128 times the sum of the integers
};

#if TRUNKLINE_LEVEL >= 3
// `n` floats, a multiple of 16 of them, to 16-bit integers of the largest magnitude and these to two rows of bytes.
template <class Value>
TRUNKLINE_INLINE SplitRow split_values(const Value& value, float largest, int n, int8_t* high, int8_t* low) {
  const Vec inverse = set1(largest > 0x1p-100f ? kInt16Largest / largest : 0.0f);
  Bits sum = zero_bits();
  for (int i = 0; i < n; i += kLanes) sum = split_lanes(mul(value(i), inverse), high + i, low + i, sum);
  return {largest / kInt16Largest, static_cast<int32_t>(128u * static_cast<uint32_t>(reduce_add_bits(sum)))};
}

// 0; NaN if one of `n` numbers is NaN or infinity.
TRUNKLINE_INLINE float poison_of(const float* x, int n) {
  Vec poison = zero();
  for (int i = 0; i < n; i += kLanes) poison = fma(load(x + i), zero(), poison);
  return reduce_add(poison);
}

TRUNKLINE_INLINE SplitRow split_row(const float* x, int n, int8_t* high, int8_t* low) {
  Vec top = zero();
  for (int i = 0; i < n; i += kLanes) top = max(top, max(load(x + i), sub(zero(), load(x + i))));
  SplitRow row = split_values([x](int i) { return load(x + i); }, reduce_max(top), n, high, low);
  row.unit += poison_of(x, n);
  return row;
}

// Weights, which are not negative, times scales. NaN among them is the caller's to see: weights of NaN add up to NaN,
// and scales are those of many rows.
TRUNKLINE_INLINE SplitRow split_weights(const float* x, const float* scales, int n, int8_t* high, int8_t* low) {
  const auto value = [x, scales](int i) { return mul(load(x + i), load(scales + i)); };
  Vec top = zero();
  for (int i = 0; i < n; i += kLanes) top = max(top, value(i));
  return split_values(value, reduce_max(top), n, high, low);
}

// `sums`: of the high and of the low bytes, as bits of integers; the total times `unit`.
TRUNKLINE_INLINE Vec joined_lanes(const float* high, const float* low, int32_t offset, Vec unit) {
  return mul(joined_bytes(load(high), load(low), offset), unit);
}
#endif

}  // namespace
}  // namespace trunkline::TRUNKLINE_NAMESPACE
