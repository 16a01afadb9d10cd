// What both attention kernels share: which tiles a thread block reads, in which order, and who the rows are.
//
// A *unit* is (piece, KV head). A *segment* is a unit and up to `tile_rows` of its query vectors (rows * group of
// query heads); almost always a unit is one segment. A *tile* is up to `tile_tokens` consecutive tokens of one
// item. The plan says which units a thread block does (`UnitList`), so a captured graph follows a new plan.
//
// Invariant: the tiles of a row depend only on its own items, never on who shares them or on how rows are packed.
// With equal arithmetic per row this makes results equal bit by bit wherever the cuts are equal (the planner's
// batch-invariant mode). So roundings are spelled out (__fmul_rn, __fmaf_rn) wherever a compiler might fuse a
// product and a sum in one instantiation and not in another.
//
// Everything here is uniform over the thread block: all threads compute the same.
#pragma once

#include <primitives.cuh>

#include "../common/work_plan.h"
#include "api.h"

namespace trunkline::cuda {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpLanes;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kNegativeInfinity = -__builtin_inff();

__device__ __forceinline__ int warp_min(int x) {
  for (int mask = kWarpLanes / 2; mask > 0; mask /= 2) x = min(x, shuffle_xor(x, mask));
  return x;
}

// The units of a thread block, in order. A dealt plan (common/deal.h) has two lists for each worker, of wide and of
// narrow units. Thread block b is worker b and, should there be fewer thread blocks than workers, also b + grid,
// b + 2 * grid, … Of another plan it does units b, b + grid, b + 2 * grid, …, all of which count as wide.
class UnitList {
 public:
  enum Kind { kWide = 1, kNarrow = 2, kAll = kWide | kNarrow };

  __device__ UnitList(const WorkView& work, int kv_heads, Kind kind)
      : bounds_(work.workers > 0 ? work.unit_bounds + (kind == kNarrow ? 1 : 0) : nullptr),
        units_(work.units),
        workers_(work.workers),
        width_(kind == kAll ? 2 : 1),
        worker_(static_cast<int>(blockIdx.x)),
        at_(0),
        stop_(0) {
    if (bounds_ != nullptr) {
      open();
    } else {
      at_ = worker_;
      stop_ = kind == kNarrow ? 0 : work.pieces * kv_heads;
    }
  }

  // The next unit; -1: there is none left.
  __device__ int next() {
    if (bounds_ == nullptr) {
      const int unit = at_;
      at_ += static_cast<int>(gridDim.x);
      return unit < stop_ ? unit : -1;
    }
    while (at_ >= stop_) {
      if (worker_ >= workers_) return -1;
      worker_ += static_cast<int>(gridDim.x);
      open();
    }
    return units_[at_++];
  }

 private:
  __device__ void open() {
    if (worker_ >= workers_) return;
    at_ = bounds_[2 * worker_];
    stop_ = bounds_[2 * worker_ + width_];
  }

  const int32_t* bounds_;
  const int32_t* units_;
  int workers_, width_, worker_, at_, stop_;
};

// Walks a thread block's segments and, within each, its tiles. The loader's and the consumer's cursor are two
// objects of this class, so that both see the same sequence. Items are read 32 at a time, one by each lane of a warp,
// and passed on by shuffles: a read of the plan takes longer than a tile's products.
class TileCursor {
 public:
  // `tile_rows`, `tile_tokens`: the most of a segment and of a tile.
  __device__ TileCursor(const WorkView& work, const AttentionCall& call, int steps, const UnitList& units,
                        int tile_rows, int tile_tokens)
      : work_(work),
        units_(units),
        group_(call.heads / call.kv_heads),
        kv_heads_(call.kv_heads),
        tile_rows_(tile_rows),
        window_(call.window),
        steps_(steps),
        tile_tokens_(tile_tokens) {}

  // False: this thread block has no more.
  __device__ bool next_segment() {
    vector_start_ += tile_rows_;
    if (vector_start_ >= vectors_) {
      const int unit = units_.next();
      if (unit < 0) return false;
      enter_unit(unit);
    }
    item_ = item_start_ - 1;
    item_tokens_ = offset_ = 0;
    read_from_ = item_start_ - kWarpLanes;  // nothing of this segment
    return true;
  }

