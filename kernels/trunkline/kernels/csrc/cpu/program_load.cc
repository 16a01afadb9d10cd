// Exported functions of step programs: reading and checking one, binding its memory, taking a step, running ops.
//
// What a program or a step could do wrong is checked here, so that the interpreter need not: a damaged list of ops
// is a ValueError, never a wrong address.
#include <tvm/ffi/function.h>
#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <utility>

#include "attention_checks.h"
#include "common/checks.h"
#include "dense_checks.h"
#include "linear_pack.h"
#include "ops.h"
#include "program.h"

namespace trunkline {
namespace {

namespace ffi = tvm::ffi;

constexpr int64_t kOpWords = 10, kOpReals = 2, kBufferWords = 3;

Program& program_of(int64_t handle) { return *reinterpret_cast<Program*>(handle); }

const int64_t* int64_data(const TensorView& tensor, const char* name) {
  if (!has_dtype(tensor, kDLInt, 64) || !tensor.IsContiguous() || tensor.device().device_type != kDLCPU) {
    TVM_FFI_THROW(ValueError) << name << " must be a contiguous int64 tensor in host memory";
  }
  return static_cast<const int64_t*>(tensor.data_ptr());
}

DenseType dense_type_of(KvType type) {
  return type == kKvFloat32   ? DenseType::kFloat32
         : type == kKvFloat16 ? DenseType::kFloat16
                              : DenseType::kBFloat16;
}

// Reads the words of one op.
struct OpReader {
  const Program& program;
  const std::vector<ffi::Tensor>& constants;
  const int64_t* words;

  int buffer(int i, bool optional = false) const {
    const int64_t index = words[i];
    if (optional && index == -1) return -1;
    require(index >= 0 && index < static_cast<int64_t>(program.buffers.size()), "an op names no buffer");
    return static_cast<int>(index);
  }

  const ProgramBuffer& at(int index) const { return program.buffers[static_cast<size_t>(index)]; }

  Constant constant(int i, bool optional = false) const {
    const int64_t index = words[i];
    if (optional && index == -1) return {};
    require(index >= 0 && index < static_cast<int64_t>(constants.size()), "an op names no constant");
    const TensorView tensor(constants[static_cast<size_t>(index)]);
    require(tensor.device().device_type == kDLCPU && tensor.IsContiguous() && tensor.ndim() >= 1,
            "constants must be contiguous in host memory");
    const int64_t width = tensor.size(tensor.ndim() - 1);
    return {bytes_of(tensor), width == 0 ? 0 : tensor.numel() / width, width, is_float32(tensor)};
  }

  // One row as wide as a buffer, in its type, or in float32 where that is allowed.
  Constant row(int i, const ProgramBuffer& like, bool optional, bool float_allowed) const {
    const Constant found = constant(i, optional);
    if (found.data == nullptr) return found;
    const DenseType type = dense_type(constants[static_cast<size_t>(words[i])], "a constant");
    require(type == like.type || (float_allowed && found.is_float32), "a constant is of another type than its op");
    require(found.width == like.width && found.rows == 1, "a constant is not as wide as its op");
    return found;
  }

