// The memory of a unit of attention, and how it is laid out: what is held of queries, keys and scores at a time.
#pragma once

#include <type_traits>

#include "attention.h"
#include "quantised_kv.h"

namespace trunkline::TRUNKLINE_NAMESPACE {
namespace {

TRUNKLINE_INLINE long round_up(long n, long step) { return (n + step - 1) / step * step; }

// Whether there are matrix registers for what is multiplied as T.
template <class T>
constexpr bool kHasTiles = TRUNKLINE_LEVEL >= 4 && std::is_same_v<T, BFloat16>;

template <class T>
TRUNKLINE_INLINE bool has_tiles(const PoolView& pool) {
  return kHasTiles<T> && pool.head_dim % 32 == 0;
}

// Whether keys and values of a short group fit the first-level cache beside the scores of one row of tiles. That saves
// more than squares of tiles do.
template <class T>
TRUNKLINE_INLINE bool is_narrow(const PoolView& pool) {
  return has_tiles<T>(pool) && pool.head_dim <= 64;
}

// Keys between two updates of many query vectors.
template <class T>
TRUNKLINE_INLINE int many_tokens(const PoolView& pool) {
  return is_narrow<T>(pool) ? kShortGroupTokens : kGroupTokens;
}

// Query vectors whose scores are held at a time: one row of tiles, or three.
template <class T>
TRUNKLINE_INLINE int row_block(const PoolView& pool) {
  return is_narrow<T>(pool) ? 16 : kRowBlock;
}

// The memory of a unit: query vectors, their states, one group of keys. All pointers are 64-byte aligned.
struct UnitMemory {
  const void** query_rows;      // [vectors] of T::A
  const void** weight_rows;     // [kRowBlock] of T::A
  float* acc;                   // [vectors, padded width of a value]
  float* total;                 // [vectors, kTotalLanes]
  float* peak;                  // [vectors]
  float* slope;                 // [vectors], times log2(e)
  float* position;              // [vectors]: of the query, minus the lowest query's
  float* reach;                 // [vectors]: positions before the query that it sees, where there is a span
  float* queries;               // [vectors, padded d]: where T::A is not what memory holds; of tiles in 2 bytes
  float* scores;                // [kRowBlock, kScoreStride]
  float *valid, *key_position;  // [kScoreStride]
  float *key_scale,
      *value_scale;  // [kScoreStride]: KV in 8 bits only, as all that follows but for keys and values
  SplitRow* splits;  // [vectors, 2]: of the two parts of a latent's query; else the first
  float* sums;       // [2 * kSplitRows, the longer of kScoreStride and padded d]
  int8_t* bytes;     // [2 * kSplitRows, kScoreStride], or a query's two rows
  char* keys;        // scratch of a Group
  char* values;
};

TRUNKLINE_INLINE char* carve(char*& at, size_t bytes) {
  char* start = at;
  at += (bytes + 63) / 64 * 64;
  return start;
}

// Lays the memory out from `base`; returns its end.
inline char* lay_out(UnitMemory& memory, char* base, long vectors, long query_width) {
  const size_t n = static_cast<size_t>(vectors), padded = static_cast<size_t>(round_up(query_width, 16));
  char* at = base;
  memory.query_rows = reinterpret_cast<const void**>(carve(at, n * sizeof(void*)));
  memory.weight_rows = reinterpret_cast<const void**>(carve(at, kRowBlock * sizeof(void*)));
  memory.acc = reinterpret_cast<float*>(carve(at, n * padded * 4));
  memory.total = reinterpret_cast<float*>(carve(at, n * kTotalLanes * 4));
  memory.peak = reinterpret_cast<float*>(carve(at, n * 4));
  memory.slope = reinterpret_cast<float*>(carve(at, n * 4));
  memory.position = reinterpret_cast<float*>(carve(at, n * 4));
  memory.reach = reinterpret_cast<float*>(carve(at, n * 4));
  memory.queries = reinterpret_cast<float*>(carve(at, n * padded * 4));
  memory.scores = reinterpret_cast<float*>(carve(at, kRowBlock * kScoreStride * 4));
  memory.valid = reinterpret_cast<float*>(carve(at, kScoreStride * 4));
  memory.key_position = reinterpret_cast<float*>(carve(at, kScoreStride * 4));
  memory.key_scale = reinterpret_cast<float*>(carve(at, kScoreStride * 4));
  memory.value_scale = reinterpret_cast<float*>(carve(at, kScoreStride * 4));
  memory.splits = reinterpret_cast<SplitRow*>(carve(at, 2 * n * sizeof(SplitRow)));
  const size_t widest = padded > kScoreStride ? padded : kScoreStride;
  memory.sums = reinterpret_cast<float*>(carve(at, 2 * kSplitRows * widest * 4));
  memory.bytes = reinterpret_cast<int8_t*>(carve(at, 2 * kSplitRows * widest));
  memory.keys = carve(at, padded * kScoreStride * 4);
  memory.values = carve(at, kScoreStride * padded * 4);
  return at;
}

}  // namespace
}  // namespace trunkline::TRUNKLINE_NAMESPACE
