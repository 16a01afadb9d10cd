// Attention on matrix units for head size 64.
#include "attention_instances.cuh"

namespace trunkline::cuda {

AttentionKernel attention_d64(int32_t dtype, bool in_bytes) { return matrix_instance_of<64>(dtype, in_bytes); }

}  // namespace trunkline::cuda
