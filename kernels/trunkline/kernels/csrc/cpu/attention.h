// What the level-independent part of the attention and block ops passes to the part that is compiled per level.
//
// Plain data only, and no function that the linker could merge over levels (see simd.h).
//
// The pool is `[blocks, layers, bands, kv_heads, chunk, row]`; a *tile* is the `chunk` rows of one block, layer, band
// and head. Bands are K and V, or, in latent attention, one whose rows are keys and end with their values; its tiles
// are always in plain order, since a product over keys and one over values want different ones. A row is the `d`
// elements of a token, or `d` bytes, int8 or floats of 8 bits (e4m3), and the float32 by which they are multiplied (of
// latents: see quantised_kv.h). Where `PoolView::packable`, a full chunk's tiles are permuted in place, once, into the
// form of gemm.h's B, the same at every level:
//
//                  K (scores: lanes along tokens)      V (outputs: lanes along d)
//      bfloat16    [d / 2][chunk][2]                   [chunk / 2][d][2]
//      others      [d][chunk]                          [chunk][d], as it is
//      8 bits      scales [chunk], [d / 4][chunk][4]   scales [chunk], [chunk / 4][d][4]
//
// An int8 x is x + 128 there, an unsigned byte; of four floats of 8 bits the two in the middle change places.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/work_plan.h"

namespace trunkline {

enum KvType : int { kKvFloat32 = 0, kKvFloat16 = 1, kKvBFloat16 = 2, kKvTypes = 3 };
// In what a pool keeps numbers of a type: as they are, or in 8 bits with a scale for each row.
enum KvKept : int { kKeptPlain = 0, kKeptInt8 = 1, kKeptFloat8 = 2, kKvKept = 3 };
constexpr int kKvForms = static_cast<int>(kKvKept) * static_cast<int>(kKvTypes);

constexpr int kTokenStep = 16;  // packed tiles are read in so many tokens, at every level
// Keys between two updates of a row's softmax state. Many query vectors: the fewer updates the better. Few: a
// short group's tiles, those being fetched included, fit the first-level cache.
constexpr int kGroupTokens = 128, kShortGroupTokens = 64;
constexpr int kManyVectors = 16;
constexpr int kScoreStride = kGroupTokens + kTokenStep;
constexpr int kRowBlock = 48;    // query vectors whose scores are held at a time (UNIT_VECTORS of cpu_plans.py)
constexpr int kTotalLanes = 16;  // a row's sum of weights is kept per lane

struct PoolView {
  char* data;
  uint8_t* packed;  // [blocks, layers]
  int64_t blocks, layers, bands, kv_heads, chunk, head_dim;
  int64_t value_dim;  // of a value and of results: the last numbers of a key if there is one band
  int64_t element_bytes, row_bytes, tile_bytes;
  KvType type;  // of queries, results, and of keys and values before they are stored; `element_bytes` is its size
  KvKept kept;
  bool packable;

