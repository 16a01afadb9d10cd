// A step as a program: a flat list of ops over fixed buffers (docs/decisions/0017-a-step-is-a-program.md), and the
// interpreter that runs a range of it in one call.
//
// `trunkline/kernels/program.py` says what the ops mean; `program_ops.cc` reads and checks them once, `program.cc`
// runs them. A buffer is `[rows, width]` in memory that Python owns; its rows in a step are the tokens, the tokens
// whose states are needed, or the first of those, whose logits are needed.
#pragma once

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "adapters.h"
#include "attention.h"
#include "context.h"
#include "elementwise.h"
#include "linear.h"
#include "scratch.h"
#include "shared_group.h"

namespace trunkline {

// The numbers of `trunkline/kernels/cpu_program.py`.
enum class OpKind : int64_t {
  kHost = 0,  // not for this interpreter
  kEmbed = 1,
  kAddPositions = 2,
  kScale = 3,
  kAllReduce = 4,
  kRotations = 5,
  kRmsNorm = 6,
  kLayerNorm = 7,
  kLinear = 8,
  kActivate = 9,
  kClamp = 10,
  kAdd = 11,
  kStoreKv = 12,
  kAttend = 13,
  kSelect = 14,
  kSoftCap = 15,
  kForbid = 16,
  kExperts = 17,
  kSquareSums = 18,
  kWideNorm = 19,
  kAbsorb = 20,
  kExpand = 21,
  kTemper = 22,
  kGate = 23,
  kHeadNorm = 24,
  kPrepareQueries = 25,
  kMultiply = 26,
  kSpread = 27,
};
constexpr int64_t kOpKinds = 28;

enum class RowKind : int64_t { kTokens = 0, kStates = 1, kLogits = 2 };
constexpr int64_t kRowKinds = 3;

struct ProgramBuffer {
  RowKind rows;
  int64_t width;
  DenseType type;
  char* data = nullptr;
  int64_t capacity = 0;  // rows

  int64_t row_bytes() const { return width * (type == DenseType::kFloat32 ? 4 : 2); }
};

// A tensor that an op has as a constant; null: none.
struct Constant {
  const void* data = nullptr;
  int64_t rows = 0, width = 0;
  bool is_float32 = false;
};

struct ProgramOp {
  OpKind kind = OpKind::kHost;
  int x = -1;      // buffer that is read
  int into = -1;   // buffer that is changed: a norm's residual, the qkv of StoreKv
  int out = -1;    // buffer that is written
  int other = -1;  // sines, rotary parts of keys, what a router reads
  int latent = -1;
  const LinearLayer* linear = nullptr;
  size_t first_site = 0;  // of those that adapters can change
  ExpertsLayer routed{};  // but its experts, which are here:
  std::vector<Expert> experts;
  std::vector<const LinearLayer*> by_head;
  Constant weight, bias;  // a table, frequencies, a norm's weights, slopes and sinks
  int64_t number = 0;     // first id or column, layer, activation, columns of queries
  int64_t heads = 0;      // or columns of keys; of kTemper, what is added to positions
  int64_t rope = -1;
  int64_t window = 0;  // of kTemper, the period
  int64_t span = 0;
  double factor = 0.0, cap = 0.0;  // eps, scale, limit

  size_t sites() const { return kind == OpKind::kExperts ? 1 + 2 * experts.size() : 1; }
  // The layer of a site; null: there is none.
  const LinearLayer* site(size_t index) const {
    if (kind != OpKind::kExperts) return linear;
    if (index == 0) return routed.router;
    return index % 2 == 1 ? experts[index / 2].up : experts[index / 2 - 1].down;
  }
};

// Tensors of one step; Python keeps them until the next one begins.
struct ProgramStep {
  std::array<int64_t, kRowKinds> rows{};
  int64_t decode_rows = 0;
  int32_t* ids = nullptr;
  int64_t* positions = nullptr;
  int32_t* slots = nullptr;
  const int64_t* state_rows = nullptr;  // null: all
  const int32_t* decode_words = nullptr;
  int32_t decode_steps = 0;
  const int32_t* entry_query = nullptr;
  const int32_t* turns = nullptr;
  int64_t turn_count = 0;
  PrefillCall prefill{};
  bool has_prefill = false;
  // Of tokens, and of those whose states are needed; without groups: no row has an adapter.
  std::array<AdaptedRows, 2> adapted;
  // By rope; empty: nothing is shifted.
  std::vector<Constant> decode_angles, prefill_angles;
};

struct Program {
  CpuContext* context;
  std::vector<ProgramBuffer> buffers;
  std::vector<ProgramOp> ops;
  tvm::ffi::Array<tvm::ffi::Tensor> kept;  // the ops' constants
  PoolView pool;
  int64_t ropes = 0;
  int64_t group = 0;  // handle of a SharedGroup; 0: none
  bool buffered = false, invariant = false;
  int logits = 0;           // their buffer
  int64_t first_logit = 0;  // the id of its first column
  std::vector<AdapterLayers> adapters;
  size_t sites = 0;  // of all ops
  ProgramStep step;
  Scratch turned, largest;

  int64_t rows_of(const ProgramBuffer& buffer) const { return step.rows[static_cast<size_t>(buffer.rows)]; }
  void run(int64_t start, int64_t stop);
  // Writes the id of the largest logit of each row, of equal ones the first: the same on every rank. What is no
  // number counts as -infinity.
  void take_largest(int32_t* ids);

 private:
  void run_op(const ProgramOp& op, SharedGroup* sums);
  void embed(const ProgramOp& op);
  void add_positions(const ProgramOp& op);
  void rotate(const ProgramOp& op);
  void norm(const ProgramOp& op);
  void linear(const ProgramOp& op);
  void experts(const ProgramOp& op);
  void elements(const ProgramOp& op, ElementOp kind);
  void square_sums(const ProgramOp& op);
  void wide_norm(const ProgramOp& op);
  void absorb(const ProgramOp& op);
  void expand(const ProgramOp& op);
  void temper(const ProgramOp& op);
  void gate(const ProgramOp& op);
  void head_norm(const ProgramOp& op);
  void multiply(const ProgramOp& op);
  void store_kv(const ProgramOp& op);
  void decode(const ProgramOp& op);
  void prefill(const ProgramOp& op);
  void select(const ProgramOp& op);
  void spread(const ProgramOp& op);
  void forbid(const ProgramOp& op);
  ScoreRule rule_of(const ProgramOp& op) const;
  OpAdapters adapters_of(const ProgramOp& op, RowKind rows) const;

  ProgramBuffer& at(int buffer) { return buffers[static_cast<size_t>(buffer)]; }
};

}  // namespace trunkline
