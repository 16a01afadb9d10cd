// Groups of keys: what attention reads between two updates of its softmax state, brought into the form of gemm.h.
//
// A group is up to kGroupTokens (or fewer) columns taken from consecutive items. Packed tiles are read where they
// lie; open ones are packed into the unit's scratch memory, only the tokens needed: one kernel serves both.
//
//      columns  0 ............ 63 | 64 ......... 127         valid: which columns hold a visible token
//      parts    tile of block 7   | scratch                  position: of the key in each column
//
// Columns are the same for all heads, so a group serves several, one after the other: `load_keys` and
// `load_values` point its parts to a head's tiles.
//
// Invariants: which column a token takes depends on the items alone, not on whether a tile is packed (results are
// then equal bit by bit); what lies outside an item is never multiplied by anything (0 * NaN is NaN).
#pragma once

#include "attention.h"
#include "attention_memory.h"
#include "quantised_kv.h"

namespace trunkline::TRUNKLINE_NAMESPACE {
namespace {

TRUNKLINE_INLINE char* tile_of(const PoolView& pool, long block, long layer, long band, long head) {
  return pool.data +
         (((block * pool.layers + layer) * pool.bands + band) * pool.kv_heads + head) * pool.tile_bytes;
}

// Rows of an open tile's last step up to which only they are read: a step of a tile that just began is mostly empty.
constexpr int kFewRows = 4;

// Columns whose keys lie together, and whose values do, for the head that was loaded last.
template <class T>
struct Part {
  const typename T::B* keys;  // lanes along tokens
  long key_stride;
  const typename T::B* values;  // lanes along d
  long value_stride;
  int column, columns;  // columns is a multiple of kTokenStep
  int value_column, value_steps;
  int block, token, stop;  // tokens [token, stop) of a block
  bool packed;
};

// Where a unit is in its items.
struct Cursor {
  const int32_t *block, *first, *count, *base, *tail;  // tail: null, or as WorkView::item_tail
  int steps;
  int item, end;
  int done;  // tokens of `item` that earlier groups took
  // Tokens at positions outside [see_from, see_to] need not be read.
  int32_t see_from, see_to;

  TRUNKLINE_INLINE int count_of(int i) const {
    return tail == nullptr ? count[i] : item_tokens(count[i], tail[i], steps);
  }
};

template <class T>
struct Group {
  Part<T> parts[kGroupTokens / kTokenStep];
  int size;     // parts
  int columns;  // multiple of kTokenStep
  bool all_valid;
  float* valid;                  // [kGroupTokens]: 1 or 0
  float* position;               // [kGroupTokens]: minus `origin`
  int32_t origin;                // near all positions that count: a float holds 24 bits of their differences
  int32_t lowest, highest;       // positions
  typename T::B* key_scratch;    // [steps of d][kScoreStride]
  typename T::B* value_scratch;  // [kGroupTokens / kStep][padded width of a value]
  // KV in 8 bits: of the columns' tokens, for the head that was loaded last; 0 where there is none. Of latents, those
  // of the rotary part and of the latent. [kScoreStride]
  float *key_scale, *value_scale;
};

template <class T>
class GroupReader {
 public:
  using B = typename T::B;
  using Storage = typename T::Storage;
  static constexpr bool kPairs = T::kStep == 2;
  static constexpr bool kQuantised = kIsQuantisedKv<T>;

  TRUNKLINE_INLINE GroupReader(const PoolView& pool, long layer, int tokens)
      : pool_(pool),
        tokens_(tokens),
        layer_(layer),
        d_(pool.head_dim),
        value_dim_(pool.value_dim),
        value_start_(pool.value_start()),
        integers_(pool.integers()),
        padded_(round_up(pool.value_dim, 16)),
        aligned_(pool.chunk % kTokenStep == 0) {}

