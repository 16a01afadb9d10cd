// Attention of a block of query vectors over groups of keys: online softmax, for decode and prefill alike.
//
//      scores S = Q K      gemm.h, keys as B                    [rows, columns]
//      scale, cap, bias, masks (only where there are any), peak, weights P = 2^(S - peak), in place
//      acc  += P V         gemm.h, values as B                  [rows, d]
//
// The state of a row is ChunkAttention's (O, m, n) in base 2: acc, peak, total. A row whose keys are all hidden
// has the empty state (0, -inf, 0). `peak` is a reference, not always the maximum: it moves, and acc is rescaled,
// only when a score exceeds it by kPeakSlack, which costs no accuracy in float32.
//
// A unit attends for one head with many query vectors, or for several heads with few: the tiles of adjoining heads
// adjoin in memory, and where reading is what takes time, long sweeps are read faster than single tiles.
//
// Batch invariance: no instruction mixes rows, and what is skipped is skipped only where it adds exactly nothing.
#pragma once

#include "attention.h"
#include "attention_ahead.h"
#include "attention_group.h"
#include "attention_mask.h"
#include "attention_memory.h"
#include "attention_result.h"
#include "tile_product.h"

namespace trunkline::TRUNKLINE_NAMESPACE {
namespace {

constexpr float kPeakSlack = 8.0f;

// T is what keys and values are multiplied as (`Attending`). Queries come and results leave in the form of a type that
// attends as T.
template <class T>
class AttentionUnit {
 public:
  using A = typename T::A;
  using B = typename T::B;
  static constexpr bool kPackedWeights = T::kStep == 2 && T::kPlainA;  // P as pairs of bfloat16
  static constexpr bool kQuantised = kIsQuantisedKv<T>;
  static constexpr bool kBytes = kMultipliesBytes<T>;
  static constexpr bool kPairs = kMultipliesPairs<T>;
  // Whether a head's scores become weights beside the products of other heads, rather than those of all heads at once.
  static constexpr bool kWeighsByHead = kBytes || kPairs;

  // `vectors` query vectors for each of `heads` KV heads from `head` on, numbered head by head. Several heads: at
  // most kRowBlock in all, and chunks of whole token steps.
  TRUNKLINE_INLINE AttentionUnit(const PoolView& pool, const ScoreRule& rule, long layer, long head, int heads,
                                 int vectors, int group_tokens, char* scratch)
      : reader_(pool, layer, group_tokens),
        pool_(pool),
        rule_(rule),
        d_(static_cast<int>(pool.head_dim)),
        padded_(static_cast<int>(round_up(pool.query_width(), 16))),
        rotary_(static_cast<int>(pool.rotary_integers())),
        values_(static_cast<int>(round_up(pool.value_dim, 16))),
        head_(head),
        heads_(heads),
        vectors_(vectors),
        tiled_(has_tiles<T>(pool)) {
    lay_out(memory_, scratch, heads * vectors, pool.query_width());
    group_.valid = memory_.valid, group_.position = memory_.key_position;
    group_.key_scale = memory_.key_scale, group_.value_scale = memory_.value_scale;
    group_.key_scratch = reinterpret_cast<B*>(memory_.keys);
    group_.value_scratch = reinterpret_cast<B*>(memory_.values);
  }

  // Others have read just before what this unit reads.
  void read_cached() { cached_ = true; }

  // What this unit fetches while it multiplies many vectors, beside its own next tiles.
  void fetch(TilesAhead& ahead) { ahead_ = &ahead; }

  UnitMemory& memory() { return memory_; }
  // Floats of a vector's sums.
  int padded() const { return values_; }

  // Empties the states. Query vectors, positions and slopes (where the rule needs them) are the caller's to set.
  void reset() {
    const int all = heads_ * vectors_;
    std::memset(memory_.acc, 0, static_cast<size_t>(all) * values_ * 4);
    std::memset(memory_.total, 0, static_cast<size_t>(all) * kTotalLanes * 4);
    for (int i = 0; i < all; ++i) memory_.peak[i] = kMinusInfinity;
  }

