// A packed layer as Python holds it: by a handle; the panels lie in a tensor that Python owns.
#pragma once

#include <vector>

#include "linear.h"

namespace trunkline {

struct PackedLayer : LinearLayer {
  std::vector<float> padded_bias;  // what `bias` points to
};

const char* dense_type_name(DenseType type);

}  // namespace trunkline
