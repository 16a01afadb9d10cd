// Keys and values kept in 8 bits with a scale: what a row is, and how numbers become bytes and floats again.
//
//      row     8 bits x head_dim | float32          vector = numbers * scale
//
// Rows lie in plain order here (kernels/quantised_kv.py), so a row begins at any multiple of 4 bytes, at any byte
// if the head size is none of 4. Numbers are exact in bfloat16 and float16.
//
// No byte becomes NaN (the two that stand for it among floats of 8 bits, which are never written, are read as
// +-480): what was never written costs nothing as long as its scale is not read.
#pragma once

#include <primitives.cuh>

#include <type_traits>

#include "api.h"

namespace trunkline::cuda {

constexpr int kScaleBytes = 4;

struct Int8Bytes {
  static constexpr float kLargest = 127.0f;
  // The value of byte `j` of a word: behind the bits of 2^23 a byte counts ones, and 128 of them too many once its sign
  // is turned. (Conversions of whole numbers run at an eighth of the rate.)
  __device__ static float value(uint32_t word, int j) {
    const uint32_t bits = byte_perm(word ^ 0x80808080u, 0x4b000000u, 0x7440u | static_cast<uint32_t>(j));
    return __fadd_rn(float_of(bits), -0x1.0001p23f);
  }
  // `twice`: two bytes, each in both halves of 16 bits. In bfloat16 2^7 has room for the seven lower bits, and the
  // excess is 2^7 or 2^8; in float16 2^10 has room for all bits.
  template <class T>
  __device__ static uint32_t pair(uint32_t twice) {
    if constexpr (std::is_same_v<T, Bf16>) {
      const uint32_t bits = (twice & 0x007f007fu) | 0x43004300u, excess = (twice & 0x00800080u) | 0x43004300u;
      return multiply_add_pairs<T>(excess, 0xbf80bf80u, bits);
    } else {
      return multiply_add_pairs<T>((twice & 0x00ff00ffu) ^ 0x64806480u, 0x3c003c00u, 0xe480e480u);
    }
  }
  __device__ static uint32_t round(float x) { return static_cast<uint32_t>(static_cast<int>(rintf(x))); }
};

// e4m3: a sign, four bits of exponent, three of fraction.
struct Float8Bytes {
  static constexpr float kLargest = 448.0f;
  // A float32 in other places: with the exponent's bias of 7 in the place of one of 127.
  __device__ static float value(uint32_t word, int j) {
    const auto top = static_cast<int32_t>(word << (24 - 8 * j));
    return __fmul_rn(float_of(static_cast<uint32_t>(top >> 4) & 0x87f00000u), 0x1p120f);
  }
  template <class T>
  __device__ static uint32_t pair(uint32_t twice) {
    constexpr bool kWide = std::is_same_v<T, Bf16>;  // as many bits of exponent as a float32
    const uint32_t magnitude = kWide ? twice >> 4 & 0x07f007f0u : twice >> 1 & 0x3f803f80u;
    const uint32_t factor = kWide ? 0x7b807b80u : 0x5c005c00u;  // 2^120, 2^8
    return multiply_add_pairs<T>((twice & 0x80008000u) | magnitude, factor, 0x80008000u);
  }
  // To the nearest, ties to even, of magnitudes up to 448. A power of two that is 2^20 times that of x leaves three
  // bits of x's fraction when it is added; below the normal numbers steps are all 2^-9.
  __device__ static uint32_t round(float x) {
    const float power = fmaxf(float_of(bits_of(x) & 0x7f800000u), 0x1p-6f), large = __fmul_rn(power, 0x1.8p20f);
    const float nearest = __fadd_rn(__fadd_rn(x, large), -large), magnitude = fabsf(nearest);
    const uint32_t code = magnitude >= 0x1p-6f ? (bits_of(magnitude) >> 20) - 960u
                                               : static_cast<uint32_t>(__fmul_rn(magnitude, 512.0f));
    return code | (bits_of(x) >> 24 & 0x80u);
  }
};

// Bytes `low` and `high` of the eight of two words as 16-bit numbers, exactly.
template <class T, class Bytes>
__device__ __forceinline__ uint32_t pair_of(uint32_t first, uint32_t second, int low, int high) {
  return Bytes::template pair<T>(byte_perm(first, second, static_cast<uint32_t>(low * 0x11 + high * 0x1100)));
}

// Calls `run` with one of the types above.
template <class Run>
__device__ __forceinline__ void with_bytes(int32_t kv_dtype, const Run& run) {
  if (kv_dtype == kInt8) {
    run(Int8Bytes{});
  } else {
    run(Float8Bytes{});
  }
}

// The scale behind a row's numbers, at any address.
__device__ __forceinline__ float load_scale(const unsigned char* at) {
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < kScaleBytes; ++i) bits |= static_cast<uint32_t>(at[i]) << (8 * i);
  return float_of(bits);
}

// A head's key or value to a row, by one warp: the largest magnitude becomes that of a byte. NaN and infinity make
// the scale NaN, and the numbers zeros.
template <class T>
__device__ void store_byte_row(const T* x, int d, int32_t kv_dtype, unsigned char* row) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  uint32_t largest = 0;  // as bits, which order magnitudes, with infinity and NaN behind all others
  const auto take = [&](uint32_t bits) { largest = bits > largest ? bits : largest; };
  for (int i = lane; i < d; i += kWarpLanes) take(bits_of(to_float(x[i])) & 0x7fffffffu);
  for (int mask = kWarpLanes / 2; mask > 0; mask /= 2) take(shuffle_xor(largest, mask));
  const bool finite = largest < 0x7f800000u;
  with_bytes(kv_dtype, [&](auto bytes) {
    using Bytes = decltype(bytes);
    constexpr float kTiny = 0x1p-126f;
    const float scale = fmaxf(__fdiv_rn(float_of(largest), Bytes::kLargest), kTiny);
    for (int i = lane; i < d; i += kWarpLanes) {
      row[i] = finite ? static_cast<unsigned char>(Bytes::round(__fdiv_rn(to_float(x[i]), scale))) : 0;
    }
    const uint32_t bits = finite ? bits_of(scale) : 0x7fc00000u;
    if (lane < kScaleBytes) row[d + lane] = static_cast<unsigned char>(bits >> (8 * lane));
  });
}

}  // namespace trunkline::cuda
