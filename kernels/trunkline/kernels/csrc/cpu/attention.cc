// Exported attention ops: checks, memory, and the distribution of units over threads.
#include "attention.h"

#include <tvm/ffi/container/array.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "attention_checks.h"
#include "common/exports.h"
#include "ops.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace trunkline {

void wait_for_turn(const uint32_t* turn, uint32_t wanted) {
  for (int i = 0;; ++i) {
    if (__atomic_load_n(turn, __ATOMIC_ACQUIRE) == wanted) return;
#if defined(__x86_64__)
    _mm_pause();
#endif
    // The thread whose turn it is may not be running: cores are shared.
    if (i >= 1000) std::this_thread::yield();
  }
}

namespace {

// Query vectors of a block of prefill: enough to use what is read of K and V well, few enough for the caches.
constexpr int64_t kPrefillVectors = 96;
// Units of decode that each thread gets at least, if there are as many.
constexpr int64_t kPiecesPerThread = 4;

const float* per_head(const TensorView& tensor, int64_t heads) {
  if (tensor.numel() == 0) return nullptr;
  require(is_float32(tensor) && tensor.IsContiguous() && tensor.numel() == heads,
          "alibi_slopes and sinks must be contiguous float32 [heads]");
  return reinterpret_cast<const float*>(bytes_of(tensor));
}

// `reals`: scale, soft cap; `limits`: window, span.
ScoreRule rule_of(const tvm::ffi::Array<double>& reals, const tvm::ffi::Array<int64_t>& limits,
                  const TensorView& slopes, const TensorView& sinks, int64_t heads) {
  require(reals.size() == 2 && limits.size() == 2, "a rule has two numbers and two limits");
  const double scale = reals[0], soft_cap = reals[1];
  const int64_t window = limits[0], span = limits[1];
  require(scale > 0.0, "scale must be positive");
  require(soft_cap >= 0.0 && window >= 0 && window <= INT32_MAX && span >= 0 && span <= INT32_MAX,
          "soft_cap, window and span must not be negative");
  return {static_cast<float>(scale),  static_cast<float>(soft_cap), static_cast<int32_t>(window),
          static_cast<int32_t>(span), per_head(slopes, heads),      per_head(sinks, heads)};
}

// `states`: for merging in place one per (row, head), for the buffer one per (partial, head).
void prepare_states(CpuContext& context, DecodeCall& call, int64_t heads, bool buffered) {
  const WorkView& work = call.work;
  const size_t slots = static_cast<size_t>(buffered ? work.partials : work.rows) * static_cast<size_t>(heads);
  const size_t floats = static_cast<size_t>(state_floats(call.pool.value_dim));
  call.states = reinterpret_cast<float*>(context.states.reserve(slots * floats * 4));
  call.turns = nullptr;
  if (!buffered) {
    const size_t turns = static_cast<size_t>(work.rows) * static_cast<size_t>(call.pool.kv_heads);
    call.turns = reinterpret_cast<uint32_t*>(context.turns.reserve(turns * 4));
    if (!call.invariant) return;
    const size_t carried = slots * static_cast<size_t>(carried_floats(call.pool.value_dim));
    call.carried = reinterpret_cast<float*>(context.carried.reserve(carried * 4));
  }
}

// Each unit of many query vectors fetches a part of the pieces of few that come behind all of those. Under a window or a
// span, which pieces are seen is another question, and nothing is fetched.
void deal_ahead(const DecodeCall& call, DecodeUnit* units, int64_t count) {
  if (call.rule.window > 0 || call.rule.span > 0) return;
  const auto vectors = [&](int32_t piece) {
    return (call.work.piece_entries[piece + 1] - call.work.piece_entries[piece]) * call.group;
  };
  int32_t first = call.work.pieces;
  while (first > 0 && vectors(first - 1) < kManyVectors) --first;
  const int64_t few = call.work.pieces - first;
  int64_t many = 0, number = 0;
  for (int64_t i = 0; i < count; ++i) many += vectors(units[i].piece) >= kManyVectors;
  for (int64_t i = 0; i < count; ++i) {
    if (vectors(units[i].piece) < kManyVectors) continue;
    units[i].ahead_first = first + static_cast<int32_t>(few * number / many);
    units[i].ahead_last = first + static_cast<int32_t>(few * ++number / many);
  }
}

// All units in the order of the pieces, which merging needs. Pieces of few query vectors, for which reading takes
// most of the time, are done for several heads at once, as long as every thread gets a few units.
int64_t list_decode_units(CpuContext& context, const DecodeCall& call, const DecodeUnit** units) {
  const int64_t kv_heads = call.pool.kv_heads, pieces = call.work.pieces;
  auto* list = reinterpret_cast<DecodeUnit*>(
      context.lists.reserve(static_cast<size_t>(pieces * kv_heads) * sizeof(DecodeUnit)));
  DecodeUnit* const begin = list;
  *units = begin;
  const int64_t threads = context.pool.threads();
  const int64_t heads_max = threads == 1 ? kv_heads : pieces * kv_heads / (threads * kPiecesPerThread);
  for (int32_t piece = 0; piece < pieces; ++piece) {
    const int64_t vectors = (call.work.piece_entries[piece + 1] - call.work.piece_entries[piece]) * call.group;
    int64_t heads = call.pool.chunk % kTokenStep == 0 ? std::min(heads_max, kRowBlock / vectors) : 1;
    heads = std::clamp<int64_t>(heads, 1, kv_heads);
    const int64_t parts = (kv_heads + heads - 1) / heads;
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t first = kv_heads * part / parts, last = kv_heads * (part + 1) / parts;
      *list++ = {piece, static_cast<int32_t>(first), static_cast<int32_t>(last - first), 0, 0};
    }
  }
  deal_ahead(call, begin, list - begin);
  return list - begin;
}

}  // namespace