  Constant table(int i, const ProgramBuffer& like) const {
    const Constant found = constant(i);
    require(
        dense_type(constants[static_cast<size_t>(words[i])], "a table") == like.type && found.width == like.width,
        "a table is not like its op");
    return found;
  }
};

void require_alike(const ProgramBuffer& a, const ProgramBuffer& b) {
  require(a.rows == b.rows && a.width == b.width && a.type == b.type, "the buffers of an op must be alike");
}

void require_apart(int a, int b) { require(a != b, "an op reads and writes one buffer"); }

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
    return own.type == x.type && own.in_features == in && own.out_features == outputs &&
           gated == (own.activation != Activation::kNone);
  };
  ExpertsLayer& routed = op.routed;
  routed.router = layer(0), routed.count = handles.numel() / 2;
  routed.first = reader.words[4], routed.per_token = reader.words[5];
  routed.sigmoid = (reader.words[6] & 1) != 0, routed.normalised = (reader.words[6] & 2) == 0;
  routed.factor = static_cast<float>(op.factor);
  routed.groups = reader.words[7], routed.groups_per_token = reader.words[8];
  const int64_t all = routed.router->out_features;
  require(fits(*routed.router, x.width, all, false) && routed.per_token >= 1 && routed.per_token <= all &&
              routed.first >= 0 && routed.first <= all - routed.count,
          "the router does not fit its experts");
  routed.group_best = (reader.words[6] & 4) != 0 ? 1 : 2;
  const bool by_outputs = (routed.groups == 1 || routed.group_best == 1) && reader.words[9] == -1;
  require((routed.sigmoid || by_outputs) && routed.groups >= 1 && all % routed.groups == 0 &&
              routed.groups_per_token >= 1 && routed.groups_per_token <= routed.groups &&
              routed.per_token <= routed.groups_per_token * (all / routed.groups),
          "experts cannot be chosen so");
  if (reader.words[9] != -1) {
    const Constant bias = reader.constant(9);
    require(bias.is_float32 && bias.width == all && bias.rows == 1,
            "the choice's bias is float32, one per expert");
    routed.choice_bias = static_cast<const float*>(bias.data);
  }
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
  const bool stores = op.kind == OpKind::kStoreKv;
  const int queries = reader.buffer(1);
  (stores ? op.into : op.x) = queries;
  op.number = reader.words[2], op.heads = reader.words[3];
  const ProgramBuffer& qkv = reader.at(queries);
  require(op.number >= 0 && op.number < pool.layers, "an op is of a layer that the pool does not have");
  require(op.heads > 0 && op.heads <= INT32_MAX && op.heads % pool.kv_heads == 0,
          "query heads must be a multiple of the KV heads");
  require(qkv.width == (op.heads + pool.bands * pool.kv_heads) * pool.head_dim && qkv.rows == RowKind::kTokens &&
              qkv.type == dense_type_of(pool.type),
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
  op.out = reader.buffer(4), op.rope = reader.words[5], op.window = reader.words[7];
  const ProgramBuffer& out = reader.at(op.out);
  require(out.width % op.heads == 0 && out.rows == RowKind::kTokens && out.type == qkv.type,
          "attention's output does not fit");
  PoolView read = pool;
  set_value_dim(read, out.width / op.heads);
  require(op.rope >= -1 && op.rope < ropes && op.window >= 0 && op.window <= INT32_MAX && op.factor > 0.0 &&
              op.cap >= 0.0,
          "attention has no such rope, window, scale or cap");
  op.weight = reader.constant(6, true);
  require(
      op.weight.data == nullptr || (op.weight.is_float32 && op.weight.width == op.heads && op.weight.rows == 1),
      "slopes must be float32, one per head");
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
  } else if (op.kind == OpKind::kActivate) {
    op.number = reader.words[2];
    require(op.number >= static_cast<int64_t>(ElementOp::kRelu) && op.number < kElementOps, "no such activation");
  } else if (op.kind == OpKind::kForbid) {
    op.number = reader.words[2];
    require(op.number >= 0 && op.number <= into.width && into.type == DenseType::kFloat32,
            "columns are forbidden in float32, up to the last");
  } else if (op.kind == OpKind::kAddPositions) {
    op.weight = reader.table(2, into);
    require(into.rows == RowKind::kTokens, "positions belong to tokens");
  } else if (op.kind == OpKind::kAllReduce) {
    require(reader.program.group != 0, "there is no group for a sum over ranks");
  }
}

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
    case OpKind::kAttend: read_attention(reader, op, reader.program.pool, ropes); break;
    case OpKind::kSelect:
      op.x = reader.buffer(1), op.out = reader.buffer(2);
      require(reader.at(op.x).rows == RowKind::kTokens && reader.at(op.out).rows == RowKind::kStates &&
                  reader.at(op.x).width == reader.at(op.out).width &&
                  reader.at(op.x).type == reader.at(op.out).type,
              "rows are selected from tokens, into states of the same width and type");
      break;
    default: read_elements(reader, op);
  }
  return op;
}

