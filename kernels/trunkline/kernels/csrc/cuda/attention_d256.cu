// Attention on matrix units for head size 256.
#include "attention_instances.cuh"

namespace trunkline::cuda {

AttentionKernel attention_d256(int32_t dtype, bool in_bytes) { return matrix_instance_of<256>(dtype, in_bytes); }

}  // namespace trunkline::cuda
