// The C interface of the CUDA kernels: raw pointers, strides and a stream; mirrored in cuda_library.py.
//
// Every function only enqueues work on `stream` (a cudaStream_t): nothing waits, nothing is allocated, so all can
// be captured in a CUDA graph. Pointers are device pointers unless said otherwise. Returns a cudaError_t, 0: fine.
#pragma once

#include <cstdint>

namespace trunkline::cuda {

enum DType : int32_t { kFloat32 = 0, kFloat16 = 1, kBfloat16 = 2, kInt8 = 3, kFloat8 = 4 };
enum Activation : int32_t { kSilu = 0, kGelu = 1, kGeluTanh = 2 };

// One layer's attention over a work plan (common/work_plan.h). Decode, or with `causal` prefill.
struct AttentionCall {
  const void* q;                      // [rows, heads, head_dim], rotated
  void* out;                          // likewise, overwritten
  const void* pool;                   // [blocks, layers, 2, kv_heads, chunk_size, row]
  const int32_t* work;                // the plan's words
  const int32_t* steps;               // how many tokens tails have grown by; null: none
  float* partial_acc;                 // [partials, heads, head_dim]
  float* partial_stats;               // [partials, heads, 2]: largest score (times log2 e), sum of weights
  const float* alibi_slopes;          // [heads], or null
  const double* inverse_frequencies;  // [rotary_half], or null
  int64_t q_row_stride;               // in elements
  int64_t out_row_stride;
  int32_t dtype;     // of q and out
  int32_t kv_dtype;  // dtype, or one of 8 bits: a row has a float32 behind its numbers, their scale
  int32_t head_dim;
  int32_t heads;
  int32_t kv_heads;
  int32_t chunk_size;
  int32_t layers;
  int32_t layer;
  int32_t rotary_half;
  int32_t window;     // 0: off
  int32_t causal;     // 1: a key that acts after its query is hidden, as it always is with a window
  int32_t rows;       // upper bound of the plan's rows, for the grid of the merge
  int32_t tile_rows;  // these five as attention_shape gave them
  int32_t stages;
  int32_t narrow_stages;
  int32_t grid;
  int32_t shared_bytes;
  int32_t plan_is_there;  // the launch before this one does not write the plan: the kernel may read it meanwhile
  float scale;
  float soft_cap;  // 0: off
};

// How to launch attention on the current device; constant per (dtype, kv_dtype, head_dim), so graphs stay valid.
struct AttentionShape {
  int32_t tile_rows;  // most query vectors of a tile: what the planner should aim at
  int32_t tile_tokens;
  int32_t stages;
  int32_t narrow_rows;    // most query vectors of a narrow piece, whose tiles take less; 0: all take the same
  int32_t narrow_stages;  // of the layout for narrow pieces: more than `stages`; 0: there is one layout for all
  int32_t shared_bytes;
  int32_t grid;       // thread blocks that fit the device at once
  int32_t is_matrix;  // 1: matrix units; 0: the general kernel
};

struct WriteCall {
  void* qkv;  // [tokens, heads + 2 * kv_heads, head_dim], contiguous; q and k change in place
  void* pool;
  const int32_t* slots;  // [tokens], -1: not stored
  const void* cos;       // [tokens, 2 * rotary_half], or null
  const void* sin;       // likewise, the first half negated
  const void* q_weight;  // [head_dim], or null: no norm
  const void* k_weight;
  int32_t dtype;
  int32_t kv_dtype;     // as in AttentionCall
  int32_t angle_dtype;  // dtype, or float32
  int32_t tokens;
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t chunk_size;
  int32_t layers;
  int32_t layer;
  int32_t rotary_half;
  float eps;
};

// Regions of equal size between two strided arrays: region i goes from source slot `source_index[i]` (null: i) to
// `destination_index[i]` (null: i). Sizes and strides are multiples of 2 bytes. Arrays may lie in pinned host memory.
struct MoveCall {
  const void* source;
  void* destination;
  const int32_t* source_index;
  const int32_t* destination_index;
  int64_t region_bytes;
  int64_t source_stride_bytes;
  int64_t destination_stride_bytes;
  int32_t regions;
  int32_t blocks_max;  // thread blocks; 0: as many as there is work for
};

struct NormCall {
  const void* x;       // [rows, width], contiguous
  void* residual;      // likewise, x is added in place and the sum normalised; null: x is normalised
  const void* weight;  // [width]
  void* out;
  int32_t dtype;
  int32_t rows;
  int32_t width;
  float eps;
};

// Drawing a token from each row of logits; the tensors of `trunkline.kernels.sampling.Draws`.
struct DrawCall {
  const float* logits;          // [rows, vocab_size], each row contiguous
  const int64_t* seeds;         // [rows]
  const int64_t* output_index;  // [rows]
  const int32_t* top_k;         // [rows]
  const float* temperature;     // [rows]
  const float* top_p;           // [rows]
  const float* log_min_p;       // [rows]
  int64_t* out;                 // [rows]
  void* scratch;                // trunkline_draw_scratch_bytes, aligned to 16
  int64_t row_stride;           // of the logits, in elements
  int32_t rows;
  int32_t vocab_size;
  int32_t limited;  // 0: no row that draws has a limit
};

// Changes of logits in place; the tensors of `trunkline.kernels.sampling.LogitEdits`.
struct EditCall {
  float* logits;          // [.., vocab_size]
  const int32_t* rows;    // [n] of the logits
  const int32_t* tokens;  // biases: [n]; penalties: [indptr[n]]
  const float* values;    // biases: [n]; penalties: [n, 3] repetition, frequency, presence
  const int32_t* words;   // masks: [n, ceil(vocab_size / 32)]
  const int64_t* indptr;  // penalties: [n + 1]
  const int32_t* counts;  // penalties: [indptr[n]]
  int64_t row_stride;     // of the logits, in elements
  int32_t n;
  int32_t vocab_size;
};

// The rows of a decode step in a graph. `table`: for each row its place [places], or -1; then for each place its words.
enum PlaceWord : int32_t {
  kPlaceToken = 0,    // the newest token: what the row computes next
  kPlaceOutputIndex,  // of the token that is drawn next, at step 0
  kPlaceTopK,
  kPlaceSeed,         // two words, the lower one first
  kPlaceFactors = 5,  // temperature, top-p, logarithm of min-p: float
  kPlaceWords = 8,
};

struct StepRowsCall {
  const int32_t* work;  // the plan's words, of a plan that goes on
  int32_t* steps;       // the step's number; the last node adds one
  int32_t* table;
  int64_t* ids;           // [rows], written by the first node, as are those behind it
  int64_t* positions;     // [rows]
  int32_t* slots;         // [rows], -1: the plan has no such row
  int64_t* seeds;         // [rows]
  int64_t* output_index;  // [rows]
  int32_t* top_k;         // [rows]
  float* factors;         // [3, rows]
  const int64_t* drawn;   // [rows], read by the last node
  int32_t* tokens;        // [rows], what it was told, -1: the plan has no such row
  int32_t rows;           // of the graph: at least the plan's
  int32_t places;
  int32_t chunk_size;
};

// Rows rounded to floats of 8 bits (e4m3): x ≈ codes * factor.
struct Float8Call {
  const void* x;   // [rows, width], contiguous
  uint8_t* codes;  // [padded, width]; zeros behind the rows
  float* factor;   // [width / group, padded]
  int32_t dtype;   // of x: 16 bits
  int32_t rows;
  int32_t padded;  // at least `rows`
  int32_t width;
  int32_t group;  // 128, or the width
};

enum WeightType : int32_t { kWeightNumbers = 0, kWeightFloat8 = 1, kWeightInt8 = 2 };

// Products of sorted rows with one of several matrices each.
struct GroupedCall {
  const void* x;        // [rows, width], contiguous
  const void* weights;  // [matrices, outputs, width]: of the type of x, or codes
  const float* scale;   // [matrices, outputs, width / group]; null: numbers
  const int32_t*
      stops;          // [matrices], ascending: where the rows of each matrix end; null: of one, that of all rows
  void* out;          // [rows, outputs]; rows behind the last stop stay as they are
  int32_t dtype;      // of x: 16 bits
  int32_t out_dtype;  // dtype, or float32
  int32_t weight_type;
  int32_t rows;
  int32_t width;    // a multiple of 16
  int32_t outputs;  // a multiple of 8
  int32_t matrices;
  int32_t group;  // inputs that share a scale, a multiple of 16
};

// Keys and values of ranges of tokens, dense and in the type in which they are computed.
struct GatherCall {
  const void* pool;       // [blocks, layers, 2, kv_heads, chunk_size, row]
  const int32_t* ranges;  // [count, 4]: block, first token in it, tokens, where the first one goes
  void* out;              // [2, kv_heads, tokens, head_dim]
  int32_t dtype;
  int32_t kv_dtype;  // as in AttentionCall; in 8 bits head_dim is a multiple of 4
  int32_t count;
  int32_t tokens;
  int32_t chunk_size;
  int32_t layers;
  int32_t layer;
  int32_t kv_heads;
  int32_t head_dim;
};

// Attention over the keys of two parts, by their log-sum-exps. `out` may be `a`. Strides and head_dim are multiples of
// 4 elements, and addresses of the size of 4.
struct JoinCall {
  const void* a;  // [rows, heads, head_dim]
  const void* b;
  void* out;
  const float* a_lse;  // [heads, rows], natural
  const float* b_lse;
  float* out_lse;
  int64_t a_row_stride;  // in elements
  int64_t a_head_stride;
  int64_t b_row_stride;
  int64_t b_head_stride;
  int64_t out_row_stride;
  int64_t out_head_stride;
  int32_t a_dtype;  // that of b, or float32
  int32_t b_dtype;
  int32_t out_dtype;  // likewise
  int32_t rows;
  int32_t heads;
  int32_t head_dim;
};

extern "C" {
// Sizes of the structures above, in order, so that the caller can check its mirror of them. Host memory.
void trunkline_struct_bytes(int32_t* sizes);
const char* trunkline_error_string(int32_t error);
// Sets the calling thread's device: this library's own copy of the runtime does not know its caller's.
int32_t trunkline_set_device(int32_t device);
// shape, call: host memory
int32_t trunkline_attention_shape(int32_t dtype, int32_t kv_dtype, int32_t head_dim, AttentionShape* shape);
int32_t trunkline_attention(const AttentionCall* call, void* stream);
int32_t trunkline_add_steps(int32_t* steps, int32_t delta, void* stream);
// changes: [n, 2] index of a word, its value; no index twice.
int32_t trunkline_patch_words(int32_t* words, const int32_t* changes, int32_t n, void* stream);
int32_t trunkline_begin_rows(const StepRowsCall* call, void* stream);  // call: host memory
int32_t trunkline_end_rows(const StepRowsCall* call, void* stream);    // likewise
int32_t trunkline_write_kv(const WriteCall* call, void* stream);
// copies: [n, 4] source block, destination block, first token, token count; all layers.
int32_t trunkline_copy_blocks(void* pool, const int32_t* copies, int32_t n, int32_t tiles_per_block,
                              int32_t chunk_size, int32_t token_bytes, void* stream);
int32_t trunkline_move_regions(const MoveCall* call, void* stream);
int32_t trunkline_gather_rows(const GatherCall* call, void* stream);  // call: host memory
int32_t trunkline_join_parts(const JoinCall* call, void* stream);     // likewise
int32_t trunkline_rms_norm(const NormCall* call, void* stream);
// gate_up: [rows, 2 * width]; out: [rows, width].
int32_t trunkline_gated_activation(const void* gate_up, void* out, int32_t dtype, int32_t activation, int32_t rows,
                                   int32_t width, void* stream);
int32_t trunkline_round_float8(const Float8Call* call, void* stream);                    // call: host memory
int32_t trunkline_grouped_products(const GroupedCall* call, void* stream);               // likewise
int32_t trunkline_draw_scratch_bytes(int32_t rows, int32_t vocab_size, int64_t* bytes);  // host memory
int32_t trunkline_draw(const DrawCall* call, void* stream);
int32_t trunkline_add_biases(const EditCall* call, void* stream);  // no token twice in a row
int32_t trunkline_mask_logits(const EditCall* call, void* stream);
int32_t trunkline_penalise(const EditCall* call, void* stream);
}

}  // namespace trunkline::cuda