  // Query vector `i` is `q`, as it is in memory.
  template <class Query>
  TRUNKLINE_INLINE void set_query(int i, const char* q) {
    using Storage = typename Query::Storage;
    if constexpr (T::kPlainA) {
      memory_.query_rows[i] = q;
      if (tiled_) std::memcpy(query_row(i), q, static_cast<size_t>(d_) * sizeof(Storage));
    } else if constexpr (kPairs) {
      auto* row = reinterpret_cast<Storage*>(memory_.queries + i * padded_);
      std::memcpy(row, q, static_cast<size_t>(d_) * sizeof(Storage));
      for (int j = d_; j < padded_; ++j) row[j] = 0;
      memory_.query_rows[i] = row;
    } else {
      float* row = memory_.queries + i * padded_;
      const Storage* from = reinterpret_cast<const Storage*>(q);
      const int own = rotary_ / 2, start = latent_start();
      if constexpr (kQuantised) {
        for (int j = 0; j < own; ++j) row[own + j] = Query::to_float(from[j]), row[j] = 256.0f * row[own + j];
        for (int j = rotary_; j < start; ++j) row[j] = 0.0f;
      }
      const int rest = d_ - own;
      widen<Query>(from + own, rest, row + start);
      if constexpr (kQuantised) {
        for (int j = start + rest; j < padded_; ++j) row[j] = 0.0f;
      }
      if constexpr (kBytes) this->split_query(i, row);
      memory_.query_rows[i] = row;
    }
  }

  // Attends to everything that `at` yields. `causal`: keys after the query are hidden. The queries' lowest and
  // highest positions are in the frame of the keys.
  void attend(Cursor& at, bool causal, int32_t query_lowest, int32_t query_highest) {
    group_.origin = query_lowest;
    while (reader_.next(at, head_, group_)) {
      if (group_.size == 0) continue;
      const Adjustment how = adjustment_of(rule_, group_, causal, query_lowest, query_highest);
      if (heads_ > 1) {
        attend_heads(how, at);
        continue;
      }
      reader_.load_keys(group_, head_);
      reader_.load_values(group_, head_);
      const int block = row_block<T>(pool_);
      for (int first = 0; first < vectors_; first += block) {
        const int rows = vectors_ - first < block ? vectors_ - first : block;
        const Cursor* next = first == 0 && !(is_narrow<T>(pool_) && cached_) ? &at : nullptr;  // fetched once
        score(0, first, rows, 0, next);
        weigh(first, rows, 0, how);
        accumulate(0, first, rows, 0, next);
      }
    }
  }

  TRUNKLINE_INLINE float total(int i) const {
    float sum = 0.0f;
    const float* lanes = memory_.total + i * kTotalLanes;
    for (int lane = 0; lane < kTotalLanes; lane += kLanes) sum += reduce_add(load(lanes + lane));
    return sum;
  }

  // The result of query vector `i`, which is one of `query_head`; zeros if it saw nothing.
  template <class Query>
  TRUNKLINE_INLINE void write_output(int i, int64_t query_head, char* out) const {
    const float factor = result_factor(rule_, query_head, total(i), memory_.peak[i]);
    write_scaled<Query>(memory_.acc + i * values_, factor, static_cast<int>(pool_.value_dim), out);
  }

 private:
  TRUNKLINE_INLINE char* query_row(int i) const { return reinterpret_cast<char*>(memory_.queries) + i * d_ * 2; }

  // Where the latent's part of a query stands in its row; 0: there are no two parts.
  TRUNKLINE_INLINE int latent_start() const { return static_cast<int>(round_up(rotary_, 16)); }

  template <class Query>
  TRUNKLINE_INLINE static void widen(const typename Query::Storage* from, int n, float* to) {
    int j = 0;
    for (; j + kLanes <= n; j += kLanes) store(to + j, Query::load_floats(from + j));
    for (; j < n; ++j) to[j] = Query::to_float(from[j]);
  }

  void attend_heads(const Adjustment& how, const Cursor& next) {
    const long values = pool_.bands - 1;
    for (int h = 0; h < heads_; ++h) {
      const bool last = h + 1 == heads_;
      reader_.fetch_open(group_, last ? values : 0, last ? head_ : head_ + h + 1);
      reader_.load_keys(group_, head_ + h);
      score(h, h * vectors_, vectors_, h * vectors_, &next);
    }
    if constexpr (!kWeighsByHead) weigh(0, heads_ * vectors_, 0, how);
    for (int h = 0; h < heads_; ++h) {
      if (h + 1 < heads_) reader_.fetch_open(group_, values, head_ + h + 1);
      reader_.load_values(group_, head_ + h);
      if constexpr (kWeighsByHead) weigh(h * vectors_, vectors_, h * vectors_, how);
      accumulate(h, h * vectors_, vectors_, h * vectors_, &next);
    }
  }

