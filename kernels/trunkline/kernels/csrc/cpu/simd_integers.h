// Vectors of integers, for codes of weights and int8 inputs: what simd.h is for floats.
#pragma once

#include "simd.h"

namespace trunkline::TRUNKLINE_NAMESPACE {
namespace {

#if TRUNKLINE_LEVEL >= 2

// Lanes of 32 bits, as bits, bytes or integers.
TRUNKLINE_INLINE Bits load_words(const void* p) { return _mm512_loadu_si512(p); }
TRUNKLINE_INLINE void store_words(void* p, Bits b) { _mm512_storeu_si512(p, b); }
// 2 * kLanes words whose halves are those of `low` and `high`.
TRUNKLINE_INLINE void pair_halves(const uint16_t* low, const uint16_t* high, uint32_t* to) {
  const __m512i parts = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  const __m512i a = _mm512_permutexvar_epi64(parts, _mm512_loadu_si512(low));
  const __m512i b = _mm512_permutexvar_epi64(parts, _mm512_loadu_si512(high));
  _mm512_storeu_si512(to, _mm512_unpacklo_epi16(a, b));
  _mm512_storeu_si512(to + kLanes, _mm512_unpackhi_epi16(a, b));
}
TRUNKLINE_INLINE Bits set1_word(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
TRUNKLINE_INLINE Bits bits_and(Bits a, Bits b) { return _mm512_and_si512(a, b); }
TRUNKLINE_INLINE Bits bits_or(Bits a, Bits b) { return _mm512_or_si512(a, b); }
// Bits of `a` where `mask` has ones, else of `b`.
TRUNKLINE_INLINE Bits bits_select(Bits mask, Bits a, Bits b) {
  return _mm512_ternarylogic_epi32(mask, a, b, 0xca);
}
TRUNKLINE_INLINE Bits shift_right(Bits b, int count) { return _mm512_srli_epi32(b, static_cast<unsigned>(count)); }
TRUNKLINE_INLINE Bits shift_left(Bits b, int count) { return _mm512_slli_epi32(b, static_cast<unsigned>(count)); }
TRUNKLINE_INLINE Vec as_floats(Bits b) { return _mm512_castsi512_ps(b); }
TRUNKLINE_INLINE Bits as_words(Vec x) { return _mm512_castps_si512(x); }
TRUNKLINE_INLINE Vec float_of_integers(Bits b) { return _mm512_cvtepi32_ps(b); }
// Entries of a table of 16; only the lowest 4 bits of a lane count.
TRUNKLINE_INLINE Vec table_floats(const float* table, Bits index) {
  return _mm512_permutexvar_ps(index, _mm512_loadu_ps(table));
}
// Entries of a table of 16 bytes, for each byte; bytes are below 16.
TRUNKLINE_INLINE Bits table_bytes(const uint8_t* table, Bits index) {
  const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(entries), index);
}
// The nearest integers, of magnitudes up to 127.
TRUNKLINE_INLINE void store_int8(int8_t* p, Vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
}
// Sums of the products of each lane's four bytes, unsigned, with four int8 that all lanes share: `x` has them as
// they are, or, without the instruction for that, two words of int16: the first and third, the second and fourth.
#if TRUNKLINE_LEVEL >= 3
constexpr int kDotWords = 1;
TRUNKLINE_INLINE Bits dot_bytes(Bits sum, Bits bytes, const uint32_t* x) {
  return _mm512_dpbusd_epi32(sum, bytes, set1_word(*x));
}
// Values of numbers below the normal ones, by their lowest 5 bits, of which the upper 2 are zero: products of bf16 take
// such numbers as zero, so they are looked up.
alignas(64) constexpr uint16_t kSubnormal[32] = {0, 0x3700, 0x3780, 0x37c0, 0x3800, 0x3820, 0x3840, 0x3860};
// Pairs of bf16 of the floats of 8 bits (e4m3, no NaN) in bytes 1 and 3 of each lane, times 2^-8.
TRUNKLINE_INLINE Bits pairs_of_float8(Bits b) {
  const Bits kept = _mm512_and_si512(_mm512_srli_epi16(b, 4), _mm512_set1_epi16(0x07f0));
  const Bits normal = _mm512_or_si512(kept, _mm512_set1_epi16(0x3800));
  const __mmask32 small = _mm512_testn_epi16_mask(b, _mm512_set1_epi16(0x7800));
  const Bits table = _mm512_load_si512(kSubnormal);
  const Bits value = _mm512_mask_permutexvar_epi16(normal, small, _mm512_srli_epi16(b, 8), table);
  return _mm512_or_si512(value, _mm512_and_si512(b, _mm512_set1_epi16(static_cast<int16_t>(0x8000))));
}
// Those of bytes 0 and 2, and of bytes 1 and 3. Shifts and permutations are what takes time, and numbers below the
// normal ones are rare. `kAsks`: look whether there are any. That is for bytes in the caches: where the answer comes
// from memory and is not as foreseen, all reads behind it are begun again.
template <bool kAsks>
TRUNKLINE_INLINE void all_pairs_of_float8(Bits b, Bits& even, Bits& odd) {
  const Bits kept = _mm512_set1_epi16(0x07f0), exponent = _mm512_set1_epi16(0x3800);
  even = _mm512_or_si512(_mm512_and_si512(_mm512_slli_epi16(b, 4), kept), exponent);
  odd = _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(b, 4), kept), exponent);
  if (!kAsks || _mm512_testn_epi8_mask(b, _mm512_set1_epi8(0x78)) != 0) [[unlikely]] {
    const Bits table = _mm512_load_si512(kSubnormal);
    const __mmask32 small_even = _mm512_testn_epi16_mask(b, _mm512_set1_epi16(0x0078));
    const __mmask32 small_odd = _mm512_testn_epi16_mask(b, _mm512_set1_epi16(0x7800));
    even = _mm512_mask_permutexvar_epi16(even, small_even, b, table);
    odd = _mm512_mask_permutexvar_epi16(odd, small_odd, _mm512_srli_epi16(b, 8), table);
  }
  const Bits sign = _mm512_set1_epi16(static_cast<int16_t>(0x8000));
  even = _mm512_or_si512(even, _mm512_and_si512(_mm512_slli_epi16(b, 8), sign));
  odd = _mm512_or_si512(odd, _mm512_and_si512(b, sign));
}
// 2^x for weights of values of 8 bits, as bf16 has: relative error below 2^-13.5; of -infinity it is exactly zero, of
// NaN it is NaN. The part of x behind the point and the power of its whole part are an instruction each, which need no
// bounds; the polynomial has the least relative error on [0, 1).
TRUNKLINE_INLINE Vec exp2_for_bf16(Vec x) {
  const Vec f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  Vec p = set1(0.0780245226f);
  p = fma(p, f, set1(0.226067155f));
  p = fma(p, f, set1(0.69583354f));
  p = fma(p, f, set1(0.999925219f));
  return _mm512_scalef_ps(p, x);
}
#else
constexpr int kDotWords = 2;
TRUNKLINE_INLINE Bits dot_bytes(Bits sum, Bits bytes, const uint32_t* x) {
  const Bits even = _mm512_and_si512(bytes, set1_word(0x00ff00ffu)), odd = _mm512_srli_epi16(bytes, 8);
  sum = _mm512_add_epi32(sum, _mm512_madd_epi16(even, set1_word(x[0])));
  return _mm512_add_epi32(sum, _mm512_madd_epi16(odd, set1_word(x[1])));
}
#endif

