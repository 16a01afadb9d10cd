// Vectors of floats as wide as the instruction set has them: with simd_integers.h all that knows intrinsics.
//
// The kernels are written once against these functions and compiled once per level (`TRUNKLINE_LEVEL`, set by the
// build: 0 portable, 1 AVX2 + FMA + F16C, 2 AVX-512, 3 AVX-512 with dot products of bf16 and of bytes), each time
// into a namespace of its own; `cpu_level.h` picks one at run time.
//
// Everything here and in the kernels has internal linkage, and the kernels use no templates of the standard
// library: a function that the linker merges over levels could bring AVX-512 to a machine without it.
#pragma once

#include <cstdint>
#include <cstring>

#if TRUNKLINE_LEVEL > 0
// GCC's own AVX-512 headers use uninitialised values on purpose (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#if TRUNKLINE_LEVEL == 0
#define TRUNKLINE_NAMESPACE portable
#elif TRUNKLINE_LEVEL == 1
#define TRUNKLINE_NAMESPACE avx2
#elif TRUNKLINE_LEVEL == 2
#define TRUNKLINE_NAMESPACE avx512
#elif TRUNKLINE_LEVEL == 3
#define TRUNKLINE_NAMESPACE avx512bf16
#else
#define TRUNKLINE_NAMESPACE amx
#endif

#define TRUNKLINE_INLINE [[gnu::always_inline]] inline

// Before a loop over vectors that registers are to hold. Unrolled only after the compiler has looked for what can be
// in registers, such an array gets a copy on the stack, which is written and read at every entry. With 16 registers
// it must not: what is unrolled early is put in another order, and spilled.
#if TRUNKLINE_LEVEL >= 2
#define TRUNKLINE_UNROLL _Pragma("GCC unroll 16")
#else
#define TRUNKLINE_UNROLL
#endif