  // The next group; false: nothing is left. A group may be empty if all its tokens are out of sight. Without
  // `aligned_` its keys and values are those of `head`, and it serves that head only.
  bool next(Cursor& at, long head, Group<T>& group) {
    group.size = group.columns = 0;
    group.all_valid = true;
    group.lowest = INT32_MAX, group.highest = INT32_MIN;
    int budget = tokens_;
    bool any = false;
    while (at.item < at.end) {
      const int left = at.count_of(at.item) - at.done;
      if (left <= 0) {
        ++at.item, at.done = 0;
        continue;
      }
      const int token = at.first[at.item] + at.done;
      const int start = aligned_ ? token / kTokenStep * kTokenStep : token;
      if (budget < (aligned_ ? kTokenStep : 1)) break;
      int stop = min_of(token + left, start + budget);
      const int position = at.base[at.item] + at.done;
      // Whole steps behind the last position that is seen are skipped in the next turn of the loop.
      const long beyond = static_cast<long>(token) + at.see_to - position + 1;
      if (aligned_ && beyond > token && beyond < stop)
        stop = min_of(stop, static_cast<int>(round_up(beyond, kTokenStep)));
      budget -= aligned_ ? static_cast<int>(round_up(stop - start, kTokenStep)) : stop - start;
      const bool seen = position <= at.see_to && position + (stop - token) - 1 >= at.see_from;
      if (aligned_) {
        if (seen) add(at.block[at.item], token, stop, position, group);
      } else {
        append(at.block[at.item], head, token, stop, position, group);
      }
      at.done += stop - token;
      any = true;
    }
    if (!aligned_ && any) finish_appended(group);
    return any;
  }

  void load_keys(Group<T>& group, long head) {
    for (int p = 0; aligned_ && p < group.size; ++p) {
      Part<T>& part = group.parts[p];
      const int start = part.token / kTokenStep * kTokenStep;
      const char* tile = tile_of(pool_, part.block, layer_, 0, head);
      const long rows = part.stop - start <= kFewRows ? part.stop - start : part.columns;
      if constexpr (kQuantised) {
        load_scales(part, tile, 0, group.key_scale);
        part.keys = words_of(tile) + start, part.key_stride = pool_.chunk;
        if (!part.packed) {
          B* to = group.key_scratch + part.column;
          pack_key_rows<typename T::Bytes>(tile + start * pool_.row_bytes, pool_.row_bytes, rows, integers_, to,
                                           kScoreStride);
          part.keys = to, part.key_stride = kScoreStride;
        }
      } else if (part.packed) {
        part.keys = reinterpret_cast<const B*>(tile) + start;
        part.key_stride = pool_.chunk;
      } else {
        B* to = group.key_scratch + part.column;
        pack_keys(reinterpret_cast<const Storage*>(tile) + start * d_, rows, d_, to, kScoreStride);
        part.keys = to;
        part.key_stride = kScoreStride;
      }
    }
  }

  void load_values(Group<T>& group, long head) {
    for (int p = 0; aligned_ && p < group.size; ++p) {
      Part<T>& part = group.parts[p];
      load_part_values(part, tile_of(pool_, part.block, layer_, pool_.bands - 1, head), group);
    }
  }

  // Asks for a head's rows of open tiles, of keys (band 0) or values, a head before they are packed: the processor's
  // own fetching begins anew at each tile that ends early. Of nearly full ones it does better alone. Inline, because
  // the compiler leaves out calls of a function that does nothing but ask.
  TRUNKLINE_INLINE void fetch_open(const Group<T>& group, long band, long head) {
    for (int p = 0; aligned_ && p < group.size; ++p) {
      const Part<T>& part = group.parts[p];
      const long rows = part.stop - part.token;
      if (part.packed || 4 * rows > 3 * pool_.chunk) continue;
      const char* from = tile_of(pool_, part.block, layer_, band, head) + part.token * pool_.row_bytes;
      for (long at = 0; at < rows * pool_.row_bytes; at += kLineBytes) prefetch_second(from + at);
    }
  }

 private:
  TRUNKLINE_INLINE static int min_of(int a, int b) { return a < b ? a : b; }
  TRUNKLINE_INLINE static int max_of(int a, int b) { return a > b ? a : b; }

  // Tokens [token, stop) of a block become the next columns, those before `token` included if they share its step.
  void add(int block, int token, int stop, int position, Group<T>& group) {
    const int start = token / kTokenStep * kTokenStep;
    const int columns = static_cast<int>(round_up(stop - start, kTokenStep));
    Part<T>& part = group.parts[group.size++];
    part.column = group.columns, part.columns = columns;
    part.block = block, part.token = token, part.stop = stop;
    part.packed = pool_.packable && pool_.packed[block * pool_.layers + layer_] != 0;
    note_columns(group, columns, token - start, stop - start, position - (token - start));
    group.columns += columns;
  }