  // Bytes from a part's tile to the one that is read after it, of the next stage or group, which starts at `next`;
  // 0: do not fetch. The next head's tile adjoins this one, so the processor fetches it by itself, and asking as well
  // costs a fifth of the time. Two readers are the exception: bytes that are multiplied by several vectors take longer
  // than it looks ahead, and it does not follow the order of matrix registers, four lines of a row at a time. A tile may
  // not fit the first-level cache beside the one that is read.
  TRUNKLINE_INLINE long ahead_of(int p, int h, bool value, const Cursor* next) const {
    const Part<T>& part = group_.parts[p];
    if (next == nullptr || !part.packed) return 0;
    const long tile = pool_.tile_bytes;
    if (h + 1 < heads_) return tiled_ || ((kBytes || kPairs) && vectors_ > 1) ? tile : 0;
    if (heads_ > 1 && !value) return (pool_.kv_heads - heads_ + 1) * tile;
    const int item = next->item + p;
    if (item >= next->end) return 0;
    const long blocks = static_cast<long>(next->block[item]) - part.block;
    const long tiles = blocks * pool_.layers * pool_.bands * pool_.kv_heads;
    return (heads_ > 1 ? tiles - pool_.kv_heads - heads_ + 1 : tiles) * tile;
  }

  // `gemm`, which of many rows fetches what other units read as well.
  TRUNKLINE_INLINE void product(int m, int n, int steps, const A* const* a, const B* b, long ldb, float* c,
                                long ldc, bool accumulate, long ahead) {
    constexpr int kColumns = kMaxVectors * kLanes;
    if (!kFetchesAhead || ahead_ == nullptr || m < kFetchingRows || n % kColumns != 0)
      return gemm<T>(m, n, steps, a, b, ldb, c, ldc, accumulate, ahead);
    const char* fetch[(kRowBlock + kMaxRows - 1) / kMaxRows];
    const char* own = reinterpret_cast<const char*>(b);
    if (ahead != 0) ahead_->begin_with(own + ahead, n * steps * static_cast<long>(sizeof(B)));
    for (int column = 0; column < n; column += kColumns) {
      for (int block = 0; block < (m + kMaxRows - 1) / kMaxRows; ++block) {
        const char* lines = ahead_->next(steps * kLineBytes);
        fetch[block] = lines == nullptr ? own : lines;  // what is in the cache costs nothing
      }
      gemm_fetching<T>(m, a, b + column, ldb, steps, c + column, ldc, accumulate, fetch);
    }
  }

#if TRUNKLINE_LEVEL >= 4
  // The same by tiles.
  TRUNKLINE_INLINE void multiply_tiles(int m, int n, int steps, const char* a, long lda, const B* b, long ldb,
                                       float* c, long ldc, bool accumulate, const Cursor* next, long ahead) {
    if (ahead_ != nullptr) {
      const int count = m > kTileRowsMax ? 32 : 12;  // a product of one row of tiles is as much shorter
      const char* lines = ahead_->next(count * kLineBytes);
      for (int line = 0; lines != nullptr && line < count; ++line) prefetch_second(lines + line * kLineBytes);
    }
    const TileOperands with{a,     lda,        reinterpret_cast<const char*>(b), ldb * 4, false,
                            steps, kTileSteps, reinterpret_cast<char*>(c),       ldc * 4, accumulate};
    if (next == nullptr && m <= kTileRowsMax && tile_gemm_cached(tiles_, m, n, with)) return;
    tile_gemm(tiles_, m, n, with, ahead);
  }
#endif

  // Scores of query vectors [first, first + rows) go to the rows of `scores` from `to` on.
  TRUNKLINE_INLINE void score(int h, int first, int rows, int to, const Cursor* next) {
    if constexpr (kBytes) return this->score_bytes(h, first, rows, to, next);
    if constexpr (kQuantised) {
      if (rotary_ != 0) return score_parts(first, rows, to);
    }
    const A* const* queries = reinterpret_cast<const A* const*>(memory_.query_rows) + first;
    for (int p = 0; p < group_.size; ++p) {
      const Part<T>& part = group_.parts[p];
      float* scores = memory_.scores + to * kScoreStride + part.column;
      const int steps = (d_ + T::kStep - 1) / T::kStep;
      const long ahead = ahead_of(p, h, false, next);
      if constexpr (kHasTiles<T>) {
        if (tiled_) {
          this->multiply_tiles(rows, part.columns, steps, query_row(first), d_ * 2, part.keys, part.key_stride,
                               scores, kScoreStride, false, next, ahead);
          continue;
        }
      }
      product(rows, part.columns, steps, queries, part.keys, part.key_stride, scores, kScoreStride, false, ahead);
    }
    if constexpr (kQuantised) {
      for (int i = 0; i < rows; ++i) scale_columns(memory_.scores + (to + i) * kScoreStride, memory_.key_scale);
    }
  }

