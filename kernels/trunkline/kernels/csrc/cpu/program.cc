// The interpreter: each op of a program is a call of the function behind the exported op.

#include "program.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "ops.h"
#include "sampling.h"
#include "shared_group_handles.h"

namespace trunkline {
namespace {

ElementType element_type(DenseType type) {
  switch (type) {
    case DenseType::kBFloat16: return ElementType::kBFloat16;
    case DenseType::kFloat16: return ElementType::kFloat16;
    default: return ElementType::kFloat32;
  }
}

// To nearest, ties to even, from double by way of float, as the reference rounds. Finite numbers only.
uint16_t bfloat16_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Of a magnitude up to 65504.
uint16_t float16_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t sign = (bits >> 16) & 0x8000u, rest = bits & 0x7fffffffu;
  if (rest < 0x38800000u) {  // below 2^-14: a multiple of 2^-24
    float magnitude;
    std::memcpy(&magnitude, &rest, 4);
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(std::nearbyint(magnitude * 0x1p24f)));
  }
  const uint32_t rounded = rest + 0xfffu + ((rest >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

void store_number(char* data, DenseType type, int64_t index, double value) {
  if (type == DenseType::kFloat32) {
    reinterpret_cast<float*>(data)[index] = static_cast<float>(value);
    return;
  }
  const float narrow = static_cast<float>(value);
  reinterpret_cast<uint16_t*>(data)[index] =
      type == DenseType::kBFloat16 ? bfloat16_of(narrow) : float16_of(narrow);
}

constexpr int64_t kRotatedTokens = 32;  // per unit

struct Candidate {
  float logit;
  int32_t id;
};

// The candidate with the largest logit, of equal ones the first.
Candidate best_of(const Candidate* candidates, int64_t count, int64_t stride = 1) {
  Candidate best = candidates[0];
  for (int64_t i = 1; i < count; ++i) {
    if (candidates[i * stride].logit > best.logit) best = candidates[i * stride];
  }
  return best;
}

}  // namespace

void Program::run(int64_t start, int64_t stop) {
  std::shared_ptr<SharedGroup> sums;
  if (group != 0) sums = group_of(group);
  for (int64_t i = start; i < stop; ++i) run_op(ops[static_cast<size_t>(i)], sums.get());
}

void Program::run_op(const ProgramOp& op, SharedGroup* sums) {
  switch (op.kind) {
    case OpKind::kEmbed: return embed(op);
    case OpKind::kAddPositions: return add_positions(op);
    case OpKind::kScale: return elements(op, ElementOp::kScale);
    case OpKind::kAllReduce: {
      ProgramBuffer& into = at(op.into);
      return translated([&] { sums->all_reduce(into.data, rows_of(into) * into.width, element_type(into.type)); });
    }
    case OpKind::kRotations: return rotate(op);
    case OpKind::kRmsNorm:
    case OpKind::kLayerNorm: return norm(op);
    case OpKind::kLinear: return linear(op);
    case OpKind::kActivate: return elements(op, static_cast<ElementOp>(op.number));
    case OpKind::kClamp: return elements(op, ElementOp::kClamp);
    case OpKind::kAdd: return elements(op, ElementOp::kAdd);
    case OpKind::kSquareSums: return square_sums(op);
    case OpKind::kWideNorm: return wide_norm(op);
    case OpKind::kAbsorb: return absorb(op);
    case OpKind::kExpand: return expand(op);
    case OpKind::kStoreKv:
    case OpKind::kPrepareQueries: return store_kv(op);
    case OpKind::kAttend:
      if (step.decode_rows > 0) decode(op);
      if (step.has_prefill) prefill(op);
      return;
    case OpKind::kSelect: return select(op);
    case OpKind::kSpread: return spread(op);
    case OpKind::kSoftCap: return elements(op, ElementOp::kSoftCap);
    case OpKind::kForbid: return forbid(op);
    case OpKind::kExperts: return experts(op);
    case OpKind::kTemper: return temper(op);
    case OpKind::kGate: return gate(op);
    case OpKind::kHeadNorm: return head_norm(op);
    case OpKind::kMultiply: return multiply(op);
    case OpKind::kHost: break;
  }
  TVM_FFI_THROW(ValueError) << "the interpreter has no such op";
}

void Program::embed(const ProgramOp& op) {
  const ProgramBuffer& out = at(op.out);
  const auto bytes = static_cast<size_t>(out.row_bytes());
  const auto* table = static_cast<const char*>(op.weight.data);
  for (int64_t row = 0; row < rows_of(out); ++row) {
    const int64_t local = step.ids[row] - op.number;
    char* to = out.data + row * out.row_bytes();
    if (local >= 0 && local < op.weight.rows) {
      std::memcpy(to, table + local * out.row_bytes(), bytes);
    } else {
      std::memset(to, 0, bytes);
    }
  }
}

void Program::add_positions(const ProgramOp& op) {
  const ProgramBuffer& into = at(op.into);
  const auto* table = static_cast<const char*>(op.weight.data);
  for (int64_t row = 0; row < rows_of(into); ++row) {
    const int64_t position = step.positions[row];
    if (position < 0 || position >= op.weight.rows) {
      TVM_FFI_THROW(ValueError) << "position " << position << ": the table has " << op.weight.rows;
    }
    ElementCall call{into.data + row * into.row_bytes(), table + position * into.row_bytes(), 0.0f};
    run_elements(*context, ElementOp::kAdd, into.type, call, into.width);
  }
}

// Laid out so that `x * cos + swap_halves(x) * sin` rotates x: equal halves of cosines, sines of opposite signs.
void Program::rotate(const ProgramOp& op) {
  const ProgramBuffer &cosines = at(op.out), &sines = at(op.other);
  const auto* frequencies = static_cast<const double*>(op.weight.data);
  const int64_t half = cosines.width / 2, tokens = rows_of(cosines);
  const auto rotate_token = [&](int64_t token) {
    const auto position = static_cast<double>(step.positions[token]);
    for (int64_t i = 0; i < half; ++i) {
      const double angle = position * frequencies[i];
      const double cosine = std::cos(angle) * op.factor, sine = std::sin(angle) * op.factor;
      const int64_t first = token * cosines.width + i;
      store_number(cosines.data, cosines.type, first, cosine);
      store_number(cosines.data, cosines.type, first + half, cosine);
      store_number(sines.data, sines.type, first, -sine);
      store_number(sines.data, sines.type, first + half, sine);
    }
  };
  context->pool.run((tokens + kRotatedTokens - 1) / kRotatedTokens, [&](int64_t unit, int) {
    const int64_t stop = std::min(tokens, (unit + 1) * kRotatedTokens);
    for (int64_t token = unit * kRotatedTokens; token < stop; ++token) rotate_token(token);
  });
}

void Program::norm(const ProgramOp& op) {
  const ProgramBuffer &x = at(op.x), &out = at(op.out);
  LayerNormCall call{};
  call.x = x.data, call.out = out.data;
  call.residual = op.into < 0 ? nullptr : at(op.into).data;
  call.weight = op.weight.data, call.bias = op.bias.data;
  call.float_weight = op.weight.is_float32;
  call.width = x.width;
  call.eps = static_cast<float>(op.factor);
  if (op.kind == OpKind::kRmsNorm) return run_norm(*context, call, x.type, rows_of(x));
  run_layer_norm(*context, call, x.type, rows_of(x));
}

void Program::linear(const ProgramOp& op) {
  const ProgramBuffer &x = at(op.x), &out = at(op.out);
  LinearCall call{};
  call.layer = op.linear;
  call.x = x.data, call.out = out.data;
  call.float_out = out.type == DenseType::kFloat32;
  call.rows = rows_of(out);
  if (call.rows == 0) return;
  call.addend = adapter_addend(*context, *op.linear, adapters_of(op, out.rows), 0, call.x);
  run_linear(*context, call);
}

OpAdapters Program::adapters_of(const ProgramOp& op, RowKind rows) const {
  if (rows == RowKind::kLogits) return {};
  const AdaptedRows& adapted = step.adapted[static_cast<size_t>(rows)];
  if (adapted.groups.empty()) return {};
  return {&adapted, &adapters, op.first_site};
}

void Program::experts(const ProgramOp& op) {
  const ProgramBuffer& x = at(op.x);
  ExpertsLayer layer = op.routed;
  layer.experts = op.experts.data();
  const char* routed = op.other < 0 ? x.data : at(op.other).data;
  if (rows_of(x) == 0) return;
  run_experts(*context, layer, routed, x.data, at(op.out).data, rows_of(x), adapters_of(op, x.rows));
}

void Program::elements(const ProgramOp& op, ElementOp kind) {
  const ProgramBuffer& into = at(op.into);
  const ElementCall call{into.data, op.x < 0 ? nullptr : at(op.x).data, static_cast<float>(op.factor)};
  run_elements(*context, kind, into.type, call, rows_of(into) * into.width);
}

void Program::square_sums(const ProgramOp& op) {
  const ProgramBuffer &qkv = at(op.x), &sums = at(op.out);
  const int64_t columns[] = {op.number, op.heads}, first[] = {0, op.number};
  for (int part = 0; part < 2; ++part) {
    float* out = reinterpret_cast<float*>(sums.data) + part;
    const SquareSumsCall call{qkv.data, out, qkv.width, first[part], columns[part], sums.width};
    run_square_sums(*context, call, qkv.type, rows_of(qkv));
  }
}

void Program::wide_norm(const ProgramOp& op) {
  const ProgramBuffer &qkv = at(op.into), &sums = at(op.x);
  const Constant* weights[] = {&op.weight, &op.bias};
  int64_t first = 0;
  for (int part = 0; part < 2; ++part) {
    const int64_t columns = weights[part]->width;
    WideNormCall call{};
    call.x = qkv.data, call.sums = reinterpret_cast<const float*>(sums.data) + part;
    call.weight = weights[part]->data;
    call.width = qkv.width, call.first = first, call.columns = columns, call.sum_width = sums.width;
    call.count = static_cast<float>(static_cast<double>(columns) * op.cap),
    call.eps = static_cast<float>(op.factor);
    run_wide_norm(*context, call, qkv.type, rows_of(qkv));
    first += columns;
  }
}

void Program::absorb(const ProgramOp& op) {
  const ProgramBuffer &queries = at(op.x), &rotary = at(op.other), &latent = at(op.latent), &out = at(op.out);
  const auto heads = static_cast<int64_t>(op.by_head.size());
  AbsorbCall call{};
  call.layers = op.by_head.data(), call.heads = heads, call.rows = rows_of(out);
  call.queries = queries.data, call.rotary = rotary.data, call.latent = latent.data, call.out = out.data;
  call.rotary_bytes = rotary.row_bytes(), call.latent_bytes = latent.row_bytes();
  call.query_bytes = queries.row_bytes() / heads;
  run_absorb(*context, call);
}

void Program::expand(const ProgramOp& op) {
  const ProgramBuffer &x = at(op.x), &out = at(op.out);
  const auto heads = static_cast<int64_t>(op.by_head.size());
  HeadsCall call{};
  call.layers = op.by_head.data(), call.heads = heads, call.rows = rows_of(out);
  call.x = x.data, call.x_row = x.row_bytes(), call.x_head = x.row_bytes() / heads;
  call.out = out.data, call.out_row = out.row_bytes(), call.out_head = out.row_bytes() / heads;
  run_heads(*context, call);
}

void Program::store_kv(const ProgramOp& op) {
  const ProgramBuffer& qkv = at(op.into);
  WriteCall call{};
  call.pool = pool;
  if (op.kind == OpKind::kPrepareQueries) call.pool.kv_heads = 0;  // then queries are all that there is
  call.layer = static_cast<int32_t>(op.number), call.heads = static_cast<int32_t>(op.heads);
  call.slots = step.slots;
  call.qkv = qkv.data;
  if (op.out >= 0) {
    call.cos = at(op.out).data, call.sin = at(op.other).data;
    call.rotary_dim = static_cast<int32_t>(at(op.out).width);
    call.wide_angles = at(op.out).type == DenseType::kFloat32;
  }
  call.q_weight = static_cast<const char*>(op.weight.data), call.k_weight = static_cast<const char*>(op.bias.data);
  call.eps = static_cast<float>(op.factor);
  run_write(*context, call, rows_of(qkv));
}

ScoreRule Program::rule_of(const ProgramOp& op) const {
  return {static_cast<float>(op.factor),
          static_cast<float>(op.cap),
          static_cast<int32_t>(op.window),
          static_cast<int32_t>(op.span),
          static_cast<const float*>(op.weight.data),
          static_cast<const float*>(op.bias.data)};
}

void Program::temper(const ProgramOp& op) {
  const ProgramBuffer& qkv = at(op.into);
  for (int64_t row = 0; row < rows_of(qkv); ++row) {
    const int64_t parts = (step.positions[row] + op.heads) / op.window;
    const double factor = 1.0 + op.factor * std::log1p(static_cast<double>(parts));
    const ElementCall call{qkv.data + row * qkv.row_bytes(), nullptr, static_cast<float>(factor)};
    run_elements(*context, ElementOp::kScale, qkv.type, call, op.number);
  }
}

void Program::gate(const ProgramOp& op) {
  const ProgramBuffer& into = at(op.into);
  const auto* x = reinterpret_cast<const float*>(at(op.x).data);
  for (int64_t row = 0; row < rows_of(into); ++row) {
    const ElementCall call{into.data + row * into.row_bytes(), nullptr, 1.0f / (1.0f + std::exp(-x[row]))};
    run_elements(*context, ElementOp::kScale, into.type, call, into.width);
  }
}

void Program::head_norm(const ProgramOp& op) {
  const ProgramBuffer& into = at(op.into);
  NormCall call{};
  call.weight = op.weight.data, call.float_weight = true;
  call.width = op.weight.width, call.eps = static_cast<float>(op.factor);
  const int64_t heads = (into.width - op.number) / call.width;
  const int64_t first = op.number * (into.row_bytes() / into.width);
  for (int64_t row = 0; row < rows_of(into); ++row) {
    char* values = into.data + row * into.row_bytes() + first;
    call.x = values, call.out = values;
    run_norm(*context, call, into.type, heads);
  }
}

void Program::multiply(const ProgramOp& op) {
  const ProgramBuffer &into = at(op.into), &x = at(op.x);
  const int64_t first = op.number * (x.row_bytes() / x.width);
  for (int64_t row = 0; row < rows_of(into); ++row) {
    const char* factors = x.data + row * x.row_bytes() + first;
    const ElementCall call{into.data + row * into.row_bytes(), factors, 0.0f};
    run_elements(*context, ElementOp::kMultiply, into.type, call, into.width);
  }
}

void Program::decode(const ProgramOp& op) {
  const ProgramBuffer &qkv = at(op.x), &out = at(op.out);
  DecodeCall call{pool, rule_of(op), WorkView(step.decode_words)};
  call.layer = static_cast<int32_t>(op.number), call.steps = step.decode_steps;
  call.group = static_cast<int32_t>(op.heads / pool.kv_heads);
  call.q = qkv.data, call.q_stride = qkv.row_bytes();
  call.out = out.data, call.out_stride = out.row_bytes();
  call.pool.value_dim = out.width / op.heads;
  call.invariant = invariant;
  if (step.entry_query != nullptr && op.rope >= 0) {
    const Constant& angles = step.decode_angles[static_cast<size_t>(op.rope)];
    TurnCall turn{};
    turn.q = call.q, turn.q_stride = call.q_stride;
    turn.heads = op.heads, turn.head_dim = pool.head_dim, turn.half_rotary = angles.width;
    turn.turns = step.turns;
    turn.angles = static_cast<const float*>(angles.data);
    turn.turned =
        turned.reserve(static_cast<size_t>(step.turn_count * op.heads * pool.head_dim * pool.element_bytes));
    run_turns(*context, turn, pool.type, step.turn_count);
    call.entry_query = step.entry_query, call.turned = turn.turned;
  }
  run_decode(*context, call, buffered);
}

void Program::prefill(const ProgramOp& op) {
  const ProgramBuffer &qkv = at(op.x), &out = at(op.out);
  PrefillCall call = step.prefill;
  call.pool = pool, call.rule = rule_of(op);
  call.pool.value_dim = out.width / op.heads;
  call.layer = static_cast<int32_t>(op.number);
  call.group = static_cast<int32_t>(op.heads / pool.kv_heads);
  call.q_stride = qkv.row_bytes(), call.out_stride = out.row_bytes();
  call.q = qkv.data + step.decode_rows * call.q_stride;
  call.out = out.data + step.decode_rows * call.out_stride;
  if (op.rope >= 0 && !step.prefill_angles.empty()) {
    const Constant& angles = step.prefill_angles[static_cast<size_t>(op.rope)];
    call.angles = static_cast<const float*>(angles.data);
    call.half_rotary = static_cast<int32_t>(angles.width);
  }
  run_prefill(*context, call);
}

void Program::select(const ProgramOp& op) {
  const ProgramBuffer &x = at(op.x), &out = at(op.out);
  const int64_t bytes = x.row_bytes();
  for (int64_t row = 0; row < rows_of(out); ++row) {
    const int64_t from = step.state_rows == nullptr ? row : step.state_rows[row];
    std::memcpy(out.data + row * bytes, x.data + from * bytes, static_cast<size_t>(bytes));
  }
}

void Program::spread(const ProgramOp& op) {
  const ProgramBuffer &x = at(op.x), &out = at(op.out);
  const auto bytes = static_cast<size_t>(x.row_bytes());
  if (step.state_rows != nullptr) std::memset(out.data, 0, static_cast<size_t>(rows_of(out)) * bytes);
  for (int64_t row = 0; row < rows_of(x); ++row) {
    const int64_t to = step.state_rows == nullptr ? row : step.state_rows[row];
    std::memcpy(out.data + to * x.row_bytes(), x.data + row * x.row_bytes(), bytes);
  }
}

void Program::take_largest(int32_t* ids) {
  const ProgramBuffer& from = at(logits);
  const int64_t rows = rows_of(from), parts = (from.width + kUnitElements - 1) / kUnitElements;
  std::shared_ptr<SharedGroup> ranks;
  if (group != 0) ranks = group_of(group);
  const int64_t size = ranks == nullptr ? 1 : ranks->size();
  // Of parts of rows, then of rows, then of all ranks' rows.
  auto* of_parts = reinterpret_cast<Candidate*>(
      largest.reserve(static_cast<size_t>(rows * (parts + 1 + size)) * sizeof(Candidate)));
  Candidate *own = of_parts + rows * parts, *all = own + rows;
  const SamplingTable& table = sampling_table(context->level);
  context->pool.run(rows * parts, [&](int64_t unit, int) {
    const int64_t begin = unit % parts * kUnitElements;
    const float* x = reinterpret_cast<const float*>(from.data) + unit / parts * from.width + begin;
    float peaks[kUnitElements / kSampleBlock];
    DrawRow row{};
    row.logits = x, row.vocab_size = std::min(kUnitElements, from.width - begin);
    const int64_t index = table.draw(row, {nullptr, nullptr, nullptr, peaks});
    const float logit = std::isnan(x[index]) ? -std::numeric_limits<float>::infinity() : x[index];
    of_parts[unit] = {logit, static_cast<int32_t>(first_logit + begin + index)};
  });
  for (int64_t row = 0; row < rows; ++row) own[row] = best_of(of_parts + row * parts, parts);
  if (ranks == nullptr) {
    all = own;
  } else {
    translated([&] { ranks->all_gather(own, rows * static_cast<int64_t>(sizeof(Candidate)), all); });
  }
  for (int64_t row = 0; row < rows; ++row) ids[row] = best_of(all + row, size, rows).id;
}

void Program::forbid(const ProgramOp& op) {
  const ProgramBuffer& into = at(op.into);
  for (int64_t row = 0; row < rows_of(into); ++row) {
    auto* numbers = reinterpret_cast<float*>(into.data) + row * into.width;
    std::fill(numbers + op.number, numbers + into.width, -std::numeric_limits<float>::infinity());
  }
}

}  // namespace trunkline