  TRUNKLINE_INLINE void load_part_values(Part<T>& part, const char* tile, Group<T>& group) {
    const bool packed = part.packed;
    const int token = part.token, stop = part.stop, start = token / kTokenStep * kTokenStep;
    part.value_stride = padded_;
    if constexpr (kQuantised) {
      load_scales(part, tile, pool_.scales() - 1, group.value_scale);
      part.value_column = part.column, part.value_steps = part.columns / T::kStep;
      part.values = words_of(tile) + start / T::kStep * d_;
      if (!packed) {
        B* to = group.value_scratch + part.column / T::kStep * padded_;
        const char* rows = tile + start * pool_.row_bytes + pool_.rotary_integers();
        pack_value_rows<typename T::Bytes>(rows, pool_.row_bytes, part.columns, value_dim_, to, padded_);
        clear_padding(to, part.value_steps);
        part.values = to;
      }
    } else if constexpr (kPairs) {
      const int even = token & ~1, pairs = (stop + 1) / 2 - even / 2;
      part.value_column = part.column + even - start, part.value_steps = pairs;
      const bool whole = token % 2 == 0 && stop % 2 == 0;
      const uint32_t* in_place = reinterpret_cast<const uint32_t*>(tile) + even / 2 * d_;
      if (packed && whole) {
        part.values = in_place;
        return;
      }
      uint32_t* to = group.value_scratch + part.value_column / 2 * padded_;
      part.values = to;
      const uint16_t* plain = reinterpret_cast<const uint16_t*>(tile) + even * d_ + value_start_;
      for (int pair = 0; pair < pairs; ++pair) {
        uint32_t* row = to + pair * padded_;
        if (packed) {
          std::memcpy(row, in_place + pair * d_, static_cast<size_t>(d_) * 4);
        } else {
          interleave(plain + 2 * pair * d_, plain + (2 * pair + 1) * d_, row, value_dim_);
        }
        for (long j = value_dim_; j < padded_; ++j) row[j] = 0;
      }
      if (token % 2 != 0) mask_words(to, 0xffff0000u);
      if (stop % 2 != 0) mask_words(to + (pairs - 1) * padded_, 0x0000ffffu);
    } else {
      const Storage* plain = reinterpret_cast<const Storage*>(tile) + token * d_ + value_start_;
      part.value_column = part.column + token - start, part.value_steps = stop - token;
      part.values = plain, part.value_stride = d_;
      if (padded_ != value_dim_) {
        part.value_stride = padded_;
        B* to = group.value_scratch + part.value_column * padded_;
        part.values = to;
        for (int i = 0; i < stop - token; ++i) copy_value_row(plain + i * d_, to + i * padded_);
      }
    }
  }

  // The words of a packed tile.
  TRUNKLINE_INLINE const B* words_of(const char* tile) const {
    return reinterpret_cast<const B*>(tile + pool_.chunk * kScaleBytes);
  }

  // The `which`-th scales of a part's columns. What was never written may be anything, and is not read.
  TRUNKLINE_INLINE void load_scales(const Part<T>& part, const char* tile, long which, float* scales) {
    const int start = part.token / kTokenStep * kTokenStep, lower = part.token - start, upper = part.stop - start;
    float* to = scales + part.column;
    for (int c = 0; c < part.columns; ++c) to[c] = 0.0f;
    if (part.packed) {
      std::memcpy(to + lower, tile + (start + lower) * kScaleBytes,
                  static_cast<size_t>(upper - lower) * kScaleBytes);
    } else {
      for (int c = lower; c < upper; ++c) to[c] = scale_of(tile + (start + c) * pool_.row_bytes, integers_, which);
    }
    if constexpr (T::Bytes::kUnit != 1.0f) {
      for (int c = 0; c < part.columns; ++c) to[c] *= T::Bytes::kUnit;
    }
  }

  TRUNKLINE_INLINE void clear_padding(uint32_t* rows, int steps) {
    for (int step = 0; padded_ != value_dim_ && step < steps; ++step) {
      for (long j = value_dim_; j < padded_; ++j) rows[step * padded_ + j] = T::Bytes::kZero;
    }
  }

  void mask_words(uint32_t* row, uint32_t mask) {
    for (long j = 0; j < padded_; ++j) row[j] &= mask;
  }

  void copy_value_row(const Storage* from, B* to) {
    for (long j = 0; j < value_dim_; ++j) to[j] = from[j];
    for (long j = value_dim_; j < padded_; ++j) to[j] = 0;
  }

