// Changes of logits before a token is drawn: biases, masks, penalties, rounded as
// `trunkline/kernels/reference_sampling.py` rounds them.
#include <primitives.cuh>

#include "api.h"

namespace trunkline::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaskTokens = 2048;  // of a thread block
constexpr float kFiniteMax = 1e20f;

// The host does not look at the tokens; nothing may be written where no logit is.
__device__ __forceinline__ bool is_outside(const EditCall& call, int32_t token) {
  return token < 0 || token >= call.vocab_size;
}

__global__ void __launch_bounds__(kThreads) bias_kernel(const EditCall call) {
  const int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (i >= call.n || is_outside(call, call.tokens[i])) return;
  float* x = call.logits + call.rows[i] * call.row_stride + call.tokens[i];
  *x = __fadd_rn(*x, call.values[i]);
}

// Thread block (masked row, part of the vocabulary).
__global__ void __launch_bounds__(kThreads) mask_kernel(const EditCall call, int parts) {
  const int masked = static_cast<int>(blockIdx.x) / parts;
  const int first = (static_cast<int>(blockIdx.x) - masked * parts) * kMaskTokens;
  const int last = min(first + kMaskTokens, call.vocab_size), row_words = (call.vocab_size + 31) / 32;
  float* x = call.logits + call.rows[masked] * call.row_stride;
  const int32_t* words = call.words + static_cast<int64_t>(masked) * row_words;
  for (int i = first + static_cast<int>(threadIdx.x); i < last; i += kThreads) {
    const float above = x[i] > -kFiniteMax ? x[i] : -kFiniteMax;  // also what is no number
    const float bounded = above < kFiniteMax ? above : kFiniteMax;
    const bool is_allowed = (static_cast<uint32_t>(words[i / 32]) >> (i % 32) & 1u) != 0;
    x[i] = is_allowed ? bounded : -__builtin_inff();
  }
}

// Thread block: a penalised row.
__global__ void __launch_bounds__(kThreads) penalise_kernel(const EditCall call) {
  const int64_t penalised = blockIdx.x;
  float* x = call.logits + call.rows[penalised] * call.row_stride;
  const float* factors = call.values + 3 * penalised;
  const int64_t stop = call.indptr[penalised + 1];
  for (int64_t i = call.indptr[penalised] + threadIdx.x; i < stop; i += kThreads) {
    const int32_t token = call.tokens[i], count = call.counts[i];
    if (is_outside(call, token)) continue;
    const float value = x[token];
    const float repeated = value > 0.0f ? __fdiv_rn(value, factors[0]) : __fmul_rn(value, factors[0]);
    const float taken = __fmul_rn(factors[1], static_cast<float>(count));
    x[token] = __fadd_rn(repeated, -__fadd_rn(taken, count > 0 ? factors[2] : 0.0f));
  }
}

}  // namespace

extern "C" {

int32_t trunkline_add_biases(const EditCall* call, void* stream) {
  if (call->n == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>((call->n + kThreads - 1) / kThreads));
  return launch(bias_kernel, grid, kThreads, 0, stream, *call);
}

int32_t trunkline_mask_logits(const EditCall* call, void* stream) {
  if (call->n == 0) return cudaSuccess;
  const int parts = (call->vocab_size + kMaskTokens - 1) / kMaskTokens;
  const dim3 grid(static_cast<unsigned>(static_cast<int64_t>(call->n) * parts));
  return launch(mask_kernel, grid, kThreads, 0, stream, *call, parts);
}

int32_t trunkline_penalise(const EditCall* call, void* stream) {
  if (call->n == 0) return cudaSuccess;
  return launch(penalise_kernel, dim3(static_cast<unsigned>(call->n)), kThreads, 0, stream, *call);
}

}  // extern "C"
}  // namespace trunkline::cuda