namespace trunkline::TRUNKLINE_NAMESPACE {
namespace {

constexpr float kMinusInfinity = -__builtin_inff();

TRUNKLINE_INLINE float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

TRUNKLINE_INLINE uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

TRUNKLINE_INLINE float float_of_bf16(uint16_t half) { return float_of_bits(uint32_t{half} << 16); }

// To nearest, ties to even; NaN stays NaN.
TRUNKLINE_INLINE uint16_t bf16_of_float(float value) {
  const uint32_t bits = bits_of_float(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

TRUNKLINE_INLINE float float_of_f16(uint16_t half) {
#if TRUNKLINE_LEVEL > 0
  return _cvtsh_ss(half);
#else
  const uint32_t sign = uint32_t{half & 0x8000u} << 16;
  const uint32_t rest = half & 0x7fffu;
  if (rest >= 0x7c00u) return float_of_bits(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));
  if (rest >= 0x0400u) return float_of_bits(sign | ((rest << 13) + (112u << 23)));
  const float magnitude = static_cast<float>(rest) * 0x1p-24f;  // subnormal or zero
  return float_of_bits(sign | bits_of_float(magnitude));
#endif
}

TRUNKLINE_INLINE uint16_t f16_of_float(float value) {
#if TRUNKLINE_LEVEL > 0
  return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
#else
  const uint32_t bits = bits_of_float(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((rest >> 13) & 0x3ffu));
  if (rest >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to infinity
  if (rest < 0x38800000u) {  // subnormal: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits
    const float shifted = float_of_bits(rest) + 0.5f;
    return static_cast<uint16_t>(sign | (bits_of_float(shifted) - 0x3f000000u));
  }
  const uint32_t rounded = rest + 0xfffu + ((rest >> 13) & 1u) - (112u << 23);
  return static_cast<uint16_t>(sign | (rounded >> 13));
#endif
}

#if TRUNKLINE_LEVEL >= 2

constexpr int kLanes = 16;
using Vec = __m512;
using Bits = __m512i;  // 16 words of 32 bits

TRUNKLINE_INLINE Vec zero() { return _mm512_setzero_ps(); }
TRUNKLINE_INLINE Vec set1(float x) { return _mm512_set1_ps(x); }
TRUNKLINE_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
TRUNKLINE_INLINE void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
TRUNKLINE_INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
TRUNKLINE_INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
TRUNKLINE_INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
TRUNKLINE_INLINE Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
TRUNKLINE_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
TRUNKLINE_INLINE Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
TRUNKLINE_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
// Lane i becomes lane i ^ 8, i ^ 4, ...
TRUNKLINE_INLINE Vec swap_eights(Vec x) { return _mm512_shuffle_f32x4(x, x, 0x4e); }
TRUNKLINE_INLINE Vec swap_fours(Vec x) { return _mm512_shuffle_f32x4(x, x, 0xb1); }
TRUNKLINE_INLINE Vec swap_pairs(Vec x) { return _mm512_permute_ps(x, 0x4e); }
TRUNKLINE_INLINE Vec swap_ones(Vec x) { return _mm512_permute_ps(x, 0xb1); }
TRUNKLINE_INLINE float reduce_add(Vec x) {
  x = add(x, swap_eights(x));
  x = add(x, swap_fours(x));
  x = add(x, swap_pairs(x));
  return _mm512_cvtss_f32(add(x, swap_ones(x)));
}
TRUNKLINE_INLINE float reduce_max(Vec x) {
  x = max(x, swap_eights(x));
  x = max(x, swap_fours(x));
  x = max(x, swap_pairs(x));
  return _mm512_cvtss_f32(max(x, swap_ones(x)));
}
// Whether any lane of `x` is greater than the limit's.
TRUNKLINE_INLINE bool any_above(Vec x, Vec limit) { return _mm512_cmp_ps_mask(x, limit, _CMP_GT_OQ) != 0; }
TRUNKLINE_INLINE Vec iota() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
// `x` where lower <= index < upper, lane by lane, else `other`.
TRUNKLINE_INLINE Vec keep_between(Vec x, Vec index, Vec lower, Vec upper, Vec other) {
  const __mmask16 from = _mm512_cmp_ps_mask(index, lower, _CMP_GE_OQ);
  const __mmask16 inside = _mm512_mask_cmp_ps_mask(from, index, upper, _CMP_LT_OQ);
  return _mm512_mask_blend_ps(inside, other, x);
}
// 2^n times x; n is integral, at least kExp2Lowest.
TRUNKLINE_INLINE Vec scale_by_power(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }
TRUNKLINE_INLINE Vec round_to_integer(Vec x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
TRUNKLINE_INLINE Bits load_bits(const uint32_t* p) { return _mm512_loadu_si512(p); }
TRUNKLINE_INLINE Vec low_bf16(Bits b) { return _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)); }
TRUNKLINE_INLINE Vec high_bf16(Bits b) {
  return _mm512_castsi512_ps(_mm512_and_si512(b, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
TRUNKLINE_INLINE Vec load_bf16(const uint16_t* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
TRUNKLINE_INLINE void store_bf16(uint16_t* p, Vec x) {
#if TRUNKLINE_LEVEL >= 3
  // Unlike the scalar path this flushes subnormal numbers to zero.
  const __m256bh half = _mm512_cvtneps_pbh(x);
  std::memcpy(p, &half, 32);
#else
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
#endif
}
TRUNKLINE_INLINE Vec load_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
TRUNKLINE_INLINE void store_f16(uint16_t* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

TRUNKLINE_INLINE Vec load_int8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
#if TRUNKLINE_LEVEL >= 3
// Pairs of bf16: the first from `low`, the second from `high`. An int8 as a float has zeros where bf16 ends.
TRUNKLINE_INLINE Bits load_int8_pairs(const int8_t* low, const int8_t* high) {
  const Bits first = _mm512_srli_epi32(_mm512_castps_si512(load_int8(low)), 16);
  return _mm512_or_si512(first, _mm512_castps_si512(load_int8(high)));
}
TRUNKLINE_INLINE void store_bits(uint32_t* p, Bits b) { _mm512_storeu_si512(p, b); }
TRUNKLINE_INLINE Bits zero_bits() { return _mm512_setzero_si512(); }
// Modulo 2^32: lanes that were made of NaN may be any.
TRUNKLINE_INLINE int32_t reduce_add_bits(Bits b) {
  const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(b), _mm512_extracti64x4_epi64(b, 1));
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
}
// Lanes of integers, in a vector of floats: plus the product of four bytes without and four with a sign.
TRUNKLINE_INLINE Vec dot_bytes(Vec sums, Bits bytes, uint32_t with_sign) {
  const Bits other = _mm512_set1_epi32(static_cast<int>(with_sign));
  return _mm512_castsi512_ps(_mm512_dpbusd_epi32(_mm512_castps_si512(sums), bytes, other));
}
// Rounds to integers of at most 32,639, stores them as high and low bytes with signs, adds them to `sum`.
TRUNKLINE_INLINE Bits split_lanes(Vec x, int8_t* high, int8_t* low, Bits sum) {
  const Bits whole = _mm512_cvtps_epi32(x);
  const Bits top = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(high), _mm512_cvtepi32_epi8(top));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(low), _mm512_cvtepi32_epi8(whole));
  return _mm512_add_epi32(sum, whole);
}
// 256 * high + low - offset of lanes of integers, as floats.
TRUNKLINE_INLINE Vec joined_bytes(Vec high, Vec low, int32_t offset) {
  const Bits both = _mm512_add_epi32(_mm512_slli_epi32(_mm512_castps_si512(high), 8), _mm512_castps_si512(low));
  return _mm512_cvtepi32_ps(_mm512_sub_epi32(both, _mm512_set1_epi32(offset)));
}
#endif
// Bytes kByte of all words, minus 128: below 2^23 an integer is the end of a float.
template <int kByte>
TRUNKLINE_INLINE Vec byte_lanes(Bits b) {
  const Bits byte = _mm512_and_si512(_mm512_srli_epi32(b, 8 * kByte), _mm512_set1_epi32(0xff));
  const Bits whole = _mm512_or_si512(byte, _mm512_set1_epi32(0x4b000000));
  return _mm512_sub_ps(_mm512_castsi512_ps(whole), _mm512_set1_ps(8388736.0f));
}

// The transpose of kLanes x kLanes words; strides in words.
TRUNKLINE_INLINE void transpose_words(const uint32_t* from, long from_stride, uint32_t* to, long to_stride) {
  __m512i r[16], t[16];
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(from + i * from_stride);
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  // r[4 g + c] holds column 4 l + c of rows 4 g .. 4 g + 3 in its 128-bit lane l.
  for (int c = 0; c < 4; ++c) {
    const __m512i even_low = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88);
    const __m512i odd_low = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd);
    const __m512i even_high = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
    const __m512i odd_high = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
    _mm512_storeu_si512(to + c * to_stride, _mm512_shuffle_i32x4(even_low, even_high, 0x88));
    _mm512_storeu_si512(to + (4 + c) * to_stride, _mm512_shuffle_i32x4(odd_low, odd_high, 0x88));
    _mm512_storeu_si512(to + (8 + c) * to_stride, _mm512_shuffle_i32x4(even_low, even_high, 0xdd));
    _mm512_storeu_si512(to + (12 + c) * to_stride, _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd));
  }
}

#elif TRUNKLINE_LEVEL == 1

constexpr int kLanes = 8;
using Vec = __m256;
using Bits = __m256i;

TRUNKLINE_INLINE Vec zero() { return _mm256_setzero_ps(); }
TRUNKLINE_INLINE Vec set1(float x) { return _mm256_set1_ps(x); }
TRUNKLINE_INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
TRUNKLINE_INLINE void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
TRUNKLINE_INLINE Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
TRUNKLINE_INLINE Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
TRUNKLINE_INLINE Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
TRUNKLINE_INLINE Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
TRUNKLINE_INLINE Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
TRUNKLINE_INLINE Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
TRUNKLINE_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
TRUNKLINE_INLINE float reduce_add(Vec x) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
TRUNKLINE_INLINE float reduce_max(Vec x) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
TRUNKLINE_INLINE bool any_above(Vec x, Vec limit) {
  return _mm256_movemask_ps(_mm256_cmp_ps(x, limit, _CMP_GT_OQ)) != 0;
}
TRUNKLINE_INLINE Vec iota() { return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7); }
TRUNKLINE_INLINE Vec keep_between(Vec x, Vec index, Vec lower, Vec upper, Vec other) {
  const Vec from = _mm256_cmp_ps(index, lower, _CMP_GE_OQ);
  const Vec inside = _mm256_and_ps(from, _mm256_cmp_ps(index, upper, _CMP_LT_OQ));
  return _mm256_blendv_ps(other, x, inside);
}
// n in [-127, 127], -127 gives zero; exp2 clamps before.
TRUNKLINE_INLINE Vec scale_by_power(Vec x, Vec n) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
TRUNKLINE_INLINE Vec round_to_integer(Vec x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
TRUNKLINE_INLINE Bits load_bits(const uint32_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
TRUNKLINE_INLINE Vec low_bf16(Bits b) { return _mm256_castsi256_ps(_mm256_slli_epi32(b, 16)); }
TRUNKLINE_INLINE Vec high_bf16(Bits b) {
  return _mm256_castsi256_ps(_mm256_and_si256(b, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
TRUNKLINE_INLINE Vec load_bf16(const uint16_t* p) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
TRUNKLINE_INLINE void store_bf16(uint16_t* p, Vec x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const Vec nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  const Vec chosen = _mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), nan);
  const __m256i high = _mm256_srli_epi32(_mm256_castps_si256(chosen), 16);
  const __m128i half = _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), half);
}
TRUNKLINE_INLINE Vec load_f16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
TRUNKLINE_INLINE void store_f16(uint16_t* p, Vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
TRUNKLINE_INLINE Vec load_int8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
template <int kByte>
TRUNKLINE_INLINE Vec byte_lanes(Bits b) {
  const Bits byte = _mm256_and_si256(_mm256_srli_epi32(b, 8 * kByte), _mm256_set1_epi32(0xff));
  const Bits whole = _mm256_or_si256(byte, _mm256_set1_epi32(0x4b000000));
  return _mm256_sub_ps(_mm256_castsi256_ps(whole), _mm256_set1_ps(8388736.0f));
}

TRUNKLINE_INLINE void transpose_words(const uint32_t* from, long from_stride, uint32_t* to, long to_stride) {
  __m256i r[8], t[8];
  for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i * from_stride));
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int c = 0; c < 4; ++c) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + c * to_stride),
                        _mm256_permute2x128_si256(r[c], r[4 + c], 0x20));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + (4 + c) * to_stride),
                        _mm256_permute2x128_si256(r[c], r[4 + c], 0x31));
  }
}