void run_decode(CpuContext& context, DecodeCall& call, bool buffered) {
  const int64_t heads = call.group * call.pool.kv_heads;
  prepare_states(context, call, heads, buffered);
  for (int32_t row = 0; row < call.work.rows; ++row) {
    if (call.work.row_partials[row] == call.work.row_partials[row + 1]) {
      std::memset(call.out + row * call.out_stride, 0,
                  static_cast<size_t>(heads * call.pool.value_dim * call.pool.element_bytes));
    }
  }
  const AttentionTable& table = attention_table_of(context);
  const int64_t widest = static_cast<int64_t>(call.work.widest) * call.group;
  const size_t bytes = table.unit_scratch_bytes(std::max<int64_t>(widest, kRowBlock), call.pool.query_width());
  const auto unit = table.decode_unit[call.pool.form()];
  const DecodeUnit* units = nullptr;
  const int64_t count = list_decode_units(context, call, &units);
  context.reserve_scratch(bytes);
  context.pool.run_in_order(
      count, [&](int64_t number, int thread) { unit(call, units[number], context.scratch(thread)); });
  if (buffered) {
    const auto merge = table.decode_merge[call.pool.type];
    context.pool.run(call.work.rows, [&](int64_t row, int) { merge(call, row); });
  }
}

void run_turns(CpuContext& context, const TurnCall& call, KvType type, int64_t slots) {
  const auto turn = attention_table_of(context).turn_query[type];
  context.pool.run(slots, [&](int64_t slot, int) { turn(call, slot); });
}

