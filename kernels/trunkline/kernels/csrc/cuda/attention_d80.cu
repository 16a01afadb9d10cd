// Attention on matrix units for head size 80.
#include "attention_instances.cuh"

namespace trunkline::cuda {

AttentionKernel attention_d80(int32_t dtype, bool in_bytes) { return matrix_instance_of<80>(dtype, in_bytes); }

}  // namespace trunkline::cuda
