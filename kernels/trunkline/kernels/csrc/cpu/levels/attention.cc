// Units of attention work at one level: a decode piece or a block of prefill queries, for one KV head.
//
// Decode (ChunkAttention §3.2): a unit attends with all rows of its piece at once, then its partial results join
// those of other pieces. Serialised merge: a row's partials are merged into one state in memory, each waiting for
// its ordinal's turn; units start in the order of the pieces, which is that of the ordinals, so the unit that
// started first among the unfinished never waits. Results do not depend on the number of threads.
//
// A shift turns queries instead of keys: attention sees only the difference of positions.
#include "cpu/attention.h"

#include "cpu/attention_tile.h"

namespace trunkline::TRUNKLINE_NAMESPACE {
namespace {

template <class T>
using UnitOf = AttentionUnit<Attending<T>>;

// Turns the first `2 * half` elements of a query.
template <class T>
void turn(const char* q, const float* cosines, const float* sines, long half, long head_dim, char* to) {
  const auto* from = reinterpret_cast<const typename T::Storage*>(q);
  auto* turned = reinterpret_cast<typename T::Storage*>(to);
  for (long j = 0; j < half; ++j) {
    const float a = T::to_float(from[j]), b = T::to_float(from[j + half]);
    turned[j] = T::from_float(a * cosines[j] - b * sines[j]);
    turned[j + half] = T::from_float(b * cosines[j] + a * sines[j]);
  }
  for (long j = 2 * half; j < head_dim; ++j) turned[j] = from[j];
}

template <class T>
void turn_query(const TurnCall& call, int64_t slot) {
  const int64_t vector_bytes = call.head_dim * static_cast<int64_t>(sizeof(typename T::Storage));
  const char* q = call.q + call.turns[2 * slot] * call.q_stride;
  char* to = call.turned + slot * call.heads * vector_bytes;
  const float* cosines = call.angles + call.turns[2 * slot + 1] * 2 * call.half_rotary;
  for (int64_t head = 0; head < call.heads; ++head) {
    turn<T>(q + head * vector_bytes, cosines, cosines + call.half_rotary, call.half_rotary, call.head_dim,
            to + head * vector_bytes);
  }
}

// The positions before a query's own that it sees under the rule's span; 0 without one.
TRUNKLINE_INLINE int32_t reach_at(const ScoreRule& rule, int32_t position) {
  return rule.span == 0 ? 0 : position % rule.span;
}

// A state in memory: acc `[padded d]`, peak, total.
struct State {
  float* acc;
  float *peak, *total;
};

TRUNKLINE_INLINE State state_at(float* states, int64_t index, int padded) {
  float* acc = states + index * (padded + 16);
  return {acc, acc + padded, acc + padded + 1};
}

// to = to merged with (acc, peak, total).
TRUNKLINE_INLINE void merge_into(const State& to, const float* acc, float peak, float total, int padded) {
  const float highest = *to.peak > peak ? *to.peak : peak;
  // Both empty, unless a score was not a number: then the totals are not zero, and must not become a row of zeros.
  if (highest == kMinusInfinity && *to.total == 0.0f && total == 0.0f) return;
  const Vec mine = exp2(set1(*to.peak - highest)), other = exp2(set1(peak - highest));
  for (int j = 0; j < padded; j += kLanes) {
    store(to.acc + j, fma(load(to.acc + j), mine, mul(load(acc + j), other)));
  }
  float weights[2 * kLanes];
  store(weights, mine), store(weights + kLanes, other);
  *to.total = *to.total * weights[0] + total * weights[kLanes];
  *to.peak = highest;
}

// A state between two groups of keys, as the row's next piece continues it: acc `[padded d]`, totals by lane, peak.
struct Carried {
  float *acc, *total, *peak;
};

TRUNKLINE_INLINE Carried carried_at(float* carried, int64_t index, int padded) {
  float* acc = carried + index * (padded + kTotalLanes + 16);
  return {acc, acc + padded, acc + padded + kTotalLanes};
}

// The row's states become those that its piece before this one left, whose turn it was.
template <class Unit>
void take_up(const DecodeCall& call, Unit& unit, const DecodeUnit& chosen) {
  const WorkView& work = call.work;
  const UnitMemory& memory = unit.memory();
  const int first_entry = work.piece_entries[chosen.piece], last_entry = work.piece_entries[chosen.piece + 1];
  const int padded = unit.padded();
  int vector = 0;
  for (int64_t head = chosen.head; head < chosen.head + chosen.heads; ++head) {
    for (int entry = first_entry; entry < last_entry; ++entry) {
      const int64_t place = work.entry_row[entry] * call.pool.kv_heads + head;
      wait_for_turn(call.turns + place, static_cast<uint32_t>(work.entry_ordinal[entry] & kEntryOrdinal));
      for (int g = 0; g < call.group; ++g, ++vector) {
        const Carried from = carried_at(call.carried, place * call.group + g, padded);
        std::memcpy(memory.acc + vector * padded, from.acc, static_cast<size_t>(padded) * 4);
        std::memcpy(memory.total + vector * kTotalLanes, from.total, kTotalLanes * 4);
        memory.peak[vector] = *from.peak;
      }
    }
  }
}

template <class Unit>
void leave(const DecodeCall& call, Unit& unit, int vector, int64_t index) {
  const UnitMemory& memory = unit.memory();
  const int padded = unit.padded();
  const Carried to = carried_at(call.carried, index, padded);
  std::memcpy(to.acc, memory.acc + vector * padded, static_cast<size_t>(padded) * 4);
  std::memcpy(to.total, memory.total + vector * kTotalLanes, kTotalLanes * 4);
  *to.peak = memory.peak[vector];
}

// `opens`: no other partial result has come before; `closes`: none comes behind.
template <class T>
void finish_vector(const DecodeCall& call, UnitOf<T>& unit, int vector, bool opens, bool closes, float* states,
                   int64_t index, int64_t query_head, char* out) {
  const UnitMemory& memory = unit.memory();
  const int padded = unit.padded();
  const float* acc = memory.acc + vector * padded;
  const State state = state_at(states, index, padded);
  if (call.turns == nullptr || opens) {
    std::memcpy(state.acc, acc, static_cast<size_t>(padded) * 4);
    *state.peak = memory.peak[vector], *state.total = unit.total(vector);
    return;
  }
  merge_into(state, acc, memory.peak[vector], unit.total(vector), padded);
  if (closes) {
    const int d = static_cast<int>(call.pool.value_dim);
    const float factor = result_factor(call.rule, query_head, *state.total, *state.peak);
    write_scaled<T>(state.acc, factor, d, out);
  }
}

template <class T>
void finish(const DecodeCall& call, UnitOf<T>& unit, const DecodeUnit& chosen) {
  const WorkView& work = call.work;
  const int64_t vector_bytes = call.pool.value_dim * static_cast<int64_t>(sizeof(typename T::Storage));
  const int first_entry = work.piece_entries[chosen.piece], last_entry = work.piece_entries[chosen.piece + 1];
  int vector = 0;
  for (int64_t head = chosen.head; head < chosen.head + chosen.heads; ++head) {
    for (int entry = first_entry; entry < last_entry; ++entry) {
      const int row = work.entry_row[entry], word = work.entry_ordinal[entry];
      const int ordinal = word & kEntryOrdinal;
      const int slot = work.row_partials[row], partials = work.row_partials[row + 1] - slot;
      char* out = call.out + row * call.out_stride + head * call.group * vector_bytes;
      uint32_t* merged = call.turns == nullptr ? nullptr : call.turns + row * call.pool.kv_heads + head;
      if (partials > 1 && merged != nullptr) wait_for_turn(merged, static_cast<uint32_t>(ordinal));
      const int64_t place = call.turns == nullptr ? slot + ordinal : row;
      const bool opens = ordinal == 0 || (word & kEntryFirst) != 0, closes = ordinal == partials - 1;
      for (int g = 0; g < call.group; ++g, ++vector, out += vector_bytes) {
        const int64_t query_head = head * call.group + g;
        const int64_t index = (place * call.pool.kv_heads + head) * call.group + g;
        if ((word & kEntryLeaves) != 0) {
          leave(call, unit, vector, index);
        } else if (opens && closes) {
          unit.template write_output<T>(vector, query_head, out);
        } else {
          finish_vector<T>(call, unit, vector, opens, closes, call.states, index, query_head, out);
        }
      }
      if (partials > 1 && merged != nullptr) {
        const uint32_t next = closes ? 0 : static_cast<uint32_t>(ordinal + 1);
        __atomic_store_n(merged, next, __ATOMIC_RELEASE);
      }
    }
  }
}

template <class T>
void decode_unit(const DecodeCall& call, const DecodeUnit& chosen, char* scratch) {
  const WorkView& work = call.work;
  const int first_entry = work.piece_entries[chosen.piece], last_entry = work.piece_entries[chosen.piece + 1];
  const int vectors = (last_entry - first_entry) * call.group;
  const int many = many_tokens<Attending<T>>(call.pool);
  const int tokens = vectors >= kManyVectors && !call.invariant ? many : kShortGroupTokens;
  UnitOf<T> unit(call.pool, call.rule, call.layer, chosen.head, chosen.heads, vectors, tokens, scratch);
  UnitMemory& memory = unit.memory();
  const int64_t vector_bytes = call.pool.head_dim * static_cast<int64_t>(sizeof(typename T::Storage));
  const auto position_of = [&](int entry) {
    return work.query_position[work.entry_row[entry]] + call.steps - work.entry_shift[entry];
  };
  const auto reach_of = [&](int entry) {
    return reach_at(call.rule, work.query_position[work.entry_row[entry]] + call.steps);
  };
  int32_t lowest = INT32_MAX, highest = INT32_MIN, farthest = INT32_MAX;
  for (int entry = first_entry; entry < last_entry; ++entry) {
    const int32_t position = position_of(entry);
    lowest = position < lowest ? position : lowest;
    highest = position > highest ? position : highest;
    const int32_t seen = position - reach_of(entry);
    farthest = seen < farthest ? seen : farthest;
  }
  for (int entry = first_entry; entry < last_entry; ++entry) {
    const int row = work.entry_row[entry];
    const int slot = call.entry_query == nullptr ? -1 : call.entry_query[entry];
    const char* q = slot < 0 ? call.q + row * call.q_stride
                             : call.turned + slot * call.pool.kv_heads * call.group * vector_bytes;
    const int32_t position = position_of(entry) - lowest;
    for (int h = 0; h < chosen.heads; ++h) {
      for (int g = 0; g < call.group; ++g) {
        const int vector = h * vectors + (entry - first_entry) * call.group + g;
        const int64_t query_head = static_cast<int64_t>(chosen.head + h) * call.group + g;
        unit.template set_query<T>(vector, q + query_head * vector_bytes);
        memory.position[vector] = static_cast<float>(position);
        memory.reach[vector] = static_cast<float>(reach_of(entry));
        if (call.rule.slopes != nullptr) memory.slope[vector] = call.rule.slopes[query_head] * kLog2E;
      }
    }
  }
  if (first_entry < last_entry && (work.entry_ordinal[first_entry] & kEntryContinues) != 0) {
    take_up(call, unit, chosen);
  } else {
    unit.reset();
  }
  Cursor at{work.item_block,
            work.item_first,
            work.item_count,
            work.item_base,
            work.item_tail,
            call.steps,
            work.piece_items[2 * chosen.piece],
            work.piece_items[2 * chosen.piece + 1],
            0,
            INT32_MIN,
            INT32_MAX};
  TilesAhead ahead(call, chosen.ahead_first, chosen.ahead_last);
  if (chosen.ahead_first < chosen.ahead_last) unit.fetch(ahead);
  const bool windowed = call.rule.window > 0;
  if (windowed) at.see_from = lowest - call.rule.window + 1, at.see_to = highest;
  if (call.rule.span > 0) at.see_from = farthest;
  unit.attend(at, windowed, lowest, highest);
  finish<T>(call, unit, chosen);
}

// Buffer: all partials of a row, in the order of ordinals.
template <class T>
void decode_merge(const DecodeCall& call, int64_t row) {
  const int padded = static_cast<int>(round_up(call.pool.value_dim, 16));
  const int64_t heads = call.pool.kv_heads * call.group;
  const int64_t vector_bytes = call.pool.value_dim * static_cast<int64_t>(sizeof(typename T::Storage));
  const int start = call.work.row_partials[row], stop = call.work.row_partials[row + 1];
  if (stop - start < 2) return;
  for (int64_t head = 0; head < heads; ++head) {
    const State state = state_at(call.states, start * heads + head, padded);
    for (int slot = start + 1; slot < stop; ++slot) {
      const State other = state_at(call.states, slot * heads + head, padded);
      merge_into(state, other.acc, *other.peak, *other.total, padded);
    }
    const float factor = result_factor(call.rule, head, *state.total, *state.peak);
    write_scaled<T>(state.acc, factor, static_cast<int>(call.pool.value_dim),
                    call.out + row * call.out_stride + head * vector_bytes);
  }
}

// A block of an entry's queries as one unit's vectors.
template <class T>
struct PrefillBlock {
  const PrefillCall& call;
  UnitOf<T>& unit;
  const PrefillUnit& chosen;
  char* turned;  // [vectors, d]

