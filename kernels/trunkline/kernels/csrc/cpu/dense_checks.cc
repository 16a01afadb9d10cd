#include "dense_checks.h"

#include <sstream>

namespace trunkline {

DenseType dense_type(const TensorView& tensor, const char* name) {
  if (tensor.device().device_type != kDLCPU || !tensor.IsContiguous()) {
    TVM_FFI_THROW(ValueError) << name << " must be a contiguous tensor in host memory";
  }
  if (is_bfloat16(tensor)) return DenseType::kBFloat16;
  if (is_float32(tensor)) return DenseType::kFloat32;
  if (is_float16(tensor)) return DenseType::kFloat16;
  TVM_FFI_THROW(ValueError) << name << " is " << described(tensor)
                            << "; allowed are float32, bfloat16 and float16";
  return DenseType::kFloat32;  // not reached
}

std::string described(const TensorView& tensor) {
  std::ostringstream text;
  const int code = tensor.dtype().code;
  text << (code == kDLFloat ? "float" : code == kDLBfloat ? "bfloat" : code == kDLInt ? "int" : "type ");
  text << static_cast<int>(tensor.dtype().bits) << " [";
  for (int i = 0; i < tensor.ndim(); ++i) text << (i > 0 ? ", " : "") << tensor.size(i);
  text << "]";
  return text.str();
}

namespace {

const LinearTable& linear_table(CpuLevel level, bool in_groups) {
  if (in_groups) TRUNKLINE_RETURN_AT(level, kGroupTable);
  TRUNKLINE_RETURN_AT(level, kLinearTable);
}

}  // namespace

bool packs_tiles(CpuLevel level, const LinearLayer& layer) {
  return level >= CpuLevel::kAmx && layer.form == WeightForm::kPlain && layer.type == DenseType::kBFloat16;
}

void require_level(CpuLevel level, const LinearLayer& layer) {
  const bool in_tiles = packs_tiles(level, layer);
  if (layer.in_tiles == in_tiles) return;
  TVM_FFI_THROW(ValueError) << "a layer was packed " << (in_tiles ? "without" : "for")
                            << " matrix registers, and these kernels multiply " << (in_tiles ? "by" : "without")
                            << " them";
}

LinearFunctions linear_functions(CpuLevel level, const LinearLayer& layer) {
  require_level(level, layer);
  const LinearTable& table = linear_table(level, layer.groups != nullptr);
  const bool second = layer.form == WeightForm::kInt8 || layer.form == WeightForm::kGroupsInt8;
  const int type = static_cast<int>(layer.type);
  const auto rows_max = table.rows_max[second][type];
  return {table.unit[second][type], table.words[second][type], rows_max == nullptr ? kRowsMax : rows_max(layer)};
}

const NormTable& norm_table(CpuLevel level) { TRUNKLINE_RETURN_AT(level, kNormTable); }

}  // namespace trunkline
