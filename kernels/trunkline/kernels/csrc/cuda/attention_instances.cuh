// The kernels of one head size: a source file per size, so that they compile in parallel.
#pragma once

#include "attention_matrix.cuh"

namespace trunkline::cuda {

// What the dispatcher needs to know of a kernel.
struct AttentionKernel {
  void (*kernel)(AttentionCall);  // null: no such instance
  int tile_tokens;
  int stage_bytes;
  int row_bytes;
};

template <class T, int D>
AttentionKernel matrix_instance() {
  using Layout = MatrixLayout<D>;
  return {attention_matrix_kernel<T, D>, Layout::kTokens, Layout::kStageBytes, Layout::kRowBytes};
}

AttentionKernel attention_d64(int32_t dtype);
AttentionKernel attention_d80(int32_t dtype);
AttentionKernel attention_d96(int32_t dtype);
AttentionKernel attention_d128(int32_t dtype);
AttentionKernel attention_d256(int32_t dtype);

template <int D>
AttentionKernel matrix_instance_of(int32_t dtype) {
  return dtype == kBfloat16 ? matrix_instance<Bf16, D>() : matrix_instance<Fp16, D>();
}

}  // namespace trunkline::cuda