  // The segment's next tile. False: it has no more.
  __device__ bool next_tile() {
    offset_ += tile_tokens_;
    while (offset_ >= item_tokens_) {
      if (++item_ >= item_stop_) return false;
      offset_ = 0;
      if (item_ >= read_from_ + kWarpLanes) read_items();
      const int lane = item_ - read_from_;
      item_tokens_ = shuffle(read_tokens_, lane);
      item_base_ = shuffle(read_base_, lane);
      item_block_ = shuffle(read_block_, lane);
      item_first_ = shuffle(read_first_, lane);
    }
    return true;
  }

  // The current segment's KV head, entries, heads and number of query vectors.
  __device__ int kv_head() const { return kv_head_; }
  __device__ int entry(int vector) const { return entry_start_ + (vector_start_ + vector) / group_; }
  __device__ int head(int vector) const { return kv_head_ * group_ + (vector_start_ + vector) % group_; }
  __device__ int vectors() const { return min(vectors_ - vector_start_, tile_rows_); }

  // The current tile's tokens, position of its first key, block, and first token in the block.
  __device__ int tokens() const { return min(item_tokens_ - offset_, tile_tokens_); }
  __device__ int base() const { return item_base_ + offset_; }
  __device__ int block() const { return item_block_; }
  __device__ int first() const { return item_first_ + offset_; }

 private:
  // The items from the current one on.
  __device__ void read_items() {
    read_from_ = item_;
    const int item = item_ + static_cast<int>(threadIdx.x % kWarpLanes);
    if (item >= item_stop_) return;
    read_tokens_ = item_tokens(work_.item_count[item], work_.item_tail[item], steps_);
    read_base_ = work_.item_base[item];
    read_block_ = work_.item_block[item];
    read_first_ = work_.item_first[item];
    // Behind every row's window: not even read.
    if (window_ > 0 && read_base_ + read_tokens_ - 1 <= oldest_ - window_) read_tokens_ = 0;
  }

  __device__ void enter_unit(int unit) {
    const int piece = unit / kv_heads_;
    kv_head_ = unit - piece * kv_heads_;
    entry_start_ = work_.piece_entries[piece];
    const int entry_stop = work_.piece_entries[piece + 1];
    item_start_ = work_.piece_items[2 * piece];
    item_stop_ = work_.piece_items[2 * piece + 1];
    vectors_ = (entry_stop - entry_start_) * group_;
    vector_start_ = 0;
    if (window_ > 0) {
      oldest_ = INT32_MAX;
#pragma unroll 1
      for (int e = entry_start_ + static_cast<int>(threadIdx.x % kWarpLanes); e < entry_stop; e += kWarpLanes) {
        oldest_ = min(oldest_, work_.query_position[work_.entry_row[e]] + steps_ - work_.entry_shift[e]);
      }
      oldest_ = warp_min(oldest_);
    }
  }

  WorkView work_;
  UnitList units_;
  int group_, kv_heads_, tile_rows_, window_, steps_, tile_tokens_;
  int kv_head_ = 0, entry_start_ = 0, item_start_ = 0, item_stop_ = 0;
  int vectors_ = 0, vector_start_ = 0;
  int oldest_ = 0;  // the query position, in keys' positions, of the row that looks back furthest
  int item_ = 0, item_tokens_ = 0, item_base_ = 0, item_block_ = 0, item_first_ = 0, offset_ = 0;
  // Of item read_from_ + lane.
  int read_from_ = 0, read_tokens_ = 0, read_base_ = 0, read_block_ = 0, read_first_ = 0;
};

// Rows of the pool before those of the cursor's tile, of keys or of values; the rows of a tile are contiguous.
__device__ __forceinline__ int64_t rows_before(const AttentionCall& call, const TileCursor& tile, int is_value) {
  const int64_t layer = static_cast<int64_t>(tile.block()) * call.layers + call.layer;
  return ((layer * 2 + is_value) * call.kv_heads + tile.kv_head()) * call.chunk_size + tile.first();
}

// What a segment's query vectors are, in shared memory, one element per vector.
struct RowTable {
  int* row;  // into q and out; -1: padding, never read and never written
  int* head;
  int* slot;      // of the partial, -1: the only one, written as the output
  int* position;  // the query's position minus its shift: in the frame in which the item's keys were rotated
  int* shift;
  float* slope;  // of ALiBi, times log2 e

  static constexpr int kArrays = 6;

  __device__ RowTable(unsigned char* memory, int capacity)
      : row(reinterpret_cast<int*>(memory)),
        head(row + capacity),
        slot(row + 2 * capacity),
        position(row + 3 * capacity),
        shift(row + 4 * capacity),
        slope(reinterpret_cast<float*>(row + 5 * capacity)) {}