#else

// Vectors of the compiler: four lanes fit the registers of every 64-bit machine.
constexpr int kLanes = 4;
typedef float Vec __attribute__((vector_size(16)));
typedef uint32_t Bits __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));

TRUNKLINE_INLINE Vec zero() { return Vec{0, 0, 0, 0}; }
TRUNKLINE_INLINE Vec set1(float x) { return Vec{x, x, x, x}; }
TRUNKLINE_INLINE Vec load(const float* p) {
  Vec x;
  std::memcpy(&x, p, 16);
  return x;
}
TRUNKLINE_INLINE void store(float* p, Vec x) { std::memcpy(p, &x, 16); }
TRUNKLINE_INLINE Vec add(Vec a, Vec b) { return a + b; }
TRUNKLINE_INLINE Vec sub(Vec a, Vec b) { return a - b; }
TRUNKLINE_INLINE Vec mul(Vec a, Vec b) { return a * b; }
TRUNKLINE_INLINE Vec div(Vec a, Vec b) { return a / b; }
TRUNKLINE_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }
TRUNKLINE_INLINE Vec min(Vec a, Vec b) { return a < b ? a : b; }
TRUNKLINE_INLINE Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
TRUNKLINE_INLINE float reduce_add(Vec x) { return (x[0] + x[2]) + (x[1] + x[3]); }
TRUNKLINE_INLINE float reduce_max(Vec x) {
  const float left = x[0] > x[1] ? x[0] : x[1];
  const float right = x[2] > x[3] ? x[2] : x[3];
  return left > right ? left : right;
}
TRUNKLINE_INLINE bool any_above(Vec x, Vec limit) {
  const Ints above = x > limit;
  return (above[0] | above[1] | above[2] | above[3]) != 0;
}
TRUNKLINE_INLINE Vec iota() { return Vec{0, 1, 2, 3}; }
TRUNKLINE_INLINE Vec keep_between(Vec x, Vec index, Vec lower, Vec upper, Vec other) {
  const Ints inside = (index >= lower) & (index < upper);
  return inside ? x : other;
}
TRUNKLINE_INLINE Vec round_to_integer(Vec x) {
  const Vec magic = set1(12582912.0f);  // 1.5 * 2^23: the sum has no fraction left
  return (x + magic) - magic;
}
TRUNKLINE_INLINE Vec scale_by_power(Vec x, Vec n) {
  const Ints exponent = __builtin_convertvector(n, Ints) + 127;
  const Ints shifted = exponent << 23;
  Vec power;
  std::memcpy(&power, &shifted, 16);
  return x * power;
}
TRUNKLINE_INLINE Bits load_bits(const uint32_t* p) {
  Bits b;
  std::memcpy(&b, p, 16);
  return b;
}
TRUNKLINE_INLINE Vec low_bf16(Bits b) {
  const Bits shifted = b << 16;
  Vec x;
  std::memcpy(&x, &shifted, 16);
  return x;
}
TRUNKLINE_INLINE Vec high_bf16(Bits b) {
  const Bits masked = b & 0xffff0000u;
  Vec x;
  std::memcpy(&x, &masked, 16);
  return x;
}
TRUNKLINE_INLINE Vec load_bf16(const uint16_t* p) {
  return Vec{float_of_bf16(p[0]), float_of_bf16(p[1]), float_of_bf16(p[2]), float_of_bf16(p[3])};
}
TRUNKLINE_INLINE void store_bf16(uint16_t* p, Vec x) {
  for (int i = 0; i < 4; ++i) p[i] = bf16_of_float(x[i]);
}
TRUNKLINE_INLINE Vec load_f16(const uint16_t* p) {
  return Vec{float_of_f16(p[0]), float_of_f16(p[1]), float_of_f16(p[2]), float_of_f16(p[3])};
}
TRUNKLINE_INLINE void store_f16(uint16_t* p, Vec x) {
  for (int i = 0; i < 4; ++i) p[i] = f16_of_float(x[i]);
}
TRUNKLINE_INLINE Vec load_int8(const int8_t* p) {
  typedef int8_t Bytes __attribute__((vector_size(4)));
  Bytes bytes;
  std::memcpy(&bytes, p, 4);
  return __builtin_convertvector(bytes, Vec);
}
template <int kByte>
TRUNKLINE_INLINE Vec byte_lanes(Bits b) {
  const Bits whole = ((b >> (8 * kByte)) & 0xffu) | 0x4b000000u;
  Vec x;
  std::memcpy(&x, &whole, 16);
  return x - 8388736.0f;
}

