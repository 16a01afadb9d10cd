// The kernels of one head size: a source file per size, so that they compile in parallel.
#pragma once

#include "attention_matrix.cuh"

namespace trunkline::cuda {

// What the dispatcher needs to know of a kernel.
struct AttentionKernel {
  void (*kernel)(AttentionCall);  // null: no such instance
  int tile_tokens;
  int stage_bytes;
  int row_bytes;  // for each query vector
};

template <class T, int D, bool kBytes>
AttentionKernel matrix_instance() {
  using Layout = MatrixLayout<D, kBytes>;
  return {attention_matrix_kernel<T, D, kBytes>, Layout::kTokens, Layout::kStageBytes, Layout::kRowBytes};
}

// `in_bytes`: K and V are in 8 bits.
AttentionKernel attention_d64(int32_t dtype, bool in_bytes);
AttentionKernel attention_d80(int32_t dtype, bool in_bytes);
AttentionKernel attention_d96(int32_t dtype, bool in_bytes);
AttentionKernel attention_d128(int32_t dtype, bool in_bytes);
AttentionKernel attention_d256(int32_t dtype, bool in_bytes);

template <int D>
AttentionKernel matrix_instance_of(int32_t dtype, bool in_bytes) {
  if (in_bytes) return dtype == kBfloat16 ? matrix_instance<Bf16, D, true>() : matrix_instance<Fp16, D, true>();
  return dtype == kBfloat16 ? matrix_instance<Bf16, D, false>() : matrix_instance<Fp16, D, false>();
}

}  // namespace trunkline::cuda
