// Attention on matrix units for head size 64.
#include "attention_instances.cuh"

namespace trunkline::cuda {

AttentionKernel attention_d64(int32_t dtype) { return matrix_instance_of<64>(dtype); }

}  // namespace trunkline::cuda