TRUNKLINE_INLINE void transpose_words(const uint32_t* from, long from_stride, uint32_t* to, long to_stride) {
  for (int i = 0; i < kLanes; ++i) {
    for (int j = 0; j < kLanes; ++j) to[j * to_stride + i] = from[i * from_stride + j];
  }
}

#endif

TRUNKLINE_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
// What is read once, soon, passes by the caches behind the first, so that a step's weights leave there what other
// programs need next, as the router that sends the step's tokens.
constexpr int kOnce = 0, kSecondLevel = 2;
TRUNKLINE_INLINE void prefetch_once(const void* p) { __builtin_prefetch(p, 0, kOnce); }
TRUNKLINE_INLINE void prefetch_second(const void* p) { __builtin_prefetch(p, 0, kSecondLevel); }

// Below this, 2^x is zero: where `scale_by_power` gives zero.
#if TRUNKLINE_LEVEL >= 2
constexpr float kExp2Lowest = -160.0f;
#else
constexpr float kExp2Lowest = -127.0f;
#endif

// 2^x, relative error below 2^-22; of -infinity it is exactly zero, of NaN it is NaN. x above 127 is not expected:
// softmax subtracts the largest score.
TRUNKLINE_INLINE Vec exp2(Vec x) {
  const Vec bounded = max(set1(kExp2Lowest), x);  // this order keeps NaN
  const Vec whole = round_to_integer(bounded);
  const Vec f = sub(bounded, whole);
  // Taylor series of 2^f = exp(f ln 2), coefficients ln(2)^k / k!: on [-0.5, 0.5] the next term is below 2^-22.
  Vec p = set1(1.5403530e-4f);
  p = fma(p, f, set1(1.3333558e-3f));
  p = fma(p, f, set1(9.6181291e-3f));
  p = fma(p, f, set1(5.5504109e-2f));
  p = fma(p, f, set1(2.4022651e-1f));
  p = fma(p, f, set1(6.9314718e-1f));
  p = fma(p, f, set1(1.0f));
  return scale_by_power(p, whole);
}

constexpr float kLog2E = 1.4426950408889634f;

// tanh by one exponential; exact at 0, saturates without overflow.
TRUNKLINE_INLINE Vec tanh(Vec x) {
  const Vec bounded = min(max(x, set1(-15.0f)), set1(15.0f));
  const Vec e = exp2(mul(bounded, set1(2.0f * kLog2E)));
  return div(sub(e, set1(1.0f)), add(e, set1(1.0f)));
}

}  // namespace
}  // namespace trunkline::TRUNKLINE_NAMESPACE