  // Needs a barrier before (others may still read) and after.
  __device__ void fill(const TileCursor& tile, const WorkView& work, const AttentionCall& call, int steps,
                       int padded) const {
#pragma unroll 1
    for (int v = static_cast<int>(threadIdx.x); v < padded; v += kThreads) {
      row[v] = slot[v] = -1;
      head[v] = position[v] = shift[v] = 0;
      slope[v] = 0.0f;
      if (v >= tile.vectors()) continue;
      const int entry = tile.entry(v), r = work.entry_row[entry];
      row[v] = r;
      head[v] = tile.head(v);
      shift[v] = work.entry_shift[entry];
      position[v] = work.query_position[r] + steps - shift[v];
      if (work.row_partials[r + 1] - work.row_partials[r] > 1) {
        slot[v] = work.row_partials[r] + work.entry_ordinal[entry];
      }
      if (call.alibi_slopes != nullptr) slope[v] = call.alibi_slopes[head[v]] * kLog2E;
    }
  }
};

// Turn the queries in shared memory by minus their shift (design.md, idea 5): pairs (i, i + rotary_half). Each
// pair belongs to one thread. Without any shift it costs one comparison per vector.
template <class T>
__device__ void turn_queries(T* q, int stride, const RowTable& rows, const AttentionCall& call, int vectors) {
  if (call.inverse_frequencies == nullptr) return;
  const int half = call.rotary_half;
#pragma unroll 1
  for (int v = static_cast<int>(threadIdx.x) / kWarpLanes; v < vectors; v += kWarps) {
    const int shift = rows.shift[v];
    if (shift == 0) continue;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) % kWarpLanes; i < half; i += kWarpLanes) {
      // Reduced to one turn in float64: shifts reach 10^5 radians, of which a float32 keeps two digits.
      constexpr double kTurn = 6.283185307179586476925287;
      const double angle = -static_cast<double>(shift) * call.inverse_frequencies[i];
      float sine, cosine;
      sine_cosine(static_cast<float>(fma(-kTurn, rint(angle / kTurn), angle)), sine, cosine);
      T* low = q + v * stride + i;
      T* high = low + half;
      const float a = to_float(*low), b = to_float(*high);
      *low = from_float<T>(__fmaf_rn(a, cosine, -__fmul_rn(b, sine)));
      *high = from_float<T>(__fmaf_rn(b, cosine, __fmul_rn(a, sine)));
    }
  }
}

// tanh, to about 1e-7 absolute.
__device__ __forceinline__ float tanh_approximate(float x) {
  const float decay = exp2_approximate(-2.0f * kLog2E * fabsf(x));
  return copysignf(__fmul_rn(1.0f - decay, reciprocal_approximate(1.0f + decay)), x);
}

// Scores are kept times log2 e, so that weights are powers of two, here and in the merge.
struct ScoreRule {
  float scale, soft_cap, inverse_cap;
  int window, causal;
  bool is_plain;  // scores are only scaled

  __device__ explicit ScoreRule(const AttentionCall& call)
      : scale(call.soft_cap > 0.0f ? call.scale : call.scale * kLog2E),
        soft_cap(call.soft_cap * kLog2E),
        inverse_cap(call.soft_cap > 0.0f ? 1.0f / call.soft_cap : 0.0f),
        window(call.window),
        causal(call.causal),
        is_plain(call.soft_cap <= 0.0f && call.alibi_slopes == nullptr) {}

  __device__ float scaled(float product) const { return __fmul_rn(product, scale); }
  // `ahead`: the key's position minus the query's.
  __device__ float apply(float product, float slope, int ahead) const {
    float x = scaled(product);
    if (soft_cap > 0.0f) x = __fmul_rn(soft_cap, tanh_approximate(__fmul_rn(x, inverse_cap)));
    return __fmaf_rn(slope, static_cast<float>(ahead), x);
  }
  __device__ bool hides(int ahead) const {
    return hides_some() && (ahead > 0 || (window > 0 && -ahead >= window));
  }
  __device__ bool hides_some() const { return window > 0 || causal != 0; }
};

// `-inf - -inf` would be NaN; with 0 subtracted instead, an empty state's weights are 2^-inf = 0.
__device__ __forceinline__ float finite_peak(float peak) { return peak == kNegativeInfinity ? 0.0f : peak; }

}  // namespace trunkline::cuda
