// Reads the ops of a step program from their words.
//
// What an op could do wrong is checked here, so that the interpreter need not: a damaged list of ops is a ValueError,
// never a wrong address.
#include <algorithm>

#include "linear_pack.h"
#include "program_reader.h"

namespace trunkline {
namespace {

void read_norm(const OpReader& reader, ProgramOp& op) {
  op.x = reader.buffer(1), op.into = reader.buffer(2, true), op.out = reader.buffer(4);
  const bool is_layer = op.kind == OpKind::kLayerNorm;
  op.weight = reader.row(3, reader.at(op.x), false, !is_layer);
  if (is_layer) op.bias = reader.row(5, reader.at(op.x), true, false);
  require_alike(reader.at(op.x), reader.at(op.out));
  if (op.into >= 0) require_alike(reader.at(op.x), reader.at(op.into));
  require_apart(op.x, op.out), require_apart(op.into, op.out);
}

void read_linear(const OpReader& reader, ProgramOp& op) {
  op.x = reader.buffer(1), op.out = reader.buffer(3);
  require(reader.words[2] != 0, "a linear op has no layer");
  op.linear = reinterpret_cast<const PackedLayer*>(reader.words[2]);
  const ProgramBuffer &x = reader.at(op.x), &out = reader.at(op.out);
  const bool gated = op.linear->activation != Activation::kNone;
  require(gated == (reader.words[4] != 0), "a gated layer is not gated, or the other way round");
  require(x.type == op.linear->type && x.width == op.linear->in_features && out.width == op.linear->out_features,
          "the buffers of a linear op do not fit its layer");
  require_level(reader.program.context->level, *op.linear);
  require(out.type == x.type || (out.type == DenseType::kFloat32 && !gated), "a layer gives its type or float32");
  require(out.rows == x.rows || (x.rows == RowKind::kStates && out.rows == RowKind::kLogits),
          "a linear op has other rows than its input");
  require_apart(op.x, op.out);
}

// The constant is int64: handles of the router, then of each expert's gated and second layer.
void read_experts(const OpReader& reader, ProgramOp& op) {
  op.x = reader.buffer(1), op.out = reader.buffer(3);
  const ProgramBuffer &x = reader.at(op.x), &out = reader.at(op.out);
  require_alike(x, out), require_apart(op.x, op.out);
  reader.constant(2);
  const TensorView handles(reader.constants[static_cast<size_t>(reader.words[2])]);
  const int64_t* at = int64_data(handles, "handles");
  require(handles.numel() % 2 == 1 && std::all_of(at, at + handles.numel(), [](int64_t handle) { return handle; }),
          "experts are a router and two layers each");
  const auto layer = [&](int64_t i) { return reinterpret_cast<const PackedLayer*>(at[i]); };
  const auto fits = [&](const LinearLayer& own, int64_t in, int64_t outputs, bool gated) {
    require_level(reader.program.context->level, own);
    return own.type == x.type && own.in_features == in && own.out_features == outputs &&
           gated == (own.activation != Activation::kNone);
  };
  ExpertsLayer& routed = op.routed;
  routed.router = layer(0), routed.count = handles.numel() / 2;
  routed.first = reader.words[4], routed.per_token = reader.words[5];
  routed.sigmoid = (reader.words[6] & 1) != 0, routed.normalised = (reader.words[6] & 2) == 0;
  routed.scales_inputs = (reader.words[6] & 8) != 0;
  routed.factor = static_cast<float>(op.factor);
  routed.groups = reader.words[7], routed.groups_per_token = reader.words[8];
  const int64_t all = routed.router->out_features;
  require(fits(*routed.router, x.width, all, false) && routed.per_token >= 1 && routed.per_token <= all &&
              routed.first >= 0 && routed.first <= all - routed.count,
          "the router does not fit its experts");
  routed.group_best = (reader.words[6] & 4) != 0 ? 1 : 2;
  const bool scored = routed.sigmoid || reader.words[9] != -1;
  require((scored || routed.groups == 1 || routed.group_best == 1) && routed.groups >= 1 &&
              all % routed.groups == 0 && routed.groups_per_token >= 1 &&
              routed.groups_per_token <= routed.groups &&
              routed.per_token <= routed.groups_per_token * (all / routed.groups),
          "experts cannot be chosen so");
  if (reader.words[9] != -1) {
    const Constant bias = reader.constant(9);
    require(bias.is_float32 && bias.width == all && bias.rows == 1,
            "the choice's bias is float32, one per expert");
    routed.choice_bias = static_cast<const float*>(bias.data);
  }
  op.other = reader.buffer(10, true);
  if (op.other >= 0) require_alike(x, reader.at(op.other)), require_apart(op.other, op.out);
  const Constant scale = reader.constant(11, true);
  require(scale.data == nullptr || (scale.is_float32 && scale.width == all && scale.rows == 1),
          "the factors of shares are float32, one per expert");
  routed.scale = static_cast<const float*>(scale.data);
  for (int64_t i = 1; i < handles.numel(); i += 2) {
    const LinearLayer &up = *layer(i), &down = *layer(i + 1);
    require(fits(up, x.width, layer(1)->out_features, true) && fits(down, up.out_features, x.width, false),
            "an expert does not fit its buffers");
    op.experts.push_back({&up, &down});
  }
}

// The constant is int64: handles of a layer for each head.
void read_heads(const OpReader& reader, ProgramOp& op, int word, int64_t in, int64_t outputs, DenseType type) {
  reader.constant(word);
  const TensorView handles(reader.constants[static_cast<size_t>(reader.words[word])]);
  const int64_t* at = int64_data(handles, "handles");
  require(handles.numel() > 0 && in % handles.numel() == 0 && outputs % handles.numel() == 0,
          "heads do not divide the buffers of their layers");
  for (int64_t i = 0; i < handles.numel(); ++i) {
    require(at[i] != 0, "a head has no layer");
    const LinearLayer& layer = *reinterpret_cast<const PackedLayer*>(at[i]);
    require(layer.type == type && layer.activation == Activation::kNone &&
                layer.in_features == in / handles.numel() && layer.out_features == outputs / handles.numel(),
            "a head's layer does not fit its buffers");
    require_level(reader.program.context->level, layer);
    op.by_head.push_back(&layer);
  }
}

void read_absorb(const OpReader& reader, ProgramOp& op) {
  op.x = reader.buffer(1), op.other = reader.buffer(2), op.latent = reader.buffer(3), op.out = reader.buffer(5);
  const ProgramBuffer &queries = reader.at(op.x), &rotary = reader.at(op.other), &latent = reader.at(op.latent);
  const ProgramBuffer& out = reader.at(op.out);
  for (const int read : {op.x, op.other, op.latent}) {
    require(reader.at(read).rows == out.rows && reader.at(read).type == out.type,
            "the buffers of an op must be alike");
    require_apart(read, op.out);
  }
  const int64_t row = rotary.width + latent.width, heads = out.width / row - 1;
  require(heads > 0 && out.width % row == 0 && queries.width > heads * rotary.width,
          "queries do not fit what is stored of a token");
  read_heads(reader, op, 4, queries.width - heads * rotary.width, heads * latent.width, out.type);
  require(static_cast<int64_t>(op.by_head.size()) == heads, "there are other heads than layers");
}

void read_expand(const OpReader& reader, ProgramOp& op) {
  op.x = reader.buffer(1), op.out = reader.buffer(3);
  const ProgramBuffer &x = reader.at(op.x), &out = reader.at(op.out);
  require(x.rows == out.rows && x.type == out.type, "the buffers of an op must be alike");
  require_apart(op.x, op.out);
  read_heads(reader, op, 2, x.width, out.width, x.type);
}

void read_squares(const OpReader& reader, ProgramOp& op) {
  const bool sums = op.kind == OpKind::kSquareSums;
  const int queries = reader.buffer(1), other = reader.buffer(2);
  const ProgramBuffer &qkv = reader.at(queries), &pair = reader.at(other);
  require(pair.width == 2 && pair.type == DenseType::kFloat32 && pair.rows == qkv.rows,
          "sums of squares are float32, two per row");
  require_apart(queries, other);
  if (sums) {
    op.x = queries, op.out = other, op.number = reader.words[3], op.heads = reader.words[4];
    require(op.number > 0 && op.heads > 0 && op.number <= qkv.width && op.heads <= qkv.width - op.number,
            "queries and keys do not fit");
    return;
  }
  op.into = queries, op.x = other;
  op.weight = reader.constant(3), op.bias = reader.constant(4);
  for (const int word : {3, 4}) {
    require(dense_type(reader.constants[static_cast<size_t>(reader.words[word])], "a weight") == qkv.type,
            "weights of a norm are of the type of its columns");
  }
  require(
      op.weight.rows == 1 && op.bias.rows == 1 && op.weight.width + op.bias.width <= qkv.width && op.cap >= 1.0,
      "queries and keys do not fit");
}

void read_attention(const OpReader& reader, ProgramOp& op, const PoolView& pool, int64_t ropes) {
  const bool stores = op.kind != OpKind::kAttend;
  const int queries = reader.buffer(1);
  (stores ? op.into : op.x) = queries;
  op.number = reader.words[2], op.heads = reader.words[3];
  const ProgramBuffer& qkv = reader.at(queries);
  require(op.number >= 0 && op.number < pool.layers, "an op is of a layer that the pool does not have");
  require(op.heads > 0 && op.heads <= INT32_MAX && op.heads % pool.kv_heads == 0,
          "query heads must be a multiple of the KV heads");
  // A layer that reads another one's KV has queries alone.
  const int64_t queries_width = op.heads * pool.head_dim;
  const bool alone = op.kind == OpKind::kPrepareQueries || (!stores && qkv.width == queries_width);
  require(qkv.width == queries_width + (alone ? 0 : pool.bands * pool.kv_heads * pool.head_dim) &&
              qkv.rows == RowKind::kTokens && qkv.type == dense_type_of(pool.type),
          "qkv does not fit the pool");
  if (stores) {
    op.out = reader.buffer(4, true), op.other = reader.buffer(5, true);
    require((op.out < 0) == (op.other < 0), "cosines come with sines");
    if (op.out >= 0) {
      const ProgramBuffer& cosines = reader.at(op.out);
      require_alike(cosines, reader.at(op.other));
      require(cosines.rows == RowKind::kTokens && cosines.width % 2 == 0 && cosines.width <= pool.head_dim &&
                  (cosines.type == qkv.type || cosines.type == DenseType::kFloat32),
              "rotary factors do not fit the heads");
    }
    const ProgramBuffer head{RowKind::kTokens, pool.head_dim, qkv.type};
    op.weight = reader.row(6, head, true, false), op.bias = reader.row(7, head, true, false);
    require((op.weight.data == nullptr) == (op.bias.data == nullptr), "queries and keys are both normalised");
    return;
  }
  op.out = reader.buffer(4), op.rope = reader.words[5], op.window = reader.words[7], op.span = reader.words[9];
  const ProgramBuffer& out = reader.at(op.out);
  require(out.width % op.heads == 0 && out.rows == RowKind::kTokens && out.type == qkv.type,
          "attention's output does not fit");
  PoolView read = pool;
  set_value_dim(read, out.width / op.heads);
  require(read.head_dim == pool.head_dim, "attention's output is not as wide as the latents are");
  require(op.rope >= -1 && op.rope < ropes && op.window >= 0 && op.window <= INT32_MAX && op.factor > 0.0 &&
              op.cap >= 0.0 && op.span >= 0 && op.span <= INT32_MAX,
          "attention has no such rope, window, span, scale or cap");
  op.weight = reader.constant(6, true), op.bias = reader.constant(8, true);
  for (const Constant* own : {&op.weight, &op.bias}) {
    require(own->data == nullptr || (own->is_float32 && own->width == op.heads && own->rows == 1),
            "slopes and sinks must be float32, one per head");
  }
}

void read_rotations(const OpReader& reader, ProgramOp& op) {
  op.out = reader.buffer(1), op.other = reader.buffer(2);
  const ProgramBuffer& cosines = reader.at(op.out);
  require_alike(cosines, reader.at(op.other));
  require_apart(op.out, op.other);
  op.weight = reader.constant(3);
  const bool doubles = has_dtype(TensorView(reader.constants[static_cast<size_t>(reader.words[3])]), kDLFloat, 64);
  require(doubles && cosines.rows == RowKind::kTokens && cosines.width == 2 * op.weight.width * op.weight.rows,
          "frequencies must be float64, one per two columns");
}

void read_elements(const OpReader& reader, ProgramOp& op) {
  op.into = reader.buffer(1);
  const ProgramBuffer& into = reader.at(op.into);
  if (op.kind == OpKind::kAdd) {
    op.x = reader.buffer(2);
    require_alike(into, reader.at(op.x));
  } else if (op.kind == OpKind::kGate) {
    op.x = reader.buffer(2);
    const ProgramBuffer& x = reader.at(op.x);
    require(x.width == 1 && x.type == DenseType::kFloat32 && x.rows == into.rows,
            "a gate is a float32 for each row");
    require_apart(op.x, op.into);
  } else if (op.kind == OpKind::kMultiply) {
    op.x = reader.buffer(2), op.number = reader.words[3];
    const ProgramBuffer& x = reader.at(op.x);
    require(x.rows == into.rows && x.type == into.type && op.number >= 0 && into.width <= x.width &&
                op.number <= x.width - into.width,
            "factors are columns of rows of the same type");
    require_apart(op.x, op.into);
  } else if (op.kind == OpKind::kHeadNorm) {
    op.number = reader.words[2], op.weight = reader.constant(3);
    require(op.weight.is_float32 && op.weight.rows == 1 && op.weight.width > 0 && op.number >= 0 &&
                op.number < into.width && (into.width - op.number) % op.weight.width == 0,
            "the heads of a norm do not fit");
  } else if (op.kind == OpKind::kActivate) {
    op.number = reader.words[2];
    require(op.number >= static_cast<int64_t>(ElementOp::kRelu) &&
                op.number <= static_cast<int64_t>(ElementOp::kGeluTanh),
            "no such activation");
  } else if (op.kind == OpKind::kForbid) {
    op.number = reader.words[2];
    require(op.number >= 0 && op.number <= into.width && into.type == DenseType::kFloat32,
            "columns are forbidden in float32, up to the last");
  } else if (op.kind == OpKind::kAddPositions) {
    op.weight = reader.table(2, into);
    require(into.rows == RowKind::kTokens, "positions belong to tokens");
  } else if (op.kind == OpKind::kAllReduce) {
    require(reader.program.group != 0, "there is no group for a sum over ranks");
  } else if (op.kind == OpKind::kTemper) {
    op.number = reader.words[2], op.window = reader.words[3], op.heads = reader.words[4];
    const bool fits = op.number > 0 && op.number <= into.width && op.window > 0 && (op.heads | 1) == 1;
    require(fits && into.rows == RowKind::kTokens, "queries of tokens are scaled, by a period");
  }
}

void read_select(const OpReader& reader, ProgramOp& op) {
  op.x = reader.buffer(1), op.out = reader.buffer(2);
  const bool selects = op.kind == OpKind::kSelect;
  const ProgramBuffer &tokens = reader.at(selects ? op.x : op.out), &states = reader.at(selects ? op.out : op.x);
  require(tokens.rows == RowKind::kTokens && states.rows == RowKind::kStates && tokens.width == states.width &&
              tokens.type == states.type,
          "rows are selected from tokens, into states of the same width and type, or brought back");
}

}  // namespace

ProgramOp read_op(const OpReader& reader, const double* reals, int64_t ropes) {
  require(reader.words[0] >= 0 && reader.words[0] < kOpKinds, "there is no such op");
  ProgramOp op;
  op.kind = static_cast<OpKind>(reader.words[0]);
  op.factor = reals[0], op.cap = reals[1];
  switch (op.kind) {
    case OpKind::kHost: break;
    case OpKind::kEmbed:
      op.out = reader.buffer(1), op.weight = reader.table(2, reader.at(op.out)), op.number = reader.words[3];
      require(reader.at(op.out).rows == RowKind::kTokens, "embeddings are of tokens");
      break;
    case OpKind::kRotations: read_rotations(reader, op); break;
    case OpKind::kRmsNorm:
    case OpKind::kLayerNorm: read_norm(reader, op); break;
    case OpKind::kLinear: read_linear(reader, op); break;
    case OpKind::kExperts: read_experts(reader, op); break;
    case OpKind::kSquareSums:
    case OpKind::kWideNorm: read_squares(reader, op); break;
    case OpKind::kAbsorb: read_absorb(reader, op); break;
    case OpKind::kExpand: read_expand(reader, op); break;
    case OpKind::kStoreKv:
    case OpKind::kPrepareQueries:
    case OpKind::kAttend: read_attention(reader, op, reader.program.pool, ropes); break;
    case OpKind::kSelect:
    case OpKind::kSpread: read_select(reader, op); break;
    default: read_elements(reader, op);
  }
  return op;
}

}  // namespace trunkline