  // Of latents in int8: the sum over the rotary part and that over the latent, each times its own scale.
  void score_parts(int first, int rows, int to) {
    const A* starts[2 * kSplitRows];
    const long words = rotary_ / T::kStep, rest = (pool_.value_dim + T::kStep - 1) / T::kStep;
    for (int start = 0; start < rows; start += 2 * kSplitRows) {
      const int count = rows - start < 2 * kSplitRows ? rows - start : 2 * kSplitRows;
      float* scores = memory_.scores + (to + start) * kScoreStride;
      for (int p = 0; p < group_.size; ++p) {
        const Part<T>& part = group_.parts[p];
        for (int i = 0; i < count; ++i) starts[i] = static_cast<const A*>(memory_.query_rows[first + start + i]);
        gemm<T>(count, part.columns, static_cast<int>(words), starts, part.keys, part.key_stride,
                memory_.sums + part.column, kScoreStride, false, 0);
        for (int i = 0; i < count; ++i) starts[i] += latent_start();
        gemm<T>(count, part.columns, static_cast<int>(rest), starts, part.keys + words * part.key_stride,
                part.key_stride, scores + part.column, kScoreStride, false, 0);
      }
      for (int i = 0; i < count; ++i, scores += kScoreStride) {
        const float* sums = memory_.sums + i * kScoreStride;
        for (int c = 0; c < group_.columns; c += kLanes) {
          const Vec latent = mul(load(scores + c), load(memory_.value_scale + c));
          store(scores + c, fma(load(sums + c), load(memory_.key_scale + c), latent));
        }
      }
    }
  }

  TRUNKLINE_INLINE void scale_columns(float* row, const float* scale) {
    for (int c = 0; c < group_.columns; c += kLanes) store(row + c, mul(load(row + c), load(scale + c)));
  }

  TRUNKLINE_INLINE MaskedQuery query_of(int i) const {
    return {memory_.slope[i], memory_.position[i], memory_.reach[i]};
  }

  // Scores of query vectors [first, first + rows), which start at row `from`, become weights.
  void weigh(int first, int rows, int from, const Adjustment& how) {
    const float factor = how.scales ? 1.0f : rule_.scale * kLog2E;
    for (int i = 0; i < rows; ++i) {
      float* scores = memory_.scores + (from + i) * kScoreStride;
      if (how.any) adjust(scores, rule_, group_, how, query_of(first + i));
      softmax(scores, first + i, factor);
    }
  }

  // Weights in the rows from `from` on, times values, are added to query vectors [first, first + rows).
  TRUNKLINE_INLINE void accumulate(int h, int first, int rows, int from, const Cursor* next) {
    if constexpr (kBytes) return this->accumulate_bytes(h, first, rows, from, next);
    if constexpr (kQuantised) {
      for (int i = 0; i < rows; ++i) {
        float* own = memory_.scores + (from + i) * kScoreStride;
        scale_columns(own, memory_.value_scale);
        if constexpr (kPairs) {  // in place: what is written lies before what is still to be read
          for (int c = 0; c < group_.columns; c += kLanes) {
            store_bf16(reinterpret_cast<uint16_t*>(own) + c, load(own + c));
          }
        }
      }
    }
    const A** weights = reinterpret_cast<const A**>(memory_.weight_rows);
    for (int p = 0; p < group_.size; ++p) {
      const Part<T>& part = group_.parts[p];
      const int word = kPackedWeights || kPairs ? part.value_column / 2 : part.value_column;
      float *row = memory_.scores + from * kScoreStride + word, *acc = memory_.acc + first * values_;
      const long ahead = ahead_of(p, h, true, next);
      if constexpr (kHasTiles<T>) {
        if (tiled_) {
          this->multiply_tiles(rows, values_, part.value_steps, reinterpret_cast<const char*>(row),
                               kScoreStride * 4, part.values, part.value_stride, acc, values_, true, next, ahead);
          continue;
        }
      }
      for (int i = 0; i < rows; ++i) weights[i] = reinterpret_cast<const A*>(row + i * kScoreStride);
      product(rows, values_, part.value_steps, weights, part.values, part.value_stride, acc, values_, true, ahead);
    }
  }

#if TRUNKLINE_LEVEL >= 3
  // Each part of a query becomes two rows of bytes, which take the place of its floats.
  void split_query(int i, float* row) {
    const int start = latent_start();
    if (start != 0) memory_.splits[2 * i + 1] = split_part(row, start);
    memory_.splits[2 * i] = split_part(row + start, padded_ - start);
  }

