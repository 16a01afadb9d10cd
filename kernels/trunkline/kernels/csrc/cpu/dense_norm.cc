// RMS norms: checks, and the split of the rows over the threads.

#include <algorithm>

#include "common/exports.h"
#include "context.h"
#include "dense_checks.h"
#include "ops.h"

namespace trunkline {
void run_norm(CpuContext& shared, const NormCall& call, DenseType type, int64_t rows) {
  const NormRows norm = norm_table(shared.level).rows[static_cast<int>(type)];
  const int64_t rows_per_unit = std::max<int64_t>(1, kUnitElements / std::max<int64_t>(1, call.width));
  if (rows <= rows_per_unit || shared.pool.threads() == 1) return norm(call, 0, rows);
  shared.pool.run((rows + rows_per_unit - 1) / rows_per_unit, [&](int64_t unit, int) {
    norm(call, unit * rows_per_unit, std::min(rows, (unit + 1) * rows_per_unit));
  });
}

namespace {

NormCall checked(const TensorView& x, const TensorView& weight, const TensorView& out, double eps,
                 DenseType type) {
  const DenseType weight_type = dense_type(weight, "weight");
  if (x.ndim() < 1 || weight.ndim() != 1 || weight.size(0) != x.size(-1)) {
    TVM_FFI_THROW(ValueError) << "weight is " << described(weight) << ", x " << described(x)
                              << "; the weight must be as long as the rows of x";
  }
  if (weight_type != type && weight_type != DenseType::kFloat32) {
    TVM_FFI_THROW(ValueError) << "weight is " << described(weight) << ", x " << described(x)
                              << "; the weight must be of the type of x or float32";
  }
  if (dense_type(out, "out") != type || out.numel() != x.numel()) {
    TVM_FFI_THROW(ValueError) << "out is " << described(out) << ", x " << described(x) << "; they must be alike";
  }
  NormCall call{};
  call.x = x.data_ptr();
  call.weight = weight.data_ptr();
  call.float_weight = weight_type == DenseType::kFloat32;
  call.out = out.data_ptr();
  call.width = x.size(-1);
  call.eps = static_cast<float>(eps);
  return call;
}

void rms_norm(int64_t context, TensorView x, TensorView weight, double eps, TensorView out) {
  const DenseType type = dense_type(x, "x");
  const NormCall call = checked(x, weight, out, eps, type);
  const ContextUse use(context);
  if (call.width > 0) run_norm(use.context(), call, type, x.numel() / call.width);
}

void add_rms_norm(int64_t context, TensorView x, TensorView residual, TensorView weight, double eps,
                  TensorView out) {
  const DenseType type = dense_type(x, "x");
  NormCall call = checked(x, weight, out, eps, type);
  if (dense_type(residual, "residual") != type || residual.numel() != x.numel() ||
      residual.size(-1) != call.width) {
    TVM_FFI_THROW(ValueError) << "residual is " << described(residual) << ", x " << described(x)
                              << "; they must be alike";
  }
  call.residual = residual.data_ptr();
  const ContextUse use(context);
  if (call.width > 0) run_norm(use.context(), call, type, x.numel() / call.width);
}

}  // namespace
}  // namespace trunkline

TRUNKLINE_EXPORT(rms_norm, trunkline::rms_norm)
TRUNKLINE_EXPORT(add_rms_norm, trunkline::add_rms_norm)