  int64_t value_start() const { return head_dim - value_dim; }
  bool is_quantised() const { return kept != kKeptPlain; }
  int form() const { return type + static_cast<int>(kept) * static_cast<int>(kKvTypes); }
  // Of rows in 8 bits: how many scales stand behind how many numbers.
  int64_t scales() const { return 3 - bands; }
  int64_t integers() const { return row_bytes - scales() * 4; }
  // Integers of a latent's rotary part, two for each number; 0: keys have one scale.
  int64_t rotary_integers() const { return is_quantised() && bands == 1 ? integers() - value_dim : 0; }
  // Floats that a query takes in a unit's memory: parts of their own scales begin at multiples of 16.
  int64_t query_width() const {
    const int64_t rotary = rotary_integers();
    return rotary == 0 ? head_dim : (rotary + 15) / 16 * 16 + value_dim;
  }
};

// What an `AttentionSpec` does to a score.
struct ScoreRule {
  float scale;
  float soft_cap;       // 0: none
  int32_t window;       // 0: none
  int32_t span;         // a query sees the positions of its own part of so many; 0: all
  const float* slopes;  // [heads] or null
  const float* sinks;   // [heads] or null: a score without a key, in every softmax
};

// One partial result of one query head, `state_floats` long: sum of weighted values, peak, total. The weights are
// 2^(score - peak), scores being multiplied by log2(e), here as everywhere.
static constexpr int64_t state_floats(int64_t value_dim) { return (value_dim + 15) / 16 * 16 + 16; }
// One that is carried on: the total is kept by lanes.
static constexpr int64_t carried_floats(int64_t value_dim) { return state_floats(value_dim) + kTotalLanes; }

struct DecodeCall {
  PoolView pool;
  ScoreRule rule;
  WorkView work;
  int32_t layer = 0, steps = 0, group = 1;
  const char* q = nullptr;
  int64_t q_stride = 0;  // bytes from row to row
  char* out = nullptr;
  int64_t out_stride = 0;
  const int32_t* entry_query = nullptr;  // [entries]: slot in `turned`, -1: the row's own query; null: all -1
  const char* turned = nullptr;          // [slots, heads, d]
  float* states = nullptr;
  bool invariant = false;     // nothing may depend on how many rows share a piece
  uint32_t* turns = nullptr;  // [rows, kv_heads]: pieces done so far; null: partials go to a buffer
  float* carried =
      nullptr;  // [rows, heads, carried_floats]: states that pieces leave to the next ones (work_plan.h)
};

// A piece for some heads. Several heads: at most kRowBlock query vectors in all.
struct DecodeUnit {
  int32_t piece, head, heads;
  int32_t ahead_first, ahead_last;  // pieces whose tiles the unit fetches while it multiplies
};

struct PrefillCall {
  PoolView pool;
  ScoreRule rule;
  int32_t layer, group, block_tokens, entries;
  const char* q;
  int64_t q_stride;
  char* out;
  int64_t out_stride;
  const int32_t *query_indptr, *query_position, *item_indptr, *block, *first, *count, *base, *shift;
  const int32_t* item_angle;  // index into `angles`, -1: not turned
  const float* angles;        // [n, 2, rotary_dim / 2]: cosines, sines of -shift
  int32_t half_rotary;
};

struct PrefillUnit {
  int32_t entry, head, first_query, queries;
};

struct TurnCall {
  const char* q;
  int64_t q_stride, heads, head_dim, half_rotary;
  const int32_t* turns;  // [slots, 2]: row, index of angles
  const float* angles;
  char* turned;
};

struct WriteCall {
  PoolView pool;
  int32_t layer, heads, rotary_dim;
  const int32_t* slots;
  char* qkv;
  const char *cos, *sin;            // [tokens, rotary_dim] or null
  bool wide_angles;                 // float32, else the type of qkv
  const char *q_weight, *k_weight;  // [head_dim] or null
  float eps;
};

// One per level. Tables by KvType, or by `PoolView::form`.
struct AttentionTable {
  size_t (*unit_scratch_bytes)(int64_t vectors, int64_t query_width);
  void (*decode_unit[kKvForms])(const DecodeCall& call, const DecodeUnit& unit, char* scratch);
  void (*decode_merge[kKvTypes])(const DecodeCall& call, int64_t row);  // the buffer's second pass
  void (*prefill_unit[kKvForms])(const PrefillCall& call, const PrefillUnit& unit, char* scratch);
  void (*turn_query[kKvTypes])(const TurnCall& call, int64_t slot);
};

struct BlockTable {
  // `scratch`: of `block_scratch_bytes`.
  void (*write_token[kKvForms])(const WriteCall& call, int64_t token, char* scratch);
  void (*pack_tile[kKvForms])(char* tile, bool is_value, int64_t chunk, int64_t head_dim, char* scratch);
  void (*unpack_tile[kKvForms])(const char* tile, char* plain, bool is_value, int64_t chunk, int64_t head_dim);
};

// The machine's limits, for benchmarks.
struct LimitTable {
  uint32_t (*read_words)(const uint32_t* words, int64_t count);
  // Returns the floating-point operations done. `scratch`: kLimitScratchBytes, zero.
  double (*multiply[kKvTypes])(int64_t repeats, char* scratch);
};
constexpr size_t kLimitScratchBytes = 1 << 16;

// Returns when `*turn` is `wanted`. Waits without giving up the core for long.
void wait_for_turn(const uint32_t* turn, uint32_t wanted);

namespace portable {
const AttentionTable& attention_table();
const BlockTable& block_table();
const LimitTable& limit_table();
}  // namespace portable
namespace avx2 {
const AttentionTable& attention_table();
const BlockTable& block_table();
const LimitTable& limit_table();
}  // namespace avx2
namespace avx512 {
const AttentionTable& attention_table();
const BlockTable& block_table();
const LimitTable& limit_table();
}  // namespace avx512
namespace avx512bf16 {
const AttentionTable& attention_table();
const BlockTable& block_table();
const LimitTable& limit_table();
}  // namespace avx512bf16
namespace amx {
using avx512bf16::block_table;
const AttentionTable& attention_table();
const LimitTable& limit_table();
}  // namespace amx

}  // namespace trunkline