  SplitRow split_part(float* row, int n) {
    int8_t* high = memory_.bytes;
    const SplitRow split = split_row(row, n, high, high + n);
    std::memcpy(row, high, static_cast<size_t>(2 * n));
    return split;
  }

  // As `score` and `accumulate`, in integers, some rows at a time. A latent's rotary part comes first.
  void score_bytes(int h, int first, int rows, int to, const Cursor* next) {
    if (rotary_ == 0) return score_bytes_of(h, first, rows, to, next, 0, (d_ + T::kStep - 1) / T::kStep);
    const int words = rotary_ / T::kStep, rest = static_cast<int>((pool_.value_dim + T::kStep - 1) / T::kStep);
    score_bytes_of(h, first, rows, to, next, 0, words);
    score_bytes_of(h, first, rows, to, next, words, rest);
  }

  // Of `steps` words of keys from word `word` on; behind a rotary part they are added to its scores.
  void score_bytes_of(int h, int first, int rows, int to, const Cursor* next, int word, int steps) {
    const A* both[2 * kSplitRows];
    const int query = word == 0 ? 0 : latent_start(), is_rotary = rotary_ != 0 && word == 0 ? 1 : 0;
    const int width = is_rotary != 0 ? latent_start() : padded_ - query;
    const float* key_scale = word == 0 ? memory_.key_scale : memory_.value_scale;
    for (int start = 0; start < rows; start += kSplitRows) {
      const int count = rows - start < kSplitRows ? rows - start : kSplitRows;
      for (int i = 0; i < count; ++i) {
        both[2 * i] = static_cast<const A*>(memory_.query_rows[first + start + i]) + query;
        both[2 * i + 1] = both[2 * i] + width / T::kStep;
      }
      for (int p = 0; p < group_.size; ++p) {
        const Part<T>& part = group_.parts[p];
        gemm<T>(2 * count, part.columns, steps, both, part.keys + word * part.key_stride, part.key_stride,
                memory_.sums + part.column, kScoreStride, false, start == 0 ? ahead_of(p, h, false, next) : 0);
      }
      for (int i = 0; i < count; ++i) {
        const SplitRow& split = memory_.splits[2 * (first + start + i) + is_rotary];
        const float* high = memory_.sums + 2 * i * kScoreStride;
        float* scores = memory_.scores + (to + start + i) * kScoreStride;
        const Vec unit = set1(split.unit);
        for (int c = 0; c < group_.columns; c += kLanes) {
          const Vec joined = joined_lanes(high + c, high + kScoreStride + c, split.offset, unit);
          const Vec score = mul(joined, load(key_scale + c));
          store(scores + c, word == 0 ? score : add(load(scores + c), score));
        }
      }
    }
  }

  void accumulate_bytes(int h, int first, int rows, int from, const Cursor* next) {
    const A* both[2 * kSplitRows];
    SplitRow splits[kSplitRows];
    const float poison = poison_of(memory_.value_scale, group_.columns);
    for (int start = 0; start < rows; start += kSplitRows) {
      const int count = rows - start < kSplitRows ? rows - start : kSplitRows;
      for (int i = 0; i < count; ++i) {
        int8_t* high = memory_.bytes + 2 * i * kScoreStride;
        const float* weights = memory_.scores + (from + start + i) * kScoreStride;
        splits[i] = split_weights(weights, memory_.value_scale, group_.columns, high, high + kScoreStride);
        splits[i].unit += poison;
      }
      for (int p = 0; p < group_.size; ++p) {
        const Part<T>& part = group_.parts[p];
        for (int i = 0; i < 2 * count; ++i) {
          both[i] = reinterpret_cast<const A*>(memory_.bytes + i * kScoreStride + part.value_column);
        }
        gemm<T>(2 * count, values_, part.value_steps, both, part.values, values_, memory_.sums, values_, p > 0,
                start == 0 ? ahead_of(p, h, true, next) : 0);
      }
      for (int i = 0; i < count; ++i) {
        const float* high = memory_.sums + 2 * i * values_;
        float* acc = memory_.acc + (first + start + i) * values_;
        const Vec unit = set1(splits[i].unit);
        for (int j = 0; j < values_; j += kLanes) {
          const Vec joined = joined_lanes(high + j, high + values_ + j, splits[i].offset, unit);
          store(acc + j, add(load(acc + j), joined));
        }
      }
    }
  }
#endif