  // Chunks that are no multiple of kTokenStep: tokens of several items follow each other in scratch memory.
  void append(int block, long head, int token, int stop, int position, Group<T>& group) {
    if constexpr (kQuantised) return append_bytes(block, head, token, stop, position, group);
    const Storage* keys = reinterpret_cast<const Storage*>(tile_of(pool_, block, layer_, 0, head));
    const auto* values =
        reinterpret_cast<const Storage*>(tile_of(pool_, block, layer_, pool_.bands - 1, head)) + value_start_;
    const int columns = stop - token;
    for (int i = 0; i < columns; ++i) {
      const int column = group.columns + i;
      append_key(keys + (token + i) * d_, group.key_scratch + column);
      const Storage* value = values + (token + i) * d_;
      if constexpr (kPairs) {
        uint32_t* row = group.value_scratch + column / 2 * padded_;
        // An even column clears the other half, which may stay without a token.
        for (long j = 0; j < padded_; ++j) {
          const uint32_t half = j < value_dim_ ? value[j] : 0;
          row[j] = column % 2 == 0 ? half : row[j] | (half << 16);
        }
      } else {
        copy_value_row(value, group.value_scratch + column * padded_);
      }
    }
    note_columns(group, columns, 0, columns, position);
    group.columns += columns;
  }

  void append_bytes(int block, long head, int token, int stop, int position, Group<T>& group) {
    using Bytes = typename T::Bytes;
    const char* keys = tile_of(pool_, block, layer_, 0, head) + token * pool_.row_bytes;
    const char* values = tile_of(pool_, block, layer_, pool_.bands - 1, head) + token * pool_.row_bytes;
    const long last = pool_.scales() - 1;
    const int columns = stop - token;
    for (int i = 0; i < columns; ++i, keys += pool_.row_bytes, values += pool_.row_bytes) {
      const int column = group.columns + i;
      pack_key_rows<Bytes>(keys, pool_.row_bytes, 1, integers_, group.key_scratch + column, kScoreStride);
      group.key_scale[column] = scale_of(keys, integers_, 0) * Bytes::kUnit;
      group.value_scale[column] = scale_of(values, integers_, last) * Bytes::kUnit;
      uint32_t* row = group.value_scratch + column / T::kStep * padded_;
      const auto* value = reinterpret_cast<const uint8_t*>(values + pool_.rotary_integers());
      const int shift = Bytes::place(column % T::kStep);
      for (long j = 0; j < padded_; ++j) {
        const uint32_t known = shift == 0 ? Bytes::kZero : row[j];
        row[j] = j < value_dim_ ? known ^ (uint32_t{value[j]} << shift) : known;
      }
    }
    note_columns(group, columns, 0, columns, position);
    group.columns += columns;
  }

  TRUNKLINE_INLINE void append_key(const Storage* key, B* to) {
    if constexpr (kPairs) {
      for (long j = 0; j < d_ / 2; ++j) {
        to[j * kScoreStride] = uint32_t{key[2 * j]} | (uint32_t{key[2 * j + 1]} << 16);
      }
    } else {
      for (long j = 0; j < d_; ++j) to[j * kScoreStride] = key[j];
    }
  }

  void finish_appended(Group<T>& group) {
    const int columns = static_cast<int>(round_up(group.columns, kTokenStep));
    Part<T>& part = group.parts[0];
    group.size = 1;
    part.keys = group.key_scratch, part.key_stride = kScoreStride;
    part.values = group.value_scratch, part.value_stride = padded_;
    part.column = part.value_column = 0;
    part.columns = columns;
    part.value_steps = (group.columns + T::kStep - 1) / T::kStep;
    part.block = part.token = part.stop = 0, part.packed = false;
    for (int c = group.columns; c < columns; ++c) {
      group.valid[c] = 0.0f, group.position[c] = 0.0f;
      if constexpr (kQuantised) group.key_scale[c] = group.value_scale[c] = 0.0f;
      group.all_valid = false;
    }
    group.columns = columns;
  }

  // Columns [group.columns, + columns), of which [lower, upper) hold tokens; `position`: of the first column.
  TRUNKLINE_INLINE void note_columns(Group<T>& group, int columns, int lower, int upper, int position) {
    float* valid = group.valid + group.columns;
    float* positions = group.position + group.columns;
    const int from_origin = position - group.origin;
    for (int c = 0; c < columns; ++c) positions[c] = static_cast<float>(from_origin + c);
    for (int c = 0; c < columns; ++c) valid[c] = c >= lower && c < upper ? 1.0f : 0.0f;
    group.all_valid = group.all_valid && lower == 0 && upper == columns;
    group.lowest = min_of(group.lowest, position + lower);
    group.highest = max_of(group.highest, position + upper - 1);
  }

  const PoolView& pool_;
  const int tokens_;
  const long layer_, d_, value_dim_, value_start_;
  const long integers_;  // of a row in int8
  const long padded_;    // width of a value
  const bool aligned_;
};

}  // namespace
}  // namespace trunkline::TRUNKLINE_NAMESPACE
