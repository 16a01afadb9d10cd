// What the dense ops check at the boundary to Python, and how they choose the functions of a level.
#pragma once

#include <string>

#include "common/checks.h"
#include "linear.h"

namespace trunkline {

// Throws a ValueError unless `tensor` is on the host, contiguous and of a type that the kernels have.
DenseType dense_type(const TensorView& tensor, const char* name);

// "float32 [3, 4]".
std::string described(const TensorView& tensor);

}  // namespace trunkline