// `words` int64 [ops, 10], `reals` float64 [ops, 2], `buffers` int64 [n, 3]: rows, width, type. `flags`: 1 decode
// merges by way of a buffer, 2 it is batch-invariant; from 4 on, 4 times the type that a pool of int8 is computed in.
int64_t program_new(int64_t context, TensorView words, TensorView reals, TensorView buffers,
                    ffi::Array<ffi::Tensor> constants, int64_t ropes, TensorView data, TensorView packed,
                    int64_t group, int64_t flags) {
  require(words.ndim() == 2 && words.size(1) == kOpWords && has_dtype(reals, kDLFloat, 64) &&
              reals.IsContiguous() && reals.numel() == words.size(0) * kOpReals && buffers.ndim() == 2 &&
              buffers.size(1) == kBufferWords,
          "a program is int64 [ops, 10], float64 [ops, 2] and int64 [buffers, 3]");
  auto program = std::make_unique<Program>();
  program->context = reinterpret_cast<CpuContext*>(context);
  program->kept = constants;
  require(flags >= 0 && flags >> 2 < kKvTypes, "there is no such type");
  program->pool = pool_of(data, packed, 0, static_cast<KvType>(flags >> 2));
  program->group = group;
  program->buffered = (flags & 1) != 0, program->invariant = (flags & 2) != 0;
  program->ropes = ropes;
  const int64_t* buffer = int64_data(buffers, "buffers");
  for (int64_t i = 0; i < buffers.size(0); ++i, buffer += kBufferWords) {
    require(buffer[0] >= 0 && buffer[0] < kRowKinds && buffer[1] > 0 && buffer[2] >= 0 && buffer[2] < kDenseTypes,
            "there is no such buffer");
    program->buffers.push_back({static_cast<RowKind>(buffer[0]), buffer[1], static_cast<DenseType>(buffer[2])});
  }
  const std::vector<ffi::Tensor> held(constants.begin(), constants.end());
  const int64_t* op = int64_data(words, "words");
  const auto* real = static_cast<const double*>(reals.data_ptr());
  for (int64_t i = 0; i < words.size(0); ++i, op += kOpWords, real += kOpReals) {
    program->ops.push_back(read_op(OpReader{*program, held, op}, real, ropes));
  }
  return reinterpret_cast<int64_t>(program.release());
}

void program_delete(int64_t handle) { delete &program_of(handle); }

void program_bind(int64_t handle, int64_t index, TensorView memory) {
  Program& program = program_of(handle);
  require(index >= 0 && index < static_cast<int64_t>(program.buffers.size()), "there is no such buffer");
  ProgramBuffer& buffer = program.buffers[static_cast<size_t>(index)];
  require(dense_type(memory, "a buffer") == buffer.type && memory.ndim() == 2 && memory.size(1) == buffer.width,
          "the memory does not fit its buffer");
  buffer.data = bytes_of(memory), buffer.capacity = memory.size(0);
}

void take_decode(Program& program, const TensorView& words, int64_t steps, const TensorView& entry_query,
                 const TensorView& turns) {
  ProgramStep& step = program.step;
  step.decode_words = nullptr, step.entry_query = nullptr, step.turn_count = 0;
  if (step.decode_rows == 0) return;
  const int32_t* at = int32_data(words, "work");
  require(
      words.numel() >= kWorkHeaderWords && at[kWorkMagic] == kWorkMagicValue && at[kWorkWords] == words.numel(),
      "work must be what plan_work returns");
  require(at[kWorkRows] == step.decode_rows, "the plan has other rows than the step");
  require(steps >= 0 && steps <= INT32_MAX, "steps must not be negative");
  step.decode_words = at, step.decode_steps = static_cast<int32_t>(steps);
  if (entry_query.numel() == 0) return;
  require(entry_query.numel() == at[kWorkEntries] && turns.ndim() == 2 && turns.size(1) == 2,
          "entry_query must have a slot per entry, and turns name them");
  step.entry_query = int32_data(entry_query, "entry_query");
  step.turns = int32_data(turns, "turns"), step.turn_count = turns.size(0);
}

