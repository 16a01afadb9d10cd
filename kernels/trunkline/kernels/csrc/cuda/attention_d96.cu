// Attention on matrix units for head size 96.
#include "attention_instances.cuh"

namespace trunkline::cuda {

AttentionKernel attention_d96(int32_t dtype, bool in_bytes) { return matrix_instance_of<96>(dtype, in_bytes); }

}  // namespace trunkline::cuda