#elif TRUNKLINE_LEVEL == 1

TRUNKLINE_INLINE Bits load_words(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
TRUNKLINE_INLINE void store_words(void* p, Bits b) { _mm256_storeu_si256(static_cast<__m256i*>(p), b); }
TRUNKLINE_INLINE void pair_halves(const uint16_t* low, const uint16_t* high, uint32_t* to) {
  const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(low));
  const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(high));
  const __m256i a = _mm256_permute4x64_epi64(first, 0xd8), b = _mm256_permute4x64_epi64(second, 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_unpacklo_epi16(a, b));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + kLanes), _mm256_unpackhi_epi16(a, b));
}
TRUNKLINE_INLINE Bits set1_word(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
TRUNKLINE_INLINE Bits bits_and(Bits a, Bits b) { return _mm256_and_si256(a, b); }
TRUNKLINE_INLINE Bits bits_or(Bits a, Bits b) { return _mm256_or_si256(a, b); }
TRUNKLINE_INLINE Bits bits_select(Bits mask, Bits a, Bits b) {
  return _mm256_or_si256(_mm256_and_si256(mask, a), _mm256_andnot_si256(mask, b));
}
TRUNKLINE_INLINE Bits shift_right(Bits b, int count) { return _mm256_srli_epi32(b, count); }
TRUNKLINE_INLINE Bits shift_left(Bits b, int count) { return _mm256_slli_epi32(b, count); }
TRUNKLINE_INLINE Vec as_floats(Bits b) { return _mm256_castsi256_ps(b); }
TRUNKLINE_INLINE Bits as_words(Vec x) { return _mm256_castps_si256(x); }
TRUNKLINE_INLINE Vec float_of_integers(Bits b) { return _mm256_cvtepi32_ps(b); }
TRUNKLINE_INLINE Vec table_floats(const float* table, Bits index) {
  const Vec low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), index);
  const Vec high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), index);
  return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
}
TRUNKLINE_INLINE Bits table_bytes(const uint8_t* table, Bits index) {
  const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(entries), index);
}
TRUNKLINE_INLINE void store_int8(int8_t* p, Vec x) {
  const __m256i words = _mm256_cvtps_epi32(x);
  const __m128i shorts = _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(shorts, shorts));
}
constexpr int kDotWords = 2;
TRUNKLINE_INLINE Bits dot_bytes(Bits sum, Bits bytes, const uint32_t* x) {
  const Bits even = _mm256_and_si256(bytes, set1_word(0x00ff00ffu)), odd = _mm256_srli_epi16(bytes, 8);
  sum = _mm256_add_epi32(sum, _mm256_madd_epi16(even, set1_word(x[0])));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(odd, set1_word(x[1])));
}

