// The two orders of a tile, and the way from one to the other; see attention.h for the packed one.
//
// Everything here reads and writes whole elements and computes nothing, so packing and unpacking is exact, for NaN
// too.
#pragma once

#include <cstdint>
#include <cstring>

#include "gemm.h"
#include "simd_integers.h"

namespace trunkline::TRUNKLINE_NAMESPACE {
namespace {

// `to[c][r] = from[r][c]`; strides in words.
inline void transpose(const uint32_t* from, long rows, long columns, long from_stride, uint32_t* to,
                      long to_stride) {
  const bool blocks = columns >= kLanes;
  long row = 0;
  for (; blocks && row + kLanes <= rows; row += kLanes) {
    for (long column = 0; column < columns; column += kLanes) {
      // The last block may overlap the one before it: the same words are written twice.
      const long start = column + kLanes <= columns ? column : columns - kLanes;
      transpose_words(from + row * from_stride + start, from_stride, to + start * to_stride + row, to_stride);
    }
  }
  for (; row < rows; ++row) {
    const uint32_t* start = from + row * from_stride;
    for (long column = 0; column < columns; ++column) to[column * to_stride + row] = start[column];
  }
}

// Rows of pairs: `to[j] = (even[j], odd[j])`.
TRUNKLINE_INLINE void interleave(const uint16_t* even, const uint16_t* odd, uint32_t* to, long n) {
  long j = 0;
  for (; j + 2 * kLanes <= n; j += 2 * kLanes) pair_halves(even + j, odd + j, to + j);
  for (; j < n; ++j) to[j] = uint32_t{even[j]} | (uint32_t{odd[j]} << 16);
}

TRUNKLINE_INLINE void split_pairs(const uint32_t* from, uint16_t* even, uint16_t* odd, long n) {
  for (long j = 0; j < n; ++j) {
    even[j] = static_cast<uint16_t>(from[j]);
    odd[j] = static_cast<uint16_t>(from[j] >> 16);
  }
}

// Keys of `tokens` tokens `[tokens][d]` to lanes along tokens, `stride` lanes from step to step; at least
// `round_up(tokens, kLanes)` lanes are free there.
inline void pack_keys(const float* from, long tokens, long d, float* to, long stride) {
  transpose(reinterpret_cast<const uint32_t*>(from), tokens, d, d, reinterpret_cast<uint32_t*>(to), stride);
}

// bfloat16: a pair is a word.
inline void pack_keys(const uint16_t* from, long tokens, long d, uint32_t* to, long stride) {
  transpose(reinterpret_cast<const uint32_t*>(from), tokens, d / 2, d / 2, to, stride);
}

// float16: words are transposed, then their halves go to two rows.
inline void pack_keys(const uint16_t* from, long tokens, long d, uint16_t* to, long stride) {
  uint32_t block[kLanes * kLanes];
  const uint32_t* words = reinterpret_cast<const uint32_t*>(from);
  const long columns = d / 2;
  for (long token = 0; token < tokens; token += kLanes) {
    const long rows = tokens - token < kLanes ? tokens - token : kLanes;
    for (long column = 0; column < columns; column += kLanes) {
      const long width = columns - column < kLanes ? columns - column : kLanes;
      transpose(words + token * columns + column, rows, width, columns, block, kLanes);
      for (long j = 0; j < width; ++j) {
        uint16_t* even = to + 2 * (column + j) * stride + token;
        split_pairs(block + j * kLanes, even, even + stride, rows);
      }
    }
  }
}

// The reverse, for a whole tile.
inline void unpack_keys(const float* from, long tokens, long d, float* to) {
  transpose(reinterpret_cast<const uint32_t*>(from), d, tokens, tokens, reinterpret_cast<uint32_t*>(to), d);
}

inline void unpack_keys(const uint32_t* from, long tokens, long d, uint16_t* to) {
  transpose(from, d / 2, tokens, tokens, reinterpret_cast<uint32_t*>(to), d / 2);
}

inline void unpack_keys(const uint16_t* from, long tokens, long d, uint16_t* to) {
  for (long j = 0; j < d; ++j) {
    for (long token = 0; token < tokens; ++token) to[token * d + j] = from[j * tokens + token];
  }
}

}  // namespace
}  // namespace trunkline::TRUNKLINE_NAMESPACE