void take_angles(const Program& program, std::vector<Constant>& kept, const ffi::Array<ffi::Tensor>& angles) {
  kept.clear();
  require(angles.empty() || static_cast<int64_t>(angles.size()) == program.ropes,
          "angles must be there for every rope");
  for (const ffi::Tensor& tensor : angles) {
    const TensorView view(tensor);
    require(is_float32(view) && view.ndim() == 3 && view.size(1) == 2 && view.IsContiguous() &&
                2 * view.size(2) <= program.pool.head_dim,
            "angles must be contiguous float32 [n, 2, rotary_dim / 2]");
    kept.push_back({bytes_of(view), view.size(0), view.size(2), true});
  }
}

// That turned queries and items name rows and angles that exist.
void check_turns(const ProgramStep& step) {
  const auto names_angles = [](const std::vector<Constant>& angles, int32_t index) {
    return std::all_of(angles.begin(), angles.end(), [&](const Constant& own) { return index < own.rows; });
  };
  for (int64_t slot = 0; slot < step.turn_count; ++slot) {
    const int32_t row = step.turns[2 * slot], angle = step.turns[2 * slot + 1];
    require(row >= 0 && row < step.decode_rows && angle >= 0 && names_angles(step.decode_angles, angle),
            "turns must name rows and angles that exist");
  }
  const int32_t items = step.has_prefill ? step.prefill.item_indptr[step.prefill.entries] : 0;
  for (int32_t item = 0; item < items; ++item) {
    require(names_angles(step.prefill_angles, step.prefill.item_angle[item]), "items must name angles that exist");
  }
}

// Takes a step, whose tensors must stay until the next one. Empty tensors and lists: there is nothing of that.
void program_begin(int64_t handle, int64_t tokens, int64_t decode_rows, int64_t states, int64_t logits,
                   int64_t steps, TensorView ids, TensorView positions, TensorView slots, TensorView state_rows,
                   TensorView work, TensorView entry_query, TensorView turns, TensorView prefill,
                   ffi::Array<ffi::Tensor> decode_angles, ffi::Array<ffi::Tensor> prefill_angles) {
  Program& program = program_of(handle);
  ProgramStep& step = program.step;
  step.rows = {0, 0, 0};  // a refused step leaves nothing to run on
  for (AdaptedRows& adapted : step.adapted) {
    if (!adapted.groups.empty()) adapted.clear();
  }
  require(tokens >= 0 && decode_rows >= 0 && decode_rows <= tokens && logits >= 0 && logits <= states,
          "a step's rows contradict each other");
  step.ids = int64_data(ids, "ids"), step.positions = int64_data(positions, "positions");
  step.slots = int32_data(slots, "slots");
  require(ids.numel() == tokens && positions.numel() == tokens && slots.numel() == tokens,
          "ids, positions and slots must be one per token");
  check_slots(program.pool, step.slots, tokens);
  step.state_rows = nullptr;
  if (state_rows.numel() != 0) {
    step.state_rows = int64_data(state_rows, "state_rows");
    const bool inside = std::all_of(step.state_rows, step.state_rows + state_rows.numel(),
                                    [&](int64_t row) { return row >= 0 && row < tokens; });
    require(state_rows.numel() == states && inside, "state_rows must be tokens");
  } else {
    require(states == tokens || states == 0, "without state_rows all tokens have states, or none");
  }
  step.decode_rows = decode_rows;
  take_decode(program, work, steps, entry_query, turns);
  step.has_prefill = prefill.numel() != 0;
  require(step.has_prefill || decode_rows == tokens, "tokens behind the decode rows need a prefill plan");
  if (step.has_prefill) {
    int64_t queries = 0;
    read_prefill_words(prefill, step.prefill, &queries);
    require(queries == tokens - decode_rows, "the prefill plan has other queries than the step");
  }
  take_angles(program, step.decode_angles, decode_angles);
  take_angles(program, step.prefill_angles, prefill_angles);
  check_turns(step);
  step.rows = {tokens, states, logits};
}