#else

TRUNKLINE_INLINE Bits load_words(const void* p) {
  Bits b;
  std::memcpy(&b, p, 16);
  return b;
}
TRUNKLINE_INLINE void store_words(void* p, Bits b) { std::memcpy(p, &b, 16); }
TRUNKLINE_INLINE void pair_halves(const uint16_t* low, const uint16_t* high, uint32_t* to) {
  for (int i = 0; i < 2 * kLanes; ++i) to[i] = uint32_t{low[i]} | (uint32_t{high[i]} << 16);
}
TRUNKLINE_INLINE Bits set1_word(uint32_t x) { return Bits{x, x, x, x}; }
TRUNKLINE_INLINE Bits bits_and(Bits a, Bits b) { return a & b; }
TRUNKLINE_INLINE Bits bits_or(Bits a, Bits b) { return a | b; }
TRUNKLINE_INLINE Bits bits_select(Bits mask, Bits a, Bits b) { return (mask & a) | (~mask & b); }
TRUNKLINE_INLINE Bits shift_right(Bits b, int count) { return b >> count; }
TRUNKLINE_INLINE Bits shift_left(Bits b, int count) { return b << count; }
TRUNKLINE_INLINE Vec as_floats(Bits b) {
  Vec x;
  std::memcpy(&x, &b, 16);
  return x;
}
TRUNKLINE_INLINE Bits as_words(Vec x) {
  Bits b;
  std::memcpy(&b, &x, 16);
  return b;
}
TRUNKLINE_INLINE Vec float_of_integers(Bits b) {
  Ints integers;
  std::memcpy(&integers, &b, 16);
  return __builtin_convertvector(integers, Vec);
}
TRUNKLINE_INLINE Vec table_floats(const float* table, Bits index) {
  return Vec{table[index[0] & 15], table[index[1] & 15], table[index[2] & 15], table[index[3] & 15]};
}
TRUNKLINE_INLINE Bits table_bytes(const uint8_t* table, Bits index) {
  uint8_t bytes[16];
  std::memcpy(bytes, &index, 16);
  for (uint8_t& byte : bytes) byte = table[byte];
  return load_words(bytes);
}
TRUNKLINE_INLINE void store_int8(int8_t* p, Vec x) {
  const Vec whole = round_to_integer(x);
  for (int i = 0; i < 4; ++i)
    p[i] = whole[i] >= -127.0f && whole[i] <= 127.0f ? static_cast<int8_t>(whole[i]) : int8_t{0};
}
constexpr int kDotWords = 2;
TRUNKLINE_INLINE Bits dot_bytes(Bits sum, Bits bytes, const uint32_t* x) {
  int16_t factors[4];  // of the first and third byte, of the second and fourth
  std::memcpy(factors, x, 8);
  Ints total;
  std::memcpy(&total, &sum, 16);
  for (int byte = 0; byte < 4; ++byte) {
    const Bits values = (bytes >> (8 * byte)) & 0xffu;
    Ints integers;
    std::memcpy(&integers, &values, 16);
    total += integers * static_cast<int>(factors[byte % 2 * 2 + byte / 2]);
  }
  std::memcpy(&sum, &total, 16);
  return sum;
}

#endif

// Two vectors, `x` first: where there is an instruction for it, in the time of one.
TRUNKLINE_INLINE void store_bf16(uint16_t* p, Vec x, Vec y) {
#if TRUNKLINE_LEVEL >= 3
  const __m512bh both = _mm512_cvtne2ps_pbh(y, x);
  std::memcpy(p, &both, 64);
#else
  store_bf16(p, x), store_bf16(p + kLanes, y);
#endif
}

// The floats of 8 bits (e4m3, no NaN) in byte 3 of each lane, times 2^-8, exactly. With 112 more in the exponent a
// normal number m stands for itself; a subnormal one has a leading one too many, which 2 m - 2^-14 takes away again.
// Of each the smaller of these two is right.
TRUNKLINE_INLINE Vec floats_of_float8(Bits b) {
  const Bits kept = bits_and(shift_right(b, 4), set1_word(0x07f00000u));
  const Vec normal = as_floats(bits_or(kept, set1_word(0x38000000u)));
  const Vec value = min(normal, fma(normal, set1(2.0f), set1(-0x1p-14f)));
  return as_floats(bits_or(as_words(value), bits_and(b, set1_word(0x80000000u))));
}

}  // namespace
}  // namespace trunkline::TRUNKLINE_NAMESPACE
