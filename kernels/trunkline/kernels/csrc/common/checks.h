// Checks of tensors at the boundary to Python: a wrong one becomes a ValueError that names it.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>

#include <cstdint>
#include <string>

namespace trunkline {

using tvm::ffi::TensorView;

inline void require(bool holds, const char* sentence) {
  if (!holds) TVM_FFI_THROW(ValueError) << sentence;
}

inline bool has_dtype(const TensorView& tensor, int code, int bits) {
  return tensor.dtype().code == code && tensor.dtype().bits == bits && tensor.dtype().lanes == 1;
}

inline bool is_float32(const TensorView& tensor) { return has_dtype(tensor, kDLFloat, 32); }
inline bool is_float16(const TensorView& tensor) { return has_dtype(tensor, kDLFloat, 16); }
inline bool is_bfloat16(const TensorView& tensor) { return has_dtype(tensor, kDLBfloat, 16); }

// The elements of a contiguous int32 tensor.
inline const int32_t* int32_data(const TensorView& tensor, const char* name) {
  if (!has_dtype(tensor, kDLInt, 32) || !tensor.IsContiguous()) {
    TVM_FFI_THROW(ValueError) << name << " must be a contiguous int32 tensor";
  }
  return static_cast<const int32_t*>(tensor.data_ptr());
}

}  // namespace trunkline