namespace {

void decode_attention(int64_t handle, TensorView work, TensorView q, TensorView data, TensorView packed,
                      int64_t layer, int64_t steps, TensorView out, tvm::ffi::Array<double> reals,
                      tvm::ffi::Array<int64_t> limits, TensorView slopes, TensorView sinks, TensorView entry_query,
                      TensorView turned, bool buffered, bool invariant) {
  const ContextUse use(handle);
  CpuContext& context = use.context();
  const int32_t* words = int32_data(work, "work");
  require(work.numel() >= kWorkHeaderWords && words[kWorkMagic] == kWorkMagicValue &&
              words[kWorkWords] == work.numel(),
          "work must be what plan_work returns");
  DecodeCall call{pool_of(data, packed, layer, kv_type_of(q, "q")), {}, WorkView(words)};
  call.layer = static_cast<int32_t>(layer), call.steps = static_cast<int32_t>(steps);
  require(steps >= 0 && steps <= INT32_MAX, "steps must not be negative");
  call.out_stride = results_stride(out, call.pool);
  call.q_stride = vectors_stride(q, call.pool, call.pool.head_dim, "q");
  const int64_t heads = q.size(1);
  require(out.size(1) == heads && q.size(0) == call.work.rows && out.size(0) == call.work.rows,
          "q and out must be [rows, heads, width] of the plan's rows");
  call.rule = rule_of(reals, limits, slopes, sinks, heads);
  call.group = static_cast<int32_t>(heads / call.pool.kv_heads);
  call.q = bytes_of(q), call.out = bytes_of(out);
  if (entry_query.numel() != 0) {
    require(entry_query.numel() == call.work.entries && turned.IsContiguous() &&
                kv_type_of(turned, "turned") == call.pool.type,
            "entry_query must have a slot per entry, and turned hold them");
    call.entry_query = int32_data(entry_query, "entry_query");
    call.turned = bytes_of(turned);
  }
  call.invariant = invariant;
  run_decode(context, call, buffered);
}

void turn_queries(int64_t handle, TensorView q, TensorView turns, TensorView angles, TensorView turned) {
  const ContextUse use(handle);
  CpuContext& context = use.context();
  TurnCall call{};
  const KvType type = kv_type_of(q, "q");
  const int64_t element_bytes = type == kKvFloat32 ? 4 : 2;
  require(q.ndim() == 3 && q.stride(2) == 1 && (q.size(1) == 1 || q.stride(1) == q.size(2)),
          "q must be [rows, heads, head_dim], heads adjoining");
  call.q = bytes_of(q), call.q_stride = q.stride(0) * element_bytes;
  call.heads = q.size(1), call.head_dim = q.size(2);
  call.turns = int32_data(turns, "turns");
  require(is_float32(angles) && angles.ndim() == 3 && angles.size(1) == 2 && angles.IsContiguous() &&
              2 * angles.size(2) <= call.head_dim,
          "angles must be contiguous float32 [n, 2, rotary_dim / 2]");
  call.half_rotary = angles.size(2);
  call.angles = reinterpret_cast<const float*>(bytes_of(angles));
  require(kv_type_of(turned, "turned") == type && turned.IsContiguous() && turns.ndim() == 2 &&
              turns.size(1) == 2 && turned.numel() >= turns.size(0) * call.heads * call.head_dim,
          "turned must hold [slots, heads, head_dim]");
  call.turned = bytes_of(turned);
  for (int64_t slot = 0; slot < turns.size(0); ++slot) {
    require(call.turns[2 * slot] >= 0 && call.turns[2 * slot] < q.size(0) && call.turns[2 * slot + 1] >= 0 &&
                call.turns[2 * slot + 1] < angles.size(0),
            "turns must name rows and angles that exist");
  }
  run_turns(context, call, type, turns.size(0));
}

}  // namespace

void read_prefill_words(const TensorView& words, PrefillCall& call, int64_t* queries) {
  const int32_t* at = int32_data(words, "words");
  require(words.numel() >= 3 && at[0] >= 0 && at[1] >= 0 && at[2] >= 0, "words must start with three lengths");
  const int64_t entries = at[0], items = at[2];
  *queries = at[1];
  require(words.numel() == 3 + 2 * (entries + 1) + *queries + 6 * items, "words must be as long as they say");
  call.entries = static_cast<int32_t>(entries);
  at += 3;
  call.query_indptr = at, at += entries + 1;
  call.item_indptr = at, at += entries + 1;
  call.query_position = at, at += *queries;
  call.block = at, at += items;
  call.first = at, at += items;
  call.count = at, at += items;
  call.base = at, at += items;
  call.shift = at, at += items;
  call.item_angle = at;
}

