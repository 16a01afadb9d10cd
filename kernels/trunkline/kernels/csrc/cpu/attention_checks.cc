#include "attention_checks.h"

namespace trunkline {

namespace {
constexpr int64_t kInt8HeadMost = 512;  // sums of products of integers fit 32 bits
}  // namespace

KvType kv_type_of(const TensorView& tensor, const char* name) {
  if (tensor.device().device_type != kDLCPU) TVM_FFI_THROW(ValueError) << name << " must be in host memory";
  if (is_bfloat16(tensor)) return kKvBFloat16;
  if (is_float32(tensor)) return kKvFloat32;
  if (is_float16(tensor)) return kKvFloat16;
  TVM_FFI_THROW(ValueError) << name << " has elements of " << static_cast<int>(tensor.dtype().bits)
                            << " bits and type code " << static_cast<int>(tensor.dtype().code)
                            << "; the CPU kernels take float32, bfloat16 and float16";
  return kKvFloat32;  // not reached
}

// Floats of 8 bits are held as bytes without a sign.
static KvKept kept_in(const TensorView& tensor) {
  if (tensor.device().device_type != kDLCPU) return kKeptPlain;
  return has_dtype(tensor, kDLInt, 8) ? kKeptInt8 : has_dtype(tensor, kDLUInt, 8) ? kKeptFloat8 : kKeptPlain;
}

bool holds_rows_of(const PoolView& pool, const TensorView& tensor) {
  return pool.is_quantised() ? kept_in(tensor) == pool.kept : kv_type_of(tensor, "the tensor") == pool.type;
}

PoolView pool_of(const TensorView& data, const TensorView& packed, int64_t layer, KvType computed) {
  PoolView pool{};
  pool.kept = kept_in(data);
  pool.type = pool.is_quantised() ? computed : kv_type_of(data, "the pool");
  constexpr int64_t kScaleBytes = 4;
  const bool has_bands =
      data.ndim() == 6 && data.size(2) >= (pool.kept == kKeptFloat8 ? 2 : 1) && data.size(2) <= 2;
  if (!has_bands || !data.IsContiguous() ||
      (pool.is_quantised() && data.size(5) <= kScaleBytes * (3 - data.size(2)))) {
    TVM_FFI_THROW(ValueError) << "the pool must be contiguous, [blocks, layers, bands, kv_heads, chunk, row], "
                                 "with two bands, or one that "
                                 "is not fp8, and rows of 8 bits longer than their scales";
  }
  pool.blocks = data.size(0), pool.layers = data.size(1), pool.bands = data.size(2), pool.kv_heads = data.size(3);
  pool.chunk = data.size(4),
  pool.head_dim = data.size(5) - (pool.is_quantised() ? kScaleBytes * pool.scales() : 0);
  pool.value_dim = pool.head_dim;
  if (!has_dtype(packed, kDLUInt, 8) || !packed.IsContiguous() || packed.ndim() != 2 ||
      packed.size(0) != pool.blocks || packed.size(1) != pool.layers) {
    TVM_FFI_THROW(ValueError) << "the pool's packed flags must be contiguous uint8 [" << pool.blocks << ", "
                              << pool.layers << "]";
  }
  if (layer < 0 || layer >= pool.layers) {
    TVM_FFI_THROW(ValueError) << "layer " << layer << ": the pool has " << pool.layers << " layers";
  }
  pool.data = bytes_of(data);
  pool.packed = reinterpret_cast<uint8_t*>(bytes_of(packed));
  pool.element_bytes = pool.type == kKvFloat32 ? 4 : 2;
  pool.row_bytes = pool.is_quantised() ? data.size(5) : pool.head_dim * pool.element_bytes;
  pool.tile_bytes = pool.chunk * pool.row_bytes;
  pool.packable = pool.bands == 2 && pool.chunk % kTokenStep == 0 && pool.head_dim % 16 == 0;
  if (pool.is_quantised() && pool.bands == 2 && pool.head_dim > kInt8HeadMost) {
    TVM_FFI_THROW(ValueError) << "head_dim " << pool.head_dim << ": with KV in 8 bits at most " << kInt8HeadMost;
  }
  if (pool.head_dim % 2 != 0 || reinterpret_cast<uintptr_t>(pool.data) % 4 != 0) {
    TVM_FFI_THROW(ValueError) << "head_dim " << pool.head_dim << " must be even, and the pool aligned to 4 bytes";
  }
  return pool;
}

int64_t vectors_stride(const TensorView& tensor, const PoolView& pool, int64_t width, const char* name) {
  const bool fits = tensor.ndim() == 3 && kv_type_of(tensor, name) == pool.type && tensor.size(2) == width &&
                    tensor.size(1) % pool.kv_heads == 0 && tensor.size(1) > 0 && tensor.stride(2) == 1 &&
                    (tensor.size(1) == 1 || tensor.stride(1) == width);
  // The stride of a single vector is not used, and may be anything.
  const int64_t stride = fits && tensor.size(0) > 1 ? tensor.stride(0) * pool.element_bytes : 0;
  if (!fits || stride % 4 != 0 || reinterpret_cast<uintptr_t>(bytes_of(tensor)) % 4 != 0) {
    TVM_FFI_THROW(ValueError) << name << " must be [n, heads, " << width
                              << "] in the pool's type, heads a multiple of " << pool.kv_heads << " and adjoining";
  }
  return stride;
}

void set_value_dim(PoolView& pool, int64_t value_dim) {
  const int64_t most = pool.is_quantised() ? pool.integers() : pool.head_dim;
  if (value_dim < 1 || (pool.bands == 2 ? value_dim != most : value_dim > most)) {
    TVM_FFI_THROW(ValueError) << "values of " << value_dim << " numbers: a pool of " << pool.bands
                              << " bands has rows of " << most;
  }
  pool.value_dim = value_dim;
  if (!pool.is_quantised() || pool.bands == 2) return;
  const int64_t rotary = pool.rotary_integers();
  if (rotary < 4 || rotary % 4 != 0 || rotary > kInt8HeadMost || value_dim > kInt8HeadMost) {
    TVM_FFI_THROW(ValueError) << "latents of " << value_dim << " numbers in rows of " << pool.integers()
                              << " int8: the rotary part must be even, and neither part longer than "
                              << kInt8HeadMost << " int8";
  }
  pool.head_dim = rotary / 2 + value_dim;
}

int64_t results_stride(const TensorView& tensor, PoolView& pool) {
  if (tensor.ndim() == 3) set_value_dim(pool, tensor.size(2));
  return vectors_stride(tensor, pool, pool.value_dim, "out");
}

const AttentionTable& attention_table_of(const CpuContext& context) {
  TRUNKLINE_RETURN_AT(context.level, attention_table());
}

const BlockTable& block_table_of(const CpuContext& context) { TRUNKLINE_RETURN_AT(context.level, block_table()); }

const LimitTable& limit_table_of(const CpuContext& context) { TRUNKLINE_RETURN_AT(context.level, limit_table()); }

}  // namespace trunkline