  // Scores times `factor` become weights, in place, in the form of A.
  TRUNKLINE_INLINE void softmax(float* scores, int row, float factor) {
    const int columns = group_.columns;
    Vec top = load(scores);
    for (int c = kLanes; c < columns; c += kLanes) top = max(top, load(scores + c));
    float peak = memory_.peak[row];
    if (any_above(mul(top, set1(factor)), set1(peak + kPeakSlack)))
      peak = raise_peak(row, reduce_max(top) * factor);
    const Vec offset = set1(peak == kMinusInfinity ? 0.0f : -peak), scale = set1(factor);
    float* lanes = memory_.total + row * kTotalLanes;
    Vec sums[kTotalLanes / kLanes];
    for (int i = 0; i < kTotalLanes / kLanes; ++i) sums[i] = load(lanes + i * kLanes);
    int c = 0;
    if constexpr (kPackedWeights) {
      for (; c + 2 * kLanes <= columns; c += 2 * kLanes) {
        const Vec weight = weight_of(fma(load(scores + c), scale, offset));
        const Vec second = weight_of(fma(load(scores + c + kLanes), scale, offset));
        sums[0] = add(add(sums[0], weight), second);
        store_bf16(reinterpret_cast<uint16_t*>(scores) + c, weight, second);
      }
    }
    for (; c < columns; c += kTotalLanes) {
      for (int i = 0; i < kTotalLanes / kLanes; ++i) {
        const int at = c + i * kLanes;
        const Vec weight = weight_of(fma(load(scores + at), scale, offset));
        sums[i] = add(sums[i], weight);
        if constexpr (kPackedWeights) {
          store_bf16(reinterpret_cast<uint16_t*>(scores) + at, weight);
        } else {
          store(scores + at, weight);
        }
      }
    }
    for (int i = 0; i < kTotalLanes / kLanes; ++i) store(lanes + i * kLanes, sums[i]);
  }

  // A weight by its exponent, as accurate as what is multiplied with it.
  TRUNKLINE_INLINE static Vec weight_of(Vec exponent) {
#if TRUNKLINE_LEVEL >= 3
    if constexpr (kPackedWeights || kBytes || kPairs) return exp2_for_bf16(exponent);
#endif
    return exp2(exponent);
  }

  // The row's new peak, if `largest` exceeds the present one by more than the slack: it may be no number.
  float raise_peak(int row, float largest) {
    const float peak = memory_.peak[row];
    if (!(largest > peak + kPeakSlack)) return peak;
    if (peak != kMinusInfinity) rescale(row, peak - largest);
    return memory_.peak[row] = largest;
  }

  void rescale(int row, float exponent) {
    const Vec factor = exp2(set1(exponent));
    float* acc = memory_.acc + row * values_;
    for (int j = 0; j < values_; j += kLanes) store(acc + j, mul(load(acc + j), factor));
    float* lanes = memory_.total + row * kTotalLanes;
    for (int j = 0; j < kTotalLanes; j += kLanes) store(lanes + j, mul(load(lanes + j), factor));
  }

  GroupReader<T> reader_;
  const PoolView& pool_;
  const ScoreRule& rule_;
  const int d_, padded_;  // of a query, as it is and in memory
  const int rotary_;      // integers of a latent's rotary part, 0: there is none
  const int values_;      // padded width of a value: that of keys if they are not the end of those
  const long head_;
  const int heads_, vectors_;  // per head
  bool cached_ = false;        // what it reads is in the second-level cache
  const bool tiled_;           // vectors are whole tiles wide: products are those of tiles, which round otherwise
  TilesAhead* ahead_ = nullptr;
  Tiles tiles_;
  UnitMemory memory_;
  Group<T> group_;
};

}  // namespace
}  // namespace trunkline::TRUNKLINE_NAMESPACE
