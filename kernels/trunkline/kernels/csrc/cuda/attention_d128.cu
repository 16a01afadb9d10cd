// Attention on matrix units for head size 128.
#include "attention_instances.cuh"

namespace trunkline::cuda {

AttentionKernel attention_d128(int32_t dtype, bool in_bytes) { return matrix_instance_of<128>(dtype, in_bytes); }

}  // namespace trunkline::cuda
