// Tensors of the attention and block ops, checked and turned into the plain data of attention.h.
#pragma once

#include <tvm/ffi/container/tensor.h>

#include <cstdint>

#include "attention.h"
#include "common/checks.h"
#include "context.h"

namespace trunkline {

// A ValueError for any other type than float32, float16 and bfloat16.
KvType kv_type_of(const TensorView& tensor, const char* name);

// `pool` and `packed` of a KvPool on the CPU. `layer` must be one of its layers. `computed`: the type of queries and
// results, for pools that keep 8 bits; others have it themselves.
PoolView pool_of(const TensorView& data, const TensorView& packed, int64_t layer, KvType computed = kKvFloat32);

// Whether a tensor's elements are those of a pool's rows.
bool holds_rows_of(const PoolView& pool, const TensorView& tensor);

// `[n, heads, width]` of the pool's type, heads adjoining; returns the bytes from one to the next of n.
int64_t vectors_stride(const TensorView& tensor, const PoolView& pool, int64_t width, const char* name);

// The same of results, whose width says what of a key is its value if there is one band. Before queries are checked:
// without it, how long a key is in a row of int8 is not known.
int64_t results_stride(const TensorView& tensor, PoolView& pool);
// Sets that number, and what follows from it in int8; a ValueError for one that the pool cannot have.
void set_value_dim(PoolView& pool, int64_t value_dim);

const AttentionTable& attention_table_of(const CpuContext& context);
const BlockTable& block_table_of(const CpuContext& context);
const LimitTable& limit_table_of(const CpuContext& context);

inline char* bytes_of(const TensorView& tensor) {
  return static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset();
}

}  // namespace trunkline