namespace {

// All units, heads of one entry one after another, late queries (which see most) first.
int64_t list_prefill_units(CpuContext& context, const PrefillCall& call, const PrefillUnit** units) {
  int64_t count = 0;
  for (int32_t entry = 0; entry < call.entries; ++entry) {
    const int64_t queries = call.query_indptr[entry + 1] - call.query_indptr[entry];
    count += (queries + call.block_tokens - 1) / call.block_tokens * call.pool.kv_heads;
  }
  const size_t bytes = static_cast<size_t>(count) * sizeof(PrefillUnit);
  auto* list = reinterpret_cast<PrefillUnit*>(context.lists.reserve(bytes));
  *units = list;
  for (int32_t entry = 0; entry < call.entries; ++entry) {
    const int32_t start = call.query_indptr[entry], stop = call.query_indptr[entry + 1];
    const int32_t blocks = (stop - start + call.block_tokens - 1) / call.block_tokens;
    for (int32_t head = 0; head < call.pool.kv_heads; ++head) {
      for (int32_t block = blocks - 1; block >= 0; --block) {
        const int32_t first = start + block * call.block_tokens;
        *list++ = {entry, head, first, std::min(call.block_tokens, stop - first)};
      }
    }
  }
  return count;
}

}  // namespace

void run_prefill(CpuContext& context, PrefillCall& call) {
  call.block_tokens = static_cast<int32_t>(std::max<int64_t>(1, kPrefillVectors / call.group));
  const PrefillUnit* units = nullptr;
  const int64_t count = list_prefill_units(context, call, &units);
  const AttentionTable& table = attention_table_of(context);
  const size_t bytes =
      table.unit_scratch_bytes(static_cast<int64_t>(call.block_tokens) * call.group, call.pool.query_width());
  const auto unit = table.prefill_unit[call.pool.form()];
  context.reserve_scratch(bytes);
  context.pool.run(count, [&](int64_t number, int thread) { unit(call, units[number], context.scratch(thread)); });
}

namespace {

void prefill_attention(int64_t handle, TensorView words, TensorView q, TensorView data, TensorView packed,
                       int64_t layer, TensorView out, tvm::ffi::Array<double> reals,
                       tvm::ffi::Array<int64_t> limits, TensorView slopes, TensorView sinks, TensorView angles) {
  const ContextUse use(handle);
  CpuContext& context = use.context();
  PrefillCall call{};
  int64_t queries = 0;
  call.pool = pool_of(data, packed, layer, kv_type_of(q, "q"));
  read_prefill_words(words, call, &queries);
  call.layer = static_cast<int32_t>(layer);
  call.out_stride = results_stride(out, call.pool);
  call.q_stride = vectors_stride(q, call.pool, call.pool.head_dim, "q");
  const int64_t heads = q.size(1);
  require(out.size(1) == heads && q.size(0) == queries && out.size(0) == queries,
          "q and out must be [queries, heads, width] of the plan's queries");
  call.rule = rule_of(reals, limits, slopes, sinks, heads);
  call.group = static_cast<int32_t>(heads / call.pool.kv_heads);
  call.q = bytes_of(q), call.out = bytes_of(out);
  if (angles.numel() != 0) {
    require(is_float32(angles) && angles.ndim() == 3 && angles.size(1) == 2 && angles.IsContiguous() &&
                2 * angles.size(2) <= call.pool.head_dim,
            "angles must be contiguous float32 [n, 2, rotary_dim / 2]");
    call.angles = reinterpret_cast<const float*>(bytes_of(angles));
    call.half_rotary = static_cast<int32_t>(angles.size(2));
  }
  run_prefill(context, call);
}

}  // namespace
}  // namespace trunkline

TRUNKLINE_EXPORT(decode_attention, trunkline::decode_attention)
TRUNKLINE_EXPORT(turn_queries, trunkline::turn_queries)
TRUNKLINE_EXPORT(prefill_attention, trunkline::prefill_attention)