// Takes an adapter's layers: int64 [ops, 2], for each op the handles of A and B, or zeros. Empty: the adapter is gone.
// Python keeps the layers until they are replaced.
void program_adapter(int64_t handle, int64_t adapter, TensorView handles) {
  Program& program = program_of(handle);
  const auto ops = static_cast<int64_t>(program.ops.size());
  const int64_t* at = int64_data(handles, "handles");
  require(adapter >= 0 && adapter <= static_cast<int64_t>(program.adapters.size()),
          "adapters are numbered from 0");
  require(handles.numel() == 0 || handles.numel() == 2 * ops, "an adapter has two layers per op");
  AdapterLayers layers(static_cast<size_t>(handles.numel() / 2));
  for (size_t i = 0; i < layers.size(); ++i) {
    const auto* down = reinterpret_cast<const PackedLayer*>(at[2 * i]);
    const auto* up = reinterpret_cast<const PackedLayer*>(at[2 * i + 1]);
    require((down == nullptr) == (up == nullptr), "an adapter has A and B of an op, or neither");
    if (down == nullptr) continue;
    const ProgramOp& op = program.ops[i];
    require(op.kind == OpKind::kLinear && program.buffers[static_cast<size_t>(op.out)].rows != RowKind::kLogits,
            "an adapter is of linear ops before the head");
    const LinearLayer& own = *op.linear;
    const int64_t outputs = own.activation == Activation::kNone ? own.out_features : 2 * own.out_features;
    require(down->type == own.type && up->type == own.type && down->in_features == own.in_features &&
                up->out_features == outputs && up->in_features == down->out_features &&
                down->activation == Activation::kNone && up->activation == Activation::kNone,
            "an adapter's layers do not fit their op");
    layers[i] = {down, up};
  }
  program.step.adapted[0].clear(), program.step.adapted[1].clear();
  if (adapter == static_cast<int64_t>(program.adapters.size())) program.adapters.emplace_back();
  program.adapters[static_cast<size_t>(adapter)] = std::move(layers);
}

// Takes the adapter of each token of the step that has begun, int32 [tokens]; -1: none.
void program_adapt(int64_t handle, TensorView of_token) {
  Program& program = program_of(handle);
  ProgramStep& step = program.step;
  const int32_t* at = int32_data(of_token, "of_token");
  require(of_token.numel() == step.rows[0], "there is an adapter, or none, for each token");
  for (int64_t token = 0; token < step.rows[0]; ++token) {
    const auto adapter = static_cast<size_t>(at[token]);
    require(at[token] == -1 ||
                (at[token] >= 0 && adapter < program.adapters.size() && !program.adapters[adapter].empty()),
            "a token has an adapter that is not there");
  }
  const size_t adapters = program.adapters.size();
  step.adapted[0].sort(step.rows[0], adapters, [&](int64_t row) { return at[row]; });
  step.adapted[1].sort(step.rows[1], adapters,
                       [&](int64_t row) { return at[step.state_rows == nullptr ? row : step.state_rows[row]]; });
}

void program_run(int64_t handle, int64_t start, int64_t stop) {
  Program& program = program_of(handle);
  require(start >= 0 && start <= stop && stop <= static_cast<int64_t>(program.ops.size()),
          "there are no such ops");
  for (const ProgramBuffer& buffer : program.buffers) {
    require(buffer.capacity >= program.rows_of(buffer), "a buffer has no room for the step's rows");
  }
  if (program.step.rows[0] == 0) return;
  const ContextUse use(reinterpret_cast<int64_t>(program.context));
  program.run(start, stop);
}

}  // namespace
}  // namespace trunkline

TVM_FFI_DLL_EXPORT_TYPED_FUNC(program_new, trunkline::program_new)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(program_delete, trunkline::program_delete)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(program_bind, trunkline::program_bind)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(program_begin, trunkline::program_begin)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(program_adapter, trunkline::program_adapter)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(program_adapt, trunkline::program_adapt)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(program_run, trunkline::program_run)