  TRUNKLINE_INLINE int64_t vector_bytes() const {
    return call.pool.head_dim * static_cast<int64_t>(sizeof(typename T::Storage));
  }

  // Query vectors as items of one shift see them. `angle` -1: as they are; `lowest`: the first query's position.
  void set_queries(int32_t lowest, int32_t angle) {
    UnitMemory& memory = unit.memory();
    int vector = 0;
    for (int token = 0; token < chosen.queries; ++token) {
      const int64_t query = chosen.first_query + token;
      const char* q = call.q + query * call.q_stride + chosen.head * call.group * vector_bytes();
      for (int g = 0; g < call.group; ++g, ++vector, q += vector_bytes()) {
        const char* row = q;
        if (angle >= 0) {
          char* to = turned + vector * vector_bytes();
          const float* cosines = call.angles + static_cast<int64_t>(angle) * 2 * call.half_rotary;
          turn<T>(q, cosines, cosines + call.half_rotary, call.half_rotary, call.pool.head_dim, to);
          row = to;
        }
        unit.template set_query<T>(vector, row);
        memory.position[vector] = static_cast<float>(call.query_position[query] - lowest);
        memory.reach[vector] = static_cast<float>(reach_at(call.rule, call.query_position[query]));
      }
    }
  }
};

template <class T>
void prefill_unit(const PrefillCall& call, const PrefillUnit& chosen, char* scratch) {
  const int vectors = chosen.queries * call.group;
  const int tokens = many_tokens<Attending<T>>(call.pool);
  UnitOf<T> unit(call.pool, call.rule, call.layer, chosen.head, 1, vectors, tokens, scratch);
  unit.read_cached();
  UnitMemory& memory = unit.memory();
  int32_t lowest = INT32_MAX, highest = INT32_MIN;
  for (int token = 0; token < chosen.queries; ++token) {
    const int32_t position = call.query_position[chosen.first_query + token];
    lowest = position < lowest ? position : lowest;
    highest = position > highest ? position : highest;
  }
  if (call.rule.slopes != nullptr) {
    for (int i = 0; i < vectors; ++i) {
      memory.slope[i] = call.rule.slopes[chosen.head * call.group + i % call.group] * kLog2E;
    }
  }
  unit.reset();
  UnitMemory after;
  char* turned = lay_out(after, scratch, vectors, call.pool.query_width());
  PrefillBlock<T> block{call, unit, chosen, turned};
  int item = call.item_indptr[chosen.entry];
  const int end = call.item_indptr[chosen.entry + 1];
  while (item < end) {
    const int32_t shift = call.shift[item];
    int stop = item + 1;
    while (stop < end && call.shift[stop] == shift) ++stop;
    block.set_queries(lowest, call.angles == nullptr ? -1 : call.item_angle[item]);
    Cursor at{call.block, call.first, call.count, call.base, nullptr, 0, item, stop, 0, INT32_MIN, INT32_MAX};
    at.see_to = highest - shift;
    if (call.rule.window > 0) at.see_from = lowest - shift - call.rule.window + 1;
    if (call.rule.span > 0) at.see_from = lowest - shift - reach_at(call.rule, lowest);
    unit.attend(at, true, lowest - shift, highest - shift);
    item = stop;
  }
  const int64_t result_bytes = call.pool.value_dim * static_cast<int64_t>(sizeof(typename T::Storage));
  for (int token = 0, vector = 0; token < chosen.queries; ++token) {
    const int64_t query = chosen.first_query + token;
    char* out = call.out + query * call.out_stride + chosen.head * call.group * result_bytes;
    for (int g = 0; g < call.group; ++g, ++vector, out += result_bytes) {
      unit.template write_output<T>(vector, static_cast<int64_t>(chosen.head) * call.group + g, out);
    }
  }
}

#if TRUNKLINE_LEVEL >= 4
// Units of other types have no use for tiles.
AttentionTable make_table() {
  AttentionTable table = avx512bf16::attention_table();
  table.decode_unit[kKvBFloat16] = decode_unit<BFloat16>;
  table.prefill_unit[kKvBFloat16] = prefill_unit<BFloat16>;
  return table;
}
#else
size_t unit_scratch_bytes(int64_t vectors, int64_t query_width) {
  UnitMemory memory;
  const char* end = lay_out(memory, nullptr, vectors, query_width);
  const size_t turned = static_cast<size_t>(vectors) * static_cast<size_t>(query_width) * 4;
  return reinterpret_cast<size_t>(end) + turned + 64;
}

constexpr AttentionTable kTable = {
    unit_scratch_bytes,
    {decode_unit<Float32>, decode_unit<Float16>, decode_unit<BFloat16>, decode_unit<Int8Kv<Float32>>,
     decode_unit<Int8Kv<Float16>>, decode_unit<Int8Kv<BFloat16>>, decode_unit<Float8Kv<Float32>>,
     decode_unit<Float8Kv<Float16>>, decode_unit<Float8Kv<BFloat16>>},
    {decode_merge<Float32>, decode_merge<Float16>, decode_merge<BFloat16>},
    {prefill_unit<Float32>, prefill_unit<Float16>, prefill_unit<BFloat16>, prefill_unit<Int8Kv<Float32>>,
     prefill_unit<Int8Kv<Float16>>, prefill_unit<Int8Kv<BFloat16>>, prefill_unit<Float8Kv<Float32>>,
     prefill_unit<Float8Kv<Float16>>, prefill_unit<Float8Kv<BFloat16>>},
    {turn_query<Float32>, turn_query<Float16>, turn_query<BFloat16>},
};
#endif

}  // namespace

#if TRUNKLINE_LEVEL >= 4
const AttentionTable& attention_table() {
  static const AttentionTable table = make_table();
  return table;
}
#else
const AttentionTable& attention_table() { return kTable; }
#endif

}  // namespace trunkline::TRUNKLINE_NAMESPACE
