// A packed layer as Python holds it: by a handle; the panels lie in a tensor that Python owns.
#pragma once

#include <vector>

#include "linear.h"

namespace trunkline {

struct PackedLayer : LinearLayer {
  std::vector<float> padded_bias;   // what `bias` points to
  std::vector<float> padded_scale;  // what `scale` points to
};

// Bytes of one element of the panels.
inline int64_t weight_bytes(const LinearLayer& layer) {
  if (layer.form == WeightForm::kInt8) return 1;
  return layer.type == DenseType::kFloat32 ? 4 : 2;
}

const char* dense_type_name(DenseType type);

}  // namespace trunkline
