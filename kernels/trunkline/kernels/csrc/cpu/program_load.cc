// Exported functions of step programs: making one of its ops (program_ops.cc), binding its memory, taking a step,
// running ops, going on by a whole step.
//
// What a step could do wrong is checked here, so that the interpreter need not: it is a ValueError, never a wrong
// address.

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "common/exports.h"
#include "common/live_plan.h"
#include "linear_pack.h"
#include "ops.h"
#include "program.h"
#include "program_reader.h"

namespace trunkline {
namespace {

namespace ffi = tvm::ffi;

constexpr int64_t kOpWords = 12, kOpReals = 2, kBufferWords = 3;

Program& program_of(int64_t handle) { return *reinterpret_cast<Program*>(handle); }

// `words` int64 [ops, 10], `reals` float64 [ops, 2], `buffers` int64 [n, 3]: rows, width, type. `flags`: 1 decode
// merges by way of a buffer, 2 it is batch-invariant; from 4 on, 4 times the type that a pool of 8 bits is computed in.
// `latent`: numbers of a latent, if there are any. `logits`: index of their buffer; `first_logit`: the id of its first
// column.
int64_t program_new(int64_t context, TensorView words, TensorView reals, TensorView buffers,
                    ffi::Array<ffi::Tensor> constants, int64_t ropes, TensorView data, TensorView packed,
                    int64_t group, int64_t flags, int64_t latent, int64_t logits, int64_t first_logit) {
  require(words.ndim() == 2 && words.size(1) == kOpWords && has_dtype(reals, kDLFloat, 64) &&
              reals.IsContiguous() && reals.numel() == words.size(0) * kOpReals && buffers.ndim() == 2 &&
              buffers.size(1) == kBufferWords,
          "a program is int64 [ops, 10], float64 [ops, 2] and int64 [buffers, 3]");
  auto program = std::make_unique<Program>();
  program->context = reinterpret_cast<CpuContext*>(context);
  program->kept = constants;
  require(flags >= 0 && flags >> 2 < kKvTypes, "there is no such type");
  program->pool = pool_of(data, packed, 0, static_cast<KvType>(flags >> 2));
  require(latent >= 0, "a latent has a size");
  if (latent > 0) set_value_dim(program->pool, latent);
  program->group = group;
  program->buffered = (flags & 1) != 0, program->invariant = (flags & 2) != 0;
  program->ropes = ropes;
  const int64_t* buffer = int64_data(buffers, "buffers");
  for (int64_t i = 0; i < buffers.size(0); ++i, buffer += kBufferWords) {
    require(buffer[0] >= 0 && buffer[0] < kRowKinds && buffer[1] > 0 && buffer[2] >= 0 && buffer[2] < kDenseTypes,
            "there is no such buffer");
    program->buffers.push_back({static_cast<RowKind>(buffer[0]), buffer[1], static_cast<DenseType>(buffer[2])});
  }
  require(logits >= 0 && logits < buffers.size(0), "logits have no buffer");
  program->logits = static_cast<int>(logits), program->first_logit = first_logit;
  const ProgramBuffer& results = program->buffers[static_cast<size_t>(logits)];
  require(results.rows == RowKind::kLogits && results.type == DenseType::kFloat32 && first_logit >= 0 &&
              results.width <= INT32_MAX - first_logit,
          "logits are float32, of int32 ids");
  const std::vector<ffi::Tensor> held(constants.begin(), constants.end());
  const int64_t* op = int64_data(words, "words");
  const auto* real = static_cast<const double*>(reals.data_ptr());
  for (int64_t i = 0; i < words.size(0); ++i, op += kOpWords, real += kOpReals) {
    program->ops.push_back(read_op(OpReader{*program, held, op}, real, ropes));
    program->ops.back().first_site = program->sites;
    program->sites += program->ops.back().sites();
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
  // Memory of the caller, in which `program_step` goes on.
  step.ids = const_cast<int32_t*>(int32_data(ids, "ids"));
  step.positions = const_cast<int64_t*>(int64_data(positions, "positions"));
  step.slots = const_cast<int32_t*>(int32_data(slots, "slots"));
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

// Goes on to a step of the same decode rows, without anything else: what the last `program_begin` took is still there,
// with other ids, positions and slots in it. So a steady step passes one number instead of a dozen tensors.
void program_go_on(int64_t handle, int64_t steps) {
  Program& program = program_of(handle);
  ProgramStep& step = program.step;
  const std::array<int64_t, kRowKinds> rows = step.rows;
  step.rows = {0, 0, 0};  // a refused step leaves nothing to run on
  const bool decodes = step.decode_words != nullptr && rows[0] == step.decode_rows && !step.has_prefill;
  require(decodes && step.state_rows == nullptr, "only a step of decode rows goes on");
  require(step.adapted[0].groups.empty(), "a step with adapters begins anew");
  require(step.decode_words[kWorkRows] == step.decode_rows, "the plan has other rows than the step");
  require(steps >= 0 && steps <= INT32_MAX, "steps must not be negative");
  check_slots(program.pool, step.slots, rows[0]);
  step.decode_steps = static_cast<int32_t>(steps);
  step.rows = rows;
}

// What an adapter has for `layer`, from the handles of A and B; zeros: nothing.
AdapterLayer adapter_layer(CpuLevel level, const LinearLayer* layer, const int64_t* handles) {
  const auto* down = reinterpret_cast<const PackedLayer*>(handles[0]);
  const auto* up = reinterpret_cast<const PackedLayer*>(handles[1]);
  require((down == nullptr) == (up == nullptr), "an adapter has A and B of a site, or neither");
  if (down == nullptr) return {};
  require(layer != nullptr, "an adapter is of linear ops and experts before the head");
  const bool is_gated = layer->activation != Activation::kNone;
  require(down->type == layer->type && up->type == layer->type && down->in_features == layer->in_features &&
              up->out_features == (is_gated ? 2 : 1) * layer->out_features &&
              up->in_features == down->out_features && down->activation == Activation::kNone &&
              up->activation == Activation::kNone,
          "an adapter's layers do not fit their op");
  require_level(level, *down), require_level(level, *up);
  return {down, up};
}

// Takes an adapter's layers: int64 [sites, 2], for each site (`adapters.h`) the handles of A and B, or zeros. Empty:
// the adapter is gone. Python keeps the layers until they are replaced.
void program_adapter(int64_t handle, int64_t adapter, TensorView handles) {
  Program& program = program_of(handle);
  const auto sites = static_cast<int64_t>(program.sites);
  const int64_t* at = int64_data(handles, "handles");
  require(adapter >= 0 && adapter <= static_cast<int64_t>(program.adapters.size()),
          "adapters are numbered from 0");
  require(handles.numel() == 0 || handles.numel() == 2 * sites, "an adapter has two layers per site");
  AdapterLayers layers(static_cast<size_t>(handles.numel() / 2));
  for (const ProgramOp& op : program.ops) {
    if (layers.empty()) break;
    const bool fits_rows = op.out >= 0 && program.buffers[static_cast<size_t>(op.out)].rows != RowKind::kLogits;
    for (size_t site = 0; site < op.sites(); ++site) {
      layers[op.first_site + site] = adapter_layer(program.context->level, fits_rows ? op.site(site) : nullptr,
                                                   at + 2 * (op.first_site + site));
    }
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

// Writes the ids of the largest logits of the last step, int32 [rows of logits].
void program_largest(int64_t handle, TensorView ids) {
  Program& program = program_of(handle);
  require(ids.numel() == program.step.rows[2], "there is an id for each row of logits");
  const ContextUse use(reinterpret_cast<int64_t>(program.context));
  program.take_largest(const_cast<int32_t*>(int32_data(ids, "ids")));
}

// Computes the step of the same decode rows behind the last one: `live_plan`, whose words that one had, goes on to
// `steps`, and each row computes the id that stands in its ids, at the place behind its last one. With `takes_largest` the ids
// of the largest logits stand there afterwards. Returns -1 if the plan's pieces have only grown, else the generation
// of its words.
int64_t program_step(int64_t handle, int64_t live_plan, int64_t steps, bool takes_largest) {
  Program& program = program_of(handle);
  ProgramStep& step = program.step;
  LivePlan& plan = *reinterpret_cast<LivePlan*>(live_plan);
  const std::array<int64_t, kRowKinds> rows =
      std::exchange(step.rows, {});  // a refused step leaves nothing to run on
  require(step.decode_words != nullptr && step.decode_words == plan.memory().get() && rows[2] == rows[0],
          "only a step of decode rows goes on, with its own plan");
  require(steps >= 0 && steps <= INT32_MAX, "steps must not be negative");
  const auto pieces = [&] { return std::pair(plan.memory().get(), plan.memory()[kWorkMade]); };
  const auto before = pieces();
  const auto now = static_cast<int32_t>(steps);
  try {
    plan.apply(&now, 1);
  } catch (const std::invalid_argument& error) {
    TVM_FFI_THROW(ValueError) << error.what();
  }
  step.decode_words = plan.memory().get();
  for (int64_t row = 0; row < rows[0]; ++row) ++step.positions[row], ++step.slots[row];
  step.rows = rows;
  program_go_on(handle, steps);
  program_run(handle, 0, static_cast<int64_t>(program.ops.size()));
  if (takes_largest) {
    const ContextUse use(reinterpret_cast<int64_t>(program.context));
    program.take_largest(step.ids);
  }
  return pieces() == before ? -1 : plan.generation();
}

}  // namespace
}  // namespace trunkline

TRUNKLINE_EXPORT(program_new, trunkline::program_new)
TRUNKLINE_EXPORT(program_delete, trunkline::program_delete)
TRUNKLINE_EXPORT(program_bind, trunkline::program_bind)
TRUNKLINE_EXPORT(program_begin, trunkline::program_begin)
TRUNKLINE_EXPORT(program_go_on, trunkline::program_go_on)
TRUNKLINE_EXPORT(program_adapter, trunkline::program_adapter)
TRUNKLINE_EXPORT(program_adapt, trunkline::program_adapt)
TRUNKLINE_EXPORT(program_run, trunkline::program_run)
TRUNKLINE_EXPORT(program_largest, trunkline::program_largest)
TRUNKLINE_EXPORT(program_step, trunkline::program_step)
