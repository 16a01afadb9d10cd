// What reads the words of a step program's ops, and what several of them check.
#pragma once

#include <vector>

#include "attention_checks.h"
#include "common/checks.h"
#include "dense_checks.h"
#include "program.h"

namespace trunkline {

inline const int64_t* int64_data(const TensorView& tensor, const char* name) {
  if (!has_dtype(tensor, kDLInt, 64) || !tensor.IsContiguous() || tensor.device().device_type != kDLCPU) {
    TVM_FFI_THROW(ValueError) << name << " must be a contiguous int64 tensor in host memory";
  }
  return static_cast<const int64_t*>(tensor.data_ptr());
}

inline DenseType dense_type_of(KvType type) {
  return type == kKvFloat32   ? DenseType::kFloat32
         : type == kKvFloat16 ? DenseType::kFloat16
                              : DenseType::kBFloat16;
}

// Reads the words of one op.
struct OpReader {
  const Program& program;
  const std::vector<tvm::ffi::Tensor>& constants;
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

inline void require_alike(const ProgramBuffer& a, const ProgramBuffer& b) {
  require(a.rows == b.rows && a.width == b.width && a.type == b.type, "the buffers of an op must be alike");
}

inline void require_apart(int a, int b) { require(a != b, "an op reads and writes one buffer"); }

// The op that the words and `reals` say, checked.
ProgramOp read_op(const OpReader& reader, const double* reals, int64_t ropes);

}  // namespace trunkline
